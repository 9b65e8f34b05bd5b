// The packed form of a right operand and a plain, portable way to write it. The library packs with faster code (micro_pack.h);
// both write the same bytes.
//
// A right operand [k, n] becomes ceil(n / w) panels of w = panel_columns columns, one after the other, columns past n zero:
//   float, double        panel[k][w]
//   bfloat16             panel[depth / 2][w][2], the pairs that vdpbf16ps and tdpbf16ps multiply; zero from k to depth, which
//                        is k rounded up to whole pairs, with AMX to whole tiles
//   float16              panel[k][w] of float: nothing multiplies float16 directly, and conversion once is cheaper
#ifndef POSTLUDE_PACK_H
#define POSTLUDE_PACK_H

#include <cstring>

#include <postlude/micro.h>

namespace postlude {

// Rows of a packed panel of bfloat16.
constexpr int64_t pairs_depth(int64_t k) { return round_up(k, kAmx ? 32 : 2); }

// Bytes of one panel of k rows.
constexpr int64_t panel_bytes(Element e, int64_t k) {
  return (e == Element::bf16 ? pairs_depth(k) / 2 : k) * panel_columns(e) * compute_bytes(e);
}

inline float to_float(float16 h) {
  const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000) << 16, exponent = (h.bits >> 10) & 31, mantissa = h.bits & 1023;
  uint32_t bits;
  float value;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact
    value = static_cast<float>(mantissa) * 0x1p-24f;
    std::memcpy(&bits, &value, 4);
    bits |= sign;
  } else {
    bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (mantissa << 13);
  }
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float to_float(bfloat16 b) {
  const uint32_t bits = static_cast<uint32_t>(b.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

namespace pack_detail {
inline void put(float *to, float from) { *to = from; }
inline void put(double *to, double from) { *to = from; }
inline void put(float *to, float16 from) { *to = to_float(from); }
}  // namespace pack_detail

// One panel of `columns` <= w columns. Strides in elements.
template <class To, class From>
inline void pack_panel_plain(To *to, const From *from, int64_t stride_k, int64_t stride_n, int64_t k, int64_t columns, int64_t w) {
  constexpr int64_t block = 16;  // of k: so that a strided read touches few lines at a time
  for (int64_t k0 = 0; k0 < k; k0 += block) {
    const int64_t k1 = k0 + block < k ? k0 + block : k;
    for (int64_t c = 0; c < columns; ++c)
      for (int64_t i = k0; i < k1; ++i) pack_detail::put(to + i * w + c, from[i * stride_k + c * stride_n]);
    for (int64_t i = k0; i < k1; ++i)
      for (int64_t c = columns; c < w; ++c) to[i * w + c] = 0;
  }
}

inline void pack_panel_pairs(uint16_t *to, const uint16_t *from, int64_t stride_k, int64_t stride_n, int64_t k, int64_t columns,
                             int64_t w) {
  constexpr int64_t block = 32;
  for (int64_t k0 = 0; k0 < k; k0 += block) {
    const int64_t k1 = k0 + block < k ? k0 + block : k, even = k1 < k ? k1 : pairs_depth(k1);
    for (int64_t c = 0; c < w; ++c)
      for (int64_t i = k0; i < even; ++i)
        to[(i / 2 * w + c) * 2 + i % 2] = c < columns && i < k1 ? from[i * stride_k + c * stride_n] : uint16_t{0};
  }
}

inline void pack_panel(Element e, void *to, const void *from, int64_t stride_k, int64_t stride_n, int64_t k, int64_t columns) {
  const int64_t w = panel_columns(e);
  switch (e) {
    case Element::f32:
      return pack_panel_plain(static_cast<float *>(to), static_cast<const float *>(from), stride_k, stride_n, k, columns, w);
    case Element::f64:
      return pack_panel_plain(static_cast<double *>(to), static_cast<const double *>(from), stride_k, stride_n, k, columns, w);
    case Element::f16:
      return pack_panel_plain(static_cast<float *>(to), static_cast<const float16 *>(from), stride_k, stride_n, k, columns, w);
    case Element::bf16:
      return pack_panel_pairs(static_cast<uint16_t *>(to), static_cast<const uint16_t *>(from), stride_k, stride_n, k, columns, w);
  }
}

}  // namespace postlude

#endif
