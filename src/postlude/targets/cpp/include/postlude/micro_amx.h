// Microkernels of AMX: blocks of at most 32 rows times one packed panel of bfloat16 pairs.
//
// A tile register holds 16 rows of 64 bytes: of the left operand 16 rows of 32 k, of a panel 16 pairs of k by 16 columns, of the
// accumulators 16 x 16 floats. More than 16 rows: 2 x 2 tiles of accumulators at a time (each loaded tile is used twice); up to
// 16 rows: 1 x 4, one pass over the panel.
//
// Products of tiles leave the vector units idle, and out-of-order execution sees only a few hundred instructions ahead. So the
// epilogue of the block before is done row by row between them (`Beside`): of an epilogue that would take 9 us by itself, 3 us
// remain.
// Included by micro.cpp only.
#ifndef POSTLUDE_MICRO_AMX_H
#define POSTLUDE_MICRO_AMX_H

#include <postlude/micro_vector.h>

namespace postlude {

constexpr int kAmxRows = 32;   // of a block
constexpr int64_t kAmxK = 32;  // k of one product of tiles

// What is done between the products of a block: the epilogue of an earlier block, and prefetching.
struct Beside {
  BlockEpilogue epilogue = nullptr;
  const void *tensors = nullptr;
  int64_t row = 0, rows = 0;  // those that are left
  int64_t c0 = 0, columns = 0;
  char *acc[kMaxContractions] = {};
  int64_t stride = 0;  // bytes
  int contractions = 0;
  int64_t due = 0, each = 0, steps = 1;  // `each` rows in `steps` steps

  const char *ahead = nullptr, *ahead_end = nullptr;
  int64_t ahead_bytes = 0;  // in a step

  // Spreads what is left over so many steps.
  void spread(int64_t over) { due = 0, each = rows, steps = over; }

  void step() {
    for (int64_t i = 0; i < ahead_bytes && ahead < ahead_end; i += 64, ahead += 64) __builtin_prefetch(ahead, 0, 2);
    due += each;
    if (due < kAtOnce * steps) return;
    int64_t now = kAtOnce;
    for (due -= kAtOnce * steps; due >= steps; due -= steps) ++now;
    finish(now < rows ? now : rows);
  }
  void finish(int64_t now) {
    if (now == 0) return;
    void *from[kMaxContractions];
    for (int c = 0; c < contractions; ++c) from[c] = acc[c], acc[c] += now * stride;
    epilogue(tensors, row, now, c0, columns, from, stride / static_cast<int64_t>(sizeof(float)), nullptr, 0);
    row += now, rows -= now;
  }

 private:
  static constexpr int64_t kAtOnce = 1;  // rows: fewer calls, still few enough instructions to be looked past
};

using AmxKernel = void (*)(int64_t k, const void *a, int64_t lda, const void *b, void *c, int64_t ldc, int rows, int columns,
                           bool accumulate, Beside *beside);

// How many steps a block has: between two of them something else is done.
constexpr int64_t amx_steps(int64_t k, int rows, int columns) { return (rows > 16 ? (columns + 31) / 32 : 1) * (k / kAmxK); }

#if defined(POSTLUDE_AMX)

// The shapes of a thread's tile registers. Set by the first kernel of a call, and released at its end: other code in this
// process (oneDNN) has shapes of its own.
struct TileShapes {
  int rows = 0;  // of the block that the registers are shaped for; 0: not in use

  void shape(int block_rows) {
    if (rows == block_rows) return;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; ++tile) {
      const bool of_right = block_rows > 16 ? tile >= 6 : tile >= 5, lower = tile == 2 || tile == 3 || tile == 5;
      config.rows[tile] = static_cast<uint8_t>(of_right ? 16 : block_rows <= 16 ? block_rows : lower ? block_rows - 16 : 16);
    }
    _tile_loadconfig(&config);
    rows = block_rows;
  }
  void release() {
    if (rows != 0) _tile_release();
    rows = 0;
  }
};
TileShapes &tile_shapes();  // this thread's

struct AmxCall {
  int64_t k;
  const char *a;
  int64_t lda;  // bytes
  const char *b;
  const char *tail;  // the last k % 32 of each row of a, and zeros: rows of 64 bytes
  float *c;
  int64_t ldc;  // bytes
  bool accumulate;
  Beside *beside;  // may be null
};

// The compiler does not see that a tile instruction reads memory.
POSTLUDE_INLINE void memory_barrier() { asm volatile("" ::: "memory"); }

