"""Joins another GEMM to a Region being grown: the gate of a SwiGLU, or a learned gate behind a sigmoid.

When an op of the Region takes a tensor from outside, that tensor may be computed elementwise from a GEMM of the same size with
the same left side. Then that GEMM becomes a second contraction, and what stands between them is absorbed too. Where a device's
kernels can, the left side may be another: the gradient of what q, k and v are projected from is the sum of three products.
"""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

from torch.fx import Node

from postlude.capture.forms import Form, Stop, depends_on
from postlude.capture.gemm import RESHAPES, Gemm, NotAGemm, Side, recognize, rows_and_contracted
from postlude.capture.sizes import Size, same, same_shape
from postlude.capture.translate import CASTS, ELEMENTWISE

if TYPE_CHECKING:
    from postlude.capture.grow import Growth

#: Most nodes that are looked at on the way back to the GEMM.
REACH = 16


def join(growth: "Growth", node: Node, shape: Sequence[Size], column: str) -> str | None:
    """The value of `node` in the Region if its GEMM could be joined, or None and nothing has changed."""
    if growth.program.batched or not same_shape(tuple(node.meta["val"].shape), tuple(shape)):
        return None
    between = _behind(growth, node)
    gemm = _gemm(growth, between, column)
    if gemm is None:
        return None
    chain = _from(gemm.node, between)
    if node not in (gemm.node, *chain):
        return None  # something that is not elementwise stands between them
    early = _users_passed([gemm.node, *chain], growth)
    if depends_on([source.node for source in growth.program.sources], early):
        return None  # the Region already reads something that is computed from this GEMM elsewhere
    before = growth.mark()
    added = early - growth.tainted
    growth.tainted |= added
    try:
        value = growth.contract(gemm, column)
        growth.gemms.append(gemm)
        growth.take(gemm.node, value, Form.TILE)
        for inner in chain:
            growth.absorb(inner)
        if growth.values[node].form is not Form.TILE:
            raise Stop("its form is another")
        if depends_on([source.node for source in growth.program.sources], early):
            raise Stop("what stands between them reads something that is computed from the GEMM elsewhere")
    except Stop:
        growth.roll_back(before)
        growth.tainted -= added
        return None
    return growth.values[node].name


def _behind(growth: "Growth", node: Node) -> set[Node]:
    """`node` and what it is computed from, elementwise, within reach."""
    found: set[Node] = set()
    stack = [node]
    while stack and len(found) < REACH:
        current = stack.pop()
        if current in found or current in growth.values or current in growth.tainted:
            continue
        found.add(current)
        if current.target in (*RESHAPES, *CASTS) or current.target in ELEMENTWISE:
            stack.extend(current.all_input_nodes)
    return found


def _gemm(growth: "Growth", nodes: set[Node], column: str) -> Gemm | None:
    """A GEMM among the nodes that has the Region's size, and its left side if kernels have one only."""
    for node in nodes - growth.settled:
        try:
            gemm = recognize(node)
        except NotAGemm:
            continue
        if gemm is None or gemm.batched or gemm.attention or not _same_left(growth, gemm.left):
            continue
        right = gemm.right
        width = right.shape[-2] if right.transposed else right.shape[-1]
        outside = [gemm.left.node, right.node] if gemm.bias is None else [gemm.left.node, right.node, gemm.bias]
        if same(width, growth.widths[column]) and not any(n in growth.tainted or n in growth.values for n in outside):
            return gemm
    return None


def _same_left(growth: "Growth", left: Side) -> bool:
    """Whether a kernel can multiply with this left side beside the Region's."""
    first = growth.first.left
    if left == first:
        return True
    sizes = [(prod(rows), contracted) for rows, contracted in (rows_and_contracted(first), rows_and_contracted(left))]
    dtypes = {side.node.meta["val"].dtype for side in (first, left)}
    return growth.reach.lefts and growth.prologue is None and same_shape(*sizes) and len(dtypes) == 1


def _from(gemm: Node, nodes: set[Node]) -> list[Node]:
    """The nodes that depend on the GEMM, in an order in which each follows its inputs."""
    chain: list[Node] = []
    inside = {gemm}
    pending = set(nodes) - inside
    while ready := [n for n in pending if inside.intersection(n.all_input_nodes) and not _waits(n, pending, gemm)]:
        chain.extend(ready)
        inside.update(ready)
        pending.difference_update(ready)
    return chain


def _waits(node: Node, pending: set[Node], gemm: Node) -> bool:
    """Whether one of the node's inputs depends on the GEMM and is not placed yet."""
    return any(source in pending and depends_on([source], {gemm}) for source in node.all_input_nodes)


def _users_passed(nodes: Sequence[Node], growth: "Growth") -> set[Node]:
    """What the walk has passed already and is computed from these nodes without being one of them."""
    users: set[Node] = set()
    stack = list(nodes)
    while stack:
        for user in stack.pop().users:
            if user < growth.position and user not in users and user not in nodes and user not in growth.values:
                users.add(user)
                stack.append(user)
    return users
