// Microkernels of AMX: blocks of at most 32 rows times one packed panel of bfloat16 pairs.
//
// A tile register holds 16 rows of 64 bytes: of the left operand 16 rows of 32 k, of a panel 16 pairs of k by 16 columns, of the
// accumulators 16 x 16 floats. More than 16 rows: 2 x 2 tiles of accumulators at a time (each loaded tile is used twice); up to
// 16 rows: 1 x 4, one pass over the panel.
// Included by micro.cpp only.
#ifndef POSTLUDE_MICRO_AMX_H
#define POSTLUDE_MICRO_AMX_H

#include <postlude/micro_vector.h>

namespace postlude {

constexpr int kAmxRows = 32;   // of a block
constexpr int64_t kAmxK = 32;  // k of one product of tiles

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
  for (int64_t i = call.k; i >= kAmxK; i -= kAmxK, a += 64, b += 16 * kPanelBytes) multiply(a, call.lda, b);
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
  for (int64_t i = call.k; i >= kAmxK; i -= kAmxK, a += 64, b += 16 * kPanelBytes) multiply(a, call.lda, b);
  if (call.k % kAmxK != 0) multiply(call.tail, 64, b);
  _tile_stored(0, c, call.ldc);
  if constexpr (Tiles > 1) _tile_stored(1, c + 16, call.ldc);
  if constexpr (Tiles > 2) _tile_stored(2, c + 32, call.ldc);
  if constexpr (Tiles > 3) _tile_stored(3, c + 48, call.ldc);
}

// A MicroKernel (micro_kernels.h) for up to kAmxRows rows.
inline void amx_kernel(int64_t k, const void *a, int64_t lda, const void *b, int64_t, void *c, int64_t ldc, int rows, int columns,
                       bool accumulate, const struct Ahead *) {
  alignas(64) char tail[kAmxRows * 64];
  AmxCall call{k,    static_cast<const char *>(a), lda * 2, static_cast<const char *>(b), tail, static_cast<float *>(c),
               ldc * 4, accumulate};
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
