// Functions of vectors: one definition per op of the Region's table, for F32 and F64.
//
// F32: within 1 to 2 ulp over the whole range (tests/targets/cpp/test_math.py has the bounds), special values exact. F64 and
// the rare F32 functions call the C library lane by lane.
//
// The methods are the classic ones: argument reduction by two-part constants (W. Cody and W. Waite, Software Manual for the
// Elementary Functions, 1980) and minimax polynomials on what remains (E. Remez, 1934). All polynomials come from
// tools/derive_coefficients.py. With AVX-512, erf and tanh are piecewise polynomials whose coefficients lie in registers and
// are picked by a lane permutation (P. T. P. Tang, Table-driven implementation, 1989).
#ifndef POSTLUDE_MATH_H
#define POSTLUDE_MATH_H

#include <postlude/vec.h>

namespace postlude {

// c0 + c1 x + c2 x^2 + ... by Horner's rule, one FMA a term.
template <class V, class C>
POSTLUDE_INLINE V polynomial(V, C c) {
  return splat<V>(c);
}
template <class V, class C, class... More>
POSTLUDE_INLINE V polynomial(V x, C c, More... more) {
  return splat<V>(c) + x * polynomial(x, more...);
}

// ---- Signs and rounding ----------------------------------------------------------------------------------------------

template <class V>
using BitsElement = std::conditional_t<sizeof(Scalar<V>) == 4, uint32_t, uint64_t>;
template <class V>
constexpr BitsElement<V> sign_bit = BitsElement<V>{1} << (sizeof(Scalar<V>) * 8 - 1);

template <class V>
POSTLUDE_INLINE V neg(V x) {
  return -x;
}
template <class V>
POSTLUDE_INLINE V abs(V x) {
  return bit_cast<V>(bit_cast<Bits<V>>(x) & ~sign_bit<V>);
}
template <class V>
POSTLUDE_INLINE V copysign(V x, V sign) {
  return bit_cast<V>((bit_cast<Bits<V>>(x) & ~sign_bit<V>) | (bit_cast<Bits<V>>(sign) & sign_bit<V>));
}
template <class V>
POSTLUDE_INLINE V with_sign(V magnitude, V sign) {  // copysign where the magnitude is known not to be negative
  return bit_cast<V>(bit_cast<Bits<V>>(magnitude) | (bit_cast<Bits<V>>(sign) & sign_bit<V>));
}
template <class V>
POSTLUDE_INLINE V sign(V x) {  // 0 for zeros and NaN, as torch.sign
  return select(x > 0, splat<V>(1), select(x < 0, splat<V>(-1), V{}));
}
template <class V>
POSTLUDE_INLINE V relu(V x) {  // keeps NaN and -0.0
  return raw_max(V{}, x);
}
template <class V>
POSTLUDE_INLINE Mask<V> isnan(V x) {
  return x != x;
}
template <class V>
POSTLUDE_INLINE Mask<V> isinf(V x) {
  return abs(x) == splat<V>(__builtin_inf());
}

// Adding and subtracting 1.5 * 2^23 rounds |x| < 2^22 to an integer, which then also stands in the low bits of the sum.
template <class V>
constexpr Scalar<V> shifter = sizeof(Scalar<V>) == 4 ? 0x1.8p23 : 0x1.8p52;

enum Rounding { kNearest = 8, kDown = 9, kUp = 10, kTowardZero = 11 };  // as vroundps encodes them
template <Rounding how, class V>
POSTLUDE_INLINE V rounded(V x) {
#if defined(POSTLUDE_AVX512) || defined(POSTLUDE_AVX2)
  V result;
#if defined(POSTLUDE_AVX512)
  if constexpr (sizeof(Scalar<V>) == 4) __asm__("vrndscaleps %2, %1, %0" : "=v"(result) : "v"(x), "i"(how));
  if constexpr (sizeof(Scalar<V>) == 8) __asm__("vrndscalepd %2, %1, %0" : "=v"(result) : "v"(x), "i"(how));
#else
  if constexpr (sizeof(Scalar<V>) == 4) __asm__("vroundps %2, %1, %0" : "=x"(result) : "x"(x), "i"(how));
  if constexpr (sizeof(Scalar<V>) == 8) __asm__("vroundpd %2, %1, %0" : "=x"(result) : "x"(x), "i"(how));
#endif
  return result;
#else
  constexpr Scalar<V> limit = sizeof(Scalar<V>) == 4 ? 0x1p23 : 0x1p52;  // all numbers from here on are integers
  const V size = abs(x);
  const V nearest = copysign((size + limit) - limit, x);
  V result = nearest;
  if constexpr (how == kDown) result = select(nearest > x, nearest - 1, nearest);
  if constexpr (how == kUp) result = select(nearest < x, nearest + 1, nearest);
  if constexpr (how == kTowardZero) result = select(abs(nearest) > size, abs(nearest) - 1, abs(nearest));
  return select(size < splat<V>(limit), copysign(result, x), x);
#endif
}
template <class V>
POSTLUDE_INLINE V round(V x) {  // halves to even
  return rounded<kNearest>(x);
}
template <class V>
POSTLUDE_INLINE V floor(V x) {
  return rounded<kDown>(x);
}
template <class V>
POSTLUDE_INLINE V ceil(V x) {
  return rounded<kUp>(x);
}
template <class V>
POSTLUDE_INLINE V trunc(V x) {
  return rounded<kTowardZero>(x);
}

// ---- The C library, lane by lane -------------------------------------------------------------------------------------

// Out of line: a loop of calls in each place that uses it would make objects large.
#define POSTLUDE_LANES(V, name, call)                                             \
  [[maybe_unused]] static inline __attribute__((noinline)) V name(V x) {          \
    Scalar<V> lane[lanes<V>];                                                     \
    __builtin_memcpy(lane, &x, sizeof(x));                                        \
    for (int i = 0; i < lanes<V>; ++i) lane[i] = call(lane[i]);                   \
    __builtin_memcpy(&x, lane, sizeof(x));                                        \
    return x;                                                                     \
  }
#define POSTLUDE_LANES_2(V, name, call)                                           \
  [[maybe_unused]] static inline __attribute__((noinline)) V name(V x, V y) {     \
    Scalar<V> lane[lanes<V>], other[lanes<V>];                                    \
    __builtin_memcpy(lane, &x, sizeof(x));                                        \
    __builtin_memcpy(other, &y, sizeof(y));                                       \
    for (int i = 0; i < lanes<V>; ++i) lane[i] = call(lane[i], other[i]);         \
    __builtin_memcpy(&x, lane, sizeof(x));                                        \
    return x;                                                                     \
  }

POSTLUDE_LANES(F64, exp, __builtin_exp)
POSTLUDE_LANES(F64, exp2, __builtin_exp2)
POSTLUDE_LANES(F64, expm1, __builtin_expm1)
POSTLUDE_LANES(F64, log, __builtin_log)
POSTLUDE_LANES(F64, log1p, __builtin_log1p)
POSTLUDE_LANES(F64, log2, __builtin_log2)
POSTLUDE_LANES(F64, log10, __builtin_log10)
POSTLUDE_LANES(F64, erf, __builtin_erf)
POSTLUDE_LANES(F64, erfc, __builtin_erfc)
POSTLUDE_LANES(F64, tanh, __builtin_tanh)
POSTLUDE_LANES(F64, sin, __builtin_sin)
POSTLUDE_LANES(F64, cos, __builtin_cos)
POSTLUDE_LANES(F64, tan, __builtin_tan)
POSTLUDE_LANES(F64, asin, __builtin_asin)
POSTLUDE_LANES(F64, acos, __builtin_acos)
POSTLUDE_LANES(F64, atan, __builtin_atan)
POSTLUDE_LANES(F64, sinh, __builtin_sinh)
POSTLUDE_LANES(F64, cosh, __builtin_cosh)
POSTLUDE_LANES_2(F64, pow, __builtin_pow)
POSTLUDE_LANES_2(F64, atan2, __builtin_atan2)
POSTLUDE_LANES_2(F64, fmod, __builtin_fmod)
POSTLUDE_LANES(F32, erfc, __builtin_erfcf)
POSTLUDE_LANES(F32, tan, __builtin_tanf)
POSTLUDE_LANES(F32, asin, __builtin_asinf)
POSTLUDE_LANES(F32, acos, __builtin_acosf)
POSTLUDE_LANES(F32, atan, __builtin_atanf)
POSTLUDE_LANES(F32, sinh, __builtin_sinhf)
POSTLUDE_LANES(F32, cosh, __builtin_coshf)
POSTLUDE_LANES(F32, sin_lanes, __builtin_sinf)
POSTLUDE_LANES(F32, cos_lanes, __builtin_cosf)
POSTLUDE_LANES_2(F32, atan2, __builtin_atan2f)
POSTLUDE_LANES_2(F32, fmod, __builtin_fmodf)

template <class V>
POSTLUDE_INLINE V remainder(V x, V divisor) {  // has the divisor's sign, as torch.remainder
  const V r = fmod(x, divisor);
  return select((r != 0) & ((r < 0) != (divisor < 0)), r + divisor, r);
}

// ---- Roots and quotients ---------------------------------------------------------------------------------------------

template <class V>
POSTLUDE_INLINE V sqrt(V x) {
#if defined(POSTLUDE_AVX512) || defined(POSTLUDE_AVX2)
  V result;
  if constexpr (sizeof(Scalar<V>) == 4) __asm__("vsqrtps %1, %0" : "=v"(result) : "v"(x));
  if constexpr (sizeof(Scalar<V>) == 8) __asm__("vsqrtpd %1, %0" : "=v"(result) : "v"(x));
  return result;
#else
  for (int i = 0; i < lanes<V>; ++i) x[i] = sizeof(Scalar<V>) == 4 ? __builtin_sqrtf(x[i]) : __builtin_sqrt(x[i]);
  return x;
#endif
}
template <class V>
POSTLUDE_INLINE V reciprocal(V x) {
  return 1 / x;
}
template <class V>
POSTLUDE_INLINE V rsqrt(V x) {
  return 1 / sqrt(x);
}

// ---- Exponentials ----------------------------------------------------------------------------------------------------

constexpr float kLog2E = 0x1.715476p+0f;
constexpr float kLn2High = 0x1.62e4p-1f, kLn2Low = 0x1.7f7d1cp-20f;  // the product of the first with an exponent is exact

// x * 2^n for |n| < 252, also into and out of the subnormal numbers. n stands in the low bits of `shifted`.
POSTLUDE_INLINE F32 scale(F32 x, F32 shifted) {
#if defined(POSTLUDE_AVX512)
  F32 result;
  __asm__("vscalefps %2, %1, %0" : "=v"(result) : "v"(x), "v"(shifted - shifter<F32>));
  return result;
#else
  const I32 n = bit_cast<I32>(shifted) - bit_cast<I32>(splat<F32>(shifter<F32>)), half = n >> 1;
  return x * bit_cast<F32>((half + 127) << 23) * bit_cast<F32>((n - half + 127) << 23);
#endif
}

// exp where the result is a normal number; `n` where the reduction is of use elsewhere.
POSTLUDE_INLINE F32 exp_reduced(F32 x, F32 shifted) {
  const F32 n = shifted - shifter<F32>;
  const F32 r = (x - n * kLn2High) - n * kLn2Low;
  return polynomial(r, 1.0f, 1.0f, 0.5f, 0.166664883f, 0.0416655503f, 0.00837234966f, 0.00140376855f);
}

POSTLUDE_INLINE F32 exp(F32 x) {
  // Beyond the bounds the result is 0 or infinity all the same, and within them the exponent is a small integer.
  x = raw_max(splat<F32>(-104.0f), raw_min(splat<F32>(89.0f), x));
  const F32 shifted = x * kLog2E + shifter<F32>;
  return scale(exp_reduced(x, shifted), shifted);
}

POSTLUDE_INLINE F32 exp2(F32 x) {
  x = raw_max(splat<F32>(-151.0f), raw_min(splat<F32>(129.0f), x));
  const F32 shifted = x + shifter<F32>;
  const F32 r = x - (shifted - shifter<F32>);
  return scale(polynomial(r, 1.0f, 0.693147242f, 0.240226552f, 0.0555027388f, 0.00961707626f, 0.00134170894f, 0.000158173629f),
               shifted);
}

POSTLUDE_INLINE F32 expm1(F32 x) {
  const F32 bounded = raw_max(splat<F32>(-20.0f), raw_min(splat<F32>(89.0f), x));
  const F32 shifted = bounded * kLog2E + shifter<F32>, n = shifted - shifter<F32>;
  const F32 r = (bounded - n * kLn2High) - n * kLn2Low;
  const F32 p = r + r * r * polynomial(r, 0.5f, 0.166666657f, 0.0416663624f, 0.00833338965f, 0.00139406277f, 0.00019845902f);
  // 2^n p + (2^n - 1), in halves because 2^128 is no float.
  const F32 half = scale(splat<F32>(0.5f), shifted);
  const F32 result = 2 * (half * p + (half - 0.5f));
  return select(x == 0, x, result);  // -0.0
}

template <class V>
POSTLUDE_INLINE V sigmoid(V x) {
  return 1 / (1 + exp(-x));
}

// ---- Logarithms ------------------------------------------------------------------------------------------------------

struct Logarithm {
  F32 exponent, f, rest;  // x = 2^exponent (1 + f), log(1 + f) = f + rest
};

// For positive x. `f` lies in [sqrt(1/2) - 1, sqrt(2) - 1).
POSTLUDE_INLINE Logarithm logarithm(F32 x) {
  const I32 subnormal = x < 0x1p-126f;
  const I32 bits = bit_cast<I32>(select(subnormal, x * 0x1p23f, x));
  const I32 exponent = (bits - 0x3f3504f3) >> 23;
  const F32 f = bit_cast<F32>(bits - (exponent << 23)) - 1;
  const F32 p = polynomial(f, 0.333333313f, -0.250008225f, 0.200012609f, -0.166233033f, 0.142008916f, -0.131605104f,
                           0.127685994f, -0.0764103308f);
  const F32 e = __builtin_convertvector(exponent + (subnormal & -23), F32);
  return {e, f, f * f * (f * p - 0.5f)};
}

// What every logarithm of x gives outside of the positive finite numbers.
POSTLUDE_INLINE F32 logarithm_of(F32 x, F32 result) {
  const F32 infinity = splat<F32>(__builtin_inff());
  result = select(x < infinity, result, x);
  return select(x > 0, result, select(x == 0, -infinity, splat<F32>(__builtin_nanf(""))));
}

POSTLUDE_INLINE F32 log(F32 x) {
  const Logarithm l = logarithm(x);
  return logarithm_of(x, l.exponent * kLn2High + (l.f + (l.rest + l.exponent * kLn2Low)));
}
POSTLUDE_INLINE F32 log2(F32 x) {
  const Logarithm l = logarithm(x);
  constexpr float more = 0.442695041f;  // log2(e) - 1
  return logarithm_of(x, l.exponent + (l.f + (l.rest + (l.f + l.rest) * more)));
}
POSTLUDE_INLINE F32 log10(F32 x) {
  const Logarithm l = logarithm(x);
  constexpr float log10_e_high = 0x1.bcb4p-2f, log10_e_low = 1.40863958e-05f;  // the second completes the first
  constexpr float log10_2_high = 0x1.344p-2f, log10_2_low = 4.60503907e-06f;
  const F32 low = l.exponent * log10_2_low + (l.f * log10_e_low + l.rest * 0.434294482f);
  return logarithm_of(x, l.exponent * log10_2_high + (l.f * log10_e_high + low));
}
POSTLUDE_INLINE F32 log1p(F32 x) {
  const F32 u = 1 + x;
  const F32 lost = select(x < 1, x - (u - 1), 1 - (u - x));  // what the sum rounded away
  const Logarithm l = logarithm(u);
  const F32 result = l.exponent * kLn2High + (l.f + (l.rest + (lost / u + l.exponent * kLn2Low)));
  return select(x == 0, x, logarithm_of(u, result));
}

// ---- Powers ----------------------------------------------------------------------------------------------------------

// 2^(y (exponent + log2(m))) as p 2^n with p near 1, for half of a vector's lanes, in double: y log2(x) needs more digits than
// a float has.
struct Power {
  VectorType<float, lanes<F64>> p, n;
};
POSTLUDE_INLINE Power power(VectorType<float, lanes<F64>> exponent, VectorType<float, lanes<F64>> m,
                            VectorType<float, lanes<F64>> y) {
  constexpr int n = lanes<F64>;
  const F64 wide = convert<double, float, n>(m), s = (wide - 1) / (wide + 1), square = s * s;
  const F64 log2_m = s * polynomial(square, 2.8853900817778495, 0.961796694114256, 0.5770779421042169, 0.412209278322094,
                                    0.31990464520452966, 0.28291505339416734);
  F64 t = convert<double, float, n>(y) * (convert<double, float, n>(exponent) + log2_m);
  t = raw_max(splat<F64>(-200.0), raw_min(splat<F64>(200.0), t));  // keeps NaN
  const F64 whole = (t + shifter<F64>) - shifter<F64>, r = t - whole;
  const F64 p = polynomial(r, 1.0, 0.693147183817638, 0.2402265092085681, 0.05550400374022283, 0.009618056907668619,
                           0.0013341951457312674, 0.00015461371621268015, 1.335983597674007e-05);
  return {convert<float, double, n>(p), convert<float, double, n>(whole)};
}

POSTLUDE_INLINE F32 pow(F32 x, F32 y) {
  struct Halves {
    VectorType<float, lanes<F64>> low, high;
  };
  const F32 infinity = splat<F32>(__builtin_inff()), size = abs(x);
  const Logarithm l = logarithm(size);
  // The logarithms of 0 and infinity are infinite exponents.
  const F32 exponent = select(size == 0, -infinity, select(size == infinity, infinity, l.exponent));
  const auto e = bit_cast<Halves>(exponent), m = bit_cast<Halves>(1 + l.f), w = bit_cast<Halves>(y);
  const Power low = power(e.low, m.low, w.low), high = power(e.high, m.high, w.high);
  const F32 p = bit_cast<F32>(Halves{low.p, high.p}), n = bit_cast<F32>(Halves{low.n, high.n});
  F32 result = scale(p, n + shifter<F32>);
  const Mask<F32> integer = trunc(y) == y, odd = integer & (trunc(y * 0.5f) * 2 != y);
  result = select(odd, copysign(result, x), result);
  result = select((x < 0) & ~integer & (size < infinity), splat<F32>(__builtin_nanf("")), result);
  result = select(x == x, result, x);
  const Mask<F32> one = (y == 0) | (x == 1) | ((size == 1) & (abs(y) == infinity));
  return select(one, splat<F32>(1), result);
}

// ---- erf and tanh ----------------------------------------------------------------------------------------------------

#if defined(POSTLUDE_AVX512)
// table[index % 16] for each lane.
POSTLUDE_INLINE F32 lookup(F32 table, I32 index) {
#if defined(__clang__)
  return __builtin_ia32_permvarsf512(table, index);
#else
  return __builtin_shuffle(table, index);
#endif
}

POSTLUDE_INLINE F32 erf(F32 x) {
  // A polynomial of degree 5 around each multiple of `step`, the last one about 3.81. The first one is added to x.
  constexpr F32 c0 = {0.0f, 0.28046301f, 0.527338445f, 0.718623817f, 0.849086046f, 0.927408159f, 0.968796372f, 0.988047481f,
                      0.995929182f, 0.998769462f, 0.999670327f, 0.999921799f, 0.999983609f, 0.99999696f, 0.999999523f,
                      0.99999994f};
  constexpr F32 c1 = {0.128379166f, 1.05792975f, 0.871890664f, 0.631641567f, 0.402237773f, 0.225163743f, 0.110794336f,
                      0.0479225703f, 0.0182207469f, 0.00608969713f, 0.00178907625f, 0.000462025171f, 0.000104883278f,
                      2.09291138e-05f, 3.67112898e-06f, 5.66047675e-07f};
  constexpr F32 c2 = {3.32557022e-07f, -0.268609136f, -0.442749739f, -0.481129527f, -0.408523619f, -0.285855591f,
                      -0.168790951f, -0.0851760358f, -0.0370108709f, -0.0139154708f, -0.00454219012f, -0.00129020563f,
                      -0.000319474668f, -6.90513116e-05f, -1.30409971e-05f, -2.15379714e-06f};
  constexpr F32 c3 = {-0.376144439f, -0.3071962f, -0.14075391f, 0.033768896f, 0.142520711f, 0.166877806f, 0.134496048f,
                      0.0849510506f, 0.0440461449f, 0.019170247f, 0.00709270919f, 0.00224853982f, 0.000614050776f,
                      0.000144997f, 2.96871822e-05f, 5.28138526e-06f};
  constexpr F32 c4 = {0.000327184564f, 0.127556562f, 0.182123706f, 0.146901473f, 0.0639466047f, -0.0101210326f,
                      -0.0457372479f, -0.046910882f, -0.0324012935f, -0.0173377097f, -0.00755420513f, -0.00274571287f,
                      -0.000844105321f, -0.000221423019f, -4.98569971e-05f, -9.67753112e-06f};
  constexpr F32 c5 = {0.110786989f, 0.0799028203f, 0.00584904058f, -0.0542990603f, -0.0682326853f, -0.044611454f,
                      -0.0123870699f, 0.00780868251f, 0.0130173462f, 0.0100168046f, 0.00549918739f, 0.00237282552f,
                      0.000837244501f, 0.000246636977f, 6.14167293e-05f, 1.30345334e-05f};
  constexpr float step = 0.25390625f;
  const F32 t = raw_min(splat<F32>(15.4998f * step), abs(x));  // keeps NaN
  const F32 shifted = t * (1 / step) + shifter<F32>;
  const I32 i = bit_cast<I32>(shifted);
  const F32 r = t - (shifted - shifter<F32>) * step;
  F32 y = lookup(c5, i);
  y = y * r + lookup(c4, i);
  y = y * r + lookup(c3, i);
  y = y * r + lookup(c2, i);
  y = y * r + lookup(c1, i);
  y = y * r + select(t < step / 2, t, lookup(c0, i));
  return with_sign(y, x);
}

POSTLUDE_INLINE F32 tanh(F32 x) {
  // Two polynomials of degree 6 from each power of two to the next, from 1/8 to 12, and one from 0, which is added to x. The
  // exponent and the first bit of the mantissa number them: 7 for [0, 1/8), 8, 9, ... 15, 0, ... 4 for [8, 12).
  constexpr F32 centre = {2.5f, 3.5f, 5.0f, 7.0f, 10.0f, 0.0f, 0.0f, 0.0f, 0.15625f, 0.21875f, 0.3125f, 0.4375f, 0.625f,
                          0.875f, 1.25f, 1.75f};
  constexpr F32 c0 = {0.986614287f, 0.998177886f, 0.999909222f, 0.999998331f, 1.0f, 0.0f, 0.0f, 0.0f, 0.154990733f,
                      0.215326339f, 0.302709728f, 0.411570042f, 0.554599702f, 0.703905582f, 0.848283648f, 0.941375554f};
  constexpr F32 c1 = {0.026592331f, 0.00364100048f, 0.000181893498f, 3.33504818e-06f, 1.01299387e-08f, 0.0f, 0.0f,
                      9.6052423e-11f, 0.975977778f, 0.95363456f, 0.908366859f, 0.830610216f, 0.692419291f, 0.504516959f,
                      0.280414671f, 0.113812044f};
  constexpr F32 c2 = {-0.0262360126f, -0.0036333825f, -0.000181987722f, -3.22160804e-06f, -2.72785332e-08f, 0.0f, 0.0f,
                      -5.54934658e-08f, -0.15130958f, -0.205331236f, -0.274967819f, -0.341793031f, -0.383992463f,
                      -0.355107754f, -0.237874001f, -0.107139826f};
  constexpr F32 c3 = {0.0170174874f, 0.00241098949f, 0.000118656324f, 2.16156332e-06f, 2.55749133e-09f, 0.0f, 0.0f,
                      -0.333328128f, -0.301469535f, -0.273606062f, -0.219596773f, -0.136299163f, -0.0178705622f,
                      0.0817935765f, 0.10833092f, 0.062928237f};
  constexpr F32 c4 = {-0.0080521144f, -0.00120740046f, -5.89320807e-05f, -1.38076348e-06f, 1.03499147e-08f, 0.0f, 0.0f,
                      -0.000178518982f, 0.210939735f, 0.0980835706f, 0.15577966f, 0.128297642f, 0.133975953f, 0.0566502288f,
                      -0.0124692544f, -0.0235257f};
  constexpr F32 c5 = {0.00288727437f, 0.000492765161f, 2.86412305e-05f, 5.35027993e-07f, 2.24304997e-09f, 0.0f, 0.0f,
                      0.136103645f, -0.247711807f, 0.019679768f, 0.0553469732f, 0.0190909822f, -0.0526893325f,
                      -0.0580983087f, -0.0197493713f, 0.00348227425f};
  constexpr F32 c6 = {-0.000695583993f, -0.000130331944f, -9.8304281e-06f, 2.06504147e-08f, -2.70665113e-09f, 0.0f, 0.0f,
                      -0.019879071f, -76.8533096f, 18.799612f, 0.305451035f, 7.03778028f, 0.142854169f, 0.188067272f,
                      0.0138524948f, 0.00210908474f};
  const F32 t = raw_min(splat<F32>(9.1f), abs(x));  // keeps NaN
  const I32 i = bit_cast<I32>(raw_max(splat<F32>(0.09375f), t)) >> 22;
  const F32 r = t - lookup(centre, i);
  F32 y = lookup(c6, i);
  y = y * r + lookup(c5, i);
  y = y * r + lookup(c4, i);
  y = y * r + lookup(c3, i);
  y = y * r + lookup(c2, i);
  y = y * r + lookup(c1, i);
  y = y * r + select(t < 0.125f, t, lookup(c0, i));
  return with_sign(y, x);
}
#else
POSTLUDE_INLINE F32 erf(F32 x) {
  const F32 t = raw_min(splat<F32>(3.93f), abs(x));  // keeps NaN
  const F32 square = x * x;
  const F32 small = x + x * polynomial(square, 0.128379166f, -0.376126289f, 0.112836242f, -0.0268555861f, 0.00519193662f,
                                       -0.000804362935f, 7.96841123e-05f);
  const F32 q = -polynomial(t, 0.00019715853f, 1.12766945f, 0.637192726f, 0.103922322f, -0.0222224109f, 0.00304207602f,
                            -0.000195819768f);
  const F32 shifted = q * kLog2E + shifter<F32>;
  const F32 large = 1 - scale(exp_reduced(q, shifted), shifted);
  return select(t < 0.921875f, small, with_sign(large, x));
}

POSTLUDE_INLINE F32 tanh(F32 x) {
  const F32 t = raw_min(splat<F32>(9.1f), abs(x));  // keeps NaN
  const F32 square = x * x;
  const F32 small = x + x * square * polynomial(square, -0.333332837f, 0.133314833f, -0.0537427738f, 0.0206480622f, -0.00571406353f);
  const F32 doubled = t + t, shifted = doubled * kLog2E + shifter<F32>;
  const F32 large = 1 - 2 / (1 + scale(exp_reduced(doubled, shifted), shifted));
  return with_sign(select(t < 0.625f, small, large), x);
}
#endif

// ---- Sine and cosine -------------------------------------------------------------------------------------------------

template <class V>
POSTLUDE_INLINE bool any(Mask<V> m) {
  return reduce_lanes(m, [](Mask<V> a, Mask<V> b) { return a | b; })[0] != 0;
}

// sin(x + quarter_turns * pi / 2). Three parts of pi / 2 need FMA; beyond 10^5 they are not enough.
template <int quarter_turns>
POSTLUDE_INLINE F32 sine(F32 x) {
#if defined(__FMA__) || defined(__aarch64__)
  if (__builtin_expect(any<F32>(abs(x) > 1e5f), 0)) return quarter_turns == 0 ? sin_lanes(x) : cos_lanes(x);
  const F32 shifted = x * 0.636619747f + shifter<F32>, n = shifted - shifter<F32>;
  const F32 r = ((x - n * 0x1.921fb6p+0f) + n * 0x1.777a5cp-25f) + n * 0x1.ee59dap-50f;
  const I32 quadrant = bit_cast<I32>(shifted) + quarter_turns;
  const F32 square = r * r;
  const F32 s = r + r * square * polynomial(square, -0.166666672f, 0.00833374914f, -0.000200134324f, 4.4903104e-06f);
  const F32 c = 1 + square * (square * polynomial(square, 0.0416666456f, -0.00138873095f, 2.44323273e-05f) - 0.5f);
  const F32 result = select((quadrant & 1) != 0, c, s);
  const F32 signed_result = bit_cast<F32>(bit_cast<I32>(result) ^ ((quadrant & 2) << 30));
  return quarter_turns == 0 ? select(x == 0, x, signed_result) : signed_result;  // -0.0
#else
  return quarter_turns == 0 ? sin_lanes(x) : cos_lanes(x);
#endif
}
POSTLUDE_INLINE F32 sin(F32 x) { return sine<0>(x); }
POSTLUDE_INLINE F32 cos(F32 x) { return sine<1>(x); }

}  // namespace postlude

#endif
