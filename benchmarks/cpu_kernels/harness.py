"""Builds the library of microkernels and hand-written Programs, and calls them: for the checks and timings next door."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Sequence

import torch

HERE = pathlib.Path(__file__).resolve().parent
CPP = HERE.parent.parent / "src" / "postlude" / "targets" / "cpp"
BUILD = pathlib.Path(os.environ.get("POSTLUDE_HARNESS_BUILD", tempfile.gettempdir())) / "postlude_cpu_kernels"
MARCH = os.environ.get("POSTLUDE_HARNESS_MARCH", "native")
CXX = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++17", "-O3", f"-march={MARCH}", "-fPIC", "-shared", "-fopenmp", "-Wall", "-Wextra"]

ELEMENTS = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "bfloat16", torch.float16: "float16"}
CODES = {torch.float32: (2, 32), torch.float64: (2, 64), torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.bool: (6, 8)}


class Tensor(ctypes.Structure):
    _fields_ = [
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
    ]


class Call(ctypes.Structure):
    _fields_ = [
        ("tensors", ctypes.POINTER(Tensor)),
        ("count", ctypes.c_int32),
        ("packed", ctypes.POINTER(ctypes.c_void_p)),
        ("micro", ctypes.c_void_p),
        ("threads", ctypes.c_int32),
        ("message", ctypes.c_char_p),
        ("message_size", ctypes.c_size_t),
    ]


def _build(source: pathlib.Path, flags: Sequence[str]) -> pathlib.Path:
    digest = hashlib.sha256()
    for path in [source, *sorted(CPP.rglob("*.h")), *sorted(HERE.rglob("*.h"))]:
        digest.update(path.read_bytes())
    digest.update(" ".join([CXX, *flags]).encode())
    target = BUILD / f"{source.stem}-{digest.hexdigest()[:16]}.so"
    if not target.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(f".{os.getpid()}")
        subprocess.run([CXX, *flags, str(source), "-o", str(unfinished)], check=True)
        unfinished.rename(target)
    return target


@functools.cache
def micro_table() -> int:
    library = ctypes.CDLL(str(_build(CPP / "micro.cpp", [*FLAGS, f"-I{CPP / 'include'}"])))
    library.postlude_micro_table.restype = ctypes.c_void_p
    return library.postlude_micro_table()


@functools.cache
def _load(flags: tuple[str, ...]) -> ctypes.CDLL:
    library = ctypes.CDLL(str(_build(HERE / "programs.h", flags)))
    library.postlude_pack_size.restype = ctypes.c_int64
    return library


def _describe(tensor: torch.Tensor) -> Tensor:
    code, bits = CODES[tensor.dtype]
    dims = ctypes.c_int64 * tensor.dim()
    return Tensor(tensor.data_ptr(), 1, 0, tensor.dim(), code, bits, 1, dims(*tensor.shape), dims(*tensor.stride()), 0)


def aligned_bytes(size: int) -> torch.Tensor:
    whole = torch.empty(size + 64, dtype=torch.uint8)
    return whole[-whole.data_ptr() % 64 :][:size]


class Kernel:
    """A compiled Program from programs.h."""

    def __init__(self, program: str, dtype: torch.dtype, **options: int) -> None:
        settings = {"LEFT_TRANSPOSED": 0, "RIGHT_TRANSPOSED": 1, "BATCHED": 0, "GELU": 0, **options}
        flags = [*FLAGS, f"-DELEMENT={ELEMENTS[dtype]}", f"-DPOSTLUDE_PROGRAM={program}Program"]
        flags += [f"-D{name}={value}" for name, value in settings.items()]
        flags += [f"-I{HERE / 'include'}", f"-I{CPP / 'include'}", "-x", "c++"]
        self.library = _load(tuple(flags))

    def pack(self, operand: torch.Tensor, index: int) -> torch.Tensor | None:
        description = _describe(operand)
        size = self.library.postlude_pack_size(ctypes.byref(description), index)
        if size == 0:
            return None
        destination = aligned_bytes(size)
        code = self.library.postlude_pack(ctypes.byref(description), index, ctypes.c_void_p(destination.data_ptr()))
        assert code == 0
        return destination

    def prepare(
        self, tensors: Sequence[torch.Tensor], packed: dict[int, torch.Tensor] | None = None, threads: int = 2
    ) -> Prepared:
        return Prepared(self, tensors, packed or {}, threads)


class Prepared:
    """A call with everything in place: calling it costs one foreign function call."""

    def __init__(self, kernel: Kernel, tensors: Sequence[torch.Tensor], packed: dict[int, torch.Tensor], threads: int) -> None:
        self.keep = (list(tensors), packed)
        self.tensors = (Tensor * len(tensors))(*[_describe(t) for t in tensors])
        self.message = ctypes.create_string_buffer(512)
        addresses = [packed[i].data_ptr() if i in packed else None for i in range(len(tensors))]
        pointers = (ctypes.c_void_p * len(tensors))(*addresses)
        message = ctypes.cast(self.message, ctypes.c_char_p)
        self.call = Call(self.tensors, len(tensors), pointers, micro_table(), threads, message, len(self.message))
        self.pointers = pointers
        self.reference = ctypes.byref(self.call)
        self.function = kernel.library.postlude_run

    def __call__(self) -> None:
        if self.function(self.reference) != 0:
            raise RuntimeError(self.message.value.decode())
