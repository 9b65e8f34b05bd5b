// Vectors of float and double at the width of the instruction set: types, masks, loads, stores, conversions, reductions.
//
// GNU vector extensions, so that a Region compiles without immintrin.h (0.3 s a file) and on any CPU; a handful of
// instructions that the extensions cannot name are inline asm or compiler builtins. The functions of numbers are in math.h.
//
//   F32, F64      Vec<float>, Vec<double>: 16 / 8 lanes with AVX-512, 8 / 4 with AVX2, 4 / 2 otherwise
//   Mask<V>       one integer per lane, 0 or -1, as comparisons give it: `a < b`, `m & n`, `~m`
//   select        m ? a : b by lanes
//   load / store  <element type> with `Full` (all lanes) or `Tail{count}` (the first lanes of the last piece of a row)
//   Sum, Max, Min accumulate the lanes of a row and reduce them at its end
//
// NaN, infinities and -0.0 behave as in ATen: maximum and minimum, Max and Min give NaN where any input is NaN.
#ifndef POSTLUDE_VEC_H
#define POSTLUDE_VEC_H

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include <postlude/micro.h>

#define POSTLUDE_INLINE static inline __attribute__((always_inline))
// Functions of vectors never cross an object's border, so how a wide vector would be passed does not matter.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

