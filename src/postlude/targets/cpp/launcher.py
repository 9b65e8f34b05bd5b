"""Compiled object -> callable.

    kernel = load(path, operands=3)
    kernel(x, weight, bias, out)          tensors only: the operands in Region order, then the results, which are written

`load` gives the `Kernel` of the C extension in launcher.c, which is compiled once per Python and torch-independent; a call with
five tensors costs a few tenths of a microsecond. Where it can't be compiled (Python's headers are missing) or this torch lacks
the C functions that it needs, `load` gives a `SlowKernel`, which does the same through ctypes in some twenty microseconds,
and says so once.

Operands are expected to be what a CPU kernel of the dispatcher gets: dense CPU tensors with no pending conjugation or negation.
Inside a graph and below the dispatcher that is always so. Tensors that require grad, parameters, views, 0-d and empty tensors
are fine. Results must not share memory with operands.

A kernel uses at most ``torch.get_num_threads()`` threads, as seen by the calling thread.
"""

import ctypes
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch

from postlude.errors import KernelBuildError, KernelLoadError
from postlude.targets.cpp import build, toolchain

_SOURCE = build.HERE / "launcher.c"

#: Where the TensorImpl pointer may lie in a tensor object: right after the object's head.
_OFFSETS = (object.__basicsize__,)

#: torch dtype -> DLPack's (code, bits)
DLPACK: dict[torch.dtype, tuple[int, int]] = {
    torch.uint8: (1, 8),
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.bfloat16: (4, 16),
    torch.bool: (6, 8),
    torch.float8_e4m3fn: (10, 8),
    torch.float8_e5m2: (12, 8),
    torch.float8_e8m0fnu: (14, 8),
}

_SHIMS = (
    "torch_get_const_data_ptr",
    "torch_get_mutable_data_ptr",
    "torch_get_num_threads",
    "aoti_torch_get_dim",
    "aoti_torch_get_sizes",
    "aoti_torch_get_strides",
    "aoti_torch_get_dtype",
    "aoti_torch_get_device_type",
)


class Kernel(Protocol):
    """What `load` returns. A kernel lives as long as the process; calls may come from any thread."""

    path: str
    operands: int

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Run on operands and results."""
        ...

    def pack_size(self, index: int, tensor: torch.Tensor) -> int:
        """Bytes of the packed form of right operand `index`; 0 where it is never packed."""
        ...

    def pack(self, index: int, tensor: torch.Tensor, keep: object) -> Any:
        """The packed form of `tensor`, or None. It holds `keep`, which must keep the tensor's memory as it is."""
        ...

    def frozen(self, handler: Callable[["Kernel", int, torch.Tensor], None], indices: tuple[int, ...]) -> "Kernel":
        """The same kernel with a memory of packed operands; see `postlude.targets.cpp.freeze`."""
        ...


# What the extension needs from torch -----------------------------------------------------------------------------------


def _torch_functions() -> dict[str, int]:
    """Addresses of the C functions of this torch that the extension can use."""
    functions = addresses(torch_library("torch_cpu"), _SHIMS)
    if api := getattr(torch.Tensor, "__dlpack_c_exchange_api__", None):
        address = _capsule_pointer(api, b"dlpack_exchange_api")
        # struct { uint32_t major, minor; older table; ... }: another major version has another layout
        if address and ctypes.c_uint32.from_address(address).value == 1:
            functions["dlpack_exchange_api"] = address
    return functions


def addresses(library: str, names: Sequence[str]) -> dict[str, int]:
    """Addresses of those C functions that a library has."""
    try:
        loaded = ctypes.CDLL(library)  # loaded already: this only gets a handle
    except OSError:
        return {}
    return {name: ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0 for name in names if hasattr(loaded, name)}


def torch_library(name: str) -> str:
    """Path of one of torch's own libraries."""
    file = {"darwin": f"lib{name}.dylib", "win32": f"{name}.dll"}.get(sys.platform, f"lib{name}.so")
    return str(Path(torch.__file__).parent / "lib" / file)


def _capsule_pointer(capsule: object, name: bytes) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return get(capsule, name) or 0


def impl_offset() -> int:
    """Where a tensor object holds its TensorImpl, or 0 if that is not plainly visible.

    Reading the pointer saves some 40 ns per tensor over asking for `_cdata`. Done only where several kinds of tensors agree.
    """
    plain = torch.empty(2, device="cpu")
    samples = [plain, plain[1:], plain.clone().requires_grad_(), torch.nn.Parameter(plain)]
    for offset in _OFFSETS:
        if all(ctypes.c_void_p.from_address(id(tensor) + offset).value == tensor._cdata for tensor in samples):
            return offset
    return 0


def _scalar_types(functions: dict[str, int]) -> dict[int, tuple[int, int]]:
    """c10::ScalarType -> DLPack's (code, bits), asked from torch itself."""
    if "aoti_torch_get_dtype" not in functions:
        return {}
    get = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32))(functions["aoti_torch_get_dtype"])
    table = {}
    for dtype, description in DLPACK.items():
        tensor, number = torch.empty(1, dtype=dtype, device="cpu"), ctypes.c_int32(-1)
        impl = ctypes.c_void_p(tensor._cdata)
        if get(ctypes.addressof(impl), ctypes.byref(number)) == 0:
            table[number.value] = description
    return table


# The extension ---------------------------------------------------------------------------------------------------------


def _headers() -> Path:
    for scheme in ("include", "platinclude"):
        folder = Path(sysconfig.get_paths()[scheme])
        if (folder / "Python.h").is_file():
            return folder
    raise FileNotFoundError("Python.h")


