// Fast packing in the library: panels of right operands, and rows of left operands whose type or strides the kernels
// cannot read. What is not worth a fast path falls back to pack.h's plain loops.
// Included by micro.cpp only.
#ifndef POSTLUDE_MICRO_PACK_H
#define POSTLUDE_MICRO_PACK_H

#include <algorithm>

#include <postlude/micro_vector.h>

namespace postlude {

// --- transposition of 32-bit elements (floats, or pairs of bfloat16) ------------------------------------------------------
// rows[i] holds kLanes<float> elements of row i; afterwards rows[i] holds column i.

#if defined(POSTLUDE_AVX512)
POSTLUDE_INLINE void transpose(__m512i (&r)[16]) {
  __m512i t[16];
  POSTLUDE_UNROLL for (int i = 0; i < 8; ++i) {  // pairs of rows: 32-bit interleave
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  POSTLUDE_UNROLL for (int i = 0; i < 4; ++i) {  // fours of rows: each 128-bit lane now holds one column's four elements
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  POSTLUDE_UNROLL for (int c = 0; c < 4; ++c) {  // lane l of r[4 i + c] is column 4 l + c of rows 4 i .. 4 i + 3
    t[c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);
    t[4 + c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xDD);
    t[8 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xDD);
  }
  POSTLUDE_UNROLL for (int c = 0; c < 4; ++c) {
    r[c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0x88);
    r[8 + c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0xDD);
    r[4 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0x88);
    r[12 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0xDD);
  }
}
using TransposeVector = __m512i;
POSTLUDE_INLINE __m512i transpose_load(const void *p) { return _mm512_loadu_si512(p); }
POSTLUDE_INLINE void transpose_store(void *p, __m512i v) { _mm512_storeu_si512(p, v); }
#elif defined(POSTLUDE_AVX2)
POSTLUDE_INLINE void transpose(__m256i (&r)[8]) {
  __m256i t[8];
  POSTLUDE_UNROLL for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  POSTLUDE_UNROLL for (int i = 0; i < 2; ++i) {
    r[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  POSTLUDE_UNROLL for (int c = 0; c < 4; ++c) {
    t[c] = _mm256_permute2x128_si256(r[c], r[4 + c], 0x20);
    t[4 + c] = _mm256_permute2x128_si256(r[c], r[4 + c], 0x31);
  }
  POSTLUDE_UNROLL for (int c = 0; c < 8; ++c) r[c] = t[c];
}
using TransposeVector = __m256i;
POSTLUDE_INLINE __m256i transpose_load(const void *p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
POSTLUDE_INLINE void transpose_store(void *p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i *>(p), v); }
#else
using TransposeVector = VecU;
POSTLUDE_INLINE void transpose(VecU (&r)[4]) {
  VecU t[4];
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) t[i][j] = r[j][i];
  for (int i = 0; i < 4; ++i) r[i] = t[i];
}
POSTLUDE_INLINE VecU transpose_load(const void *p) { return load_bits(p); }
POSTLUDE_INLINE void transpose_store(void *p, VecU v) { store_bits(p, v); }
#endif

constexpr int kTransposed = kLanes<float>;  // the square's side

// to[c * to_stride + r] = from row r, element c, for `rows` <= kTransposed rows of whole 32-bit elements; rows past the end
// are zero. Only `columns` elements of each row are taken. Strides in bytes.
POSTLUDE_INLINE void transpose_square(char *to, int64_t to_stride, const char *from, int64_t from_stride, int rows,
                                      int columns = kTransposed) {
  TransposeVector r[kTransposed];
  if (rows == kTransposed) {
    POSTLUDE_UNROLL for (int i = 0; i < kTransposed; ++i) r[i] = transpose_load(from + i * from_stride);
  } else {
    POSTLUDE_UNROLL for (int i = 0; i < kTransposed; ++i) r[i] = i < rows ? transpose_load(from + i * from_stride) : TransposeVector{};
  }
  transpose(r);
  POSTLUDE_UNROLL for (int i = 0; i < kTransposed; ++i)
    if (i < columns) transpose_store(to + i * to_stride, r[i]);
}

// --- right operands: one panel -----------------------------------------------------------------------------------------------

// [n, k] with k contiguous. `unit`: elements in 32 bits.
inline void pack_panel_rows(Element e, char *to, const char *from, int64_t stride_n, int64_t k, int64_t columns) {
  const int64_t bytes = element_bytes(e), unit = 4 / bytes, whole = k / (kTransposed * unit) * kTransposed;  // in 32-bit units
  const int64_t w = panel_columns(e);
  for (int64_t u = 0; u < whole; u += kTransposed)
    for (int64_t c = 0; c < round_up(columns, kTransposed); c += kTransposed)
      transpose_square(to + (u * w + c) * 4, w * 4, from + c * stride_n * bytes + u * 4, stride_n * bytes,
                       static_cast<int>(columns - c < kTransposed ? columns - c : kTransposed));
  if (whole * unit < k) {
    pack_panel(e, to + whole * w * 4, from + whole * 4, 1, stride_n, k - whole * unit, columns);
  }
}

// [k, n] with n contiguous: rows are copied, and filled with zeros up to a whole vector.
inline void pack_panel_copy(char *to, const char *from, int64_t stride_k, int64_t k, int64_t row_bytes) {
  if (row_bytes == kPanelBytes) {
    for (int64_t i = 0; i < k; ++i, to += kPanelBytes, from += stride_k)
      POSTLUDE_UNROLL for (int v = 0; v < kTileVectors; ++v) store_bits(to + v * kVectorBytes, load_bits(from + v * kVectorBytes));
    return;
  }
  const int64_t whole = row_bytes / kVectorBytes * kVectorBytes;
  for (int64_t i = 0; i < k; ++i, to += kPanelBytes, from += stride_k) {
    for (int64_t v = 0; v < whole; v += kVectorBytes) store_bits(to + v, load_bits(from + v));
    if (whole < row_bytes) {
      store_bits(to + whole, VecU{});
      std::memcpy(to + whole, from + whole, static_cast<size_t>(row_bytes - whole));
    }
  }
}

// 16-bit elements, zero-extended.
POSTLUDE_INLINE VecU widen(const uint16_t *p) {
#if defined(POSTLUDE_AVX512)
  return reinterpret_cast<VecU>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))));
#elif defined(POSTLUDE_AVX2)
  return reinterpret_cast<VecU>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
#else
  VecU v;
  for (int i = 0; i < kLanes<float>; ++i) v[i] = p[i];
  return v;
#endif
}

