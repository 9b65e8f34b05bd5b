// The microkernels: a block of at most kTileRows rows times one panel of columns, over all of k.
//
// All have one signature, so that the driver treats a packed panel, weights [n, k] and weights [k, n] alike:
//
//     kernel(k, a, lda, b, ldb, c, ldc, rows, columns, accumulate)
//
//   a        rows of the left operand, k stride 1, lda elements apart: float, double, or bfloat16 (vdpbf16ps only)
//   b, ldb   a packed panel (ldb unused); or the first weight row of the panel, ldb apart ([n, k]: one row per column;
//            [k, n]: one row per k)
//   c, ldc   accumulators, rows of whole panels: everything up to the panel's width may be written
//
// k is cut into blocks whose sums are added up in c: one long chain of additions loses accuracy (7e-6 against 2e-6 at
// k = 4096 in float).
// Included by micro.cpp only.
#ifndef POSTLUDE_MICRO_KERNELS_H
#define POSTLUDE_MICRO_KERNELS_H

#include <postlude/micro_vector.h>

namespace postlude {

using MicroKernel = void (*)(int64_t k, const void *a, int64_t lda, const void *b, int64_t ldb, void *c, int64_t ldc, int rows,
                             int columns, bool accumulate);

constexpr int64_t kChain = 256;  // additions in one accumulator before its sum moves to c

// --- outer product form: packed panels, and [k, n] in place ---------------------------------------------------------
// A policy multiplies one step of k (one row of b, or a pair) into the tile.

// b is a row of Right per k: a panel of Compute, or weights [k, n] of any type, converted as they are loaded.
template <class Compute_, class Right_>
struct RowStep {
  using Compute = Compute_;
  using Left = Compute_;
  using Right = Right_;
  using V = typename VecOf<Compute>::V;
  static constexpr int step = 1;
  template <int R, int N>
  static POSTLUDE_INLINE void multiply(V (&acc)[R][N], const Left *const (&a)[R], int64_t k, const Right *b, int64_t) {
    V bv[N];
    POSTLUDE_UNROLL for (int v = 0; v < N; ++v) bv[v] = load(b + v * kLanes<Compute>);
    POSTLUDE_UNROLL for (int r = 0; r < R; ++r) {
      const Compute s = a[r][k];
      POSTLUDE_UNROLL for (int v = 0; v < N; ++v) acc[r][v] += s * bv[v];
    }
  }
  template <int R, int N>
  static POSTLUDE_INLINE void last(V (&)[R][N], const Left *const (&)[R], int64_t, const Right *, int64_t) {}
};

// b is a panel of bfloat16 pairs, a is float: the halves of a pair become floats by a shift and a mask.
struct PairStepFloat {
  using Compute = float;
  using Left = float;
  using Right = uint32_t;
  using V = VecF;
  static constexpr int step = 2;
  template <int R, int N>
  static POSTLUDE_INLINE void half(V (&acc)[R][N], const Left *const (&a)[R], int64_t k, const Right *b, bool odd) {
    V bv[N];
    POSTLUDE_UNROLL for (int v = 0; v < N; ++v) {
      const VecU pair = load_bits(b + v * kLanes<float>);
      bv[v] = odd ? reinterpret_cast<VecF>(pair & 0xffff0000u) : reinterpret_cast<VecF>(pair << 16);
    }
    POSTLUDE_UNROLL for (int r = 0; r < R; ++r) {
      const float s = a[r][k];
      POSTLUDE_UNROLL for (int v = 0; v < N; ++v) acc[r][v] += s * bv[v];
    }
  }
  template <int R, int N>
  static POSTLUDE_INLINE void multiply(V (&acc)[R][N], const Left *const (&a)[R], int64_t k, const Right *b, int64_t) {
    half(acc, a, k, b, false);
    half(acc, a, k + 1, b, true);
  }
  template <int R, int N>
  static POSTLUDE_INLINE void last(V (&acc)[R][N], const Left *const (&a)[R], int64_t k, const Right *b, int64_t) {
    half(acc, a, k, b, false);
  }
};

#if defined(POSTLUDE_AVX512_BF16)
// Pairs of bfloat16 on both sides. InPlace: b is weights [k, n] and two of its rows are interleaved here.
template <bool InPlace>
struct PairStepDot {
  using Compute = float;
  using Left = uint16_t;
  using Right = uint16_t;
  using V = VecF;
  static constexpr int step = 2;
  template <int R, int N>
  static POSTLUDE_INLINE void dot(V (&acc)[R][N], const uint32_t (&s)[R], const Right *b, const Right *second) {
    __m512bh bv[N];
    POSTLUDE_UNROLL for (int v = 0; v < N; ++v) {
      if constexpr (InPlace) {
        const __m512i even = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(b + 16 * v)));
        const __m512i odd = second == nullptr
            ? _mm512_setzero_si512()
            : _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(second + 16 * v)));
        bv[v] = reinterpret_cast<__m512bh>(_mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
      } else {
        bv[v] = reinterpret_cast<__m512bh>(load_bits(b + 32 * v));
      }
    }
    POSTLUDE_UNROLL for (int r = 0; r < R; ++r) {
      const __m512bh sv = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(s[r])));
      POSTLUDE_UNROLL for (int v = 0; v < N; ++v)
        acc[r][v] = reinterpret_cast<VecF>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc[r][v]), sv, bv[v]));
    }
  }
  template <int R, int N>
  static POSTLUDE_INLINE void multiply(V (&acc)[R][N], const Left *const (&a)[R], int64_t k, const Right *b, int64_t ldb) {
    uint32_t s[R];
    POSTLUDE_UNROLL for (int r = 0; r < R; ++r) std::memcpy(&s[r], a[r] + k, 4);
    dot(acc, s, b, b + ldb);
  }
  template <int R, int N>
  static POSTLUDE_INLINE void last(V (&acc)[R][N], const Left *const (&a)[R], int64_t k, const Right *b, int64_t) {
    uint32_t s[R];  // nothing may be read past the row's end, and the missing half must be zero
    POSTLUDE_UNROLL for (int r = 0; r < R; ++r) s[r] = a[r][k];
    dot(acc, s, b, nullptr);
  }
};
#endif

