"""From a program to something that runs."""

import sys
import threading
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from postlude.capture.gemm import ACCUMULATE
from postlude.errors import KernelBuildError, KernelLoadError
from postlude.ir import Region
from postlude.ir.region import DTYPE_NAMES
from postlude.op import region_of
from postlude.targets import aten, cpp
from postlude.targets.base import Kernel, serving, target

_kernels: dict[tuple[str, str, tuple[int, ...], bool], Kernel] = {}
_lock = threading.Lock()


def kernel(device: str, program: str, frozen: tuple[int, ...] = (), constant: bool = False) -> Kernel:
    """A callable (*operands, *results) for a program on a device type; compiled at first use, then kept.

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
    if device == "cpu" and dtype in ACCUMULATE and cpp.unavailable() is None:
        from postlude.targets.cpp import launcher

        launcher.submit(DTYPE_NAMES[dtype])


def submit(device: str, program: str, tensors: Sequence[Tensor] = ()) -> None:
    """Start compiling in the background: the kernel will be wanted soon.

    `tensors` are the operands and the results, fake ones, by which kernels for GPUs are chosen; without them the first call
    compiles those. Nothing that goes wrong here is an error: whoever calls the kernel meets it again.
    """
    if target_of(device, program) == "cpp":
        cpp.submit(region_of(program))
    elif device == "cuda" and tensors:
        from postlude.select.rows import submit

        submit(region_of(program), serving(device, region_of(program)), tensors)


def target_of(device: str, program: str) -> str:
    """Name of the target that serves a program on a device type; where several do, of the first."""
    return next(iter(serving(device, region_of(program))), "aten")


def source(device: str, program: str) -> str:
    """Generated source code of a program's kernels; empty for the interpreter."""
    region = region_of(program)
    names = serving(device, region)
    sources = [target(name).source(region) for name in names]
    return sources[0] if len(sources) == 1 else "\n\n".join(f"# Target {n}\n{s}" for n, s in zip(names, sources, strict=True))


def reset() -> None:
    """Forget all kernels that were looked up, all packed weights, and whether there was a compiler."""
    with _lock:
        _kernels.clear()
        cpp.unavailable.cache_clear()
    if freeze := sys.modules.get("postlude.targets.cpp.freeze"):
        freeze.release()


def _interpreter(region: Region) -> Kernel:
    """The kernel of target `aten`: right, and slow."""
    count = len(region.operands)

    def interpret(*tensors: Tensor) -> None:
        aten.run(region, tensors[:count], tensors[count:])

    return interpret


def _make(device: str, program: str, frozen: tuple[int, ...], constant: bool) -> Kernel:
    region = region_of(program)
    names = serving(device, region)
    try:
        if names == ["cpp"]:
            return cpp.load(region, frozen, constant)
        if names:
            from postlude.select.rows import ByRows

            return ByRows(region, names).fast
    except (KernelBuildError, KernelLoadError) as error:
        warnings.warn(f"{error} Until then this kernel is interpreted, which is slow.", stacklevel=2)
        from postlude.select.knowledge import knowledge

        if not knowledge().empty:  # the next compilation will not choose it
            knowledge().mark_region_failed(region, program, device, names[0], str(error))
    return _interpreter(region)
