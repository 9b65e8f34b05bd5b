// The harness's own Tensors: it keeps the call and nothing else, so that the driver is tested apart from code generation.
#ifndef POSTLUDE_TENSOR_H
#define POSTLUDE_TENSOR_H

#include <postlude/abi.h>

namespace postlude {

struct Tensors {
  const PostludeCall &call;
  explicit Tensors(const PostludeCall &c) : call(c) {}
  template <class T>
  T *data(int i) const {
    return reinterpret_cast<T *>(static_cast<char *>(call.tensors[i].data) + call.tensors[i].byte_offset);
  }
  int64_t columns(int i) const { return call.tensors[i].shape[call.tensors[i].ndim - 1]; }
};

}  // namespace postlude

#endif
