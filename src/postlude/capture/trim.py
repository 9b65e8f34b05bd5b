"""Decides where a Region on a tiled device should end, so that it stores no more than it must.

Growth takes in everything legal. Where a row reduction ends it, what stands before the reduction (a conversion to float32, a
square) would be stored for the reduction's kernel to read, next to the value it was computed from. Inductor computes
such elementwise ops in the reduction's own kernel for nothing, so the Region ends before them if that stores fewer bytes.

A row reduction itself is left to Inductor where what is made of it meets the rows again, as in a norm: the kernel that does so
reads the rows anyway, and reduces them for nothing.
"""

from collections.abc import Collection, Sequence
from math import prod

import networkx
import torch
from networkx.algorithms.flow import edmonds_karp
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


#: A capacity that no cut goes through.
_NEVER = 1 << 60


def trim(growth: Growth) -> frozenset[Node]:
    """Absorbed nodes that are better computed outside."""
    if meeting := _meeting_reductions(growth.values):
        return meeting
    return _outside(growth)


def _outside(growth: Growth) -> frozenset[Node]:
    """The nodes that the Region ends before, if it stores the fewest bytes that it can.

    That is a minimum cut through the values that are stored. What can't be left to a kernel of Inductor's is the Region's.
    """
    nodes = growth.values
    gemms = {gemm.node for gemm in growth.gemms}
    by_value: dict[object, list[Node]] = {}  # views of one value are stored once
    for node, value in nodes.items():
        by_value.setdefault((value.name, node.meta["val"].dtype), []).append(node)
    places = {node: place for place, same in enumerate(by_value.values()) for node in same}
    flow = networkx.DiGraph()
    for place, same in enumerate(by_value.values()):
        tensor, computed, used = same[0].meta["val"], (place, "computed"), (place, "used")
        flow.add_edge(computed, used, capacity=prod(map(hint, tensor.shape)) * tensor.dtype.itemsize)
        # Of equal cuts the one that leaves the fewest nodes outside.
        stays = any(node in gemms or not _left(node, nodes) for node in same)
        flow.add_edge("region", computed, capacity=_NEVER if stays else 1)
        for node in same:
            for user in node.users:
                flow.add_edge(used, (places[user], "computed") if user in nodes else "outside", capacity=_NEVER)
            for source in node.all_input_nodes:
                if source in nodes and places[source] != place:
                    flow.add_edge(computed, (places[source], "computed"), capacity=_NEVER)
    _, (inside, _) = networkx.minimum_cut(flow, "region", "outside", flow_func=edmonds_karp)
    return frozenset(node for node in nodes if (places[node], "computed") not in inside)


def _left(node: Node, inside: Collection[Node]) -> bool:
    """Whether a node may be left to the kernels that read it."""
    return all(user in inside or user.target in _FUSED_BY_INDUCTOR for user in node.users)


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
