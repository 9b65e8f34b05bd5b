"""Launches of kernels by the CUDA driver itself.

Triton's launcher reads every argument anew for each call. Here what stays the same from call to call is laid out once, as the
driver wants it; a call fills in the pointers and the stream. plans.c does so too, in less time.
"""

import ctypes
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from postlude.targets import plans

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


class DriverLaunch:
    """The launch of one kernel: called, by any thread, with the stream's handle and all pointers; False where the driver refused.

    Attributes:
        driver: the CUDA driver.
        kernel: the compiled kernel, loaded.
        grid: programs.
        arguments: all arguments as the kernel takes them, pointers first, which each call replaces.
        pointers: how many there are.
    """

    def __init__(self, driver: Any, kernel: Any, grid: int, arguments: Sequence[int], pointers: int) -> None:
        self.driver = driver
        self.kernel = kernel
        self.grid = grid
        self.arguments = tuple(arguments)
        self.pointers = pointers
        count = len(self.arguments)
        # Every argument has eight bytes. Narrower integers are the lower of them, which come first.
        self._values = (ctypes.c_uint64 * count)(*self.arguments)
        first = ctypes.addressof(self._values)
        self._addresses = (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8))
        metadata = kernel.metadata
        self._config = _Config((grid, 1, 1), (32 * metadata.num_warps, 1, 1), metadata.shared)
        if metadata.launch_pdl:
            self._config.attributes = ctypes.pointer(_Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1))
            self._config.count = 1
        self._lock = threading.Lock()

    def __call__(self, stream: int, pointers: Sequence[int]) -> bool:
        with self._lock:
            self._values[: self.pointers] = pointers  # type: ignore[call-overload]
            self._config.stream = stream
            return self.driver.cuLaunchKernelEx(self._config, self.kernel.function, self._addresses, None) == 0  # type: ignore[no-any-return]

    def native(self, device: int, workspace: int) -> Any:
        """The same for plans.c, or None where that can't be had.

        Args:
            device: the GPU's index.
            workspace: bytes of the memory that the last two pointers are for, with its counters; 0 where there is none.
        """
        names = ("cuLaunchKernelEx", "cuCtxGetDevice", "cuStreamIsCapturing")
        try:
            addresses = [ctypes.cast(getattr(self.driver, name), ctypes.c_void_p).value or 0 for name in names]
        except AttributeError:
            return None
        metadata = self.kernel.metadata
        return plans.kernel(
            tuple(addresses),
            self.kernel.function,
            device,
            self.grid,
            32 * metadata.num_warps,
            metadata.shared,
            early=bool(metadata.launch_pdl),
            tensors=self.pointers - (2 if workspace else 0),
            arguments=self.arguments,
            workspace=workspace,
            keep=self.kernel,
        )


def cuda_launch(compiled: Any, grid: int, values: Sequence[Any]) -> DriverLaunch | None:
    """The launch of a kernel that Triton compiled, or None where it can't be had.

    Args:
        compiled: the compiled kernel, loaded.
        grid: programs.
        values: of all arguments, constants too, in the order of the kernel's signature. Those of pointers, which come first,
            are replaced by each call.
    """
    driver = load_driver()
    if driver is None:
        return None
    metadata = compiled.metadata
    plain = {"num_ctas": 1, "launch_cooperative_grid": False, "global_scratch_size": 0, "profile_scratch_size": 0}
    if any(getattr(metadata, name, expected) != expected for name, expected in plain.items()):
        return None
    given = [(kind, value) for kind, value in zip(compiled.src.signature.values(), values, strict=True) if kind != "constexpr"]
    kinds = [kind for kind, _ in given]
    if not _takes(driver, compiled.function, kinds):
        return None
    arguments = [*(value for _, value in given), *[0] * _SCRATCH]
    return DriverLaunch(driver, compiled, grid, arguments, sum(kind[0] == "*" for kind in kinds))


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
    launch.argtypes = [ctypes.POINTER(_Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p]
    size = ctypes.POINTER(ctypes.c_size_t)
    info.argtypes = [ctypes.c_void_p, ctypes.c_size_t, size, size]
    return driver
