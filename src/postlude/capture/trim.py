"""Decides where a Region on a tiled device should end, so that it stores no more than it must.

Growth takes in everything legal. Where a row reduction ends it, what stands before the reduction (a conversion to float32, a
square) would be stored for the reduction's kernel to read, next to the value it was computed from. Inductor computes
such elementwise ops in the reduction's own kernel for nothing, so the Region ends before them if that stores fewer bytes.
"""

from math import prod

import torch
from torch.fx import Node

from postlude.capture.forms import Value
from postlude.capture.grow import Growth
from postlude.capture.sizes import hint
from postlude.capture.translate import CASTS, ELEMENTWISE

aten = torch.ops.aten

#: Ops that Inductor computes in the kernel that reads their input: elementwise ones, and reductions.
_REDUCTIONS = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.var.correction)
_FUSED_BY_INDUCTOR = frozenset((*ELEMENTWISE, *CASTS, *_REDUCTIONS, aten.var_mean.correction))


def trim(growth: Growth) -> frozenset[Node]:
    """Absorbed nodes that are better computed outside."""
    inside = dict(growth.values)
    cost = _stored_bytes(inside)
    gemms = {gemm.node for gemm in growth.gemms}
    for node in reversed(growth.values):
        if node in gemms or not all(user not in inside and user.target in _FUSED_BY_INDUCTOR for user in node.users):
            continue
        without = {other: value for other, value in inside.items() if other is not node}
        if (cheaper := _stored_bytes(without)) < cost:
            inside, cost = without, cheaper
    return frozenset(growth.values) - frozenset(inside)


def _stored_bytes(inside: dict[Node, Value]) -> int:
    """Bytes of the results: each value that is used outside counts once per type."""
    stored: dict[tuple[str, torch.dtype], int] = {}
    for node, value in inside.items():
        if any(user not in inside for user in node.users):
            tensor = node.meta["val"]
            stored[value.name, tensor.dtype] = prod(map(hint, tensor.shape)) * tensor.dtype.itemsize
    return sum(stored.values())