// [k, n] of bfloat16 with n contiguous: two rows become one row of pairs.
inline void pack_panel_interleave(char *to, const uint16_t *from, int64_t stride_k, int64_t k, int64_t columns) {
  constexpr int lanes = kLanes<float>;
  static const uint16_t zeros[kPanelBytes / 4] = {};
  const int64_t whole = columns / lanes * lanes;
  for (int64_t i = 0; i < k; i += 2, to += kPanelBytes, from += 2 * stride_k) {
    const uint16_t *odd = i + 1 < k ? from + stride_k : zeros;
    for (int64_t c = 0; c < whole; c += lanes) store_bits(to + c * 4, widen(from + c) | (widen(odd + c) << 16));
    if (whole < columns) {
      VecU last{};
      for (int64_t c = whole; c < columns; ++c) last[c - whole] = from[c] | static_cast<uint32_t>(odd[c]) << 16;
      store_bits(to + whole * 4, last);
    }
  }
  std::memset(to, 0, static_cast<size_t>((pairs_depth(k) - round_up(k, 2)) / 2 * kPanelBytes));
}

// Any strides (in elements). The same bytes as pack_panel, but for columns past the last vector in use, which stay unwritten.
inline void pack_panel_fast(Element e, void *to_, const void *from_, int64_t stride_k, int64_t stride_n, int64_t k, int64_t columns) {
  auto *to = static_cast<char *>(to_);
  const auto *from = static_cast<const char *>(from_);
  if ((e == Element::f32 || e == Element::bf16) && stride_k == 1) return pack_panel_rows(e, to, from, stride_n, k, columns);
  if ((e == Element::f32 || e == Element::f64) && stride_n == 1)
    return pack_panel_copy(to, from, stride_k * element_bytes(e), k, columns * element_bytes(e));
  if (e == Element::bf16 && stride_n == 1)
    return pack_panel_interleave(to, reinterpret_cast<const uint16_t *>(from), stride_k, k, columns);
  pack_panel(e, to, from, stride_k, stride_n, k, columns);
}

