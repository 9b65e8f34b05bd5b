// Hand-written Programs for the harness. POSTLUDE_PROGRAM chooses one, ELEMENT is the element type of all tensors.
// Every epilogue works on dense tensors, in vectors of 16 floats where the row allows.
#include <postlude/run.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

namespace {
using namespace postlude;
using T = ELEMENT;
using C = std::conditional_t<std::is_same_v<T, double>, double, float>;

typedef float F16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint16_t H16 __attribute__((vector_size(32)));
typedef F16 F16Any __attribute__((aligned(1), may_alias));
typedef H16 H16Any __attribute__((aligned(1), may_alias));

inline float get(const float *p) { return *p; }
inline double get(const double *p) { return *p; }
inline float get(const bfloat16 *p) { return to_float(*p); }
inline float get(const float16 *p) { return to_float(*p); }
inline void put(float *p, float x) { *p = x; }
inline void put(double *p, double x) { *p = x; }
inline void put(bfloat16 *p, float x) {
  uint32_t b;
  std::memcpy(&b, &x, 4);
  p->bits = static_cast<uint16_t>((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
inline void put(float16 *p, float x) {
  const _Float16 h = static_cast<_Float16>(x);
  std::memcpy(p, &h, 2);
}
inline F16 get16(const float *p) { return *reinterpret_cast<const F16Any *>(p); }
inline F16 get16(const bfloat16 *p) {
  return reinterpret_cast<F16>(__builtin_convertvector(*reinterpret_cast<const H16Any *>(p), I16) << 16);
}
inline void put16(float *p, F16 x) { *reinterpret_cast<F16Any *>(p) = x; }
inline void put16(bfloat16 *p, F16 x) {
  const I16 b = reinterpret_cast<I16>(x);
  *reinterpret_cast<H16Any *>(p) = __builtin_convertvector((b + 0x7fff + ((b >> 16) & 1)) >> 16, H16);
}
// never called: `if constexpr` outside a template still compiles the branch not taken
template <class Other>
F16 get16(const Other *) {
  return F16{};
}
template <class Other>
void put16(Other *, F16) {}
constexpr bool kVectors = sizeof(C) == 4 && !std::is_same_v<T, float16>;

inline F16 exp16(F16 x) {
  x = x > 88.0f ? F16{} + 88.0f : x;
  x = x < -87.0f ? F16{} - 87.0f : x;
  const F16 shifted = x * 1.44269504f + 12582912.0f;
  const F16 n = shifted - 12582912.0f;
  const F16 r = x - n * 0.693145752f - n * 1.42860677e-6f;
  F16 p = 1.3981999e-3f + r * 1.9875691e-4f;
  p = 8.3334519e-3f + r * p;
  p = 4.1665795e-2f + r * p;
  p = 1.6666665e-1f + r * p;
  p = 0.5f + r * p;
  p = 1.0f + r + r * r * p;
  const I16 scale = (__builtin_convertvector(n, I16) + 127) << 23;
  return p * reinterpret_cast<F16>(scale);
}
// Abramowitz and Stegun 7.1.26: 1.5e-7 absolute
inline F16 erf16(F16 x) {
  const I16 sign = reinterpret_cast<I16>(x) & static_cast<int32_t>(0x80000000);
  const F16 a = reinterpret_cast<F16>(reinterpret_cast<I16>(x) & 0x7fffffff);
  const F16 t = 1.0f / (1.0f + 0.3275911f * a);
  const F16 p = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  return reinterpret_cast<F16>(reinterpret_cast<I16>(1.0f - p * exp16(-a * a)) | sign);
}

template <class Vector, class Scalar>
inline void columns(int64_t nc, Vector vector, Scalar scalar) {
  int64_t c = 0;
  if constexpr (kVectors)
    for (; c + 16 <= nc; c += 16) vector(c);
  for (; c < nc; ++c) scalar(c);
}

#define TYPES \
  using Left = T; \
  using Right = T;                                          \
  using Compute = C;

// out = x w^T + bias, gelu (GELU = 1) or nothing
struct Linear {
  TYPES
  static constexpr int contractions = 1;
  static constexpr Source left[1] = {{0, LEFT_TRANSPOSED}};
  static constexpr Source right[1] = {{1, RIGHT_TRANSPOSED}};
  static constexpr bool batched = BATCHED, whole_rows = false, feeds_next = false;
  static void epilogue(const Tensors &t, int64_t row, int64_t c0, int64_t nc, C *const *acc, void *) {
    const T *bias = t.data<T>(2) + c0;
    T *out = t.data<T>(3) + row * t.columns(3) + c0;
    const C *a = acc[0];
    columns(
        nc,
        [&](int64_t c) {
          if constexpr (kVectors) {
            F16 x = get16(a + c) + get16(bias + c);
            if (GELU) x = 0.5f * x * (1.0f + erf16(x * 0.70710678f));
            put16(out + c, x);
          }
        },
        [&](int64_t c) {
          C x = a[c] + get(bias + c);
          if (GELU) x = C(0.5) * x * (1 + std::erf(x * C(0.70710678118654752)));
          put(out + c, x);
        });
  }
};
struct LinearProgram {
  using Groups = std::tuple<Linear>;
  static constexpr int operands = 3, results = 1;
};

// out = layer_norm(x w^T + bias + residual): operands x, w, bias, residual, gamma, beta
struct Norm {
  TYPES
  static constexpr int contractions = 1;
  static constexpr Source left[1] = {{0, LEFT_TRANSPOSED}};
  static constexpr Source right[1] = {{1, RIGHT_TRANSPOSED}};
  static constexpr bool batched = BATCHED, whole_rows = true, feeds_next = false;
  static void epilogue(const Tensors &t, int64_t row, int64_t, int64_t nc, C *const *acc, void *) {
    const T *bias = t.data<T>(2), *residual = t.data<T>(3) + row * nc, *gamma = t.data<T>(4), *beta = t.data<T>(5);
    T *out = t.data<T>(6) + row * nc;
    C *a = acc[0];
    C sum = 0;
    F16 sums{};
    columns(
        nc,
        [&](int64_t c) {
          if constexpr (kVectors) {
            const F16 x = get16(a + c) + get16(bias + c) + get16(residual + c);
            put16(a + c, x);
            sums += x;
          }
        },
        [&](int64_t c) { sum += a[c] += get(bias + c) + get(residual + c); });
    for (int i = 0; i < 16; ++i) sum += sums[i];
    const C mean = sum / C(nc);
    C square = 0;
    F16 squares{};
    columns(
        nc,
        [&](int64_t c) {
          if constexpr (kVectors) {
            const F16 x = get16(a + c) - float(mean);
            squares += x * x;
          }
        },
        [&](int64_t c) { square += (a[c] - mean) * (a[c] - mean); });
    for (int i = 0; i < 16; ++i) square += squares[i];
    const C scale = 1 / std::sqrt(square / C(nc) + C(1e-5));
    columns(
        nc,
        [&](int64_t c) {
          if constexpr (kVectors) put16(out + c, (get16(a + c) - float(mean)) * float(scale) * get16(gamma + c) + get16(beta + c));
        },
        [&](int64_t c) { put(out + c, (a[c] - mean) * scale * get(gamma + c) + get(beta + c)); });
  }
};
struct NormProgram {
  using Groups = std::tuple<Norm>;
  static constexpr int operands = 6, results = 1;
};

// out = silu(x g^T) * (x u^T): operands x, g, u
struct Swiglu {
  TYPES
  static constexpr int contractions = 2;
  static constexpr Source left[2] = {{0, false}, {0, false}};
  static constexpr Source right[2] = {{1, RIGHT_TRANSPOSED}, {2, RIGHT_TRANSPOSED}};
  static constexpr bool batched = BATCHED, whole_rows = false, feeds_next = false;
  static void epilogue(const Tensors &t, int64_t row, int64_t c0, int64_t nc, C *const *acc, void *) {
    T *out = t.data<T>(3) + row * t.columns(3) + c0;
    columns(
        nc,
        [&](int64_t c) {
          if constexpr (kVectors) {
            const F16 g = get16(acc[0] + c);
            put16(out + c, g / (1.0f + exp16(-g)) * get16(acc[1] + c));
          }
        },
        [&](int64_t c) { put(out + c, acc[0][c] / (1 + std::exp(-acc[0][c])) * acc[1][c]); });
  }
};
struct SwigluProgram {
  using Groups = std::tuple<Swiglu>;
  static constexpr int operands = 3, results = 1;
};

// q, k, v = x w_i^T + b_i: operands x, wq, wk, wv, bq, bk, bv
template <int I>
struct Projection {
  TYPES
  static constexpr int contractions = 1;
  static constexpr Source left[1] = {{0, LEFT_TRANSPOSED}};
  static constexpr Source right[1] = {{1 + I, RIGHT_TRANSPOSED}};
  static constexpr bool batched = BATCHED, whole_rows = false, feeds_next = false;
  static void epilogue(const Tensors &t, int64_t row, int64_t c0, int64_t nc, C *const *acc, void *) {
    const T *bias = t.data<T>(4 + I) + c0;
    T *out = t.data<T>(7 + I) + row * t.columns(7 + I) + c0;
    columns(
        nc,
        [&](int64_t c) {
          if constexpr (kVectors) put16(out + c, get16(acc[0] + c) + get16(bias + c));
        },
        [&](int64_t c) { put(out + c, acc[0][c] + get(bias + c)); });
  }
};
struct ProjectionsProgram {
  using Groups = std::tuple<Projection<0>, Projection<1>, Projection<2>>;
  static constexpr int operands = 7, results = 3;
};

// out = softmax(q k^T * scale + mask) v: operands q, k, v [b..., rows, d], mask [n] (float for float types)
struct Scores {
  TYPES
  static constexpr int contractions = 1;
  static constexpr Source left[1] = {{0, false}};
  static constexpr Source right[1] = {{1, true}};
  static constexpr bool batched = true, whole_rows = true, feeds_next = true;
  static void epilogue(const Tensors &t, int64_t, int64_t, int64_t nc, C *const *acc, void *next) {
    const C scale = 1 / std::sqrt(C(t.columns(0)));
    const T *mask = t.data<T>(3);
    T *out = static_cast<T *>(next);
    C *a = acc[0];
    C most = -INFINITY, sum = 0;
    F16 mosts = F16{} - INFINITY, sums{};
    columns(
        nc,
        [&](int64_t c) {
          if constexpr (kVectors) {
            const F16 x = get16(a + c) * float(scale) + get16(mask + c);
            put16(a + c, x);
            mosts = mosts > x ? mosts : x;
          }
        },
        [&](int64_t c) { most = std::max(most, a[c] = a[c] * scale + get(mask + c)); });
    for (int i = 0; i < 16; ++i) most = std::max<C>(most, mosts[i]);
    columns(
        nc,
        [&](int64_t c) {
          if constexpr (kVectors) {
            const F16 x = exp16(get16(a + c) - float(most));
            put16(a + c, x);
            sums += x;
          }
        },
        [&](int64_t c) { sum += a[c] = std::exp(a[c] - most); });
    for (int i = 0; i < 16; ++i) sum += sums[i];
    const C inverse = 1 / sum;
    columns(
        nc,
        [&](int64_t c) {
          if constexpr (kVectors) put16(out + c, get16(a + c) * float(inverse));
        },
        [&](int64_t c) { put(out + c, a[c] * inverse); });
  }
};
struct Values {
  TYPES
  static constexpr int contractions = 1;
  static constexpr Source left[1] = {{-1, false}};
  static constexpr Source right[1] = {{2, false}};
  static constexpr bool batched = true, whole_rows = false, feeds_next = false;
  static void epilogue(const Tensors &t, int64_t row, int64_t c0, int64_t nc, C *const *acc, void *) {
    T *out = t.data<T>(4) + row * t.columns(4) + c0;
    columns(
        nc,
        [&](int64_t c) {
          if constexpr (kVectors) put16(out + c, get16(acc[0] + c));
        },
        [&](int64_t c) { put(out + c, acc[0][c]); });
  }
};
struct AttentionProgram {
  using Groups = std::tuple<Scores, Values>;
  static constexpr int operands = 4, results = 1;
};

// out = relu(x a^T) b^T without a batch, as one chain: operands x, a, b
struct Hidden {
  TYPES
  static constexpr int contractions = 1;
  static constexpr Source left[1] = {{0, LEFT_TRANSPOSED}};
  static constexpr Source right[1] = {{1, RIGHT_TRANSPOSED}};
  static constexpr bool batched = false, whole_rows = true, feeds_next = true;
  static void epilogue(const Tensors &, int64_t, int64_t, int64_t nc, C *const *acc, void *next) {
    for (int64_t c = 0; c < nc; ++c) put(static_cast<T *>(next) + c, acc[0][c] > 0 ? acc[0][c] : 0);
  }
};
struct Output {
  TYPES
  static constexpr int contractions = 1;
  static constexpr Source left[1] = {{-1, false}};
  static constexpr Source right[1] = {{2, RIGHT_TRANSPOSED}};
  static constexpr bool batched = false, whole_rows = false, feeds_next = false;
  static void epilogue(const Tensors &t, int64_t row, int64_t c0, int64_t nc, C *const *acc, void *) {
    T *out = t.data<T>(3) + row * t.columns(3) + c0;
    for (int64_t c = 0; c < nc; ++c) put(out + c, acc[0][c]);
  }
};
struct ChainProgram {
  using Groups = std::tuple<Hidden, Output>;
  static constexpr int operands = 3, results = 1;
};

}  // namespace

POSTLUDE_EXPORT(POSTLUDE_PROGRAM)
