"""The limits of this machine, with as many threads as the kernels have: a loop that sums a buffer, and one of products.

What depends on memory speed is compared with this loop, measured in the same rounds, and not with a data sheet: on shared
machines the limit drifts by a factor of two.
"""

from __future__ import annotations

import ctypes
import tempfile
import time
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from postlude.targets.cpp import toolchain

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# Eight vectors per step keep enough loads in flight, and twelve chains of products hide their latency; the results are used
# so that nothing can be dropped.
SOURCE = r"""
#include <cstdint>
#include <cstring>
typedef uint64_t Vector __attribute__((vector_size(64)));
extern "C" uint64_t read_all(const char *data, int64_t bytes, int threads) {
  uint64_t total = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(^ : total)
  for (int64_t block = 0; block < bytes / 4096; block++) {
    Vector sums[8] = {};
    for (int64_t at = 0; at < 4096; at += 512) {
      for (int lane = 0; lane < 8; lane++) {
        Vector value;
        std::memcpy(&value, data + block * 4096 + at + lane * 64, 64);
        sums[lane] ^= value;
      }
    }
    for (int lane = 1; lane < 8; lane++) sums[0] ^= sums[lane];
    for (int element = 0; element < 8; element++) total ^= sums[0][element];
  }
  return total;
}
typedef float Floats __attribute__((vector_size(64)));
extern "C" float multiply(int64_t steps, float half, int threads) {
  float total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
  {
    Floats sums[12] = {};
    const Floats factor = Floats{} + half;
    for (int chain = 0; chain < 12; chain++) sums[chain] += (float)chain;
    for (int64_t step = 0; step < steps; step++)
#pragma GCC unroll 12
      for (int chain = 0; chain < 12; chain++) sums[chain] = sums[chain] * factor + factor;  // stays near 1
    for (int chain = 0; chain < 12; chain++) total += sums[chain][0];
  }
  return total;
}
"""


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    compiler = toolchain.compiler()
    isa = toolchain.usable(toolchain.detect(), compiler)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "read.cpp", Path(folder) / "read.so"
        source.write_text(SOURCE, encoding="utf-8")
        done = compiler.run(["-O3", "-fPIC", "-w", *isa.flags, "-fopenmp", *compiler.shared, str(source), "-o", str(target)])
        if done.returncode:
            raise RuntimeError(f"the read loop did not compile: {done.stderr}")
        library = ctypes.CDLL(str(target))
    library.multiply.restype = ctypes.c_float
    library.multiply.argtypes = [ctypes.c_int64, ctypes.c_float, ctypes.c_int]
    library.read_all.restype = ctypes.c_uint64
    library.read_all.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    return library


def reader(tensor: Tensor, threads: int) -> Callable[[], int]:
    """A call that reads the whole of a dense tensor once."""
    library, size = _library(), tensor.numel() * tensor.element_size()

    def read() -> int:
        return int(library.read_all(tensor.data_ptr(), size, threads))

    return read


def limits(threads: int) -> dict[str, float]:
    """The best of several short runs: FMA in float32 from registers (GFLOP/s), and reading memory (GB/s)."""
    library, steps = _library(), 100_000
    data = torch.ones(128 << 20, dtype=torch.uint8)

    def best(run: Callable[[], object], work: float) -> float:
        rates = []
        for _ in range(15):
            start = time.perf_counter()
            run()
            rates.append(work / (time.perf_counter() - start) / 1e9)
        return max(rates)

    return {
        "gflops": best(lambda: library.multiply(steps, 0.5, threads), steps * 12 * 16 * 2 * threads),
        "read_gigabytes_per_second": best(reader(data, threads), data.numel()),
    }
