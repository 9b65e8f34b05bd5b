// What a Region's object and the library of microkernels agree on: the register tile that the compiler's flags choose,
// type-erased descriptions of a Program, and the library's table.
//
// The driver lives in the library (gemm.h, compiled once into micro.cpp) and calls a Region's epilogue through a pointer,
// once for a block of rows. So a Region's object holds its epilogue and little else, and compiles in a moment.
#ifndef POSTLUDE_MICRO_H
#define POSTLUDE_MICRO_H

#include <cstddef>
#include <cstdint>

#include <postlude/abi.h>
#include <postlude/run_program.h>

namespace postlude {

// Registers of one accumulator tile: kTileRows x kTileVectors. AVX-512 and AArch64 have 32 registers, the others 16.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define POSTLUDE_AVX512 1
constexpr int kVectorBytes = 64, kTileRows = 6, kTileVectors = 4;
#elif defined(__AVX2__) && defined(__FMA__)
#define POSTLUDE_AVX2 1
constexpr int kVectorBytes = 32, kTileRows = 6, kTileVectors = 2;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16, kTileRows = 6, kTileVectors = 4;
#else
constexpr int kVectorBytes = 16, kTileRows = 3, kTileVectors = 4;
#endif

#if defined(POSTLUDE_AVX512) && defined(__AVX512BF16__)
#define POSTLUDE_AVX512_BF16 1
constexpr bool kDotBf16 = true;  // products of bfloat16 pairs by vdpbf16ps
#else
constexpr bool kDotBf16 = false;
#endif

// Tiles of AMX: 16 rows of 64 bytes, products of bfloat16 pairs.
#if defined(POSTLUDE_AVX512_BF16) && defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define POSTLUDE_AMX 1
constexpr bool kAmx = true;
#else
constexpr bool kAmx = false;
#endif

// A panel is this many bytes of accumulators wide: 64 floats with AVX-512.
constexpr int kPanelBytes = kVectorBytes * kTileVectors;

// Changes with every change of the structures below, of the packed form or of the tile: a Region compiled with other flags
// than the library is refused instead of computing nonsense.
constexpr int32_t kMicroVersion = (1 << 18) | (kAmx ? 1 << 16 : 0) | (kVectorBytes << 8) | (kTileRows << 4) |
                                  (kTileVectors << 1) | (kDotBf16 ? 1 : 0);

enum class Element : int32_t { f32, f64, bf16, f16 };

template <class T>
struct ElementOf;
template <>
struct ElementOf<float> {
  static constexpr Element value = Element::f32;
};
template <>
struct ElementOf<double> {
  static constexpr Element value = Element::f64;
};
template <>
struct ElementOf<bfloat16> {
  static constexpr Element value = Element::bf16;
};
template <>
struct ElementOf<float16> {
  static constexpr Element value = Element::f16;
};

constexpr int64_t element_bytes(Element e) { return e == Element::f64 ? 8 : e == Element::f32 ? 4 : 2; }
constexpr int64_t compute_bytes(Element e) { return e == Element::f64 ? 8 : 4; }
constexpr int64_t panel_columns(Element e) { return kPanelBytes / compute_bytes(e); }
constexpr int codes_bits(Codes c) { return c == Codes::f4e2m1 || c == Codes::i4 || c == Codes::u4 ? 4 : 8; }
constexpr int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// The epilogue over `rows` rows: acc[i] is the first row of contraction i, acc_stride (in accumulators) leads to the next;
// next_stride (in bytes) likewise.
using BlockEpilogue = void (*)(const void *tensors, int64_t row, int64_t rows, int64_t c0, int64_t nc, void *const *acc,
                               int64_t acc_stride, void *next, int64_t next_stride);

// What becomes of sums over the rows: sums[i] is the i-th for all columns, writable scratch.
using Totals = void (*)(const void *tensors, int64_t nc, void *const *sums);

// Bytes at the end of each row of `next` that belong to the groups on both sides, not to the row.
constexpr int64_t kRowNote = 64;

constexpr int kMaxContractions = 8;

struct GroupInfo {
  Element left_type, right_type;
  int32_t contractions;
  const Source *left, *right;
  bool batched, whole_rows, feeds_next;
  BlockEpilogue epilogue;
  int32_t totals;  // how many sums over the rows the epilogue adds to
  Totals finish;   // of these sums; null where there are none
  // Of weights that are codes. They are [n, k], and `right_type` is what they are decoded to.
  Codes codes = Codes::none;
  ScaleType scale_type = ScaleType::none;
  int32_t block = 0;  // columns of a scale
  const Scales *scales = nullptr;
};

constexpr int kMaxTotals = 16;

struct ProgramInfo {
  const GroupInfo *groups;
  int32_t count;    // of groups
  int32_t tensors;  // operands + results
};

struct MicroTable {
  int32_t version;  // kMicroVersion of the library's build
  int (*run)(const ProgramInfo &program, const PostludeCall &call, const void *tensors);
};

}  // namespace postlude

#endif