// stride: elements of b from one step to the next.
template <class Step, int R, int N>
void outer_tile(int64_t k, const typename Step::Left *a, int64_t lda, const typename Step::Right *b, int64_t ldb, int64_t stride,
                typename Step::Compute *c, int64_t ldc, bool accumulate) {
  using V = typename Step::V;
  constexpr int lanes = kLanes<typename Step::Compute>;
  int64_t begin = 0;
  do {
    const int64_t end = k - begin > kChain * Step::step ? begin + kChain * Step::step : k;
    V acc[R][N] = {};
    const typename Step::Left *rows[R];
    POSTLUDE_UNROLL for (int r = 0; r < R; ++r) rows[r] = a + r * lda;
    int64_t i = begin;
    if constexpr (R * N <= 12) {  // few products a step: the loop itself would cost
      for (; i + 4 * Step::step <= end; i += 4 * Step::step) {
        POSTLUDE_UNROLL for (int u = 0; u < 4; ++u) Step::multiply(acc, rows, i + u * Step::step, b + u * stride, ldb);
        b += 4 * stride;
      }
    }
    for (; i + Step::step <= end; i += Step::step, b += stride) Step::multiply(acc, rows, i, b, ldb);
    if (i < end) Step::last(acc, rows, i, b, ldb);
    if (accumulate) {
      POSTLUDE_UNROLL for (int r = 0; r < R; ++r)
        POSTLUDE_UNROLL for (int v = 0; v < N; ++v) store(c + r * ldc + v * lanes, load(c + r * ldc + v * lanes) + acc[r][v]);
    } else {
      POSTLUDE_UNROLL for (int r = 0; r < R; ++r)
        POSTLUDE_UNROLL for (int v = 0; v < N; ++v) store(c + r * ldc + v * lanes, acc[r][v]);
    }
    accumulate = true;
    begin = end;
  } while (begin < k);
}

template <class Step, int N>
void outer_rows(int64_t k, const typename Step::Left *a, int64_t lda, const typename Step::Right *b, int64_t ldb, int64_t stride,
                typename Step::Compute *c, int64_t ldc, int rows, bool accumulate) {
  switch (rows) {
    case 1: return outer_tile<Step, 1, N>(k, a, lda, b, ldb, stride, c, ldc, accumulate);
    case 2: return outer_tile<Step, 2, N>(k, a, lda, b, ldb, stride, c, ldc, accumulate);
    case 3: return outer_tile<Step, 3, N>(k, a, lda, b, ldb, stride, c, ldc, accumulate);
#define POSTLUDE_ROWS(R)                                                                                      \
  case R:                                                                                                     \
    if constexpr (R <= kTileRows) return outer_tile<Step, R, N>(k, a, lda, b, ldb, stride, c, ldc, accumulate); \
    break;
    POSTLUDE_ROWS(4)
    POSTLUDE_ROWS(5)
    POSTLUDE_ROWS(6)
#undef POSTLUDE_ROWS
  }
}