namespace postlude {

// `n` elements of T. A struct, because only a typedef in a template may have a dependent vector_size.
template <class T, int n>
struct VectorOf {
  typedef T type __attribute__((vector_size(n * sizeof(T))));
};
template <class T, int n>
using VectorType = typename VectorOf<T, n>::type;

template <class T>
constexpr int lanes_of = kVectorBytes / static_cast<int>(sizeof(T));

template <class T>
using Vec = VectorType<T, lanes_of<T>>;
using F32 = Vec<float>;
using F64 = Vec<double>;
using I32 = Vec<int32_t>;
using I64 = Vec<int64_t>;
using U32 = Vec<uint32_t>;
using U64 = Vec<uint64_t>;

// The scalar, the mask and the unsigned bits that belong to a vector.
template <class V>
struct Traits;
template <>
struct Traits<F32> {
  using Scalar = float;
  using Mask = I32;
  using Bits = U32;
};
template <>
struct Traits<F64> {
  using Scalar = double;
  using Mask = I64;
  using Bits = U64;
};
template <>
struct Traits<I32> {
  using Scalar = int32_t;
  using Mask = I32;
};
template <>
struct Traits<I64> {
  using Scalar = int64_t;
  using Mask = I64;
};
template <class V>
using Scalar = typename Traits<V>::Scalar;
template <class V>
using Mask = typename Traits<V>::Mask;
template <class V>
using Bits = typename Traits<V>::Bits;
template <class V>
constexpr int lanes = lanes_of<Scalar<V>>;

// Which lanes take part in a load, a store or a reduction.
struct Full {};
struct Tail {
  int count;  // 1 .. lanes - 1
};

template <class To, class From>
POSTLUDE_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

// All lanes alike. (x - 0, not x + 0: it keeps -0.0, and the compilers know that it is x.)
template <class V>
POSTLUDE_INLINE V splat(Scalar<V> x) {
  return x - V{};
}

template <class V>
POSTLUDE_INLINE V select(Mask<V> m, V a, V b) {
  return m ? a : b;
}

template <class V>
POSTLUDE_INLINE Mask<V> lane_numbers() {
  Mask<V> numbers;
  for (int i = 0; i < lanes<V>; ++i) numbers[i] = i;
  return numbers;
}
template <class V>
POSTLUDE_INLINE Mask<V> active(Tail tail) {
  return lane_numbers<V>() < tail.count;
}

// max(a, b) as one instruction, with its rule: a > b ? a : b, so `b` where either is NaN or both are zeros.
template <class V>
POSTLUDE_INLINE V raw_max(V a, V b) {
  return a > b ? a : b;
}
template <class V>
POSTLUDE_INLINE V raw_min(V a, V b) {
  return a < b ? a : b;
}
#if defined(POSTLUDE_AVX512) && !defined(__clang__)  // GCC makes a comparison and a blend of the expression above
POSTLUDE_INLINE F32 raw_max(F32 a, F32 b) { return __builtin_ia32_maxps512_mask(a, b, a, -1, 4); }
POSTLUDE_INLINE F32 raw_min(F32 a, F32 b) { return __builtin_ia32_minps512_mask(a, b, a, -1, 4); }
POSTLUDE_INLINE F64 raw_max(F64 a, F64 b) { return __builtin_ia32_maxpd512_mask(a, b, a, -1, 4); }
POSTLUDE_INLINE F64 raw_min(F64 a, F64 b) { return __builtin_ia32_minpd512_mask(a, b, a, -1, 4); }
#endif

template <class V>
POSTLUDE_INLINE V maximum(V a, V b) {
  return select(a != a, a, raw_max(a, b));
}
template <class V>
POSTLUDE_INLINE V minimum(V a, V b) {
  return select(a != a, a, raw_min(a, b));
}

// ---- Conversion of storage types -------------------------------------------------------------------------------------

// convert<To, n> changes the element type of n lanes. __builtin_convertvector means the same, but GCC widens in halves,
// or one element at a time where the size changes by more than a factor of two.
template <class From, class To>
struct Instruction {};
#if (defined(POSTLUDE_AVX2) || defined(POSTLUDE_AVX512)) && !defined(__clang__)
#define POSTLUDE_CONVERT(From, To, bytes, name)                          \
  template <>                                                            \
  struct Instruction<From, To> {                                         \
    static constexpr int least = bytes;                                  \
    template <class VFrom, class VTo>                                    \
    static __attribute__((always_inline)) void apply(VFrom x, VTo &to) { \
      __asm__(name " %1, %0" : "=v"(to) : "v"(x));                       \
    }                                                                    \
  };
POSTLUDE_CONVERT(uint8_t, int32_t, 32, "vpmovzxbd")
POSTLUDE_CONVERT(uint8_t, int64_t, 32, "vpmovzxbq")
POSTLUDE_CONVERT(uint16_t, uint32_t, 32, "vpmovzxwd")
POSTLUDE_CONVERT(float, double, 32, "vcvtps2pd")
#if defined(POSTLUDE_AVX512)
POSTLUDE_CONVERT(int32_t, uint8_t, 32, "vpmovdb")
POSTLUDE_CONVERT(int64_t, uint8_t, 32, "vpmovqb")
POSTLUDE_CONVERT(uint32_t, uint16_t, 32, "vpmovdw")
#endif
#undef POSTLUDE_CONVERT
#endif

template <class To, class From, int n, class V>
POSTLUDE_INLINE VectorType<To, n> convert(V x) {
  constexpr int from = sizeof(From), to = sizeof(To), larger = from > to ? from : to;
  if constexpr (requires { Instruction<From, To>::least; } && n * larger >= 32) {
    VectorType<To, n> result;
    Instruction<From, To>::apply(x, result);
    return result;
  } else if constexpr (from == 1 && to > 2) {
    return convert<To, uint16_t, n>(__builtin_convertvector(x, VectorType<uint16_t, n>));
  } else if constexpr (from > 2 && to == 1) {
    return __builtin_convertvector(convert<uint16_t, From, n>(x), VectorType<To, n>);
  } else if constexpr (from == 8 && to == 2) {
    return __builtin_convertvector(__builtin_convertvector(x, VectorType<int32_t, n>), VectorType<To, n>);
  } else {
    return __builtin_convertvector(x, VectorType<To, n>);
  }
}

// bfloat16 is the upper half of a float.
template <int n>
POSTLUDE_INLINE VectorType<float, n> from_bfloat16(VectorType<uint16_t, n> bits) {
  return bit_cast<VectorType<float, n>>(convert<uint32_t, uint16_t, n>(bits) << 16);
}

// To the nearest bfloat16, ties to even; NaN stays NaN, and quiet.
template <int n>
POSTLUDE_INLINE VectorType<uint16_t, n> to_bfloat16(VectorType<float, n> x) {
#if defined(POSTLUDE_AVX512_BF16)
  if constexpr (n == 16) {  // as the dot product of the same extension does, this takes subnormal floats as 0
    VectorType<uint16_t, n> result;
    __asm__("vcvtneps2bf16 %1, %0" : "=v"(result) : "v"(x));
    return result;
  }
#endif
  const auto bits = bit_cast<VectorType<uint32_t, n>>(x);
  const auto rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const auto quiet = (bits >> 16) | 0x40u;
  return convert<uint16_t, uint32_t, n>(x != x ? quiet : rounded);
}

#if defined(__F16C__) && defined(POSTLUDE_AVX512)
POSTLUDE_INLINE VectorType<float, 16> from_float16_native(VectorType<uint16_t, 16> bits) {
  VectorType<float, 16> result;
  __asm__("vcvtph2ps %1, %0" : "=v"(result) : "v"(bits));
  return result;
}
POSTLUDE_INLINE VectorType<uint16_t, 16> to_float16_native(VectorType<float, 16> x) {
  VectorType<uint16_t, 16> result;
  __asm__("vcvtps2ph $0, %1, %0" : "=v"(result) : "v"(x));
  return result;
}
#endif
#if defined(__F16C__)
POSTLUDE_INLINE VectorType<float, 8> from_float16_native(VectorType<uint16_t, 8> bits) {
  VectorType<float, 8> result;
  __asm__("vcvtph2ps %1, %0" : "=x"(result) : "x"(bits));
  return result;
}
POSTLUDE_INLINE VectorType<uint16_t, 8> to_float16_native(VectorType<float, 8> x) {
  VectorType<uint16_t, 8> result;
  __asm__("vcvtps2ph $0, %1, %0" : "=x"(result) : "x"(x));
  return result;
}
#endif

template <int n>
constexpr bool native_float16 =
#if defined(__F16C__) && defined(POSTLUDE_AVX512)
    n == 8 || n == 16;
#elif defined(__F16C__)
    n == 8;
#else
    false;
#endif

template <int n>
POSTLUDE_INLINE VectorType<float, n> from_float16(VectorType<uint16_t, n> bits) {
  if constexpr (native_float16<n>) {
    return from_float16_native(bits);
  } else {
    using U = VectorType<uint32_t, n>;
    using F = VectorType<float, n>;
    const U wide = convert<uint32_t, uint16_t, n>(bits);
    const U sign = (wide & 0x8000u) << 16, magnitude = wide & 0x7fffu;
    // The exponent moves from bias 15 to 127 by a multiplication with 2^112, which also brings subnormals to their value.
    const U scaled = bit_cast<U>(bit_cast<F>(magnitude << 13) * 0x1p112f);
    const U special = 0x7f800000u | (magnitude << 13);
    return bit_cast<F>(sign | (magnitude >= 0x7c00u ? special : scaled));
  }
}

// To the nearest float16, ties to even; beyond its range infinity.
template <int n>
POSTLUDE_INLINE VectorType<uint16_t, n> to_float16(VectorType<float, n> x) {
  if constexpr (native_float16<n>) {
    return to_float16_native(x);
  } else {
    using U = VectorType<uint32_t, n>;
    using F = VectorType<float, n>;
    const U bits = bit_cast<U>(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    // Normal results: round the mantissa to 10 bits in place. Subnormal ones: the addition of 0.5 aligns them to 2^-24.
    const U normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const U subnormal = bit_cast<U>(bit_cast<F>(magnitude) + 0.5f) - (126u << 23);
    U result = magnitude < (113u << 23) ? subnormal : normal;
    result = magnitude >= 0x477ff000u ? U{} + 0x7c00u : result;  // 65520 and above
    result = magnitude > 0x7f800000u ? 0x7e00u | ((magnitude >> 13) & 0x3ffu) : result;
    return convert<uint16_t, uint32_t, n>(sign | result);
  }
}

// Storage<T, V>: how an element type stands in memory, and its way to and from the vector of the arithmetic. A double
// reaches the 16-bit types through float, as in ATen.
template <class T, class V>
struct Storage {  // float and double
  using S = Scalar<V>;
  using Raw = VectorType<T, lanes<V>>;
  POSTLUDE_INLINE V get(Raw raw) { return convert<S, T, lanes<V>>(raw); }
  POSTLUDE_INLINE Raw put(V x) { return convert<T, S, lanes<V>>(x); }
};
template <class V>
struct Storage<bfloat16, V> {
  using S = Scalar<V>;
  using Raw = VectorType<uint16_t, lanes<V>>;
  POSTLUDE_INLINE V get(Raw raw) { return convert<S, float, lanes<V>>(from_bfloat16<lanes<V>>(raw)); }
  POSTLUDE_INLINE Raw put(V x) { return to_bfloat16<lanes<V>>(convert<float, S, lanes<V>>(x)); }
};
template <class V>
struct Storage<float16, V> {
  using S = Scalar<V>;
  using Raw = VectorType<uint16_t, lanes<V>>;
  POSTLUDE_INLINE V get(Raw raw) { return convert<S, float, lanes<V>>(from_float16<lanes<V>>(raw)); }
  POSTLUDE_INLINE Raw put(V x) { return to_float16<lanes<V>>(convert<float, S, lanes<V>>(x)); }
};
template <class V>
struct Storage<bool, V> {
  using I = std::remove_reference_t<decltype(Mask<V>{}[0])>;
  using Integer = std::conditional_t<sizeof(I) == 4, int32_t, int64_t>;
  using Raw = VectorType<uint8_t, lanes<V>>;
  POSTLUDE_INLINE Mask<V> get(Raw raw) { return convert<Integer, uint8_t, lanes<V>>(raw) != 0; }
  POSTLUDE_INLINE Raw put(Mask<V> x) { return convert<uint8_t, Integer, lanes<V>>(x & 1); }
};

// Rounds to T's precision and comes back.
template <class T, class V>
POSTLUDE_INLINE V round_to(V x) {
  return Storage<T, V>::get(Storage<T, V>::put(x));
}

// ---- Loads and stores ------------------------------------------------------------------------------------------------

template <class Raw>
struct __attribute__((packed, may_alias)) Unaligned {
  Raw raw;
};

template <class Raw>
POSTLUDE_INLINE Raw raw_load(const void *from, Full) {
  return static_cast<const Unaligned<Raw> *>(from)->raw;
}
template <class Raw>
POSTLUDE_INLINE void raw_store(void *to, Raw raw, Full) {
  static_cast<Unaligned<Raw> *>(to)->raw = raw;
}

// The first `count` lanes; nothing beyond them is touched. Lanes that are not loaded are 0.
template <class Raw>
POSTLUDE_INLINE Raw raw_load(const void *from, Tail tail) {
  constexpr int size = sizeof(Raw{}[0]);
#if defined(POSTLUDE_AVX512)
  if constexpr (sizeof(Raw) >= 16) {
    const auto &memory = *static_cast<const Unaligned<Raw> *>(from);
    const uint16_t mask = static_cast<uint16_t>((1u << tail.count) - 1);
    Raw raw;
    if constexpr (size == 1) __asm__("vmovdqu8 %1, %0%{%2%}%{z%}" : "=v"(raw) : "m"(memory), "Yk"(mask));
    if constexpr (size == 2) __asm__("vmovdqu16 %1, %0%{%2%}%{z%}" : "=v"(raw) : "m"(memory), "Yk"(mask));
    if constexpr (size == 4) __asm__("vmovdqu32 %1, %0%{%2%}%{z%}" : "=v"(raw) : "m"(memory), "Yk"(mask));
    if constexpr (size == 8) __asm__("vmovdqu64 %1, %0%{%2%}%{z%}" : "=v"(raw) : "m"(memory), "Yk"(mask));
    return raw;
  }
#endif
  Raw raw{};
  __builtin_memcpy(&raw, from, static_cast<size_t>(tail.count) * size);
  return raw;
}
template <class Raw>
POSTLUDE_INLINE void raw_store(void *to, Raw raw, Tail tail) {
  constexpr int size = sizeof(Raw{}[0]);
#if defined(POSTLUDE_AVX512)
  if constexpr (sizeof(Raw) >= 16) {
    auto &memory = *static_cast<Unaligned<Raw> *>(to);
    // volatile: g++ 12 else takes an epilogue whose only stores are these for free of effects, and drops it.
    const uint16_t mask = static_cast<uint16_t>((1u << tail.count) - 1);
    if constexpr (size == 1) __asm__ volatile("vmovdqu8 %1, %0%{%2%}" : "+m"(memory) : "v"(raw), "Yk"(mask) : "memory");
    if constexpr (size == 2) __asm__ volatile("vmovdqu16 %1, %0%{%2%}" : "+m"(memory) : "v"(raw), "Yk"(mask) : "memory");
    if constexpr (size == 4) __asm__ volatile("vmovdqu32 %1, %0%{%2%}" : "+m"(memory) : "v"(raw), "Yk"(mask) : "memory");
    if constexpr (size == 8) __asm__ volatile("vmovdqu64 %1, %0%{%2%}" : "+m"(memory) : "v"(raw), "Yk"(mask) : "memory");
    return;
  }
#endif
  __builtin_memcpy(to, &raw, static_cast<size_t>(tail.count) * size);
}

// Numbers come as V, truth values (bool) as Mask<V>.
template <class V, class T, class Lanes>
POSTLUDE_INLINE auto load(const T *from, Lanes which) {
  using S = Storage<T, V>;
  return S::get(raw_load<typename S::Raw>(from, which));
}
template <class V, class T, class X, class Lanes>
POSTLUDE_INLINE void store(T *to, X x, Lanes which) {
  using S = Storage<T, V>;
  raw_store<typename S::Raw>(to, S::put(x), which);
}

// Elements that lie `stride` apart.
template <class V, class T, class X>
POSTLUDE_INLINE void store(T *to, int64_t stride, X x, Tail tail) {
  T row[lanes<V>];
  store<V>(row, x, Full{});
  for (int i = 0; i < tail.count; ++i) to[i * stride] = row[i];
}
template <class V, class T, class X>
POSTLUDE_INLINE void store(T *to, int64_t stride, X x, Full) {
  store<V>(to, stride, x, Tail{lanes<V>});
}

// One element for all lanes, and the element of a value whose lanes are alike.
template <class V, class T>
POSTLUDE_INLINE auto load_one(const T *from) {
  using S = Storage<T, V>;
  std::remove_reference_t<decltype(typename S::Raw{}[0])> one;
  __builtin_memcpy(&one, from, sizeof(T));
  return S::get(one - typename S::Raw{});
}
template <class V, class T, class X>
POSTLUDE_INLINE void store_one(T *to, X x) {
  store<V>(to, x, Tail{1});
}

// A number that one group notes for the next at the end of row `r` of `next`, alike in all lanes.
static_assert(kVectorBytes <= kRowNote, "the driver leaves this much room");
template <class V>
POSTLUDE_INLINE void note(void *next, int64_t next_stride, int64_t r, V x) {
  raw_store<V>(static_cast<char *>(next) + (r + 1) * next_stride - kRowNote, x, Full{});
}
template <class V>
POSTLUDE_INLINE V noted(const void *next, int64_t next_stride, int64_t r) {
  return raw_load<V>(static_cast<const char *>(next) + (r + 1) * next_stride - kRowNote, Full{});
}

// ---- Reductions of a row ---------------------------------------------------------------------------------------------

// x with lanes i and i ^ distance exchanged.
#if defined(__clang__)
template <int distance, class V, int... i>
POSTLUDE_INLINE V exchange(V x, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(x, x, (i ^ distance)...);
}
template <int distance, class V>
POSTLUDE_INLINE V exchange(V x) {
  return exchange<distance>(x, std::make_integer_sequence<int, lanes<V>>());
}
#else
template <int distance, class V>
POSTLUDE_INLINE V exchange(V x) {
  return __builtin_shuffle(x, lane_numbers<V>() ^ distance);
}
#endif

// Combines all lanes in a tree; every lane of the result holds it.
template <class V, class Combine, int distance = lanes<V> / 2>
POSTLUDE_INLINE V reduce_lanes(V x, Combine combine) {
  const V pairs = combine(x, exchange<distance>(x));
  if constexpr (distance == 1) {
    return pairs;
  } else {
    return reduce_lanes<V, Combine, distance / 2>(pairs, combine);
  }
}

// A sum in three levels, so that its error grows slowly with the number of columns: a lane adds up the vectors of one
// block of columns (columns() below folds after each), then 32 blocks, then these.
template <class V>
struct Sum {
  V block{}, blocks{}, all{};
  int count = 0;
  __attribute__((always_inline)) void add(V x, Full) { block += x; }
  __attribute__((always_inline)) void add(V x, Tail tail) { block += select(active<V>(tail), x, V{}); }
  __attribute__((always_inline)) void fold() {
    blocks += block;
    block = V{};
    if (++count % 32 == 0) {
      all += blocks;
      blocks = V{};
    }
  }
  __attribute__((always_inline)) V lanes() const { return all + blocks; }
  POSTLUDE_INLINE V reduce(V lanes) {
    return reduce_lanes(lanes, [](V a, V b) { return a + b; });
  }
};

// The largest (sign 1) or smallest (sign -1) value; NaN if there is one.
template <class V, int sign>
struct Extreme {
  V best = splat<V>(-sign * __builtin_inf());
  Mask<V> nan{};
  __attribute__((always_inline)) void add(V x, Full) {
    best = sign > 0 ? raw_max(x, best) : raw_min(x, best);  // keeps `best` where x is NaN
    nan |= x != x;
  }
  __attribute__((always_inline)) void add(V x, Tail tail) {
    add(select(active<V>(tail), x, splat<V>(-sign * __builtin_inf())), Full{});
  }
  __attribute__((always_inline)) void fold() {}
  __attribute__((always_inline)) V lanes() const { return select(nan, splat<V>(__builtin_nan("")), best); }
  POSTLUDE_INLINE V reduce(V lanes) {
    return reduce_lanes(lanes, [](V a, V b) { return sign > 0 ? maximum(a, b) : minimum(a, b); });
  }
};
template <class V>
using Max = Extreme<V, 1>;
template <class V>
using Min = Extreme<V, -1>;

// Runs `body(column, Full or Tail)` over a row of `count` columns, and folds the accumulators after each block.
template <class V, class Body, class... Accumulators>
POSTLUDE_INLINE void columns(int64_t count, Body body, Accumulators &...accumulators) {
  constexpr int64_t block = 32 * lanes<V>;
  const int64_t whole = count - count % lanes<V>;
  for (int64_t begin = 0; begin < whole; begin += block) {
    const int64_t end = begin + block < whole ? begin + block : whole;
    for (int64_t c = begin; c < end; c += lanes<V>) body(c, Full{});
    (accumulators.fold(), ...);
  }
  if (whole < count) {
    body(whole, Tail{static_cast<int>(count - whole)});
    (accumulators.fold(), ...);
  }
}

}  // namespace postlude

#endif
