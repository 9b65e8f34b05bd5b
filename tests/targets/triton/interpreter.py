"""Gives Triton's interpreter what it lacks: device functions, and bfloat16 that is rounded and multiplied as on a GPU.

Functions of `libdevice` are torch's in double precision, rounded once; on a GPU the same names are NVIDIA's or AMD's own. The
interpreter itself cuts floats off where it makes them bfloat16, and multiplies the bits of bfloat16 as integers.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

#: Name in libdevice -> name in torch.
FUNCTIONS = {
    name: name
    for name in (
        *("exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "sqrt", "rsqrt", "erf", "erfc", "tanh", "sin", "cos", "tan"),
        *("asin", "acos", "atan", "sinh", "cosh", "floor", "ceil", "trunc", "pow", "atan2", "fmod", "copysign"),
    )
} | {"nearbyint": "round"}


def _function(name: str) -> Callable[..., tl.tensor]:
    function: Callable[..., torch.Tensor] = getattr(torch, name)

    def call(*arguments: tl.tensor) -> tl.tensor:
        arrays = np.broadcast_arrays(*(argument.handle.data for argument in arguments))
        values = function(*(torch.from_numpy(np.array(array)).double() for array in arrays)).numpy()
        first = next(a for a in arguments if a.handle.data.shape == values.shape)
        return tl.core.tensor(TensorHandle(values.astype(arrays[0].dtype), first.dtype.scalar), first.type)

    return call


def _bfloat16(bits: np.ndarray) -> np.ndarray:
    """Float32 values of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _cast(self: Any, source: TensorHandle, target: Any, plain: Any = InterpreterBuilder.cast_impl) -> TensorHandle:
    types = (source.dtype.scalar, target.scalar)
    if tl.bfloat16 not in types:
        return plain(self, source, target)
    if types[0] == tl.bfloat16:
        return plain(self, TensorHandle(_bfloat16(source.data), tl.float32), target)
    rounded = torch.from_numpy(np.array(source.data)).to(torch.bfloat16)
    return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)


def _dot(self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, *rest: Any) -> TensorHandle:
    left, right = (_bfloat16(x.data) if x.dtype.scalar == tl.bfloat16 else x.data for x in (a, b))
    return TensorHandle(np.matmul(left, right, dtype=d.data.dtype) + d.data, d.dtype.scalar)


def install() -> None:
    """Once per process."""
    InterpreterBuilder.cast_impl = _cast
    InterpreterBuilder.create_dot = _dot
    for ours, theirs in FUNCTIONS.items():
        setattr(libdevice, ours, _function(theirs))