// Every: kernels for 1, 2, ... vectors of columns, and not for the whole panel only.
template <class Step, bool Every>
void outer(int64_t k, const void *a_, int64_t lda, const void *b_, int64_t ldb, int64_t stride, void *c_, int64_t ldc, int rows,
           int columns, bool accumulate) {
  const auto *a = static_cast<const typename Step::Left *>(a_);
  const auto *b = static_cast<const typename Step::Right *>(b_);
  auto *c = static_cast<typename Step::Compute *>(c_);
  constexpr int lanes = kLanes<typename Step::Compute>;
  if constexpr (Every) {
    if (columns <= lanes) return outer_rows<Step, 1>(k, a, lda, b, ldb, stride, c, ldc, rows, accumulate);
    if constexpr (kTileVectors > 2) {
      if (columns <= 2 * lanes) return outer_rows<Step, 2>(k, a, lda, b, ldb, stride, c, ldc, rows, accumulate);
      if (columns <= 3 * lanes) return outer_rows<Step, 3>(k, a, lda, b, ldb, stride, c, ldc, rows, accumulate);
    }
  }
  outer_rows<Step, kTileVectors>(k, a, lda, b, ldb, stride, c, ldc, rows, accumulate);
}

template <class Step, bool Every>
void panel_kernel(int64_t k, const void *a, int64_t lda, const void *b, int64_t, void *c, int64_t ldc, int rows, int columns,
                  bool accumulate) {
  constexpr int64_t stride = kPanelBytes / sizeof(typename Step::Right);
  outer<Step, Every>(k, a, lda, b, 0, stride, c, ldc, rows, columns, accumulate);
}

// Weights [k, n] in place: whole panels only, so that nothing is read past the last column.
template <class Step>
void in_place_kernel(int64_t k, const void *a, int64_t lda, const void *b, int64_t ldb, void *c, int64_t ldc, int rows, int columns,
                     bool accumulate) {
  outer<Step, false>(k, a, lda, b, ldb, ldb * Step::step, c, ldc, rows, columns, accumulate);
}

// --- dot product form: weights [n, k] in place ------------------------------------------------------------------------
// Vectors run along k; a tile is rows x 4 columns, and the lanes are added up at its end.

template <class Compute_, class Right_>
struct DotStep {
  using Compute = Compute_;
  using Left = Compute_;
  using Right = Right_;
  using V = typename VecOf<Compute>::V;
  using VA = V;
  static constexpr int step = kLanes<Compute>;
  static POSTLUDE_INLINE V load_a(const Left *p) { return load(p); }
  static POSTLUDE_INLINE V load_b(const Right *p) { return load(p); }
  static POSTLUDE_INLINE V first_a(const Left *p, int n) { return load_first(p, n); }
  static POSTLUDE_INLINE V first_b(const Right *p, int n) { return load_first(p, n); }
  static POSTLUDE_INLINE V multiply(V acc, V a, V b) { return acc + a * b; }
};

#if defined(POSTLUDE_AVX512_BF16)
struct DotStepBf16 {
  using Compute = float;
  using Left = uint16_t;
  using Right = uint16_t;
  using V = VecF;
  using VA = VecU;
  static constexpr int step = 32;
  static POSTLUDE_INLINE VecU load_a(const Left *p) { return load_bits(p); }
  static POSTLUDE_INLINE VecU load_b(const Right *p) { return load_bits(p); }
  static POSTLUDE_INLINE VecU first_a(const Left *p, int n) { return load_bits_first(p, n); }
  static POSTLUDE_INLINE VecU first_b(const Right *p, int n) { return load_bits_first(p, n); }
  static POSTLUDE_INLINE V multiply(V acc, VecU a, VecU b) {
    return reinterpret_cast<VecF>(
        _mm512_dpbf16_ps(reinterpret_cast<__m512>(acc), reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)));
  }
};
#endif

