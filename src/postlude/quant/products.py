"""Products of which both sides are quantised: a linear layer that quantises its input at each call.

The definition is the product of the dequantised sides. GPUs that multiply the format do so by ``torch._scaled_mm``.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from postlude.quant.blocks import Quantized, quantize, round_trip
from postlude.quant.formats import format_named

if TYPE_CHECKING:
    from postlude.quant.weight import QuantizedTensor


class _RoundTrip(torch.autograd.Function):
    """Numbers through a format and back; its derivative is taken to be 1."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, format: str) -> Tensor:
        return round_trip(rows, format_named(format))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def linear(x: Tensor, weight: "QuantizedTensor", bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` of an input that is quantised, row by row, in the format of the weight's scheme.

    Args:
        x: [..., k] of the weight's dtype.
        weight: [n, k] with a scheme that has a format for activations.
        bias: [n].
    """
    name = weight.scheme.activation
    assert name is not None
    rows = x.reshape(-1, x.shape[-1])
    if multiplies(weight) and not (torch.is_grad_enabled() and x.requires_grad):
        product = _scaled_mm(quantize(rows, format_named(name)), weight.quantized(), x.dtype, bias)
        return product.view(*x.shape[:-1], product.shape[-1])
    numbers: Tensor = _RoundTrip.apply(rows, name)
    product = F.linear(numbers, weight.dequantize(), bias)
    return product.view(*x.shape[:-1], product.shape[-1])


@lru_cache(maxsize=64)
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def multiplies(weight: "QuantizedTensor") -> bool:
    """Whether ``torch._scaled_mm`` takes rows of this format on the weight's device, for bfloat16 results."""
    fits = weight.dtype == torch.bfloat16 and weight.shape[0] % 16 == 0 and weight.shape[1] % 16 == 0
    # Scales of blocks (Blackwell) need the swizzled layout; nobody has run that here yet.
    row_wise = weight.scheme.activation == weight.scheme.weight == "fp8_e4m3_row"
    return weight.is_cuda and fits and row_wise and _capability(weight.device.index) >= (8, 9)


def _scaled_mm(left: Quantized, right: Quantized, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    return torch._scaled_mm(left.codes, right.codes.t(), scale_a=left.scale, scale_b=right.scale.t(), bias=bias, out_dtype=dtype)
