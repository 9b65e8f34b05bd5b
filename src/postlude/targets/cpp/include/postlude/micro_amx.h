// Microkernels of AMX: blocks of at most 32 rows times one packed panel of bfloat16 pairs.
//
// A tile register holds 16 rows of 64 bytes: of the left operand 16 rows of 32 k, of a panel 16 pairs of k by 16 columns, of the
// accumulators 16 x 16 floats. More than 16 rows: 2 x 2 tiles of accumulators at a time (each loaded tile is used twice); up to
// 16 rows: 1 x 4, one pass over the panel.
//
// Products of tiles leave the vector units idle, and out-of-order execution sees only a few hundred instructions ahead. So the
// epilogue of the block before is done row by row between them (`Beside`).
// Included by micro.cpp only.
#ifndef POSTLUDE_MICRO_AMX_H
#define POSTLUDE_MICRO_AMX_H

#include <algorithm>

#include <postlude/micro_pack.h>

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
  void *next = nullptr;  // partial sums over the rows, if the epilogue has any
  int64_t next_stride = 0;
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
    epilogue(tensors, row, now, c0, columns, from, stride / static_cast<int64_t>(sizeof(float)), next, next_stride);
    row += now, rows -= now;
  }

 private:
  // Rows of a call of the epilogue. One at a time costs a call for each; 8 are too many instructions to be looked past. On an
  // Emerald Rapids four were 0.95 to 1.42 times as fast as one, in the median 1.05 (one thread, 32 to 1024 rows).
  static constexpr int64_t kAtOnce = 4;
};

struct AmxKernels {
  // A packed panel. Parameters as those of a MicroKernel (micro_kernels.h).
  void (*panel)(int64_t k, const void *a, int64_t lda, const void *b, void *c, int64_t ldc, int rows, int columns, bool accumulate,
                Beside *beside) = nullptr;
  // Weights [n, k] where they lie, times rows in pairs of k.
  void (*weights)(int64_t k, const void *pairs, const void *w, int64_t ldw, void *c, int64_t ldc, int rows, int columns,
                  Beside *beside) = nullptr;
  void (*pack_rows)(char *to, const char *from, int64_t stride, int64_t k, int rows) = nullptr;
};

// How many steps a block has: between two of them something else is done.
constexpr int64_t amx_steps(int64_t k, int rows, int columns) { return (rows > 16 ? (columns + 31) / 32 * 2 : 1) * (k / kAmxK); }

#if defined(POSTLUDE_AMX)

// The shapes of a thread's tile registers. Set by the first kernel of a call, and released at its end: other code in this
// process (oneDNN) has shapes of its own.
class TileShapes {
 public:
  // For `rows` of a block times a packed panel. Registers: 0 to 3 accumulators, then the left operand's, then the panel's.
  void for_panel(int rows) {
    if (!changes(rows, false)) return;
    const uint8_t first = static_cast<uint8_t>(std::min(rows, 16)), second = static_cast<uint8_t>(rows - first);
    if (second > 0)
      load({first, first, second, second, first, second, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64});
    else
      load({first, first, first, first, first, 16, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64});
  }
  // For weights [n, k] times `rows` of a block in pairs of k. Registers: 0 to 3 accumulators, 4 and 5 weights, 6 and 7 pairs.
  void for_weights(int rows) {
    if (!changes(rows, true)) return;
    const uint16_t first = static_cast<uint16_t>(4 * std::min(rows, 16)), second = static_cast<uint16_t>(4 * rows - first);
    if (second > 0)
      load({16, 16, 16, 16, 16, 16, 16, 16}, {first, first, second, second, 64, 64, first, second});
    else
      load({16, 16, 16, 16, 16, 16, 16, 16}, {first, first, first, first, 64, 64, first, first});
  }
  void release() {
    if (rows_ != 0) _tile_release();
    rows_ = 0;
  }

 private:
  int rows_ = 0;  // 0: not in use
  bool weights_ = false;