template <int Tiles>  // of 16 columns
POSTLUDE_INLINE void amx_two_rows(const AmxCall &call) {
  const char *a = call.a, *b = call.b;
  float *c = call.c, *lower = reinterpret_cast<float *>(reinterpret_cast<char *>(c) + 16 * call.ldc);
  if (call.accumulate) {
    _tile_loadd(0, c, call.ldc);
    _tile_loadd(2, lower, call.ldc);
    if constexpr (Tiles == 2) _tile_loadd(1, c + 16, call.ldc);
    if constexpr (Tiles == 2) _tile_loadd(3, lower + 16, call.ldc);
  } else {
    _tile_zero(0);
    _tile_zero(2);
    if constexpr (Tiles == 2) _tile_zero(1);
    if constexpr (Tiles == 2) _tile_zero(3);
  }
  const auto multiply = [](const char *left, int64_t stride, const char *right) {
    _tile_loadd(6, right, kPanelBytes);
    _tile_loadd(4, left, stride);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (Tiles == 2) _tile_loadd(7, right + 64, kPanelBytes);
    if constexpr (Tiles == 2) _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, left + 16 * stride, stride);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (Tiles == 2) _tile_dpbf16ps(3, 5, 7);
  };
  for (int64_t i = call.k; i >= kAmxK; i -= kAmxK, a += 64, b += 16 * kPanelBytes) {
    multiply(a, call.lda, b);
    if (call.beside != nullptr) call.beside->step();
  }
  if (call.k % kAmxK != 0) multiply(call.tail, 64, b);
  _tile_stored(0, c, call.ldc);
  _tile_stored(2, lower, call.ldc);
  if constexpr (Tiles == 2) _tile_stored(1, c + 16, call.ldc);
  if constexpr (Tiles == 2) _tile_stored(3, lower + 16, call.ldc);
}

template <int Tiles>
POSTLUDE_INLINE void amx_one_row(const AmxCall &call) {
  const char *a = call.a, *b = call.b;
  float *c = call.c;
  if (call.accumulate) {
    _tile_loadd(0, c, call.ldc);
    if constexpr (Tiles > 1) _tile_loadd(1, c + 16, call.ldc);
    if constexpr (Tiles > 2) _tile_loadd(2, c + 32, call.ldc);
    if constexpr (Tiles > 3) _tile_loadd(3, c + 48, call.ldc);
  } else {
    _tile_zero(0);
    if constexpr (Tiles > 1) _tile_zero(1);
    if constexpr (Tiles > 2) _tile_zero(2);
    if constexpr (Tiles > 3) _tile_zero(3);
  }
  const auto multiply = [](const char *left, int64_t stride, const char *right) {
    _tile_loadd(4, left, stride);
    _tile_loadd(5, right, kPanelBytes);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (Tiles > 1) _tile_loadd(6, right + 64, kPanelBytes);
    if constexpr (Tiles > 1) _tile_dpbf16ps(1, 4, 6);
    if constexpr (Tiles > 2) _tile_loadd(7, right + 128, kPanelBytes);
    if constexpr (Tiles > 2) _tile_dpbf16ps(2, 4, 7);
    if constexpr (Tiles > 3) _tile_loadd(5, right + 192, kPanelBytes);
    if constexpr (Tiles > 3) _tile_dpbf16ps(3, 4, 5);
  };
  for (int64_t i = call.k; i >= kAmxK; i -= kAmxK, a += 64, b += 16 * kPanelBytes) {
    multiply(a, call.lda, b);
    if (call.beside != nullptr) call.beside->step();
  }
  if (call.k % kAmxK != 0) multiply(call.tail, 64, b);
  _tile_stored(0, c, call.ldc);
  if constexpr (Tiles > 1) _tile_stored(1, c + 16, call.ldc);
  if constexpr (Tiles > 2) _tile_stored(2, c + 32, call.ldc);
  if constexpr (Tiles > 3) _tile_stored(3, c + 48, call.ldc);
}

// Up to kAmxRows rows. Parameters as those of a MicroKernel (micro_kernels.h).
inline void amx_kernel(int64_t k, const void *a, int64_t lda, const void *b, void *c, int64_t ldc, int rows, int columns,
                       bool accumulate, Beside *beside) {
  alignas(64) char tail[kAmxRows * 64];
  AmxCall call{k,    static_cast<const char *>(a), lda * 2, static_cast<const char *>(b), tail, static_cast<float *>(c),
               ldc * 4, accumulate, beside};
  if (const int rest = static_cast<int>(k % kAmxK); rest != 0)
    for (int r = 0; r < rows; ++r)
      store_bits(tail + r * 64, load_bits_first(static_cast<const uint16_t *>(a) + r * lda + (k - rest), rest));
  memory_barrier();
  tile_shapes().shape(rows);
  if (rows > 16) {
    for (int left = columns; left > 0; left -= 32, call.b += 128, call.c += 32)
      left > 16 ? amx_two_rows<2>(call) : amx_two_rows<1>(call);
  } else if (columns > 48) {
    amx_one_row<4>(call);
  } else if (columns > 32) {
    amx_one_row<3>(call);
  } else if (columns > 16) {
    amx_one_row<2>(call);
  } else {
    amx_one_row<1>(call);
  }
}

#endif

}  // namespace postlude

#endif
