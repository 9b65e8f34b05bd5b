// Weights [n, k] that are kept as codes of 8 or 4 bits: decoded in registers and multiplied with a few rows, or decoded to rows of
// numbers that the other kernels read.
//
// A line is a vector of bytes of one weight row: 4 vectors of numbers from 8-bit codes, 8 from 4-bit codes. Byte codes stand in
// order. Number j of the 8 in a 32-bit lane i is number 8 i + j of the line: it is found by a shift, without crossing lanes, and the
// rows are brought into this order instead (arrange_line), once for all weights. Scales of a weight row become floats first.
// Included by micro.cpp only, for one type of codes: POSTLUDE_CODES.
#ifndef POSTLUDE_MICRO_CODES_H
#define POSTLUDE_MICRO_CODES_H

#include <postlude/micro_pack.h>

namespace postlude {

// A weight's rows, with their scales and shifts: one for each `block` numbers. block 0: none.
struct CodedRows {
  const uint8_t *codes = nullptr;
  int64_t stride = 0;  // bytes from row to row
  const char *scale = nullptr;
  int64_t scale_stride = 0;  // bytes
  const int8_t *shift = nullptr;
  int64_t shift_stride = 0;
  int64_t block = 0;
  ScaleType scale_type = ScaleType::none;

  CodedRows from(int64_t row) const {
    CodedRows rows = *this;
    rows.codes += row * stride;
    if (scale != nullptr) rows.scale += row * scale_stride;
    if (shift != nullptr) rows.shift += row * shift_stride;
    return rows;
  }
};

constexpr int64_t kLineBytes = kVectorBytes;
constexpr int64_t line_numbers(Codes c) { return kLineBytes * 8 / codes_bits(c); }
constexpr int line_vectors(Codes c) { return 32 / codes_bits(c); }
constexpr int64_t padded_numbers(Codes c, int64_t k) { return round_up(k, line_numbers(c)); }

// --- decoding -----------------------------------------------------------------------------------------------------------

// What the values of e4m3 have been divided by in `decode_line`: their exponent's bias is 8 less than that of float16.
constexpr float codes_factor(Codes c) { return c == Codes::f8e4m3 ? 256.0f : 1.0f; }

// A float16's bits from those of an 8-bit code.
POSTLUDE_INLINE constexpr uint16_t half_of(Codes c, uint8_t code) {
  if (c == Codes::f8e5m2) return static_cast<uint16_t>(code << 8);
  const uint16_t bits = static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7);
  return (code & 0x7f) == 0x7f ? bits | 0x7e00 : bits;
}