  bool changes(int rows, bool weights) {
    const bool different = rows != rows_ || weights != weights_;
    rows_ = rows, weights_ = weights;
    return different;
  }
  static void load(const uint8_t (&rows)[8], const uint16_t (&bytes)[8]) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    std::copy(rows, rows + 8, config.rows);
    std::copy(bytes, bytes + 8, config.bytes);
    _tile_loadconfig(&config);
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
  const auto multiply = [&](const char *left, int64_t stride, const char *right) {
    _tile_loadd(6, right, kPanelBytes);
    _tile_loadd(4, left, stride);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (Tiles == 2) _tile_loadd(7, right + 64, kPanelBytes);
    if constexpr (Tiles == 2) _tile_dpbf16ps(1, 4, 7);
    if (call.beside != nullptr) call.beside->step();
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
inline void amx_panel_kernel(int64_t k, const void *a, int64_t lda, const void *b, void *c, int64_t ldc, int rows, int columns,
                       bool accumulate, Beside *beside) {
  alignas(64) char tail[kAmxRows * 64];
  AmxCall call{k,    static_cast<const char *>(a), lda * 2, static_cast<const char *>(b), tail, static_cast<float *>(c),
               ldc * 4, accumulate, beside};
  if (const int rest = static_cast<int>(k % kAmxK); rest != 0)
    for (int r = 0; r < rows; ++r)
      store_bits(tail + r * 64, load_bits_first(static_cast<const uint16_t *>(a) + r * lda + (k - rest), rest));
  memory_barrier();
  tile_shapes().for_panel(rows);
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

// --- weights [n, k] where they lie ------------------------------------------------------------------------------------------
// They have the form of a left operand already: 16 weight rows of 32 k are a tile. So the block's rows become the right operand
// (in pairs of k, which is little to do while there are few of them), and the product comes out transposed.

// The rows of a block in pairs of k: [depth / 2][kAmxRows][2].
inline void amx_pack_rows(char *to, const char *from, int64_t stride, int64_t k, int rows) {
  for (int r = 0; r < rows; r += 16) {
    const int count = std::min(16, rows - r);
    const char *row = from + r * stride;
    int64_t i = 0;
    for (; i + kAmxK <= k; i += kAmxK) transpose_square(to + (i * kAmxRows + 2 * r) * 2, kAmxRows * 4, row + i * 2, stride, count);
    if (i == k) continue;
    alignas(64) char last[16 * 64];
    for (int j = 0; j < count; ++j)
      store_bits(last + j * 64, load_bits_first(reinterpret_cast<const uint16_t *>(row + j * stride) + i, static_cast<int>(k - i)));
    transpose_square(to + (i * kAmxRows + 2 * r) * 2, kAmxRows * 4, last, 64, count);
  }
}

// A transposed tile of accumulators to its rows.
POSTLUDE_INLINE void amx_store_transposed(float *c, int64_t ldc, const float *tile, int rows) {
  TransposeVector v[16];
  POSTLUDE_UNROLL for (int i = 0; i < 16; ++i) v[i] = transpose_load(tile + 16 * i);
  transpose(v);
  POSTLUDE_UNROLL for (int i = 0; i < 16; ++i)
    if (i < rows) transpose_store(c + i * ldc, v[i]);
}

struct AmxWeightsCall {
  int64_t k;
  const char *pairs;
  const char *w, *tail;  // weight rows; the last k % 32 of each, and zeros, in rows of 64 bytes
  int64_t ldw;           // bytes
  Beside *beside;
};

// 64 weight rows, up to 16 rows of the block; `at`: the first weight row of each tile.
POSTLUDE_INLINE void amx_weights_one(const AmxWeightsCall &call, const int (&at)[4]) {
  const char *w[4], *pairs = call.pairs;
  for (int i = 0; i < 4; ++i) w[i] = call.w + at[i] * call.ldw;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const auto multiply = [&](const char *w0, const char *w1, const char *w2, const char *w3, int64_t stride) {
    _tile_loadd(6, pairs, kAmxRows * 4);
    _tile_loadd(4, w0, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, w1, stride);
    _tile_dpbf16ps(1, 5, 6);
    _tile_loadd(4, w2, stride);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(5, w3, stride);
    _tile_dpbf16ps(3, 5, 6);
  };
  int64_t i = 0;
  for (; i + kAmxK <= call.k; i += kAmxK, pairs += kAmxK * kAmxRows * 2) {
    multiply(w[0] + 2 * i, w[1] + 2 * i, w[2] + 2 * i, w[3] + 2 * i, call.ldw);
    if (call.beside != nullptr) call.beside->step();
  }
  if (i < call.k) multiply(call.tail + at[0] * 64, call.tail + at[1] * 64, call.tail + at[2] * 64, call.tail + at[3] * 64, 64);
}

// 32 weight rows, 17 to 32 rows of the block.
POSTLUDE_INLINE void amx_weights_two(const AmxWeightsCall &call, const int (&at)[2]) {
  const char *w[2] = {call.w + at[0] * call.ldw, call.w + at[1] * call.ldw}, *pairs = call.pairs;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const auto multiply = [&](const char *w0, const char *w1, int64_t stride) {
    _tile_loadd(6, pairs, kAmxRows * 4);
    _tile_loadd(4, w0, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, w1, stride);
    _tile_dpbf16ps(1, 5, 6);
    _tile_loadd(7, pairs + 64, kAmxRows * 4);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  };
  int64_t i = 0;
  for (; i + kAmxK <= call.k; i += kAmxK, pairs += kAmxK * kAmxRows * 2) {
    multiply(w[0] + 2 * i, w[1] + 2 * i, call.ldw);
    if (call.beside != nullptr) call.beside->step();
  }
  if (i < call.k) multiply(call.tail + at[0] * 64, call.tail + at[1] * 64, 64);
}

// `pairs`: the block's rows as amx_pack_rows leaves them. `w`: `columns` weight rows, at least 16, ldw elements apart.
inline void amx_weights_kernel(int64_t k, const void *pairs, const void *w, int64_t ldw, void *c_, int64_t ldc, int rows, int columns,
                               Beside *beside) {
  alignas(64) char tail[4 * 16 * 64];
  alignas(64) float tiles[4][16 * 16];
  auto *c = static_cast<float *>(c_);
  const AmxWeightsCall call{k, static_cast<const char *>(pairs), static_cast<const char *>(w), tail, ldw * 2, beside};
  if (const int rest = static_cast<int>(k % kAmxK); rest != 0)
    for (int j = 0; j < columns; ++j)
      store_bits(tail + j * 64, load_bits_first(static_cast<const uint16_t *>(w) + j * ldw + (k - rest), rest));
  int at[4];  // tiles that would go past the end are moved back, and compute some columns again
  for (int i = 0; i < 4; ++i) at[i] = std::min(16 * i, columns - 16);
  memory_barrier();
  tile_shapes().for_weights(rows);
  if (rows <= 16) {
    amx_weights_one(call, at);
    _tile_stored(0, tiles[0], 64);
    _tile_stored(1, tiles[1], 64);
    _tile_stored(2, tiles[2], 64);
    _tile_stored(3, tiles[3], 64);
    for (int i = 0; i < 4 && 16 * i < columns; ++i) amx_store_transposed(c + at[i], ldc, tiles[i], rows);
    return;
  }
  for (int half = 0; half < 4 && 16 * half < columns; half += 2) {
    amx_weights_two(call, {at[half], at[half + 1]});
    _tile_stored(0, tiles[0], 64);
    _tile_stored(1, tiles[1], 64);
    _tile_stored(2, tiles[2], 64);
    _tile_stored(3, tiles[3], 64);
    for (int i = 0; i < 2; ++i) {
      amx_store_transposed(c + at[half + i], ldc, tiles[i], 16);
      amx_store_transposed(c + 16 * ldc + at[half + i], ldc, tiles[2 + i], rows - 16);
    }
  }
}

constexpr AmxKernels kAmxKernels{amx_panel_kernel, amx_weights_kernel, amx_pack_rows};

#else

constexpr AmxKernels kAmxKernels{};

#endif

}  // namespace postlude

#endif