template <class Step, int R>
void dot_tile(int64_t k, const typename Step::Left *a, int64_t lda, const typename Step::Right *const (&b)[4],
              typename Step::Compute *c, int64_t ldc, bool accumulate) {
  using V = typename Step::V;
  using VA = typename Step::VA;
  constexpr int U = R <= 3 && kTileVectors == 4 ? 2 : 1;  // sets of accumulators: enough independent chains for few rows too
  constexpr int64_t block = kChain * Step::step * U;
  int64_t begin = 0;
  do {
    const int64_t end = k - begin > block ? begin + block : k;
    V acc[U][R][4] = {};
    int64_t i = begin;
    for (; i + U * Step::step <= end; i += U * Step::step) {
      POSTLUDE_UNROLL for (int u = 0; u < U; ++u) {
        VA bv[4];
        POSTLUDE_UNROLL for (int j = 0; j < 4; ++j) bv[j] = Step::load_b(b[j] + i + u * Step::step);
        POSTLUDE_UNROLL for (int r = 0; r < R; ++r) {
          VA av = Step::load_a(a + r * lda + i + u * Step::step);
          POSTLUDE_KEEP(av);
          POSTLUDE_UNROLL for (int j = 0; j < 4; ++j) acc[u][r][j] = Step::multiply(acc[u][r][j], av, bv[j]);
        }
      }
    }
    for (; i < end; i += Step::step) {
      const bool whole = end - i >= Step::step;
      const int n = static_cast<int>(end - i);
      VA bv[4];
      POSTLUDE_UNROLL for (int j = 0; j < 4; ++j) bv[j] = whole ? Step::load_b(b[j] + i) : Step::first_b(b[j] + i, n);
      POSTLUDE_UNROLL for (int r = 0; r < R; ++r) {
        const VA av = whole ? Step::load_a(a + r * lda + i) : Step::first_a(a + r * lda + i, n);
        POSTLUDE_UNROLL for (int j = 0; j < 4; ++j) acc[0][r][j] = Step::multiply(acc[0][r][j], av, bv[j]);
      }
    }
    POSTLUDE_UNROLL for (int r = 0; r < R; ++r) {
      V sums[4];
      POSTLUDE_UNROLL for (int j = 0; j < 4; ++j) sums[j] = U == 2 ? acc[0][r][j] + acc[U - 1][r][j] : acc[0][r][j];
      sum4(sums, c + r * ldc, accumulate);
    }
    accumulate = true;
    begin = end;
  } while (begin < k);
}

template <class Step>
void dot_kernel(int64_t k, const void *a_, int64_t lda, const void *b_, int64_t ldb, void *c_, int64_t ldc, int rows, int columns,
                bool accumulate) {
  const auto *a = static_cast<const typename Step::Left *>(a_);
  const auto *weights = static_cast<const typename Step::Right *>(b_);
  auto *c = static_cast<typename Step::Compute *>(c_);
  for (int j = 0; j < columns; j += 4) {
    const typename Step::Right *b[4];  // columns past the end repeat the last: computed, never used
    for (int i = 0; i < 4; ++i) b[i] = weights + (j + i < columns ? j + i : columns - 1) * ldb;
    switch (rows) {
      case 1: dot_tile<Step, 1>(k, a, lda, b, c + j, ldc, accumulate); break;
      case 2: dot_tile<Step, 2>(k, a, lda, b, c + j, ldc, accumulate); break;
      case 3: dot_tile<Step, 3>(k, a, lda, b, c + j, ldc, accumulate); break;
#define POSTLUDE_ROWS(R)                                                                               \
  case R:                                                                                              \
    if constexpr (R <= kTileRows) dot_tile<Step, R>(k, a, lda, b, c + j, ldc, accumulate);             \
    break;
      POSTLUDE_ROWS(4)
      POSTLUDE_ROWS(5)
      POSTLUDE_ROWS(6)
#undef POSTLUDE_ROWS
    }
  }
}

// --- the choice by element types -----------------------------------------------------------------------------------------

struct KernelSet {
  Element left;          // what the kernels read: other left types are converted first
  MicroKernel panel;     // packed
  MicroKernel in_place;  // [k, n]
  MicroKernel dot;       // [n, k]
};

inline KernelSet kernels_for(Element left, Element right) {
  switch (right) {
    case Element::f64:
      return {Element::f64, panel_kernel<RowStep<double, double>, true>, in_place_kernel<RowStep<double, double>>,
              dot_kernel<DotStep<double, double>>};
    case Element::bf16:
#if defined(POSTLUDE_AVX512_BF16)
      if (left == Element::bf16)
        return {Element::bf16, panel_kernel<PairStepDot<false>, true>, in_place_kernel<PairStepDot<true>>, dot_kernel<DotStepBf16>};
#endif
      return {Element::f32, panel_kernel<PairStepFloat, true>, in_place_kernel<RowStep<float, bfloat16>>,
              dot_kernel<DotStep<float, bfloat16>>};
    case Element::f16:
      return {Element::f32, panel_kernel<RowStep<float, float>, true>, in_place_kernel<RowStep<float, float16>>,
              dot_kernel<DotStep<float, float16>>};
    case Element::f32: break;
  }
  (void)left;
  return {Element::f32, panel_kernel<RowStep<float, float>, true>, in_place_kernel<RowStep<float, float>>,
          dot_kernel<DotStep<float, float>>};
}

}  // namespace postlude

#endif
