"""Decides where a Region on a tiled device should end, so that it stores no more than it must.

Growth takes in everything legal. Where a row reduction ends it, what stands before the reduction (a conversion to float32, a
square) would be stored for the reduction's kernel to read, next to the value it was computed from. Inductor computes
such elementwise ops in the reduction's own kernel for nothing, so the Region ends before them if that stores fewer bytes.

A row reduction itself is left to Inductor where what is made of it meets the rows again, as in a norm: the kernel that does so
reads the rows anyway, and reduces them for nothing.
"""

from collections.abc import Collection, Sequence
from math import prod

import torch
from torch.fx import Node

from postlude.capture.forms import PER_ROW, Form, Value
from postlude.capture.gemm import RESHAPES
from postlude.capture.grow import Growth
from postlude.capture.norms import DEFERRED
from postlude.capture.sizes import hint
from postlude.capture.translate import CASTS, ELEMENTWISE

aten = torch.ops.aten

#: Ops that Inductor computes in the kernel that reads their input: elementwise ones, and reductions.
_REDUCTIONS = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.var.correction)
_FUSED_BY_INDUCTOR = frozenset((*ELEMENTWISE, *CASTS, *_REDUCTIONS, aten.var_mean.correction))

#: Ops that don't end one of its kernels: elementwise ones, and views.
_ELEMENTWISE = frozenset((*ELEMENTWISE, *CASTS, *RESHAPES, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default))


def trim(growth: Growth) -> frozenset[Node]:
    """Absorbed nodes that are better computed outside."""
    if meeting := _meeting_reductions(growth.values):
        return meeting
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


def _meeting_reductions(inside: dict[Node, Value]) -> frozenset[Node]:
    """All reductions of rows, if what is made of one outside meets a tile of the Region in one of Inductor's kernels."""
    per_row = [node for node, value in inside.items() if value.form in PER_ROW and DEFERRED not in node.meta]
    tiles = [node for node, value in inside.items() if value.form is Form.TILE]
    if _computed_from(per_row, inside).isdisjoint(_computed_from(tiles, inside)):
        return frozenset()
    return frozenset(node for node in per_row if node.target in _REDUCTIONS)


def _computed_from(nodes: Sequence[Node], inside: Collection[Node]) -> set[Node]:
    """What is computed outside from these nodes, as far as kernels of elementwise ops reach."""
    found: set[Node] = set()
    stack = [user for node in nodes for user in node.users]
    while stack:
        node = stack.pop()
        if node not in inside and node not in found and node.target in _ELEMENTWISE:
            found.add(node)
            stack.extend(node.users)
    return found


def _stored_bytes(inside: dict[Node, Value]) -> int:
    """Bytes of the results: each value that is used outside counts once per type."""
    stored: dict[tuple[str, torch.dtype], int] = {}
    for node, value in inside.items():
        if any(user not in inside for user in node.users):
            tensor = node.meta["val"]
            stored[value.name, tensor.dtype] = prod(map(hint, tensor.shape)) * tensor.dtype.itemsize
    return sum(stored.values())