// The numbers of 4-bit codes.
constexpr float number_of(Codes c, int code) {
  constexpr float e2m1[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  if (c == Codes::f4e2m1) return code < 8 ? e2m1[code] : -e2m1[code - 8];
  return static_cast<float>(c == Codes::i4 && code >= 8 ? code - 16 : code);
}

template <Codes C>
struct Numbers {
  alignas(64) float of[16];
  constexpr Numbers() : of{} {
    for (int i = 0; i < 16; ++i) of[i] = number_of(C, i);
  }
};
template <Codes C>
inline constexpr Numbers<C> kNumbers{};

// The low 4 bits of each lane as numbers; what stands above them does not count.
template <Codes C>
POSTLUDE_INLINE VecF look_up(VecU nibbles) {
#if defined(POSTLUDE_AVX512)
  return reinterpret_cast<VecF>(
      _mm512_permutexvar_ps(reinterpret_cast<__m512i>(nibbles), reinterpret_cast<__m512>(load(kNumbers<C>.of))));
#elif defined(POSTLUDE_AVX2)
  if constexpr (C == Codes::f4e2m1) {
    const __m256 size = _mm256_permutevar8x32_ps(_mm256_load_ps(kNumbers<C>.of), reinterpret_cast<__m256i>(nibbles));
    return reinterpret_cast<VecF>(reinterpret_cast<VecU>(size) | ((nibbles & 8) << 28));
  } else {
    const __m256i up = _mm256_slli_epi32(reinterpret_cast<__m256i>(nibbles), 28);
    return reinterpret_cast<VecF>(_mm256_cvtepi32_ps(C == Codes::i4 ? _mm256_srai_epi32(up, 28) : _mm256_srli_epi32(up, 28)));
  }
#else
  VecF v;
  for (int i = 0; i < kLanes<float>; ++i) v[i] = kNumbers<C>.of[nibbles[i] & 15];
  return v;
#endif
}

// One vector of numbers from as many 8-bit codes.
template <Codes C>
POSTLUDE_INLINE VecF decode_bytes(const uint8_t *p) {
#if defined(POSTLUDE_AVX512)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
  if constexpr (C == Codes::i8) return reinterpret_cast<VecF>(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
  const __m256i wide = _mm256_cvtepu8_epi16(bytes);
  __m256i half = _mm256_slli_epi16(wide, 8);
  if constexpr (C == Codes::f8e4m3) {
    const __m256i size = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(0x3f80));
    const __mmask16 nan = _mm256_cmpeq_epi16_mask(size, _mm256_set1_epi16(0x3f80));
    // size | (half & the sign)
    half = _mm256_ternarylogic_epi32(size, half, _mm256_set1_epi16(static_cast<short>(0x8000)), 0xF8);
    half = _mm256_mask_mov_epi16(half, nan, _mm256_set1_epi16(0x7e00));
  }
  return reinterpret_cast<VecF>(_mm512_cvtph_ps(half));
#elif defined(POSTLUDE_AVX2) && defined(__F16C__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p));
  if constexpr (C == Codes::i8) return reinterpret_cast<VecF>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
  const __m128i wide = _mm_cvtepu8_epi16(bytes);
  __m128i half = _mm_slli_epi16(wide, 8);
  if constexpr (C == Codes::f8e4m3) {
    const __m128i size = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(0x3f80));
    const __m128i nan = _mm_and_si128(_mm_cmpeq_epi16(size, _mm_set1_epi16(0x3f80)), _mm_set1_epi16(0x7e00));
    half = _mm_or_si128(_mm_or_si128(size, nan), _mm_and_si128(half, _mm_set1_epi16(static_cast<short>(0x8000))));
  }
  return reinterpret_cast<VecF>(_mm256_cvtph_ps(half));
#else
  VecF v;
  for (int i = 0; i < kLanes<float>; ++i)
    v[i] = C == Codes::i8 ? static_cast<float>(static_cast<int8_t>(p[i])) : to_float(float16{half_of(C, p[i])});
  return v;
#endif
}

template <Codes C>
POSTLUDE_INLINE void decode_line(const uint8_t *p, VecF (&v)[line_vectors(C)]) {
  if constexpr (codes_bits(C) == 8) {
    POSTLUDE_UNROLL for (int j = 0; j < 4; ++j) v[j] = decode_bytes<C>(p + j * kLanes<float>);
  } else {
    const VecU lanes = load_bits(p);
    POSTLUDE_UNROLL for (int j = 0; j < 8; ++j) v[j] = look_up<C>(lanes >> (4 * j));
  }
}

// Lane i of the result is x[i * step / block], for blocks that are no shorter than a step.
POSTLUDE_INLINE VecU block_lanes(int step, int64_t block) {
  VecU lanes;
  for (int i = 0; i < kLanes<float>; ++i) lanes[i] = static_cast<uint32_t>(i * step / block);
  return lanes;
}
POSTLUDE_INLINE VecF pick(const float *x, VecU lanes) {
#if defined(POSTLUDE_AVX512)
  return reinterpret_cast<VecF>(_mm512_permutexvar_ps(reinterpret_cast<__m512i>(lanes), reinterpret_cast<__m512>(load(x))));
#elif defined(POSTLUDE_AVX2)
  return reinterpret_cast<VecF>(_mm256_permutevar8x32_ps(reinterpret_cast<__m256>(load(x)), reinterpret_cast<__m256i>(lanes)));
#else
  VecF v;
  for (int i = 0; i < kLanes<float>; ++i) v[i] = x[lanes[i]];
  return v;
#endif
}
POSTLUDE_INLINE VecF splat(float x) { return VecF{} + x; }

