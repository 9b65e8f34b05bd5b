"""A CUDA driver without a GPU, built from fake_cuda.c against the declarations of CUDA that come with Triton."""

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton

COMPILER = shutil.which("cc") or shutil.which("gcc")


class Kernel(ctypes.Structure):
    """A kernel, as the fake driver knows it: the sizes of its parameters."""

    _fields_ = (("count", ctypes.c_int), ("sizes", ctypes.c_size_t * 32))


class Record(ctypes.Structure):
    """What the last launch was told, how many there were, what the driver answers, its device, whether a graph is captured."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        *((name, ctypes.c_uint) for name in ("shared", "attributes", "attribute", "value")),
        ("stream", ctypes.c_void_p),
        ("arguments", ctypes.c_uint64 * 32),
        ("launches", ctypes.c_int),
        ("answer", ctypes.c_int),
        ("device", ctypes.c_int),
        ("capturing", ctypes.c_int),
    )


def build(folder: Path) -> str:
    """Path of the library."""
    assert COMPILER is not None
    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    library = folder / "libcuda_fake.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", f"-I{include}", str(source), "-o", str(library)], check=True)
    return str(library)


def kernel(sizes: Sequence[int]) -> Kernel:
    """A kernel with parameters of these sizes."""
    return Kernel(len(sizes), (ctypes.c_size_t * 32)(*sizes))


def record(library: Any) -> Record:
    """The driver's record."""
    return Record.in_dll(library, "record")
