// The microkernels: a block of at most kTileRows rows times one panel of columns, over all of k.
//
// All have one signature, so that the driver treats a packed panel, weights [n, k] and weights [k, n] alike:
//
//     kernel(k, a, lda, b, ldb, c, ldc, rows, columns, accumulate, ahead)
//
//   a        rows of the left operand, k stride 1, lda elements apart: float, double, or bfloat16 (vdpbf16ps only)
//   b, ldb   a packed panel (ldb unused); or the first weight row of the panel, ldb apart ([n, k]: one row per column;
//            [k, n]: one row per k)
//   c, ldc   accumulators, rows of whole panels: everything up to the panel's width may be written
//   ahead    null, or what to prefetch: the hardware's prefetcher does not run far enough ahead while there are several products
//            for each load (4 rows from DRAM: 20 -> 29 GB/s on one core)
//
// k is cut into blocks whose sums are added up in c: one long chain of additions loses accuracy (7e-6 against 2e-6 at
// k = 4096 in float).
// Included by micro.cpp only.
#ifndef POSTLUDE_MICRO_KERNELS_H
#define POSTLUDE_MICRO_KERNELS_H

#include <postlude/micro_amx.h>

namespace postlude {

// The walk of a prefetch beside that of b. One step of b reads four lines of 64 bytes: two at `from` and two `second` bytes later
// (of four weight rows [n, k]: a line of each); the next step is `step` bytes further on.
struct Ahead {
  const char *from;
  int64_t step, second;
  bool all;  // four lines; else the first two
};

using MicroKernel = void (*)(int64_t k, const void *a, int64_t lda, const void *b, int64_t ldb, void *c, int64_t ldc, int rows,
                             int columns, bool accumulate, const Ahead *ahead);

constexpr int64_t kChain = 256;  // at most so many additions in one accumulator before its sum moves to c

// k in nearly equal chains. In float32 of at most 160 additions: one chain of 256 has an error of 2.9e-7, MKL's sums 2.0e-7 at
// k = 256 and 2.5e-7 from k = 1024 on.
template <class Step>
POSTLUDE_INLINE int64_t chain_length(int64_t k) {
  constexpr bool exact = Step::step == 1 && sizeof(typename Step::Compute) == 4;
  constexpr int64_t most = exact ? 160 : kChain * Step::step, unit = 16 * Step::step;
  const int64_t parts = (k + most - 1) / most;
  return parts <= 1 ? k : ((k + parts - 1) / parts + unit - 1) / unit * unit;
}

// Whether a kernel prefetches the rows of the next block into L2: many short streams. It paid on Zen 4. On Emerald Rapids it made a
// microkernel whose operands lie in L2 4 to 8% slower (one quiet run); in whole layers it was not measured apart.
#if defined(__x86_64__)
inline const bool kPrefetchRows = __builtin_cpu_is("amd");
#else
constexpr bool kPrefetchRows = true;
#endif

// What lies there need not exist.
POSTLUDE_INLINE void prefetch(uintptr_t p) { __builtin_prefetch(reinterpret_cast<const void *>(p)); }
POSTLUDE_INLINE void prefetch_later(const void *p, int64_t distance) {
  __builtin_prefetch(reinterpret_cast<const char *>(reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(distance)), 0, 2);
}

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

template <class Step>
struct OuterCall {
  int64_t k;
  const typename Step::Left *a;
  int64_t lda;
  const typename Step::Right *b;
  int64_t ldb, stride;  // elements of b from one k to the next, from one step to the next (in place)
  typename Step::Compute *c;
  int64_t ldc;
  bool accumulate;
  const Ahead *ahead;
};

// Packed: `stride` is known while compiling, which leaves the registers of addresses free.
template <class Step, bool Packed, int R, int N, int Lines>
void outer_tile(const OuterCall<Step> &call) {
  using V = typename Step::V;
  constexpr int lanes = kLanes<typename Step::Compute>;
  constexpr int64_t packed_stride = kPanelBytes / static_cast<int64_t>(sizeof(typename Step::Right));
  const int64_t k = call.k, ldc = call.ldc, stride = Packed ? packed_stride : call.stride, ldb = call.ldb;
  const typename Step::Right *b = call.b;
  uintptr_t ahead = Lines > 0 ? reinterpret_cast<uintptr_t>(call.ahead->from) : 0;
  const int64_t ahead_step = Lines > 0 ? call.ahead->step : 0, second = Lines > 0 ? call.ahead->second : 0;
  const auto look_ahead = [&] {
    if constexpr (Lines > 0) prefetch(ahead), prefetch(ahead + 64);
    if constexpr (Lines > 2) prefetch(ahead + static_cast<uintptr_t>(second)), prefetch(ahead + static_cast<uintptr_t>(second) + 64);
    if constexpr (Lines > 0) ahead += static_cast<uintptr_t>(ahead_step);
  };
  typename Step::Compute *c = call.c;
  bool accumulate = call.accumulate;
  const int64_t chain = chain_length<Step>(k);
  int64_t begin = 0;
  do {
    const int64_t end = k - begin > chain ? begin + chain : k;
    V acc[R][N] = {};
    const typename Step::Left *rows[R];
    POSTLUDE_UNROLL for (int r = 0; r < R; ++r) rows[r] = call.a + r * call.lda;
    int64_t i = begin;
    if constexpr (R * N <= 12) {  // few products a step: the loop itself would cost
      for (; i + 4 * Step::step <= end; i += 4 * Step::step) {
        POSTLUDE_UNROLL for (int u = 0; u < 4; ++u) {
          look_ahead();
          Step::multiply(acc, rows, i + u * Step::step, b + u * stride, ldb);
        }
        b += 4 * stride;
      }
    }
    if constexpr (R >= 4 && N == kTileVectors) {
      constexpr int line = 64 / (sizeof(typename Step::Compute) / sizeof(float) * 4);  // steps that use up a line of each row
      for (; i + line * Step::step <= end;) {
        if (kPrefetchRows)
          POSTLUDE_UNROLL for (int r = 0; r < R; ++r) prefetch_later(rows[r] + i, R * call.lda * static_cast<int64_t>(sizeof(*call.a)));
        constexpr int each = Packed ? 4 : 1;
        POSTLUDE_NO_UNROLL for (int s = 0; s < line; s += each, i += each * Step::step, b += each * stride) {
          POSTLUDE_UNROLL for (int u = 0; u < each; ++u) {
            look_ahead();
            Step::multiply(acc, rows, i + u * Step::step, b + u * stride, ldb);
          }
        }
      }
    }
    for (; i + Step::step <= end; i += Step::step, b += stride) {
      look_ahead();
      Step::multiply(acc, rows, i, b, ldb);
    }
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

template <class Step, bool Packed, int N, int Lines>
void outer_rows(const OuterCall<Step> &call, int rows) {
  switch (rows) {
    case 1: return outer_tile<Step, Packed, 1, N, Lines>(call);
    case 2: return outer_tile<Step, Packed, 2, N, Lines>(call);
    case 3: return outer_tile<Step, Packed, 3, N, Lines>(call);
#define POSTLUDE_ROWS(R)                                                              \
  case R:                                                                             \
    if constexpr (R <= kTileRows) return outer_tile<Step, Packed, R, N, Lines>(call); \
    break;
    POSTLUDE_ROWS(4)
    POSTLUDE_ROWS(5)
    POSTLUDE_ROWS(6)
#undef POSTLUDE_ROWS
  }
}

// Which kernels are worth their compile time: kFull are the types of nearly all models.
enum Variants {
  kWhole,  // whole panels only
  kAhead,  // and prefetching
  kHalf,   // whole and half panels
  kFull,   // panels of 1, 2, ... vectors, and prefetching
};

template <class Step, bool Packed, Variants Which>
void outer(const OuterCall<Step> &call, int rows, int columns) {
  constexpr int lanes = kLanes<typename Step::Compute>, half = kTileVectors / 2;
  if constexpr (Which == kFull && kTileVectors == 4) {
    if (columns <= lanes) return outer_rows<Step, Packed, 1, 0>(call, rows);
    if (columns > 2 * lanes && columns <= 3 * lanes) return outer_rows<Step, Packed, 3, 0>(call, rows);
  }
  if constexpr (Which == kHalf || Which == kFull) {
    if (columns <= half * lanes) return outer_rows<Step, Packed, half, 0>(call, rows);
  }
  if constexpr ((Which == kFull || Which == kAhead) && kPanelBytes == 256) {
    if (call.ahead != nullptr)
      return call.ahead->all ? outer_rows<Step, Packed, kTileVectors, 4>(call, rows) : outer_rows<Step, Packed, kTileVectors, 2>(call, rows);
  }
  outer_rows<Step, Packed, kTileVectors, 0>(call, rows);
}

template <class Step, Variants Which>
void panel_kernel(int64_t k, const void *a, int64_t lda, const void *b, int64_t, void *c, int64_t ldc, int rows, int columns,
                  bool accumulate, const Ahead *ahead) {
  using Right = typename Step::Right;
  outer<Step, true, Which>({k, static_cast<const typename Step::Left *>(a), lda, static_cast<const Right *>(b), 0, kPanelBytes / sizeof(Right),
                      static_cast<typename Step::Compute *>(c), ldc, accumulate, ahead},
                     rows, columns);
}

// Weights [k, n] in place: whole panels only, so that nothing is read past the last column.
template <class Step, Variants Which>
void in_place_kernel(int64_t k, const void *a, int64_t lda, const void *b, int64_t ldb, void *c, int64_t ldc, int rows, int columns,
                     bool accumulate, const Ahead *ahead) {
  using Right = typename Step::Right;
  outer<Step, false, Which>({k, static_cast<const typename Step::Left *>(a), lda, static_cast<const Right *>(b), ldb, ldb * Step::step,
                       static_cast<typename Step::Compute *>(c), ldc, accumulate, ahead},
                      rows, columns);
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

template <class Step>
struct DotCall {
  int64_t k;
  const typename Step::Left *a;
  int64_t lda;
  const typename Step::Right *b[4];
  typename Step::Compute *c;
  int64_t ldc;
  bool accumulate;
  int64_t ahead;  // bytes from b to what is prefetched
};

// R rows times W weight rows at a time, U sets of accumulators (enough independent chains where R * W is small). One row takes
// one weight row after the other, so that memory is read in order: 97% of a plain loop's bandwidth, four at once 90%.
template <class Step, int R, int Lines>
void dot_tile(const DotCall<Step> &call) {
  using V = typename Step::V;
  using VA = typename Step::VA;
  constexpr int W = R == 1 ? 1 : 4;
  constexpr int U = R == 1 ? 4 : R <= 3 && kTileVectors == 4 ? 2 : 1;
  constexpr int64_t block = kChain * Step::step * U;
  const int64_t k = call.k, lda = call.lda;
  const typename Step::Left *a = call.a;
  bool accumulate = call.accumulate;
  int64_t begin = 0;
  do {
    const int64_t end = k - begin > block ? begin + block : k;
    V sums[R][4];
    POSTLUDE_UNROLL for (int w = 0; w < 4; w += W) {
      const typename Step::Right *b[W];
      POSTLUDE_UNROLL for (int j = 0; j < W; ++j) b[j] = call.b[w + j];
      V acc[U][R][W] = {};
      int64_t i = begin;
      for (; i + U * Step::step <= end; i += U * Step::step) {
        POSTLUDE_UNROLL for (int u = 0; u < U; ++u) {
          VA bv[W];
          POSTLUDE_UNROLL for (int j = 0; j < W; ++j) bv[j] = Step::load_b(b[j] + i + u * Step::step);
          POSTLUDE_UNROLL for (int j = 0; j < Lines; ++j)
            prefetch(reinterpret_cast<uintptr_t>(b[j] + i + u * Step::step) + static_cast<uintptr_t>(call.ahead));
          POSTLUDE_UNROLL for (int r = 0; r < R; ++r) {
            VA av = Step::load_a(a + r * lda + i + u * Step::step);
            POSTLUDE_KEEP(av);
            POSTLUDE_UNROLL for (int j = 0; j < W; ++j) acc[u][r][j] = Step::multiply(acc[u][r][j], av, bv[j]);
          }
        }
      }
      if constexpr (U > 1) {
        for (; i + Step::step <= end; i += Step::step) {
          VA bv[W];
          POSTLUDE_UNROLL for (int j = 0; j < W; ++j) bv[j] = Step::load_b(b[j] + i);
          POSTLUDE_UNROLL for (int r = 0; r < R; ++r) {
            VA av = Step::load_a(a + r * lda + i);
            POSTLUDE_KEEP(av);
            POSTLUDE_UNROLL for (int j = 0; j < W; ++j) acc[0][r][j] = Step::multiply(acc[0][r][j], av, bv[j]);
          }
        }
      }
      if (i < end) {
        const int n = static_cast<int>(end - i);
        VA bv[W];
        POSTLUDE_UNROLL for (int j = 0; j < W; ++j) bv[j] = Step::first_b(b[j] + i, n);
        POSTLUDE_UNROLL for (int r = 0; r < R; ++r) {
          const VA av = Step::first_a(a + r * lda + i, n);
          POSTLUDE_UNROLL for (int j = 0; j < W; ++j) acc[0][r][j] = Step::multiply(acc[0][r][j], av, bv[j]);
        }
      }
      POSTLUDE_UNROLL for (int r = 0; r < R; ++r)
        POSTLUDE_UNROLL for (int j = 0; j < W; ++j) {
          V sum = acc[0][r][j];
          POSTLUDE_UNROLL for (int u = 1; u < U; ++u) sum += acc[u][r][j];
          sums[r][w + j] = sum;
        }
    }
    POSTLUDE_UNROLL for (int r = 0; r < R; ++r) sum4(sums[r], call.c + r * call.ldc, accumulate);
    accumulate = true;
    begin = end;
  } while (begin < k);
}

template <class Step, int Lines>
void dot_rows(const DotCall<Step> &call, int rows) {
  switch (rows) {
    case 1: return dot_tile<Step, 1, 0>(call);  // in order: the hardware prefetches
    case 2: return dot_tile<Step, 2, Lines>(call);
    case 3: return dot_tile<Step, 3, Lines>(call);
#define POSTLUDE_ROWS(R)                                                 \
  case R:                                                                \
    if constexpr (R <= kTileRows) return dot_tile<Step, R, Lines>(call); \
    break;
    POSTLUDE_ROWS(4)
    POSTLUDE_ROWS(5)
    POSTLUDE_ROWS(6)
#undef POSTLUDE_ROWS
  }
}

template <class Step, Variants Which>
void dot_kernel(int64_t k, const void *a, int64_t lda, const void *b, int64_t ldb, void *c, int64_t ldc, int rows, int columns,
                bool accumulate, const Ahead *ahead) {
  const auto *weights = static_cast<const typename Step::Right *>(b);
  DotCall<Step> call{k, static_cast<const typename Step::Left *>(a), lda, {}, static_cast<typename Step::Compute *>(c), ldc, accumulate,
                     ahead == nullptr ? 0 : ahead->from - static_cast<const char *>(b)};
  for (int j = 0; j < columns; j += 4, call.c += 4) {
    // columns past the end repeat the last: computed, never used
    for (int i = 0; i < 4; ++i) call.b[i] = weights + (j + i < columns ? j + i : columns - 1) * ldb;
    if constexpr (Which == kFull) {
      if (ahead != nullptr) {
        ahead->all ? dot_rows<Step, 4>(call, rows) : dot_rows<Step, 2>(call, rows);
        continue;
      }
    }
    dot_rows<Step, 0>(call, rows);
  }
}

// --- the choice by element types -----------------------------------------------------------------------------------------

// A library for codes multiplies decoded panels, whose memory is near: the variants that matter least are left out.
#if defined(POSTLUDE_CODES)
constexpr Variants kBest = kWhole, kSome = kWhole, kFew = kWhole;
#else
constexpr Variants kBest = kFull, kSome = kHalf, kFew = kAhead;
#endif

struct KernelSet {
  Element left;          // what the kernels read: other left types are converted first
  MicroKernel panel;     // packed
  MicroKernel in_place;  // [k, n]
  MicroKernel dot;       // [n, k]
  AmxKernels amx = {};  // for blocks of kAmxRows
};

template <Element Right>
inline KernelSet kernels_of(Element left) {
  if constexpr (Right == Element::f64) {
    return {Element::f64, panel_kernel<RowStep<double, double>, kSome>, in_place_kernel<RowStep<double, double>, kWhole>,
            dot_kernel<DotStep<double, double>, kWhole>};
  } else if constexpr (Right == Element::bf16) {
#if defined(POSTLUDE_AVX512_BF16)
    if (left == Element::bf16)
      return {Element::bf16, panel_kernel<PairStepDot<false>, kBest>, in_place_kernel<PairStepDot<true>, kFew>,
              dot_kernel<DotStepBf16, kBest>, kAmxKernels};
#endif
    return {Element::f32, panel_kernel<PairStepFloat, kDotBf16 ? kHalf : kBest>, in_place_kernel<RowStep<float, bfloat16>, kWhole>,
            dot_kernel<DotStep<float, bfloat16>, kDotBf16 ? kWhole : kBest>};
  } else if constexpr (Right == Element::f16) {
    return {Element::f32, panel_kernel<RowStep<float, float>, kBest>, in_place_kernel<RowStep<float, float16>, kWhole>,
            dot_kernel<DotStep<float, float16>, kWhole>};
  } else {
    return {Element::f32, panel_kernel<RowStep<float, float>, kBest>, in_place_kernel<RowStep<float, float>, kFew>,
            dot_kernel<DotStep<float, float>, kBest>};
  }
}

// The kernels for a contraction. With POSTLUDE_ELEMENT the library holds those of one type of right operand alone, so that a
// process compiles only what its models need; for the others all pointers are null.
inline KernelSet kernels_for(Element left, Element right) {
#if defined(POSTLUDE_ELEMENT)
  return right == Element::POSTLUDE_ELEMENT ? kernels_of<Element::POSTLUDE_ELEMENT>(left) : KernelSet{};
#else
  switch (right) {
    case Element::f64: return kernels_of<Element::f64>(left);
    case Element::bf16: return kernels_of<Element::bf16>(left);
    case Element::f16: return kernels_of<Element::f16>(left);
    case Element::f32: break;
  }
  return kernels_of<Element::f32>(left);
#endif
}

}  // namespace postlude

#endif
