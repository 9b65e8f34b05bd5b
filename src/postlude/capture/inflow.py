"""Computes in a Region what it would read: the derivative of an activation, from the activation's saved input.

An op of a Region may take a tile that is elementwise computed from others, without this Region: a backward graph multiplies a
gradient by f'(x). Some kernel would have to write that tile, in float32 as the decomposition leaves it, for the Region to read.
So the Region reads what it is computed from instead, where that moves less memory.
"""

from collections.abc import Collection, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from postlude.capture.forms import Stop, constant_value
from postlude.capture.gemm import RESHAPES
from postlude.capture.sizes import Kind, Size, broadcast_kind, hint, same_rows, same_shape
from postlude.capture.translate import CASTS, ELEMENTWISE

if TYPE_CHECKING:
    from postlude.capture.grow import Growth

aten = torch.ops.aten

#: Most nodes that are computed in the Region in place of one tensor.
MOST_NODES = 40

_COMPUTED = frozenset((*ELEMENTWISE, *CASTS))
#: Users that leave it open whether their input is ever in memory: Inductor computes it in the kernel of such a user.
_INLINE = _COMPUTED | {
    aten.sum.dim_IntList,
    aten.mean.dim,
    aten.amax.default,
    aten.amin.default,
    aten.var_mean.correction,
}
_VIEWS = (*RESHAPES, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default)


def compute(growth: "Growth", node: Node, shape: Sequence[Size], column: str) -> str | None:
    """The value of `node`, computed in the Region; None where that can't be or is no gain, and then nothing has changed."""
    inner = _behind(growth, node, shape)
    if not inner:
        return None
    read = dict.fromkeys(source for one in inner for source in one.all_input_nodes if source not in inner)
    tiles = [source for source in read if _is_tile(source, shape) and source not in growth.tiles]
    if not _pays(growth, node, inner, list(read), tiles):
        return None
    before = growth.mark()
    try:
        name = _Tree(growth, inner, column).value(node)
    except Stop:
        growth.roll_back(before)
        return None
    growth.tiles |= dict.fromkeys(tiles)
    return name


def _pays(growth: "Growth", node: Node, inner: set[Node], read: Sequence[Node], tiles: Sequence[Node]) -> bool:
    """Whether reading `read` in place of `node` moves less memory; `tiles` of it the Region would not read otherwise."""
    stored = _in_memory(node, {*inner, *growth.values, growth.absorbing})
    most = growth.reach.tiles
    if most is None:
        # A tensor that is written and read for the Region alone costs that beside what it is computed from.
        return not stored or sum(map(_bytes, read)) < _bytes(node)
    if stored or (tiles and len(growth.tiles) + len(tiles) > most):
        return False
    # Where other kernels compute the node as well, they go on doing so, and what we read only gets more.
    return len(node.users) == 1 or sum(tile.meta["val"].dtype.itemsize for tile in tiles) <= node.meta["val"].dtype.itemsize


def _fits(growth: "Growth", node: Node, shape: Sequence[Size]) -> bool:
    """Whether a node is elementwise over the Region's tile, and nothing that the Region gives."""
    if node in growth.values or node in growth.tainted or node in growth.moments or node.op != "call_function":
        return False
    if node.target not in RESHAPES and node.target not in _COMPUTED:
        return False
    own = tuple(node.meta["val"].shape)
    if node.target in RESHAPES and not same_rows(own, tuple(node.all_input_nodes[0].meta["val"].shape)):
        return False
    return same_shape(own, shape) or (not growth.program.batched and same_rows(own, shape))


def _behind(growth: "Growth", node: Node, shape: Sequence[Size]) -> set[Node]:
    """`node` and what it is computed from, elementwise; empty if that does not fit or is too much.

    What is in memory anyway is read, not computed, by kernels that own tiles.
    """
    if not _fits(growth, node, shape):
        return set()
    found = {node}
    stack = [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source in found or not _fits(growth, source, shape):
                continue
            if growth.reach.tiles is not None and _in_memory(source, found):
                continue
            if len(found) == MOST_NODES:
                return set()
            found.add(source)
            stack.append(source)
    return found


def _in_memory(node: Node, inside: Collection[Node]) -> bool:
    """Whether somebody else reads the node from memory."""
    stack = [user for user in node.users if user not in inside]
    while stack:
        user = stack.pop()
        if user.target in _VIEWS:
            stack.extend(user.users)
        elif user.target not in _INLINE:
            return True
    return False


def _is_tile(node: Node, shape: Sequence[Size]) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or constant_value(node) is not None:
        return False
    return same_rows(value.shape, shape) or broadcast_kind(tuple(value.shape), tuple(shape)) is Kind.TILE


def _bytes(node: Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or constant_value(node) is not None:
        return 0
    return prod(map(hint, value.shape)) * value.dtype.itemsize


class _Tree:
    """Values of the nodes `inner` in a Region, from what they read."""

    def __init__(self, growth: "Growth", inner: set[Node], column: str) -> None:
        self.growth, self.inner, self.column = growth, inner, column
        self.known: dict[Node, str] = {}

    def value(self, node: Node) -> str:
        """The value of an inner node.

        Raises:
            Stop: it can't be computed here.
        """
        if node not in self.known:
            self.known[node] = self._computed(node)
        return self.known[node]

    def _computed(self, node: Node) -> str:
        growth = self.growth
        if node.target in RESHAPES:
            (source,) = node.all_input_nodes[:1]
            return self.value(source) if source in self.inner else self._read(source, source)
        if node.target in CASTS:
            name = growth.converted(node, self._argument(node, node.args[0]))
        else:
            growth.check_type(node)
            name = growth.elementwise(node, lambda argument: self._argument(node, argument))
        return growth.as_stored(node, name)

    def _argument(self, node: Node, argument: Any) -> Any:
        if not isinstance(argument, Node):
            return self.growth.plain(node, argument)
        if argument in self.inner:
            return self.growth.as_eager_compares(node, argument, self.value(argument))
        if not isinstance(argument.meta.get("val"), torch.Tensor):
            raise Stop("a symbolic number")
        return self._read(argument, node)

    def _read(self, node: Node, like: Node) -> str:
        """A tensor as an operand that broadcasts to the shape of another."""
        return self.growth.external(node, tuple(like.meta["val"].shape), self.column, alone=True)
