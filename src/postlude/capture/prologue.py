"""A norm in front of a GEMM, computed by the GEMM's own kernel.

Where one row is multiplied, a kernel reads all of it anyway, so it can compute the norm of it: the norm's own kernel, and the
wait for it, disappear. Rounding between the norm, its weight and the product is left out, as everywhere inside a Region. The
norm is computed anew by each kernel that needs it, so it is taken in only where nobody else does.
"""

from math import prod
from typing import Any

import torch
from torch.fx import Node

from postlude.capture.forms import LOW, Stop
from postlude.capture.gemm import RESHAPES, Gemm, arguments
from postlude.capture.program import Program, Source
from postlude.capture.sizes import same
from postlude.capture.translate import CASTS, ELEMENTWISE, apply, as_type

aten = torch.ops.aten

#: Nodes that a norm may consist of.
_MOST_NODES = 24

_REDUCTIONS = (aten.mean.dim, aten.sum.dim_IntList)


class Prologue:
    """What comes before a product, as statements over its rows and its contracted axis.

    Attributes:
        value: name of what is multiplied.
        nodes: the nodes that are computed anew.
    """

    def __init__(self, program: Program, gemm: Gemm, readers: frozenset[Node], contracted: str) -> None:
        """Append the statements to the program. `readers` are all products of the Region, `gemm` one of them.

        Raises:
            Stop: there is no norm, or it is of no use here; some statements may have been added already.
        """
        left = gemm.left
        self.program = program
        self.axis = contracted
        self.size = left.shape[-1]
        self.nodes: dict[Node, str] = {}
        self.tiles: set[Node] = set()
        if gemm.batched or left.transposed or not isinstance(self.size, int) or prod(left.shape[:-1]) != 1:
            raise Stop("more than one row")
        if left.node.meta["val"].dtype not in LOW:
            raise Stop("no narrow type")
        self.value = self._value(left.node, wide=False)
        reduced = any(node.target in _REDUCTIONS for node in self.nodes)
        if not reduced or len(self.tiles) != 1:
            raise Stop("no norm")
        inside = {*self.nodes, *readers}
        if not all(_ends_in(node, inside) for node in self.nodes):
            raise Stop("a part of the norm is needed elsewhere")

    def _value(self, node: Node, *, wide: bool) -> str:
        """The name of a node's value. `wide`: whether the walk has come to what is computed in float32."""
        if node in self.nodes:
            return self.nodes[node]
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
            raise Stop(f"{node.name} has symbolic sizes")
        if self._is_read(node, wide=wide):
            return self._operand(node)
        if len(self.nodes) >= _MOST_NODES:
            raise Stop("too long a way back")
        if value.ndim == 0 or not (same(value.shape[-1], self.size) or same(value.shape[-1], 1)) or prod(value.shape[:-1]) != 1:
            raise Stop(f"{node.name} has another shape")
        self.nodes[node] = name = self._computed(node, wide=wide)
        return name

    def _is_read(self, node: Node, *, wide: bool) -> bool:
        """Whether the walk ends here: at what is in memory, and at the narrow tensor that a wide norm begins with."""
        if node.op != "call_function" or node.meta["val"].ndim == 1:
            return True
        return wide and node.meta["val"].dtype in LOW

    def _operand(self, node: Node) -> str:
        value = node.meta["val"]
        if value.ndim == 1 and same(value.shape[0], self.size) and value.dtype in (*LOW, torch.float32):
            return self.program.operand(Source(node), (self.axis,))
        if value.ndim > 1 and same(value.shape[-1], self.size) and prod(value.shape[:-1]) == 1 and value.dtype in LOW:
            self.tiles.add(node)
            return self.program.operand(Source(node), ("m", self.axis))
        raise Stop(f"{node.name} is no row")

    def _computed(self, node: Node, *, wide: bool) -> str:
        source: Any = node.args[0] if node.args else None
        if node.target in RESHAPES or node.target in (aten.unsqueeze.default, aten.squeeze.dim):
            return self._value(source, wide=wide)
        if node.target in CASTS:
            target, given = node.meta["val"].dtype, source.meta["val"].dtype
            if {target, given} <= {*LOW, torch.float32} and set(node.kwargs) <= {"dtype"}:
                return self._value(source, wide=wide or given == torch.float32)
            raise Stop(f"{node.name} converts {given} to {target}")
        if node.target in _REDUCTIONS:
            return self._reduced(node)
        if node.target not in ELEMENTWISE or node.meta["val"].dtype not in (*LOW, torch.float32):
            raise Stop(f"{node.target} is not part of a norm")

        def resolve(argument: Any) -> Any:
            if isinstance(argument, Node):
                return self._value(argument, wide=wide)
            if isinstance(argument, int | float) and not isinstance(argument, bool):
                return argument
            raise Stop(f"{node.name} takes {argument!r}")

        resolved = [resolve(argument) for argument in node.args]
        try:
            name = ELEMENTWISE[node.target](self.program, *resolved, **{k: resolve(a) for k, a in node.kwargs.items()})
        except TypeError:
            raise Stop(f"{node.name} has arguments that no op of a Region has") from None
        return as_type(self.program, name, "float")

    def _reduced(self, node: Node) -> str:
        source, dims = arguments(node)[:2]
        keep = arguments(node)[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
        ndim = source.meta["val"].ndim
        if [int(dim) % ndim for dim in dims or ()] != [ndim - 1] or not keep or not same(source.meta["val"].shape[-1], self.size):
            raise Stop(f"{node.name} reduces something else")
        total = self.program.reduce("sum", self._value(source, wide=True), self.axis)
        if node.target is aten.sum.dim_IntList:
            return total
        return apply(self.program, "div", total, self.program.extent(self.axis))


def _ends_in(node: Node, inside: set[Node]) -> bool:
    """Whether only these nodes read a node, perhaps in another shape."""
    return all(user in inside or (user.target in RESHAPES and _ends_in(user, inside)) for user in node.users)
