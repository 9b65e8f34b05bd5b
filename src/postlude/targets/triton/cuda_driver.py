"""Launches of kernels by the CUDA driver itself.

Triton's launcher reads every argument anew for each call. Here what stays the same from call to call is laid out once, as the
driver wants it; a call fills in the pointers and the stream.
"""

import ctypes
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

_PROGRAMMATIC_STREAM_SERIALIZATION = 6

#: Most pointers that a kernel may have after those of its signature: memory that Triton gives it for itself, here none.
_SCRATCH = 2


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute``, with a value that is an integer."""

    _fields_ = (("id", ctypes.c_int), ("unused", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


class _Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class CudaLaunch:
    """Launches one kernel with one grid. Calls may come from several threads."""

    def __init__(self, driver: Any, compiled: Any, grid: int, kinds: Sequence[str], values: Sequence[int]) -> None:
        metadata = compiled.metadata
        count = len(kinds) + _SCRATCH
        # Every argument has eight bytes. Narrower integers are the lower of them, which come first.
        self.arguments = (ctypes.c_uint64 * count)(*values)
        first = ctypes.addressof(self.arguments)
        self.addresses = (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8))
        self.attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
        self.config = _Config((grid, 1, 1), (32 * metadata.num_warps, 1, 1), metadata.shared)
        if metadata.launch_pdl:
            self.config.attributes, self.config.count = ctypes.pointer(self.attribute), 1
        self.launch = driver.cuLaunchKernelEx
        self.passed = (ctypes.addressof(self.config), compiled.function, ctypes.addressof(self.addresses), None)
        self.lock = threading.Lock()

    def __call__(self, stream: int, pointers: Sequence[int]) -> bool:
        """Launch with these pointers, the first arguments of the kernel; False if the driver refused."""
        with self.lock:
            self.arguments[: len(pointers)] = pointers  # type: ignore[call-overload]
            self.config.stream = stream
            return self.launch(*self.passed) == 0  # type: ignore[no-any-return]


def cuda_launch(compiled: Any, grid: int, values: Sequence[Any]) -> CudaLaunch | None:
    """The launch of a kernel that Triton compiled, or None where it can't be had.

    Args:
        compiled: the compiled kernel, loaded.
        grid: programs.
        values: of all arguments, constants too, in the order of the kernel's signature. A call replaces those of pointers.
    """
    driver = load_driver()
    if driver is None:
        return None
    metadata = compiled.metadata
    plain = {"num_ctas": 1, "launch_cooperative_grid": False, "global_scratch_size": 0, "profile_scratch_size": 0}
    if any(getattr(metadata, name, expected) != expected for name, expected in plain.items()):
        return None
    arguments = [
        (kind, value) for kind, value in zip(compiled.src.signature.values(), values, strict=True) if kind != "constexpr"
    ]
    kinds = [kind for kind, _ in arguments]
    if not _takes(driver, compiled.function, kinds):
        return None
    return CudaLaunch(driver, compiled, grid, kinds, [value for _, value in arguments])


def _takes(driver: Any, function: int, kinds: Sequence[str]) -> bool:
    """Whether a kernel's parameters are of these kinds, and after them only pointers to scratch memory."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    sizes: list[int] = []
    while driver.cuFuncGetParamInfo(function, len(sizes), ctypes.byref(offset), ctypes.byref(size)) == 0:
        sizes.append(size.value)
    expected = [8 if kind[0] == "*" or kind.endswith("64") else 4 for kind in kinds]
    return sizes[: len(kinds)] == expected and len(sizes) <= len(kinds) + _SCRATCH and set(sizes[len(kinds) :]) <= {8}


@lru_cache(maxsize=1)
def load_driver(name: str = "libcuda.so.1") -> Any:
    """The CUDA driver, or None if there is none, or one before 12.4, which does not tell a kernel's parameters."""
    try:
        driver = ctypes.CDLL(name)
        launch, info = driver.cuLaunchKernelEx, driver.cuFuncGetParamInfo
    except (OSError, AttributeError):
        return None
    launch.argtypes = [ctypes.c_void_p] * 4
    size = ctypes.POINTER(ctypes.c_size_t)
    info.argtypes = [ctypes.c_void_p, ctypes.c_size_t, size, size]
    return driver
