"""Weights that are dequantised in the graph: a product reads their codes instead.

What a row of the weight or the whole weight has one scale for is multiplied behind the product, which then sums up the codes
themselves. Scales of blocks along the contracted axis belong to the contraction.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from postlude.capture.gemm import Side
from postlude.capture.program import Program, Source
from postlude.capture.translate import apply
from postlude.ir.region import INT4, UINT4
from postlude.quant.formats import ALL, Format, format_named
from postlude.quant.op import dequantize

#: Storage types of element types, as a Region names them.
_CODES: dict[str, torch.dtype] = {
    "int8": torch.int8,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e2m1": torch.float4_e2m1fn_x2,
    "int4": INT4,
    "uint4": UINT4,
}


@dataclass(frozen=True)
class CodedWeight:
    """The parts of a quantised weight [n, k], as nodes."""

    format: Format
    codes: Node
    scale: Node
    zero_point: Node | None
    matrix_scale: Node | None

    def contract(self, program: Program, left: str, contracted: str, column: str) -> str:
        """Append the product of `left` with what the codes stand for."""
        axes, format = (column, contracted), self.format
        right = program.operand(Source(self.codes), axes, _CODES[format.element.name])
        if format.block[1] == ALL:
            squeezed = (1,) if format.block[0] == 1 else (0, 1)
            value = program.contract(left, right, column)
            scale = program.operand(Source(self.scale, squeeze=squeezed), axes[: 2 - len(squeezed)])
            value = apply(program, "mul", value, scale)
        else:
            scale = program.operand(Source(self.scale), axes, format.scale, format.block)
            shift = None if self.zero_point is None else program.operand(Source(self.zero_point), axes, None, format.block)
            value = program.contract(left, right, column, scale, shift)
        if self.matrix_scale is not None:
            value = apply(program, "mul", value, program.operand(Source(self.matrix_scale), ()))
        return value


def weight_of(right: Side) -> CodedWeight | None:
    """The quantised weight that a right side is, or None."""
    if right.node.target is not dequantize or not right.transposed:
        return None
    arguments: tuple[Any, ...] = right.node.args
    codes, scale, zero_point, matrix_scale, name, _ = arguments
    parts = [part for part in (codes, scale, zero_point) if part is not None]
    if any(part.meta["val"].ndim != 2 or not part.meta["val"].is_contiguous() for part in parts):
        return None
    return CodedWeight(format_named(name), codes, scale, zero_point, matrix_scale)
