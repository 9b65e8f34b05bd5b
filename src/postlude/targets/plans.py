"""The C extension in plans.c, which looks plans up and launches them: compiled once per Python, configured for this torch.

Where it can't be compiled, `planned.py` does the same in Python, in some ten microseconds more per call.
"""

import warnings
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from postlude.errors import PostludeError
from postlude.targets.cpp import launcher

_SOURCE = Path(__file__).with_name("plans.c")

#: What describes a tensor; in the order in which the extension is told.
_TENSOR = (
    "aoti_torch_get_data_ptr",
    "aoti_torch_get_dim",
    "aoti_torch_get_sizes",
    "aoti_torch_get_strides",
    "aoti_torch_get_dtype",
    "aoti_torch_get_device_type",
    "aoti_torch_get_device_index",
)

#: What makes a workspace and gives it back.
_MEMORY = ("aoti_torch_empty_strided", "aoti_torch_delete_tensor_object")

#: Stands for a tensor's position where a function takes the workspace.
WORKSPACE = -1

_CURRENT_STREAM = "aoti_torch_get_current_cuda_stream"
_SET_STREAM = "TVMFFIEnvSetStream"


@lru_cache(maxsize=1)
def extension() -> ModuleType | None:
    """The configured extension, or None where it can't be had (a warning says why, once)."""
    try:
        module = launcher.import_extension(launcher.build_extension(_SOURCE), "postlude_plans")
        functions = launcher.addresses(launcher.torch_library("torch_cpu"), (*_TENSOR, *_MEMORY))
        streams = _stream_functions()
        if missing := [name for name in (*_TENSOR, *_MEMORY) if name not in functions]:
            raise ImportError(f"this torch has no {missing[0]}")
    except (FileNotFoundError, ImportError, PostludeError) as error:
        reason = "Python's headers are missing" if isinstance(error, FileNotFoundError) else str(error).splitlines()[0]
        warnings.warn(
            f"Postlude's launcher for GPUs can't be compiled: {reason}. Calls cost some ten microseconds more on the host.",
            stacklevel=2,
        )
        return None
    addresses = (*(functions[name] for name in (*_TENSOR, *_MEMORY)), *streams)
    module.configure(torch.Tensor, launcher.impl_offset(), addresses)
    return module


@lru_cache(maxsize=1)
def _stream_functions() -> tuple[int, int]:
    """torch's question for the current stream, and TVM-FFI's setting of it; 0 where there is no such thing."""
    current = launcher.addresses(launcher.torch_library("torch_cuda"), [_CURRENT_STREAM])
    try:
        import tvm_ffi

        found = launcher.addresses(tvm_ffi.libinfo.find_libtvm_ffi(), [_SET_STREAM])
    except Exception:  # it is missing, or is of a version that hides its library elsewhere
        found = {}
    return current.get(_CURRENT_STREAM, 0), found.get(_SET_STREAM, 0)


def plan(steps: tuple[Any, ...], device: int, keep: object, workspace: int = 0, **order: int) -> object | None:
    """A plan that the extension launches itself, or None where it can't.

    Args:
        steps: for each function, its address and its arguments: (position or `WORKSPACE`, DLPack's type, shape, strides).
        device: the CUDA device's index.
        keep: whatever holds the functions in memory.
        workspace: bytes that all functions may write, one after the other, while a call is under way.
        order: `lower`, `upper`: positions of tensors of which the first must lie below the second by less than `reach` bytes.
    """
    module = extension()
    if module is None or not all(_stream_functions()):
        return None
    return module.Plan(steps, device, keep, workspace=workspace, **order)  # type: ignore[no-any-return]


def kernel(driver: tuple[int, ...], *launch: object, **more: object) -> Any:
    """A kernel that the extension launches through the CUDA driver, or None where it can't.

    Args:
        driver: addresses of the driver's `cuLaunchKernelEx`, `cuCtxGetDevice` and `cuStreamIsCapturing`.
        launch: the function, the device's index, programs, threads of each, bytes of shared memory.
        more: `early`, whether it may start before the kernel ahead has ended; `tensors`, how many; `arguments`, all of them as
            integers, of which those for the tensors are filled in; `workspace`, bytes of memory whose address comes after them,
            and then that of counters (0: neither); `keep`, whatever holds the kernel in memory.
    """
    module = extension()
    if module is None or not _stream_functions()[0]:
        return None
    return module.Kernel(driver, *launch, **more)
