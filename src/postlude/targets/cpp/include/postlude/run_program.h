// The contract between generated code and the driver: element types, Source, and what a Group and a Program must offer.
// Data and documentation only; the driver itself is run.h.
//
// Generated code looks like this:
//
//     #include <postlude/run.h>
//     namespace {
//     using namespace postlude;
//     struct Group0 {
//       using Left = bfloat16;      // element type in memory: float, double, bfloat16, float16
//       using Right = bfloat16;     //   (double goes with double only)
//       using Compute = float;      // double exactly where Left and Right are double
//       static constexpr int contractions = 1;
//       static constexpr Source left[1] = {{0, false}};
//       static constexpr Source right[1] = {{1, true}};
//       static constexpr bool batched = false;
//       static constexpr bool whole_rows = false;
//       static constexpr bool feeds_next = false;
//       static constexpr int rows_at_once = 8;  // the most rows of one call; 0: any number
//       static constexpr int totals = 1;        // sums over the rows, if there are any; then also
//       static void finish(const Tensors &t, int64_t nc, float *const *sums);
//       static void epilogue(const Tensors &t, int64_t row, int64_t rows, int64_t c0, int64_t nc, float *const *acc,
//                            int64_t acc_stride, void *next, int64_t next_stride);
//     };
//     struct Program {
//       using Groups = std::tuple<Group0>;
//       static constexpr int operands = 3, results = 1;
//     };
//     }  // namespace
//     POSTLUDE_EXPORT(Program)      // defines postlude_run, postlude_pack_size, postlude_pack
//
// What the driver takes from the tensors (the last dimensions; `leading` are any number of dimensions before them):
//   left,  transposed = false   [leading..., m, k]
//   left,  transposed = true    [leading..., k, m]
//   right, transposed = true    [leading..., n, k]     (nn.Linear's layout)
//   right, transposed = false   [leading..., k, n]
//   batched = false: right and a transposed left have two dimensions; leading dimensions of the left belong to m.
//   batched = true:  leading dimensions are the batch. One side may have two dimensions only: it serves every batch item.
//   Any strides, any size including 0. All groups of a Program have the same number of rows.
//
// What the driver guarantees to `epilogue`:
//   - It is called for `rows` rows from `row` on; the next row of acc[i] is acc_stride accumulators further, that of `next`
//     next_stride bytes. An epilogue for one row, (t, row, c0, nc, acc, next) without rows_at_once, is possible as well.
//   - `row` is the flat row index, batch * m + row in the batch, or the flat index over the leading dimensions and m.
//   - acc[i] points at column c0 of contraction i: nc accumulators, aligned to 64 bytes, writable scratch, readable and
//     writable in whole 64-byte vectors past nc (what stands there is unspecified).
//   - whole_rows = false: called once for each piece of each row, from any thread, in any order; never with nc = 0.
//     c0 is a multiple of 64 bytes' worth of columns. A value without a column axis is to be written where c0 = 0.
//   - whole_rows = true: called exactly once for each row with c0 = 0 and nc = n, also when n = 0.
//   - k = 0 gives accumulators of 0, and the epilogue runs as usual.
//   - feeds_next = true (needs whole_rows): the next group in the tuple has tensor -1 as every left Source, its k is this
//     n, and its rows are these rows. `next` points at this row's n elements of type NextGroup::Left, aligned to 64 bytes;
//     whole 64-byte vectors may be written past n. The next group's epilogue for a row runs after this one, on the same
//     thread. The last kRowNote bytes of each of these rows are for what one epilogue has to tell the other: a group that
//     reads the rows, and feeds no third one, gets the same `next`. `next` is null otherwise.
//   - totals > 0 (not batched, not fed and feeding nothing): `next` points at partial sums over rows, for all columns from 0
//     on, the next sum's next_stride bytes further, writable in whole vectors past n. The epilogue adds its rows to them. At the
//     end `finish` is called once, with the sums of all rows.
//   - Tensors is constructed once for a call, `Tensors(const PostludeCall &)`, and shared by the threads.
//
// The row space of a chain whose first group is batched is that group's.
#ifndef POSTLUDE_RUN_PROGRAM_H
#define POSTLUDE_RUN_PROGRAM_H

#include <cstdint>

namespace postlude {

// Storage types: arithmetic happens in float, so these are bits and nothing else.
struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

// What the bytes of a weight stand for: 8-bit codes, or pairs of 4-bit codes of which the first has the lower half. `none`: numbers.
enum class Codes : int32_t { none, i8, f8e4m3, f8e5m2, f4e2m1, i4, u4 };

// The type of scales of blocks; `none`: the codes are multiplied as they are.
enum class ScaleType : int32_t { none, f32, bf16, f8e4m3, e8m0 };

// Scales and shifts of a contraction's right side, as indices into PostludeCall::tensors; -1: there are none.
struct Scales {
  int scale, shift;
};

// Where one side of a contraction comes from.
struct Source {
  int tensor;       // index into PostludeCall::tensors; -1: the rows that the previous group's epilogue wrote to `next`
  bool transposed;  // left: [k, m]; right: [n, k]
};

}  // namespace postlude

#endif