def build_extension(source: Path) -> Path:
    """Compile a C extension for this interpreter, or find it compiled.

    Raises:
        FileNotFoundError: Python's headers are missing.
        KernelBuildError: the compiler refused it.
    """
    compiler = toolchain.compiler()
    flags = (
        "-x",
        "c",
        "-std=c11",
        "-O2",
        "-fPIC",
        "-fvisibility=hidden",
        "-w",
        "-D_GNU_SOURCE",
        f"-DPOSTLUDE_PYTHON=0x{sys.hexversion:08x}",
        f"-I{_headers()}",
    )
    return build.compile_to_cache(source.read_text(), compiler, flags, name=source.name)


def import_extension(path: Path, name: str) -> ModuleType:
    """A compiled extension as a module."""
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


_extension_lock = threading.Lock()
_extension: ModuleType | bool | None = False  # False: not tried yet


def extension() -> ModuleType | None:
    """The configured C extension, or None where it can't be had (a warning says why, once)."""
    global _extension
    if _extension is False:
        with _extension_lock:
            if _extension is False:
                _extension = _load_extension()
    return _extension  # type: ignore[return-value]


def _load_extension() -> ModuleType | None:
    try:
        module = import_extension(build_extension(_SOURCE), "postlude_launcher")
        functions = _torch_functions()
        module.configure(torch.Tensor, functions, impl_offset(), _scalar_types(functions))
        return module
    except (FileNotFoundError, ImportError, KernelBuildError, RuntimeError) as error:
        if isinstance(error, FileNotFoundError):
            reason = "Python's headers are missing (Debian, Ubuntu: `apt install python3-dev`)"
        else:
            reason = str(error).splitlines()[0]
        warnings.warn(
            f"Postlude's launcher can't be compiled: {reason}. Kernels are called through ctypes, which costs some twenty"
            " microseconds more per call, and weights are not frozen.",
            stacklevel=3,
        )
        return None


@lru_cache(maxsize=1)
def can_freeze() -> bool:
    """Whether this torch lets weights be packed in such a way that no write to them can be missed."""
    functions = _torch_functions()
    return extension() is not None and set(_SHIMS) <= set(functions)


_kernels: dict[tuple[str, int, int], Kernel] = {}
_kernels_lock = threading.Lock()


def _after_fork() -> None:
    """Other threads may have held the locks at the fork; they do not exist in the child."""
    global _extension_lock, _kernels_lock
    _extension_lock = threading.Lock()
    _kernels_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def load(path: Path | str, *, operands: int = 0, micro: int | None = None) -> Kernel:
    """The kernel in the object at `path`: one per path and process.

    `operands` is the number of arguments that are only read. `micro` is the address of the table of microkernels (default:
    `build.micro_table()`).
    """
    table = build.micro_table() if micro is None else micro
    key = (os.fspath(path), operands, table)
    with _kernels_lock:
        if key not in _kernels:
            _kernels[key] = _load(*key)
        return _kernels[key]


def _load(path: str, operands: int, micro: int) -> Kernel:
    module = extension()
    try:
        return module.Kernel(path, micro, operands) if module else SlowKernel(path, micro, operands)
    except OSError as error:
        raise KernelLoadError(path, str(error)) from error


# Without the extension -------------------------------------------------------------------------------------------------


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        ("tensors", ctypes.POINTER(_DLTensor)),
        ("count", ctypes.c_int32),
        ("packed", ctypes.c_void_p),
        ("micro", ctypes.c_void_p),
        ("threads", ctypes.c_int32),
        ("message", ctypes.c_char_p),
        ("message_size", ctypes.c_size_t),
    )


class SlowKernel:
    """A kernel called through ctypes, for a Python without headers. It never packs."""

    def __init__(self, path: str, micro: int, operands: int) -> None:
        library = ctypes.CDLL(path)
        self.path, self.operands, self._micro = path, operands, micro
        self._run = library.postlude_run

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Run on operands and results."""
        described = [_describe(tensor, index) for index, tensor in enumerate(tensors)]
        message = ctypes.create_string_buffer(1024)
        call = _Call(
            (_DLTensor * len(tensors))(*described),
            len(tensors),
            None,
            self._micro,
            torch.get_num_threads(),
            ctypes.cast(message, ctypes.c_char_p),
            len(message),
        )
        if status := self._run(ctypes.byref(call)):
            text = message.value.decode(errors="replace") or "no message"
            raise RuntimeError(f"Postlude kernel failed (code {status}): {text}")

    def pack_size(self, index: int, tensor: torch.Tensor) -> int:
        """Nothing is packed."""
        return 0

    def pack(self, index: int, tensor: torch.Tensor, keep: object) -> None:
        """Nothing is packed."""

    def frozen(self, handler: object, indices: tuple[int, ...]) -> "SlowKernel":
        """The kernel itself."""
        return self


def _describe(tensor: torch.Tensor, index: int) -> _DLTensor:
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise TypeError(f"argument {index} of a Postlude kernel is a {type(tensor)}; a dense tensor on the CPU was expected")
    address = tensor.data_ptr()
    if not address and tensor.numel():
        raise TypeError(f"argument {index} of a Postlude kernel has no memory (it is fake, or was freed)")
    dimensions = tensor.dim()
    array = ctypes.c_int64 * max(dimensions, 1)
    code, bits = DLPACK[tensor.dtype]
    return _DLTensor(
        address,
        1,
        0,
        dimensions,
        code,
        bits,
        1,
        ctypes.cast(array(*tensor.shape), ctypes.POINTER(ctypes.c_int64)),
        ctypes.cast(array(*tensor.stride()), ctypes.POINTER(ctypes.c_int64)),
        0,
    )


def submit(element: str) -> None:
    """Start building what every call needs, in the background: the launcher, and the microkernels for an element type.

    Cheap to call again.
    """
    build.submit_micro(element)
    build.background(extension)
