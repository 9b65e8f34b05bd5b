// Operands as the driver sees them: a matrix for each batch item, or one tall matrix of all rows, over a DLTensor's strides.
// Included by micro.cpp only.
#ifndef POSTLUDE_GEMM_VIEW_H
#define POSTLUDE_GEMM_VIEW_H

#include <postlude/micro.h>

namespace postlude {

constexpr int kMaxDims = 16;

// An index space of some dimensions, neighbours merged where one stride walks through both.
struct Dims {
  int count = 0;
  int64_t size[kMaxDims], stride[kMaxDims];
  int64_t total = 1;

  void add(int64_t extent, int64_t step) {  // outermost first
    total *= extent;
    if (extent == 1) return;
    if (count > 0 && stride[count - 1] == step * extent) {
      size[count - 1] *= extent;
      stride[count - 1] = step;
      return;
    }
    size[count] = extent;
    stride[count++] = step;
  }
  int64_t offset(int64_t flat) const {
    int64_t at = 0;
    for (int d = count - 1; d > 0; --d) {
      at += flat % size[d] * stride[d];
      flat /= size[d];
    }
    return count > 0 ? at + flat * stride[0] : at;
  }
  bool uniform() const { return count <= 1; }
  int64_t step() const { return count == 0 ? 0 : stride[0]; }
};

struct View {
  const char *data = nullptr;
  Element type = Element::f32;
  Dims batch;  // left and right of a batched group
  Dims rows;   // left: all its rows; right: its columns n
  int64_t k = 0, stride_k = 0;

  const char *at(int64_t item, int64_t row) const { return data + (batch.offset(item) + rows.offset(row)) * element_bytes(type); }
};

// rows_first: [..., rows, k], or [..., k, rows]. batched: leading dimensions are the batch, else they belong to the rows.
inline View view_of(const DLTensor &t, Element type, bool rows_first, bool batched) {
  View v;
  v.data = static_cast<const char *>(t.data) + t.byte_offset;
  v.type = type;
  const int rows = t.ndim - (rows_first ? 2 : 1), k = t.ndim - (rows_first ? 1 : 2);
  for (int d = 0; d < t.ndim - 2; ++d) (batched ? v.batch : v.rows).add(t.shape[d], t.strides[d]);
  v.rows.add(t.shape[rows], t.strides[rows]);
  v.k = t.shape[k];
  v.stride_k = v.k == 1 ? 1 : t.strides[k];
  return v;
}

}  // namespace postlude

#endif
