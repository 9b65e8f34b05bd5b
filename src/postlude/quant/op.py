"""The op ``postlude::dequantize``: a weight's codes and scales to the numbers that they stand for, as one node of a graph.

Capture finds it before a product and has the product's kernel read the codes (`capture.packed`). Everybody else computes the
reference of `blocks`: eager and unknown backends by calling it, TorchInductor from its operations, which it fuses.
"""

import sys
from functools import lru_cache

import torch
from torch import Tensor

from postlude.quant.blocks import Quantized
from postlude.quant.blocks import dequantize as reference
from postlude.quant.formats import format_named

_LIBRARY = torch.library.Library("postlude", "FRAGMENT")
_LIBRARY.define(
    "dequantize(Tensor codes, Tensor scale, Tensor? zero_point, Tensor? matrix_scale, str format, ScalarType dtype) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)

dequantize: torch._ops.OpOverload = torch.ops.postlude.dequantize.default


def decomposed(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None, matrix_scale: Tensor | None, format: str, dtype: torch.dtype
) -> Tensor:
    """The op in torch's own operations."""
    return reference(Quantized(format_named(format), codes, scale, zero_point, matrix_scale), dtype)


def _fake(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None, matrix_scale: Tensor | None, format: str, dtype: torch.dtype
) -> Tensor:
    if "torch._dynamo" in sys.modules:  # a graph is being traced; to import Inductor takes long
        tell_inductor()
    width = codes.shape[-1] * (2 if format_named(format).element.packed else 1)
    return codes.new_empty((*codes.shape[:-1], width), dtype=dtype)


_LIBRARY.impl("dequantize", decomposed, "CompositeExplicitAutograd")
torch.library.register_fake("postlude::dequantize", _fake, lib=_LIBRARY)


@lru_cache(maxsize=1)
def tell_inductor() -> None:
    """Have TorchInductor, used by itself, compile the op's own operations."""
    from torch._inductor import decomposition

    decomposition.register_decomposition([dequantize])(decomposed)
    # A copy of the table that was made before does not have it.
    if (copy := getattr(decomposition, "fast_random_decomps", None)) is not None:
        copy.cache_clear()
