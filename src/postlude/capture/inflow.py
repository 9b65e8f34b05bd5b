"""Computes in a Region what it would read: the derivative of an activation, from the activation's saved input.

A backward graph multiplies a gradient by f'(x), which is elementwise in a saved x. Read as an operand, f'(x) is a tensor, in
float32 as the decomposition leaves it, that another kernel must store. So where a Region meets a tile that is elementwise in
others, it reads those. A node that is stored anyway, since something other than elementwise ops reads it, is read as it is.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from postlude.capture.forms import Form, Stop, Value, constant_value
from postlude.capture.gemm import RESHAPES
from postlude.capture.program import Source
from postlude.capture.sizes import Kind, Size, broadcast_kind, same_rows
from postlude.capture.translate import CASTS, ELEMENTWISE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from postlude.capture.grow import Growth

aten = torch.ops.aten

#: Most nodes that are computed in place of one operand.
_MOST_NODES = 32

#: Most whole tiles that a kernel reads beside its products' operands: each takes shared memory from the mainloop.
_MOST_TILES = 3

_COMPUTED = frozenset((*ELEMENTWISE, *CASTS))
_REDUCTIONS = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.var_mean.correction)


def compute(growth: "Growth", node: Node, shape: "Sequence[Size]", column: str) -> str | None:
    """The value of `node`, computed from what it is elementwise in; None where that can't be or is no gain; nothing changed."""
    if broadcast_kind(tuple(node.meta["val"].shape), tuple(shape)) is not Kind.TILE:
        return None
    inner, leaves = _cone(growth, node)
    if not inner:
        return None
    new = [leaf for leaf in leaves if leaf not in growth.tiles]
    read = sum(leaf.meta["val"].dtype.itemsize for leaf in new)
    if read > node.meta["val"].dtype.itemsize and len(node.users) > 1:
        return None  # the other kernel stays, and what we read gets more
    if new and len(growth.tiles) + len(new) > _MOST_TILES:
        return None
    before = growth.mark()
    try:
        for leaf in new:
            read_tile(growth, leaf, column)
        for one in inner:
            _compute_one(growth, one)
    except Stop:
        growth.roll_back(before)
        return None
    return growth.computed[node].name


def read_tile(growth: "Growth", leaf: Node, column: str) -> None:
    """Let a whole tile from outside be an operand that other nodes can be computed from."""
    growth.check_external(leaf)
    source = Source(leaf, expand=tuple(leaf.meta["val"].shape))
    growth.tiles[leaf] = Value(growth.program.operand(source, (*growth.program.rows, column)), Form.TILE, leaf)


def _cone(growth: "Growth", node: Node) -> tuple[list[Node], list[Node]]:
    """What `node` is computed by, elementwise, each node behind its inputs; and the tiles that this begins with."""
    rows = tuple(node.meta["val"].shape)
    inner: dict[Node, None] = {}
    leaves: dict[Node, None] = {}
    begins = False
    stack = [(node, False)]
    while stack:
        current, ready = stack.pop()
        if current in inner or current in leaves:
            continue
        if current in growth.computed:
            begins = True
            continue
        if ready:
            inner[current] = None
            continue
        if not (_is_computed(current) or _is_view(current)) or _is_stored(current) or len(inner) >= _MOST_NODES:
            leaves[current] = None
            continue
        stack.append((current, True))
        stack.extend((source, False) for source in _tiles_of(current, rows))
    if any(leaf in growth.tainted or leaf in growth.values for leaf in leaves) or node in leaves or not (leaves or begins):
        return [], []
    return list(inner), list(leaves)


def _tiles_of(node: Node, rows: "Sequence[Size]") -> Iterator[Node]:
    """The inputs that are whole tiles, perhaps with other leading dimensions."""
    for source in node.all_input_nodes:
        value = source.meta.get("val")
        if isinstance(value, torch.Tensor) and constant_value(source) is None and same_rows(value.shape, rows):
            yield source


def _compute_one(growth: "Growth", node: Node) -> None:
    """Compute a node from tiles and computed nodes, without making it the Region's.

    Raises:
        Stop: it can't be.
    """
    known = len(growth.values)
    growth.absorb(node)
    made = list(growth.values)[known:]
    if made != [node]:
        raise Stop("it joins another product")
    growth.computed[node] = growth.values.pop(node)


def _is_computed(node: Node) -> bool:
    return node.op == "call_function" and node.target in _COMPUTED


def _is_view(node: Node) -> bool:
    return node.op == "call_function" and node.target in RESHAPES


def _is_stored(node: Node) -> bool:
    """Whether a node must be in memory: something reads it, perhaps in another shape, that is not elementwise nor a reduction."""
    users = [user for user in node.users if not _is_computed(user) and user.target not in _REDUCTIONS]
    return any(not _is_view(user) or _is_stored(user) for user in users)
