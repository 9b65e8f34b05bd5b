// Vectors of the library of microkernels: compiler vector extensions wherever they suffice, intrinsics where they pay
// (conversions, masked tails, pairs of bfloat16). Included by micro.cpp only: immintrin.h is slow to compile.
#ifndef POSTLUDE_MICRO_VECTOR_H
#define POSTLUDE_MICRO_VECTOR_H

#include <cstring>

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12's intrinsics for 'undefined' registers warn about themselves, once for each kernel they are inlined into.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#include <postlude/micro.h>
#include <postlude/pack.h>

// Loops over accumulators must disappear before register allocation, or the accumulators live in memory.
#if defined(__clang__)
#define POSTLUDE_UNROLL _Pragma("clang loop unroll(full)")
#define POSTLUDE_NO_UNROLL _Pragma("clang loop unroll(disable)")
#else
#define POSTLUDE_UNROLL _Pragma("GCC unroll 32")
#define POSTLUDE_NO_UNROLL _Pragma("GCC unroll 1")
#endif
#define POSTLUDE_INLINE inline __attribute__((always_inline))

// Keeps a vector in a register: GCC prefers to load it again as the memory operand of each product, and the load ports then
// limit the kernel (185 instead of 250 GF/s).
#if defined(__AVX512F__)
#define POSTLUDE_KEEP(v) asm("" : "+v"(v))
#elif defined(__x86_64__)
#define POSTLUDE_KEEP(v) asm("" : "+x"(v))
#elif defined(__aarch64__)
#define POSTLUDE_KEEP(v) asm("" : "+w"(v))
#else
#define POSTLUDE_KEEP(v) (void)0
#endif

namespace postlude {

typedef float VecF __attribute__((vector_size(kVectorBytes)));
typedef double VecD __attribute__((vector_size(kVectorBytes)));
typedef uint32_t VecU __attribute__((vector_size(kVectorBytes)));
typedef float VecFAny __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));
typedef double VecDAny __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));
typedef uint32_t VecUAny __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));

template <class C>
struct VecOf;
template <>
struct VecOf<float> {
  using V = VecF;
};
template <>
struct VecOf<double> {
  using V = VecD;
};

template <class C>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(C));

POSTLUDE_INLINE VecF load(const float *p) { return *reinterpret_cast<const VecFAny *>(p); }
POSTLUDE_INLINE VecD load(const double *p) { return *reinterpret_cast<const VecDAny *>(p); }
POSTLUDE_INLINE void store(float *p, VecF v) { *reinterpret_cast<VecFAny *>(p) = v; }
POSTLUDE_INLINE void store(double *p, VecD v) { *reinterpret_cast<VecDAny *>(p) = v; }
POSTLUDE_INLINE VecU load_bits(const void *p) { return *static_cast<const VecUAny *>(p); }
POSTLUDE_INLINE void store_bits(void *p, VecU v) { *static_cast<VecUAny *>(p) = v; }

#if defined(POSTLUDE_AVX512)

POSTLUDE_INLINE VecF load(const bfloat16 *p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
  return reinterpret_cast<VecF>(_mm512_slli_epi32(wide, 16));
}
POSTLUDE_INLINE VecF load(const float16 *p) {
  return reinterpret_cast<VecF>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))));
}
// The first n elements, zero after them; n < a vector.
POSTLUDE_INLINE VecF load_first(const float *p, int n) {
  return reinterpret_cast<VecF>(_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p));
}
POSTLUDE_INLINE VecD load_first(const double *p, int n) {
  return reinterpret_cast<VecD>(_mm512_maskz_loadu_pd(static_cast<__mmask8>((1u << n) - 1), p));
}
POSTLUDE_INLINE VecF load_first(const bfloat16 *p, int n) {
  const __m256i half = _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), p);
  return reinterpret_cast<VecF>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
POSTLUDE_INLINE VecF load_first(const float16 *p, int n) {
  return reinterpret_cast<VecF>(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), p)));
}
POSTLUDE_INLINE VecU load_bits_first(const uint16_t *p, int n) {
  return reinterpret_cast<VecU>(_mm512_maskz_loadu_epi16((1u << n) - 1, p));
}

#else

#if defined(POSTLUDE_AVX2)
POSTLUDE_INLINE VecF load(const bfloat16 *p) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
  return reinterpret_cast<VecF>(_mm256_slli_epi32(wide, 16));
}
#else
POSTLUDE_INLINE VecF load(const bfloat16 *p) {
  VecU bits;
  for (int i = 0; i < kLanes<float>; ++i) bits[i] = static_cast<uint32_t>(p[i].bits) << 16;
  return reinterpret_cast<VecF>(bits);
}
#endif
#if defined(POSTLUDE_AVX2) && defined(__F16C__)
POSTLUDE_INLINE VecF load(const float16 *p) {
  return reinterpret_cast<VecF>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
}
#else
POSTLUDE_INLINE VecF load(const float16 *p) {
  VecF v;
  for (int i = 0; i < kLanes<float>; ++i) v[i] = to_float(p[i]);
  return v;
}
#endif
template <class T>
POSTLUDE_INLINE auto load_first(const T *p, int n) {
  T whole[kVectorBytes / (sizeof(T) == 8 ? 8 : 4)] = {};
  std::memcpy(whole, p, static_cast<size_t>(n) * sizeof(T));
  return load(whole);
}

#endif

// Sums of four vectors, as four neighbouring results.
POSTLUDE_INLINE void sum4(const VecF (&v)[4], float *to, bool accumulate) {
#if defined(POSTLUDE_AVX512)
  const __m512 a = reinterpret_cast<__m512>(v[0]), b = reinterpret_cast<__m512>(v[1]), c = reinterpret_cast<__m512>(v[2]),
               d = reinterpret_cast<__m512>(v[3]);
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  if (accumulate) sum = _mm_add_ps(sum, _mm_loadu_ps(to));
  _mm_storeu_ps(to, sum);
#elif defined(POSTLUDE_AVX2)
  const __m256 a = reinterpret_cast<__m256>(v[0]), b = reinterpret_cast<__m256>(v[1]), c = reinterpret_cast<__m256>(v[2]),
               d = reinterpret_cast<__m256>(v[3]);
  const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
  if (accumulate) sum = _mm_add_ps(sum, _mm_loadu_ps(to));
  _mm_storeu_ps(to, sum);
#else
  for (int i = 0; i < 4; ++i) {
    float sum = 0;
    for (int l = 0; l < kLanes<float>; ++l) sum += v[i][l];
    to[i] = accumulate ? to[i] + sum : sum;
  }
#endif
}

POSTLUDE_INLINE void sum4(const VecD (&v)[4], double *to, bool accumulate) {
  for (int i = 0; i < 4; ++i) {
    double sum = 0;
    for (int l = 0; l < kLanes<double>; ++l) sum += v[i][l];
    to[i] = accumulate ? to[i] + sum : sum;
  }
}

}  // namespace postlude

#endif
