"""A tiny hand-written kernel that implements the binary interface: out[m, n] = x[m, k] @ w[n, k]^T in float32, any strides.

It makes launcher and freeze testable without code generation. Its packed form is a dense copy, so a stale one gives a
wrong result.
"""

import torch
from torch import Tensor

from postlude.targets.cpp import build, launcher

SOURCE = r"""
#include <postlude/abi.h>
#include <cstdio>
#include <cstring>

static const float *at(const DLTensor &t, int64_t i, int64_t j) {
  return (const float *)t.data + i * t.strides[0] + j * t.strides[1];
}

extern "C" int postlude_run(const PostludeCall *call) {
  if (call->count != 3) {
    std::snprintf(call->message, call->message_size, "3 tensors were expected, not %d", call->count);
    return 7;
  }
  const DLTensor &x = call->tensors[0], &w = call->tensors[1], &out = call->tensors[2];
  const float *packed = call->packed ? (const float *)call->packed[1] : nullptr;
  int64_t m = x.shape[0], k = x.shape[1], n = w.shape[0];
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t q = 0; q < k; ++q) sum += double(*at(x, i, q)) * (packed ? packed[j * k + q] : *at(w, j, q));
      *(float *)at(out, i, j) = (float)sum;
    }
  return 0;
}

extern "C" int64_t postlude_pack_size(const DLTensor *t, int32_t index) {
  return index == 1 ? t->shape[0] * t->shape[1] * 4 : 0;
}

extern "C" int postlude_pack(const DLTensor *t, int32_t, void *destination) {
  for (int64_t j = 0; j < t->shape[0]; ++j)
    for (int64_t q = 0; q < t->shape[1]; ++q) ((float *)destination)[j * t->shape[1] + q] = *at(*t, j, q);
  return 0;
}
"""


def kernel() -> launcher.Kernel:
    return launcher.load(build.build(SOURCE), operands=2, micro=0)


def check(kernel: launcher.Kernel, x: Tensor, weight: Tensor) -> None:
    """Run, and compare with float64."""
    out = torch.full((x.shape[0], weight.shape[0]), float("nan"))
    kernel(x, weight, out)
    expected = x.detach().double() @ weight.detach().double().T
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
