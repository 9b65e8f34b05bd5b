"""How a graph's tensors can stand for values of a Region, and what forbids it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
import torch._inductor.config
from torch.fx import Node

from postlude.capture.sizes import hint, is_dense

aten = torch.ops.aten

#: Storage types whose arithmetic is float32.
LOW = (torch.bfloat16, torch.float16)


class Form(Enum):
    """How a value of the Region lies in its node's tensor."""

    TILE = "tile"  # [*rows, n]
    COLUMN_KEPT = "column kept"  # [*rows, 1]
    COLUMN = "column"  # [*rows]
    ROW_KEPT = "row kept"  # [1, ..., 1, n], or [*batch, 1, n]: rows were added
    ROW = "row"  # [n], or [*batch, n]
    REPEATED = "repeated"  # [*rows, n], the same in all columns; no result can have this form
    PERMUTED = "permuted"  # a tile's dimensions exchanged; the end of the growth, but for a copy


@dataclass(frozen=True)
class Value:
    """The Region's value of a node.

    `memory` is the node that made the memory which eager would have it in: views share their source's, a copy has its own.
    `permutation` is that of a permuted tile; `copied` says that the node is dense in its own, permuted dimensions.
    """

    name: str
    form: Form
    memory: Node
    permutation: tuple[int, ...] = ()
    copied: bool = False


#: Forms of what one row has one value of.
PER_ROW = (Form.COLUMN, Form.COLUMN_KEPT, Form.REPEATED)

#: Forms of what one column has one value of.
PER_COLUMN = (Form.ROW, Form.ROW_KEPT)


class Stop(Exception):
    """A node can't be taken in; the message says why."""


def layout_order(value: torch.Tensor, form: Form, batch: int) -> tuple[int, ...]:
    """Order of the dimensions in memory, as a `yield` says it: empty for a plain dense tensor.

    `batch` is the number of the Region's batch dimensions.

    Raises:
        Stop: the tensor is not dense in any order that a result can have.
    """
    if is_dense(value.stride(), value.shape, range(value.ndim)):
        return ()
    strides = value.stride()
    has_own_dims = {Form.TILE: value.ndim == batch + 2, Form.COLUMN: value.ndim == batch + 1}.get(form, False)
    if has_own_dims:
        # The example shows the order; whether it is that for all sizes is then proved.
        order = tuple(sorted(range(value.ndim), key=lambda dim: -hint(strides[dim])))
        if is_dense(value.stride(), value.shape, order) and (form is Form.COLUMN or order[-1] == value.ndim - 1):
            return order
    raise Stop("its result is not dense in memory")


def depends_on(nodes: Sequence[Node], targets: Collection[Node]) -> bool:
    """Whether one of the nodes is one of the targets or is computed from one."""
    seen: set[Node] = set()
    stack = list(nodes) if targets else []
    while stack:
        node = stack.pop()
        if node in targets:
            return True
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return False


def constant_value(node: Node) -> float | None:
    """The number that fills a tensor made by `full`, if it is one."""
    if node.target not in (aten.full.default, aten.scalar_tensor.default):
        return None
    value = node.args[1] if node.target is aten.full.default else node.args[0]
    made = node.meta["val"]
    # A truth value or an integer would meet other promotion rules than a floating point literal does, and so would a
    # float64 tensor that has dimensions.
    if not isinstance(value, int | float) or not made.dtype.is_floating_point or (made.dtype == torch.float64 and made.ndim):
        return None
    return float(torch.tensor(value, dtype=made.dtype).item())


def two_constants(node: Node) -> tuple[Node, float, float] | None:
    """(condition, value if true, value if false) of a `where` between two constants."""
    if node.target is not aten.where.self:
        return None
    condition, *values = node.args
    constants = [constant_value(value) if isinstance(value, Node) else None for value in values]
    if not isinstance(condition, Node) or constants[0] is None or constants[1] is None:
        return None
    return condition, constants[0], constants[1]


def check_clone(node: Node) -> None:
    wanted = node.kwargs.get("memory_format")
    if wanted not in (None, torch.contiguous_format, torch.preserve_format):
        raise Stop("a clone in another memory format")


def must_not_move(node: Node) -> bool:
    """Whether other nodes may not change places with this one: it writes in place, or draws from the global generator."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        return True
    # Inductor's own random numbers don't depend on the order; those of its fallback do.
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return random and bool(torch._inductor.config.fallback_random)