// --- left operands: rows with k contiguous, in a type that the kernels read ----------------------------------------------------

template <class To, class From>
POSTLUDE_INLINE To convert(From x) {
  if constexpr (sizeof(From) == 2 && sizeof(To) == 4) {
    return to_float(x);
  } else if constexpr (sizeof(From) == 2) {
    return To{x.bits};
  } else {
    return static_cast<To>(x);
  }
}

template <class To, class From>
void copy_rows_as(To *to, int64_t to_stride, const From *from, int64_t stride_row, int64_t stride_k, int64_t rows, int64_t k) {
  if (stride_k == 1) {
    for (int64_t r = 0; r < rows; ++r) {
      To *out = to + r * to_stride;
      const From *in = from + r * stride_row;
      int64_t i = 0;
      if constexpr (sizeof(To) == sizeof(From)) {
        std::memcpy(out, in, static_cast<size_t>(k) * sizeof(To));
        i = k;
      } else if constexpr (sizeof(From) == 2) {
        for (; i + kLanes<float> <= k; i += kLanes<float>) store(out + i, load(in + i));
      }
      for (; i < k; ++i) out[i] = convert<To>(in[i]);
    }
    return;
  }
  int64_t done_rows = 0, done_k = 0;  // what whole squares covered
  if constexpr (sizeof(To) <= 4) {
    constexpr int64_t unit = 4 / sizeof(To), square = kTransposed * unit;  // bfloat16 is transposed in pairs along k
    if (stride_row == 1) {
      done_rows = rows / kTransposed * kTransposed, done_k = k / square * square;
      for (int64_t r = 0; r < done_rows; r += kTransposed)
        for (int64_t i = 0; i < done_k; i += square) {
          TransposeVector v[kTransposed];
          POSTLUDE_UNROLL for (int j = 0; j < kTransposed; ++j) {
            const From *in = from + r + (i + j * unit) * stride_k;
            if constexpr (unit == 1) {
              v[j] = reinterpret_cast<TransposeVector>(load(in));
            } else {
              v[j] = reinterpret_cast<TransposeVector>(widen(&in->bits) | (widen(&in[stride_k].bits) << 16));
            }
          }
          transpose(v);
          POSTLUDE_UNROLL for (int j = 0; j < kTransposed; ++j) transpose_store(to + (r + j) * to_stride + i, v[j]);
        }
    }
  }
  constexpr int64_t block = 16;  // of k: a strided read touches few lines at a time
  for (int64_t i0 = 0; i0 < k; i0 += block)
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = r < done_rows && i0 < done_k ? done_k : i0; i < std::min(i0 + block, k); ++i)
        to[r * to_stride + i] = convert<To>(from[r * stride_row + i * stride_k]);
}

// Strides in elements. `as` is what the kernels read: the same type, or float for bfloat16 and float16.
inline void copy_rows(Element as, void *to, int64_t to_stride, Element type, const void *from, int64_t stride_row, int64_t stride_k,
                      int64_t rows, int64_t k) {
  if (as == Element::f64)
    copy_rows_as(static_cast<double *>(to), to_stride, static_cast<const double *>(from), stride_row, stride_k, rows, k);
  else if (as == Element::bf16)
    copy_rows_as(static_cast<bfloat16 *>(to), to_stride, static_cast<const bfloat16 *>(from), stride_row, stride_k, rows, k);
  else if (type == Element::bf16)
    copy_rows_as(static_cast<float *>(to), to_stride, static_cast<const bfloat16 *>(from), stride_row, stride_k, rows, k);
  else if (type == Element::f16)
    copy_rows_as(static_cast<float *>(to), to_stride, static_cast<const float16 *>(from), stride_row, stride_k, rows, k);
  else
    copy_rows_as(static_cast<float *>(to), to_stride, static_cast<const float *>(from), stride_row, stride_k, rows, k);
}

}  // namespace postlude

#endif
