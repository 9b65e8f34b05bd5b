// Tensors: where the epilogue's operands and results lie in memory.
//
// A generated epilogue works on one row at a time and knows it by its flat index over all row dimensions. Tensors turns that
// index into a pointer, for any number of leading dimensions and any strides, 0 included. Dimensions that lie behind each other
// are joined once per call, after which nearly every tensor has one row dimension and the pointer costs a multiplication.
//
// Rows are handed out with their columns behind each other. A row whose columns lie apart (a transposed or broadcast
// operand) is copied into a buffer of the thread first, so that generated code has one form of load.
#ifndef POSTLUDE_TENSOR_H
#define POSTLUDE_TENSOR_H

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <postlude/micro.h>

namespace postlude {

// Buffers of a thread that only grow. They outlive the call, as rows are many and small.
class ThreadBuffers {
 public:
  static constexpr int kCount = 96;
  ThreadBuffers() = default;
  ThreadBuffers(const ThreadBuffers &) = delete;
  ThreadBuffers &operator=(const ThreadBuffers &) = delete;
  ~ThreadBuffers() {
    for (void *p : data_) std::free(p);
  }
  void *get(int index, int64_t bytes) {
    if (size_[index] < bytes) {
      const int64_t size = (bytes + bytes / 4 + 63) / 64 * 64;
      std::free(data_[index]);
      data_[index] = std::aligned_alloc(64, static_cast<size_t>(size));
      if (data_[index] == nullptr) {
        std::fputs("postlude: out of memory for a buffer of one row\n", stderr);
        std::abort();
      }
      size_[index] = size;
    }
    return data_[index];
  }

 private:
  void *data_[kCount] = {};
  int64_t size_[kCount] = {};
};

class Tensors {
 public:
  static constexpr int kMost = 64;  // operands and results of one Region

  // Generated code defines the table: for each tensor the dimension of its columns, counted from the last one (0), or
  // kNoColumn, or kUnused where the epilogue does not touch the tensor. All other dimensions are rows.
  static const signed char columns[];
  static const int operands;  // so many of the tensors are only read; the others are results
  static constexpr signed char kNoColumn = -1, kUnused = -2;

  explicit Tensors(const PostludeCall &call) : call_(call) {
    for (int i = 0; i < call.count; ++i)
      if (columns[i] != kUnused) resolve(views_[i], call.tensors[i], columns[i], i < operands);
  }
  Tensors(const Tensors &) = delete;
  Tensors &operator=(const Tensors &) = delete;
  ~Tensors() {
    for (int i = 0; i < call_.count; ++i)
      if (columns[i] != kUnused) std::free(views_[i].owned);
  }

  // Columns [c0, c0 + nc) of one row of operand `i`, to read.
  template <class T>
  const T *row(int i, int64_t row, int64_t c0, int64_t nc) const {
    const View &v = views_[i];
    const T *from = static_cast<const T *>(v.data) + offset(v, row) + c0 * v.stride;
    if (__builtin_expect(v.stride == 1, 1)) return from;
    T *to = static_cast<T *>(buffer(i, nc * static_cast<int64_t>(sizeof(T))));
    for (int64_t c = 0; c < nc; ++c) to[c] = from[c * v.stride];
    return to;
  }

  // The element of a value without columns.
  template <class T>
  const T *element(int i, int64_t row) const {
    return static_cast<const T *>(views_[i].data) + offset(views_[i], row);
  }

  // The same two for results, to write. The columns of a result lie result_stride(i) apart.
  template <class T>
  T *result(int i, int64_t row, int64_t c0) const {
    const View &v = views_[i];
    return static_cast<T *>(v.data) + offset(v, row) + c0 * v.stride;
  }
  int64_t result_stride(int i) const { return views_[i].stride; }

  // The size of a dimension, counted from the last one (0); the product of all but the last `trailing` dimensions.
  int64_t size(int i, int dimension) const { return call_.tensors[i].shape[call_.tensors[i].ndim - 1 - dimension]; }
  int64_t leading(int i, int trailing) const {
    int64_t product = 1;
    for (int d = 0; d < call_.tensors[i].ndim - trailing; ++d) product *= call_.tensors[i].shape[d];
    return product;
  }

  // A row of the thread's own memory, aligned to 64 bytes and writable in whole vectors past `count`.
  template <class T>
  static T *scratch_row(int index, int64_t count) {
    return static_cast<T *>(buffer(kMost + index, count * static_cast<int64_t>(sizeof(T)) + 64));
  }
  static constexpr int kMostScratchRows = ThreadBuffers::kCount - kMost;

 private:
  static constexpr int kJoined = 6;
  struct View {
    void *data;
    int64_t stride;  // from column to column, in elements
    int count;       // row dimensions after joining, the innermost first; more than kJoined: see `tensor`
    int column;
    int64_t sizes[kJoined], strides[kJoined];
    const DLTensor *tensor;
    void *owned;
  };

  const PostludeCall &call_;
  View views_[kMost];

  static void *buffer(int index, int64_t bytes) {
    static thread_local ThreadBuffers buffers;
    return buffers.get(index, bytes);
  }

  static void resolve(View &v, const DLTensor &t, int column_from_last, bool read_only) {
    v.data = static_cast<char *>(t.data) + t.byte_offset;
    v.column = column_from_last == kNoColumn ? -1 : t.ndim - 1 - column_from_last;
    v.stride = v.column >= 0 && t.shape[v.column] > 1 ? t.strides[v.column] : 1;
    v.count = 0;
    v.tensor = &t;
    v.owned = nullptr;
    for (int d = t.ndim - 1; d >= 0; --d) {
      if (d == v.column || t.shape[d] == 1) continue;
      if (v.count > 0 && v.count <= kJoined && t.strides[d] == v.strides[v.count - 1] * v.sizes[v.count - 1]) {
        v.sizes[v.count - 1] *= t.shape[d];
      } else {
        if (v.count < kJoined) {
          v.sizes[v.count] = t.shape[d];
          v.strides[v.count] = t.strides[d];
        }
        ++v.count;
      }
    }
    // A bias that is used for all rows is brought together once.
    if (read_only && v.stride != 1 && v.count == 0 && v.column >= 0) {
      const int64_t bytes = t.dtype.bits / 8, n = t.shape[v.column];
      v.owned = std::malloc(static_cast<size_t>(bytes * n));
      if (v.owned == nullptr) return;
      for (int64_t c = 0; c < n; ++c)
        std::memcpy(static_cast<char *>(v.owned) + c * bytes, static_cast<const char *>(v.data) + c * v.stride * bytes,
                    static_cast<size_t>(bytes));
      v.data = v.owned;
      v.stride = 1;
    }
  }

  static int64_t offset(const View &v, int64_t row) {
    if (__builtin_expect(v.count <= 1, 1)) return v.count == 0 ? 0 : row * v.strides[0];
    return far_offset(v, row);
  }

  __attribute__((noinline)) static int64_t far_offset(const View &v, int64_t row) {
    int64_t offset = 0;
    if (v.count <= kJoined) {
      for (int i = 0; i < v.count - 1; ++i) {
        offset += row % v.sizes[i] * v.strides[i];
        row /= v.sizes[i];
      }
      return offset + row * v.strides[v.count - 1];
    }
    for (int d = v.tensor->ndim - 1; d >= 0; --d) {
      if (d == v.column) continue;
      offset += row % v.tensor->shape[d] * v.tensor->strides[d];
      row /= v.tensor->shape[d];
    }
    return offset;
  }
};

}  // namespace postlude

#endif