// Scales as floats, zeros for a vector after them.
inline void decode_scales(float *to, const char *from, ScaleType type, int64_t count) {
  constexpr int lanes = kLanes<float>;
  int64_t i = 0;
  const auto *bytes = reinterpret_cast<const uint8_t *>(from);
  switch (type) {
    case ScaleType::f32: std::memcpy(to, from, static_cast<size_t>(count) * 4), i = count; break;
    case ScaleType::bf16:
      for (; i + lanes <= count; i += lanes) store(to + i, load(reinterpret_cast<const bfloat16 *>(from) + i));
      for (; i < count; ++i) to[i] = to_float(reinterpret_cast<const bfloat16 *>(from)[i]);
      break;
    case ScaleType::f8e4m3:
      for (; i + lanes <= count; i += lanes) store(to + i, decode_bytes<Codes::f8e4m3>(bytes + i) * 256.0f);
      for (; i < count; ++i) to[i] = to_float(float16{half_of(Codes::f8e4m3, bytes[i])}) * 256.0f;
      break;
    case ScaleType::e8m0:
      for (; i < count; ++i) {
        const uint32_t bits = bytes[i] == 0 ? 0x00400000u : bytes[i] == 255 ? 0x7fc00000u : static_cast<uint32_t>(bytes[i]) << 23;
        std::memcpy(to + i, &bits, 4);
      }
      break;
    case ScaleType::none: break;
  }
  std::memset(to + count, 0, kVectorBytes);
}

inline void decode_shifts(float *to, const int8_t *from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
  std::memset(to + count, 0, kVectorBytes);
}

// Room for the scales, then the shifts, of one row.
constexpr int64_t scales_room(int64_t k, int64_t block) {
  return block == 0 ? 0 : round_up((k + block - 1) / block + kLanes<float>, kLanes<float>);
}

// --- a few rows -----------------------------------------------------------------------------------------------------------

// A row in the order in which lines of codes are decoded, with zeros up to a whole line.
template <Codes C, class From>
inline void arrange_row(float *to, const From *from, int64_t k) {
  constexpr int64_t numbers = line_numbers(C), lanes = kLanes<float>;
  for (int64_t begin = 0; begin < k; begin += numbers, to += numbers)
    for (int64_t j = 0; j < numbers / lanes; ++j)
      for (int64_t i = 0; i < lanes; ++i) {
        const int64_t at = begin + (codes_bits(C) == 8 ? j * lanes + i : 8 * i + j);
        to[j * lanes + i] = at < k ? convert<float>(from[at]) : 0.0f;
      }
}

struct CodedCall {
  int64_t k;
  const float *x;  // arranged rows
  int64_t ldx;
  CodedRows weights;
  float *c;
  int64_t ldc;
  float *scales;  // room
};

// How far ahead of the codes memory is asked for them.
constexpr int64_t kCodesAhead = 4096;

