"""From a program to something that runs: the one place that knows which target serves which device."""

import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from postlude.errors import CompilerFailed, CompilerNotFound, KernelBuildError, KernelLoadError
from postlude.ir.region import DTYPE_NAMES
from postlude.op import region_of
from postlude.targets import aten

Kernel = Callable[..., Any]

_kernels: dict[tuple[str, str, tuple[int, ...], bool], Kernel] = {}
_lock = threading.Lock()


def kernel(device: str, program: str, frozen: tuple[int, ...] = (), constant: bool = False) -> Kernel:
    """A callable (*operands, *results) -> None for a program on a device type; compiled at first use, then kept.

    `frozen` lists operands that may be packed ahead of time and kept so for as long as they do not change; `constant` says
    that they never will.
    """
    key = (device, program, frozen, constant)
    found = _kernels.get(key)
    if found is None:
        made = _make(*key)
        with _lock:
            found = _kernels.setdefault(key, made)
    return found


def prepare(device: str, dtype: torch.dtype) -> None:
    """Start compiling, in the background, what every kernel for weights of this type needs."""
    if device == "cpu" and dtype.is_floating_point and dtype in DTYPE_NAMES and cpp_available():
        from postlude.targets.cpp import launcher

        launcher.submit(DTYPE_NAMES[dtype])


def submit(device: str, program: str) -> None:
    """Start compiling in the background: the kernel will be wanted soon."""
    if target_of(device, program) == "cpp":
        from postlude.targets import cpp

        cpp.submit(region_of(program))


def target_of(device: str, program: str) -> str:
    """Name of the target that serves a program on a device type."""
    if device != "cpu" or not cpp_available():
        return "aten"
    from postlude.targets import cpp

    return "aten" if cpp.unsupported(region_of(program)) else "cpp"


def source(device: str, program: str) -> str:
    """Generated source code of a program's kernel; empty for the interpreter."""
    if target_of(device, program) != "cpp":
        return ""
    from postlude.targets import cpp

    return cpp.source(region_of(program))


def reset() -> None:
    """Forget all kernels that were looked up, all packed weights, and whether there was a compiler."""
    with _lock:
        _kernels.clear()
        _available.clear()
    if freeze := sys.modules.get("postlude.targets.cpp.freeze"):
        freeze.release()


_available: list[bool] = []


def cpp_available() -> bool:
    """Whether C++ kernels can be compiled here. Says once, as a warning, why not."""
    if not _available:
        from postlude.targets.cpp import toolchain

        try:
            toolchain.compiler()
            _available.append(True)
        except (CompilerNotFound, CompilerFailed) as error:
            warnings.warn(
                f"{error} Until then Inductor does all the work, or eager PyTorch if Inductor finds no compiler.", stacklevel=2
            )
            _available.append(False)
    return _available[0]


def _make(device: str, program: str, frozen: tuple[int, ...], constant: bool) -> Kernel:
    region = region_of(program)
    if target_of(device, program) == "cpp":
        from postlude.targets import cpp

        try:
            compiled: Kernel = cpp.load(region, frozen, constant)
            return compiled
        except (KernelBuildError, KernelLoadError) as error:
            warnings.warn(f"{error} Until then this kernel is interpreted, which is slow.", stacklevel=2)
    count = len(region.operands)

    def interpret(*tensors: Tensor) -> None:
        aten.run(region, tensors[:count], tensors[count:])

    return interpret