// R rows times W weight rows.
template <Codes C, bool Block, bool Shift, int R>
POSTLUDE_INLINE void coded_sums(const CodedCall &call, int64_t row, VecF (&sums)[R]) {
  constexpr int vectors = line_vectors(C), lanes = kLanes<float>;
  constexpr int chains = R == 1 && codes_bits(C) == 8 ? 4 : R == 1 ? 2 : 1;
  constexpr int64_t numbers = line_numbers(C);
  // At most 160 additions in an accumulator.
  constexpr int64_t most = codes_bits(C) == 8 ? 160 * chains / 4 : 160;
  const CodedRows weights = call.weights.from(row);
  const uint8_t *p = weights.codes;
  const int64_t k = call.k, bytes = k * codes_bits(C) / 8;
  const float *scales = call.scales, *shifts = call.scales + scales_room(k, weights.block);
  VecU picked{};
  if constexpr (Block) {
    const int64_t count = (k + weights.block - 1) / weights.block;
    decode_scales(call.scales, weights.scale, weights.scale_type, count);
    if constexpr (Shift) decode_shifts(call.scales + scales_room(k, weights.block), weights.shift, count);
    picked = block_lanes(codes_bits(C) == 8 ? 1 : 8, weights.block);
  }
  POSTLUDE_UNROLL for (int r = 0; r < R; ++r) sums[r] = VecF{};
  VecF acc[R][chains];
  const auto multiply = [&](const uint8_t *from, int64_t line) __attribute__((always_inline)) {
    VecF v[vectors];
    decode_line<C>(from, v);
    const float *x = call.x + line * numbers;
    if constexpr (Block && codes_bits(C) == 8) {
      POSTLUDE_UNROLL for (int j = 0; j < vectors; ++j) {
        const int64_t at = (line * numbers + j * lanes) / weights.block;
        if constexpr (Shift) v[j] -= splat(shifts[at]);
        v[j] *= splat(scales[at]);
      }
    }
    if constexpr (Block && codes_bits(C) == 4) {
      const int64_t at = line * numbers / weights.block;
      if constexpr (Shift) {
        const VecF shift = pick(shifts + at, picked);
        POSTLUDE_UNROLL for (int j = 0; j < vectors; ++j) v[j] -= shift;
      }
      const VecF scale = pick(scales + at, picked);
      POSTLUDE_UNROLL for (int r = 0; r < R; ++r) {
        VecF even = v[0] * load(x + r * call.ldx), odd = v[1] * load(x + r * call.ldx + lanes);
        POSTLUDE_UNROLL for (int j = 2; j < vectors; j += 2) {
          even += v[j] * load(x + r * call.ldx + j * lanes);
          odd += v[j + 1] * load(x + r * call.ldx + (j + 1) * lanes);
        }
        acc[r][0] += (even + odd) * scale;
      }
    } else {
      POSTLUDE_UNROLL for (int r = 0; r < R; ++r)
        POSTLUDE_UNROLL for (int j = 0; j < vectors; ++j) acc[r][j % chains] += v[j] * load(x + r * call.ldx + j * lanes);
    }
  };
  const int64_t whole = bytes / kLineBytes;
  for (int64_t line = 0; line * kLineBytes < bytes;) {
    POSTLUDE_UNROLL for (int r = 0; r < R; ++r)
      POSTLUDE_UNROLL for (int u = 0; u < chains; ++u) acc[r][u] = VecF{};
    const int64_t end = std::min(whole, line + most);
    for (; line < end; ++line) {
      __builtin_prefetch(p + line * kLineBytes + kCodesAhead);
      multiply(p + line * kLineBytes, line);
    }
    if (line == whole && line * kLineBytes < bytes) {
      alignas(64) uint8_t last[kLineBytes] = {};
      std::memcpy(last, p + line * kLineBytes, static_cast<size_t>(bytes - line * kLineBytes));
      multiply(last, line);
      ++line;
    }
    POSTLUDE_UNROLL for (int r = 0; r < R; ++r)
      POSTLUDE_UNROLL for (int u = 0; u < chains; ++u) sums[r] += acc[r][u];
  }
}

template <Codes C, bool Block, bool Shift, int R>
inline void coded_rows(const CodedCall &call, int columns) {
  for (int j = 0; j < columns; j += 4) {
    VecF sums[R][4];
    for (int w = 0; w < 4; ++w) {
      VecF own[R] = {};
      if (j + w < columns) coded_sums<C, Block, Shift, R>(call, j + w, own);
      POSTLUDE_UNROLL for (int r = 0; r < R; ++r) sums[r][w] = own[r] * codes_factor(C);
    }
    POSTLUDE_UNROLL for (int r = 0; r < R; ++r) sum4(sums[r], call.c + r * call.ldc + j, false);
  }
}

constexpr int kCodedRows = 4;  // rows that are multiplied at once

template <Codes C, bool Block, bool Shift>
inline void coded_kernel_of(const CodedCall &call, int rows, int columns) {
  switch (rows) {
    case 1: return coded_rows<C, Block, Shift, 1>(call, columns);
    case 2: return coded_rows<C, Block, Shift, 2>(call, columns);
    case 3: return coded_rows<C, Block, Shift, 3>(call, columns);
    default: return coded_rows<C, Block, Shift, 4>(call, columns);
  }
}

template <Codes C>
inline void coded_kernel(const CodedCall &call, int rows, int columns) {
  if (call.weights.block == 0) return coded_kernel_of<C, false, false>(call, rows, columns);
  if constexpr (C == Codes::u4) {
    if (call.weights.shift != nullptr) return coded_kernel_of<C, true, true>(call, rows, columns);
  }
  coded_kernel_of<C, true, false>(call, rows, columns);
}

// --- many rows: decoded weight rows ---------------------------------------------------------------------------------------

POSTLUDE_INLINE VecU rounded_bits(VecF v) {  // to bfloat16, halves to even, in the upper half
  const VecU bits = reinterpret_cast<VecU>(v);
  return bits + 0x7fff + ((bits >> 16) & 1);
}

POSTLUDE_INLINE void store_numbers(float *to, VecF v) { store(to, v); }
POSTLUDE_INLINE void store_numbers(bfloat16 *to, VecF v) {
#if defined(POSTLUDE_AVX512)
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(rounded_bits(v) >> 16)));
#else
  const VecU bits = rounded_bits(v) >> 16;
  for (int i = 0; i < kLanes<float>; ++i) to[i].bits = static_cast<uint16_t>(bits[i]);
#endif
}

// Numbers 0, 2, 4, ... and 1, 3, 5, ... of two vectors.
POSTLUDE_INLINE void store_pairs(bfloat16 *to, VecF even, VecF odd) {
  store_bits(to, (rounded_bits(even) >> 16) | (rounded_bits(odd) & 0xffff0000u));
}
POSTLUDE_INLINE void store_pairs(float *to, VecF even, VecF odd) {
#if defined(POSTLUDE_AVX512)
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512 a = reinterpret_cast<__m512>(even), b = reinterpret_cast<__m512>(odd);
  _mm512_storeu_ps(to, _mm512_permutex2var_ps(a, first, b));
  _mm512_storeu_ps(to + 16, _mm512_permutex2var_ps(a, _mm512_add_epi32(first, _mm512_set1_epi32(8)), b));
#else
  for (int i = 0; i < kLanes<float>; ++i) to[2 * i] = even[i], to[2 * i + 1] = odd[i];
#endif
}

// One weight row of k numbers, and zeros up to whole steps of two vectors: `to` has room for them.
template <Codes C, class To>
inline void decode_row(To *to, const CodedRows &weights, int64_t k, float *scales) {
  constexpr int lanes = kLanes<float>;
  constexpr int64_t step = codes_bits(C) == 8 ? lanes : 2 * lanes, step_bytes = lanes;
  float *shifts = scales + scales_room(k, weights.block);
  VecU picked{};
  if (weights.block != 0) {
    const int64_t count = (k + weights.block - 1) / weights.block;
    decode_scales(scales, weights.scale, weights.scale_type, count);
    if (weights.shift != nullptr) decode_shifts(shifts, weights.shift, count);
    picked = block_lanes(codes_bits(C) == 8 ? 1 : 2, weights.block);
  }
  const VecF factor = splat(codes_factor(C));
  const auto decode = [&](const uint8_t *p, int64_t at) {
    VecF shift{}, scale = factor;
    if (weights.block != 0) {
      scale *= pick(scales + at / weights.block, picked);
      if (weights.shift != nullptr) shift = pick(shifts + at / weights.block, picked);
    }
    if constexpr (codes_bits(C) == 8) {
      store_numbers(to + at, (decode_bytes<C>(p) - shift) * scale);
    } else {
#if defined(POSTLUDE_AVX512)
      const VecU bytes = reinterpret_cast<VecU>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
#elif defined(POSTLUDE_AVX2)
      const VecU bytes = reinterpret_cast<VecU>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
#else
      VecU bytes;
      for (int i = 0; i < lanes; ++i) bytes[i] = p[i];
#endif
      store_pairs(to + at, (look_up<C>(bytes) - shift) * scale, (look_up<C>(bytes >> 4) - shift) * scale);
    }
  };
  const int64_t bytes = k * codes_bits(C) / 8;
  int64_t i = 0;
  for (; i + step_bytes <= bytes; i += step_bytes) decode(weights.codes + i, i / step_bytes * step);
  if (i < bytes) {
    uint8_t last[step_bytes] = {};
    std::memcpy(last, weights.codes + i, static_cast<size_t>(bytes - i));
    decode(last, i / step_bytes * step);
  }
}

}  // namespace postlude

#endif
