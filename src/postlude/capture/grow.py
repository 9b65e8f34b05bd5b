"""Grows a Region from a GEMM: takes in every later node that may legally be computed in its epilogue.

The walk follows the graph's order, so the set of nodes that depend on the Region but stay outside (`tainted`) is known
exactly, and with it convexity: a Region never reads what is computed from its own results elsewhere.

What a node is to the Region depends on the shape of its tensor. Rows may be spread over any number of leading dimensions,
as reshapes between a projection's [rows, n] and a module's [batch, length, n] leave them.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Node

from postlude.capture.codes import weight_of
from postlude.capture.forms import (
    IMPLICIT,
    LOW,
    PER_COLUMN,
    PER_ROW,
    Form,
    Stop,
    Value,
    check_clone,
    constant_value,
    layout_order,
    must_not_move,
    two_constants,
)
from postlude.capture.gemm import (
    ACCUMULATE,
    RESHAPES,
    Attention,
    Gemm,
    NotAGemm,
    Side,
    arguments,
    batch_of,
    is_gemm,
    side_batched,
)
from postlude.capture.inflow import compute
from postlude.capture.partner import join
from postlude.capture.program import Program, Source
from postlude.capture.prologue import Prologue
from postlude.capture.reach import reach_of
from postlude.capture.sizes import Kind, Size, broadcast_kind, same, same_rows, same_shape
from postlude.capture.translate import CASTS, COMPARISONS, ELEMENTWISE, ROUNDED_NUMBERS, apply, as_type

aten = torch.ops.aten


@dataclass
class Settings:
    """What a user may choose about capture.

    Attributes:
        eager_rounding: keep every rounding that eager does between ops.
        strict: raise where a fault of ours would else leave a GEMM to Inductor.
    """

    eager_rounding: bool = False
    strict: bool = False


class Growth:
    """One Region being grown. After `run`, `values` holds the absorbed nodes and `stops` why growth ended where."""

    def __init__(
        self,
        gemms: Sequence[Gemm],
        settings: Settings,
        refused: Mapping[Node, str] = MappingProxyType({}),
        settled: frozenset[Node] = frozenset(),
        norm_of: frozenset[Node] = frozenset(),
        *,
        totals: bool = True,
        inflow: bool = True,
        coded: bool = False,
    ) -> None:
        self.settings = settings
        #: Whether products read the codes of quantised weights, where there are such.
        self.coded = coded and not settings.eager_rounding
        #: Whether reductions may be results where nothing of the Region can depend on them.
        self.totals = totals
        #: Nodes that must stay outside, and why.
        self.refused = refused
        #: GEMMs that were left to Inductor already, and must stay there.
        self.settled = settled
        self.roots = {gemm.node: gemm for gemm in gemms}
        self.first = gemms[0]
        self.reach = reach_of(self.first.left.node.meta["val"].device.type)
        #: Whether what is elementwise in tensors from outside is computed, not read.
        self.inflow = inflow
        self.gemms: list[Gemm] = []
        self.values: dict[Node, Value] = {}
        #: Whole tiles from outside that others are computed from, in place of being read.
        self.tiles: dict[Node, None] = {}
        self.moments: dict[Node, tuple[str, str]] = {}
        self.tainted: set[Node] = set()
        self.absorbing = self.first.node  # the node that is being taken in
        self.position = self.first.node  # where the walk is: everything from here on is still to be decided
        self.stops: dict[Node, str] = {}
        self.program = Program(batched=self.first.batched, accumulate=ACCUMULATE[self.first.left.node.meta["val"].dtype])
        self.widths: dict[str, Size] = {}
        left = self.first.left
        self.batch = batch_of(self.first.right) if self.first.batched else ()
        rows = left.shape[-1:] if left.transposed else left.shape[-2:-1] if self.first.batched else left.shape[:-1]
        self.rows: tuple[Size, ...] = (*self.batch, *rows)
        self.contracted = self.program.axis("k")
        #: The norm before the products `norm_of`, if they are asked for with it, and it is one.
        self.prologue = self._prologue(norm_of) if norm_of and self.reach.prologues and not settings.eager_rounding else None
        self.left = (
            self.prologue.value
            if self.prologue
            else self.program.operand(Source(left.node), self._left_axes(left, self.contracted))
        )

    def run(self) -> None:
        """Absorb the GEMMs and what follows them."""
        node = self.first.node
        waiting = set(self.roots)  # nothing else can still be absorbed
        while waiting and node.op != "root" and not must_not_move(node):
            known = len(self.values)
            self.position = node
            self._visit(node)
            waiting.discard(node)
            added = [*islice(self.values, known, None), node] if node in self.moments else islice(self.values, known, None)
            waiting.update(user for member in added for user in member.users if node < user)
            node = node.next

    @property
    def absorbed(self) -> list[Node]:
        """All nodes that the Region replaces, in graph order of absorption."""
        whole = [n for n in self.moments if all(user in self.values for user in n.users)]
        return [*whole, *self.values]

    def _visit(self, node: Node) -> None:
        if node in self.values:
            return
        inputs = node.all_input_nodes
        if node in self.roots and not any(source in self.tainted or source in self.values for source in inputs):
            self._start(self.roots[node])
            return
        if not any(source in self.values or source in self.moments for source in inputs):
            if any(source in self.tainted for source in inputs):
                self.tainted.add(node)
            return
        before = self.mark()
        try:
            if any(source in self.tainted for source in inputs):
                raise Stop("it needs another kernel's result, which is computed from this Region's")
            self.absorb(node)
        except Stop as stop:
            self.roll_back(before)
            self.tainted.add(node)
            self.stops[node] = str(stop)

    def mark(self) -> tuple[int, ...]:
        """How much there is of everything, for `roll_back`."""
        return len(self.program.body), len(self.program.operands), len(self.gemms), len(self.values), len(self.tiles)

    def roll_back(self, mark: tuple[int, ...]) -> None:
        """Forget what was added since the mark."""
        statements, operands, gemms, values, tiles = mark
        self.program.truncate(statements, operands)
        del self.gemms[gemms:]
        for node in list(self.values)[values:]:
            del self.values[node]
        for node in list(self.tiles)[tiles:]:
            del self.tiles[node]

    # The start: the GEMM itself.

    def _prologue(self, readers: frozenset[Node]) -> Prologue | None:
        try:
            return Prologue(self.program, self.first, readers, self.contracted)
        except Stop:
            self.program.truncate(0, 0)
            return None

    def _start(self, gemm: Gemm) -> None:
        try:
            value = self.contract(gemm, self._new_column(gemm.right))
            self.gemms.append(gemm)
            if gemm.attention:
                self._attention(gemm, gemm.attention, value)
            else:
                self.take(gemm.node, value, Form.TILE)
        except Stop as stop:
            raise NotAGemm(str(stop)) from None

    def _new_column(self, right: Side) -> str:
        column = self.program.axis("n")
        self.widths[column] = right.shape[-2] if right.transposed else right.shape[-1]
        return column

    def _left_axes(self, side: Side, contracted: str) -> tuple[str, ...]:
        axes = (contracted, "m") if side.transposed else ("m", contracted)
        return ("b", *axes) if self.program.batched else axes

    def _right_axes(self, side: Side, contracted: str, column: str) -> tuple[str, ...]:
        axes = (column, contracted) if side.transposed else (contracted, column)
        return ("b", *axes) if self.program.batched else axes

    def contract(self, gemm: Gemm, column: str) -> str:
        """The GEMM with its bias and factors."""
        other = gemm.left != self.first.left
        weight = weight_of(gemm.right) if self.coded else None
        right = None
        if weight is None:
            right = self.program.operand(Source(gemm.right.node), self._right_axes(gemm.right, self.contracted, column))
        left = self.program.operand(Source(gemm.left.node), self._left_axes(gemm.left, self.contracted)) if other else self.left
        if weight is not None:
            value = weight.contract(self.program, left, self.contracted, column)
        else:
            assert right is not None
            value = self.program.contract(left, right, column)
        if gemm.alpha != 1.0:
            value = apply(self.program, "mul", value, gemm.alpha)
        if gemm.bias is not None:
            bias = self.external(gemm.bias, (*self.rows, self.widths[column]), column)
            if gemm.beta != 1.0:
                bias = apply(self.program, "mul", bias, gemm.beta)
            value = apply(self.program, "add", value, bias)
        return value

    def _attention(self, gemm: Gemm, attention: Attention, scores: str) -> None:
        """softmax(scale * scores + mask) v, with rows whose scores are all -inf giving 0, as PyTorch's kernels do."""
        few = isinstance(self.rows[-1], int) and self.rows[-1] <= self.reach.queries
        if not few:
            self._check_whole_rows("attention over rows")
        p = self.program
        column = p.types[scores].column
        assert column is not None
        scores = apply(p, "mul", scores, attention.scale)
        if attention.mask is not None:
            mask = self.external(attention.mask, (*self.rows, self.widths[column]), column)
            if p.types[mask].value == "bool":
                scores = apply(p, "where", mask, scores, float("-inf"))
            else:
                scores = apply(p, "add", scores, mask)
        peak = p.reduce("max", scores)
        empty = apply(p, "eq", peak, float("-inf"))
        weights = apply(p, "exp", apply(p, "sub", scores, apply(p, "where", empty, 0.0, peak)))
        total = p.reduce("sum", weights)
        inverse = apply(p, "reciprocal", apply(p, "where", empty, 1.0, total))
        weights = apply(p, "mul", weights, inverse)
        output = self._new_column(attention.value)
        right = p.operand(Source(attention.value.node), self._right_axes(attention.value, column, output))
        result = p.contract(weights, right, output)
        # The op gives (output, log-sum-exp): their getitems are what the graph uses.
        self.moments[gemm.node] = (result, apply(p, "add", peak, apply(p, "log", total)))

    # Taking in one node.

    def take(self, node: Node, name: str, form: Form, memory: Node | None = None) -> None:
        """Let value `name` stand for the node."""
        value = node.meta["val"]
        layout_order(value, form, len(self.batch))
        self.values[node] = Value(self.as_stored(node, name), form, memory or node)

    def as_stored(self, node: Node, name: str) -> str:
        """The value of a node, rounded as eager stores it if that is wanted."""
        dtype = node.meta["val"].dtype
        return self.program.round(dtype, name) if self.settings.eager_rounding and dtype in LOW else name

    def absorb(self, node: Node) -> None:
        """Compute the node in the Region.

        Raises:
            Stop: it can't be; some statements may have been added already.
        """
        if node in self.refused:
            raise Stop(self.refused[node])
        self.absorbing = node
        if node.op != "call_function":
            raise Stop("the end of the graph" if node.op == "output" else f"{node.op} node")
        if node.target is operator.getitem:
            self._getitem(node)
        elif not isinstance(node.meta.get("val"), torch.Tensor) and node.target not in _MOMENTS and not is_gemm(node):
            raise Stop(f"{_name(node)} does not give one tensor")
        elif node.target in VIEWS:
            self._view(node)
        elif node.target is aten.permute.default:
            self._permute(node)
        elif node.target in CASTS:
            self._cast(node)
        elif node.target in ELEMENTWISE:
            self._elementwise(node)
        elif node.target in _REDUCTIONS or node.target in _MOMENTS:
            self._reduction(node)
        elif node.target in (aten.bmm.default, aten.baddbmm.default):
            self._chain(node)
        else:
            raise Stop("the next GEMM" if is_gemm(node) else f"{_name(node)} is not an op that an epilogue can hold")

    def check_type(self, node: Node) -> None:
        dtype = node.meta["val"].dtype
        if dtype == torch.bool or dtype == self.program.accumulate or dtype in LOW:
            return
        raise Stop(f"{_name(node)} computes in {dtype}, the Region in {self.program.accumulate}")

    def _elementwise(self, node: Node) -> None:
        self.check_type(node)
        shape = tuple(node.meta["val"].shape)
        inside = [(n, self.values[n]) for n in node.all_input_nodes if n in self.values]
        form = self._common_form(node, shape, inside)
        columns = {self.program.types[v.name].column for _, v in inside} - {None}
        if len(columns) > 1:
            raise Stop(f"{_name(node)} joins results of different widths")
        column = columns.pop() if columns else self._column_reduced(inside, shape) if form is Form.TILE else None
        if form is Form.TILE and column is None:
            raise Stop(f"{_name(node)} widens a value of one column")

        def resolve(argument: Any) -> Any:
            if isinstance(argument, Node):
                if argument in self.values:
                    return self.as_eager_compares(node, argument, self.values[argument].name)
                if not isinstance(argument.meta.get("val"), torch.Tensor):
                    raise Stop(f"{_name(node)} takes a symbolic number")
                if form is Form.TILE:
                    return self.external(argument, shape, column)
                return self._external_column(argument, shape, form)
            return self.plain(node, argument)

        name = self.elementwise(node, resolve)
        if len(self.program.origins[name]) > 1:
            raise Stop(f"{_name(node)} joins a reduction over one result's columns with another result")
        self.take(node, name, form)

    def elementwise(self, node: Node, resolve: Callable[[Any], Any]) -> str:
        """An elementwise node's value, of what its arguments are resolved to."""
        arguments = [resolve(a) for a in node.args]
        keywords = {k: resolve(a) for k, a in node.kwargs.items()}
        try:
            name = ELEMENTWISE[node.target](self.program, *arguments, **keywords)
        except TypeError:
            raise Stop(f"{_name(node)} has arguments that the epilogue's op has not") from None
        return as_type(self.program, name, "bool" if node.meta["val"].dtype == torch.bool else "float")

    def as_eager_compares(self, node: Node, argument: Node, name: str) -> str:
        """A value that is not stored as an input: comparisons see what eager would have stored."""
        dtype = argument.meta["val"].dtype
        with_zero = any(isinstance(a, int | float) and a == 0 for a in node.args)
        if node.target in COMPARISONS and dtype in LOW and not with_zero:
            return self.program.round(dtype, name)
        return name

    def plain(self, node: Node, argument: Any) -> Any:
        """An argument that is no tensor."""
        if isinstance(argument, int | float) and not isinstance(argument, bool):
            return self._as_eager_rounds(node, argument)
        if isinstance(argument, bool | str | None):
            return argument
        raise Stop(f"{_name(node)} takes an argument {argument!r}")

    def _as_eager_rounds(self, node: Node, number: float) -> float:
        """A Python number as an input: eager rounds it to the tensors' type in comparisons, and in other ops that jump."""
        dtypes = {n.meta["val"].dtype for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)}
        low = dtypes - {torch.bool}
        counts = node.target in COMPARISONS or (self.settings.eager_rounding and node.target in ROUNDED_NUMBERS)
        if not counts or len(low) != 1 or not low <= set(LOW):
            return number
        return float(torch.tensor(number, dtype=low.pop()).item())

    def _common_form(self, node: Node, shape: Sequence[Size], inside: Sequence[tuple[Node, Value]]) -> Form:
        """The form of an elementwise node's result, if all of the Region's values in it fit together."""
        forms = {value.form for _, value in inside}
        if Form.PERMUTED in forms:
            raise Stop(f"{_name(node)} of permuted dimensions")
        if forms & {*PER_COLUMN}:
            raise Stop(f"{_name(node)} of one value per column")
        if Form.COLUMN in forms:
            if forms != {Form.COLUMN}:
                raise Stop(f"{_name(node)} broadcasts a value per row along the columns")
            form = Form.COLUMN
        elif Form.TILE in forms or Form.REPEATED in forms:
            form = Form.TILE
        else:
            own = tuple(inside[0][0].meta["val"].shape)
            form = Form.COLUMN_KEPT if same_shape(own, shape) else Form.TILE
        for source, value in inside:
            wanted = (*shape[:-1], 1) if value.form is Form.COLUMN_KEPT else tuple(shape)
            if not same_shape(tuple(source.meta["val"].shape), wanted):
                raise Stop(f"{_name(node)} broadcasts a result of the Region to more rows or columns")
        if form is Form.TILE and forms & {*PER_ROW}:
            self._check_whole_rows(f"{_name(node)} of a reduction with its rows")
        return form

    def _column_reduced(self, inside: Sequence[tuple[Node, Value]], shape: Sequence[Size]) -> str | None:
        """The columns that reductions were over which meet a tensor from outside, if it has the same columns."""
        columns = frozenset().union(*(self.program.origins[value.name] for _, value in inside))
        return next((column for column in columns if len(columns) == 1 and same(shape[-1], self.widths[column])), None)

    def _check_whole_rows(self, what: str) -> None:
        if not self.reach.whole_rows:
            raise Stop(f"{what}, which this device's kernels spread over many tiles")

    def _cast(self, node: Node) -> None:
        (source,) = node.all_input_nodes
        value = self.values[source]
        if value.form is Form.PERMUTED:
            raise Stop("a conversion of permuted dimensions")
        self.take(node, self.converted(node, value.name), value.form)

    def converted(self, node: Node, name: str) -> str:
        """The value of a conversion of a value to another type."""
        keywords: dict[str, Any] = dict(node.kwargs)
        dtype: Any = keywords.pop("dtype", None) or (node.args[1] if len(node.args) > 1 else None)
        device = keywords.pop("device", None)
        (source,) = node.all_input_nodes
        if keywords.pop("memory_format", None) not in (None, torch.preserve_format, torch.contiguous_format):
            raise Stop("a change of memory format")
        if device is not None and torch.device(device) != source.meta["val"].device:
            raise Stop("a copy to another device")
        if dtype is None or dtype == source.meta["val"].dtype:
            return name
        if not (dtype in LOW or dtype in (self.program.accumulate, torch.bool)):
            raise Stop(f"a conversion to {dtype}")
        name = as_type(self.program, name, "bool" if dtype == torch.bool else "float")
        if dtype in LOW and source.meta["val"].dtype not in LOW and IMPLICIT not in node.meta:
            # An explicit rounding may be what is meant: the low part of a number is what it leaves.
            name = self.program.round(dtype, name)
        return name

    def _view(self, node: Node) -> None:
        (source,) = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        if source not in self.values:
            raise Stop(f"{_name(node)} of sizes that the Region gives")
        value = self.values[source]
        before, after = tuple(source.meta["val"].shape), tuple(node.meta["val"].shape)
        if value.form is Form.PERMUTED:
            if node.target is not aten.clone.default or node.kwargs.get("memory_format") is not torch.contiguous_format:
                raise Stop(f"{_name(node)} of permuted dimensions")
            self.values[node] = replace(value, copied=True, memory=node)
            return
        if node.target is aten.expand.default:
            form: Form = value.form
            if not same_shape(before, after):
                kept = value.form is Form.COLUMN_KEPT and same_shape(before[:-1], after[:-1])
                if not kept or not any(same(after[-1], width) for width in self.widths.values()):
                    raise Stop("expand repeats a result of the Region")
                self._check_whole_rows("expand of a reduction over the rows")
                self.values[node] = Value(value.name, Form.REPEATED, value.memory)
                return
        elif value.form is Form.REPEATED:
            raise Stop(f"{_name(node)} of a repeated value")
        elif value.form is Form.TILE:
            if not same_rows(before, after):
                raise Stop(f"{_name(node)} splits or joins the columns")
            form = Form.TILE
        elif value.form in PER_COLUMN:
            form = self._view_per_column(node, after)
        else:
            form = Form.COLUMN_KEPT if after and same(after[-1], 1) else Form.COLUMN
        if node.target is aten.clone.default:
            check_clone(node)
            self.take(node, value.name, form)
        else:
            self.take(node, value.name, form, value.memory)

    def _view_per_column(self, node: Node, after: Sequence[Size]) -> Form:
        """The form of a view of one value per column."""
        batch, width = len(self.batch), after[-1:]
        kept = (*self.batch, *(1 for _ in after[batch:-1]), *width)
        if len(after) > batch and same_shape(after, kept) and any(same(after[-1], own) for own in self.widths.values()):
            return Form.ROW if len(after) == batch + 1 else Form.ROW_KEPT
        raise Stop(f"{_name(node)} of one value per column")

    def _permute(self, node: Node) -> None:
        """Heads back beside each other: a result may be stored in another order of its dimensions."""
        source: Any = node.args[0]
        value, shape = self.values[source], tuple(source.meta["val"].shape)
        dims = tuple(int(dim) % len(shape) for dim in arguments(node)[1])
        whole = self.program.batched and same_shape(shape[:-1], self.rows)
        if value.form is not Form.TILE or not whole or dims[-1] != len(shape) - 1:
            raise Stop("permute moves the columns")
        if layout_order(source.meta["val"], Form.TILE, len(self.batch)):
            raise Stop("permute of a result that lies in another order already")
        self.values[node] = Value(value.name, Form.PERMUTED, value.memory, dims)

    def _reduction(self, node: Node) -> None:
        source = node.args[0]
        if not isinstance(source, Node) or source not in self.values or self.values[source].form is not Form.TILE:
            raise Stop(f"{_name(node)} over what was reduced before")
        if not (self.totals or self.reach.whole_rows):
            raise Stop(f"{_name(node)}, which its own kernel computes faster")
        over_rows = self._reduces_rows(node, tuple(source.meta["val"].shape))
        value = self.values[source].name
        if self.program.types[value].value != "float":
            raise Stop(f"{_name(node)} of truth values")
        if self.program.types[value].column is None:
            raise Stop(f"{_name(node)} of a value that is the same in all columns")
        if node.target in _VARIANCES:
            self._check_whole_rows(f"{_name(node)} in two passes over the rows")
        if node.target in _MOMENTS:
            self.moments[node] = self.variance_and_mean(node, value)
            return
        self.check_type(node)
        keep = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
        name = _REDUCTIONS[node.target](self, node, value, "m" if over_rows else self.program.types[value].axes[-1])
        forms = (Form.ROW, Form.ROW_KEPT) if over_rows else (Form.COLUMN, Form.COLUMN_KEPT)
        self.take(node, name, forms[1 if keep else 0])

    def _reduces_rows(self, node: Node, shape: Sequence[Size]) -> bool:
        """Whether a reduction is over all rows of a product; else it is over the columns."""
        dims: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        listed = [dims] if isinstance(dims, int) else list(dims) if dims is not None else []
        wanted = sorted(int(dim) % len(shape) for dim in listed)
        if wanted == [len(shape) - 1]:
            return False
        rows = range(len(self.batch), len(shape) - 1)
        if wanted != [*rows] or (self.batch and not same_shape(shape[:-1], self.rows)):
            raise Stop(f"{_name(node)} over other dimensions than the columns or all rows")
        if not self.reach.columns or node.target not in _ADDITIONS or (self.reach.whole_rows and self.batch):
            raise Stop(f"{_name(node)} over rows, which this device's kernels do not reduce so")
        return True

    def variance_and_mean(self, node: Node, value: str) -> tuple[str, str]:
        """Both moments of a row, the variance about the mean in a second pass."""
        given = node.kwargs.get("correction")
        correction = 1.0 if given is None else given
        if not isinstance(correction, int | float):
            raise Stop("a variance with a symbolic correction")
        p = self.program
        column = p.types[value].column
        assert column is not None
        count = p.extent(column)
        mean = apply(p, "div", p.reduce("sum", value), count)
        deviation = apply(p, "sub", value, mean)
        squares = p.reduce("sum", apply(p, "mul", deviation, deviation))
        # As PyTorch: no degrees of freedom left gives 0 / 0 = NaN, never a negative divisor.
        freedom = apply(p, "maximum", apply(p, "sub", count, correction), 0.0) if correction else count
        return apply(p, "div", squares, freedom), mean

    def _getitem(self, node: Node) -> None:
        source, index = node.args
        if source not in self.moments:
            raise Stop("getitem")
        assert isinstance(source, Node)
        assert isinstance(index, int)
        name = self.moments[source][index]
        if source in self.roots:
            self.take(node, name, Form.TILE if index == 0 else Form.COLUMN)
            return
        self.check_type(node)
        kept = source.kwargs.get("keepdim", False)
        self.take(node, name, Form.COLUMN_KEPT if kept else Form.COLUMN)

    def _chain(self, node: Node) -> None:
        """A batched GEMM whose left side is a tile of this Region: softmax(q k^T) v written out."""
        left, right = (node.args[0], node.args[1]) if node.target is aten.bmm.default else (None, None)
        if not isinstance(left, Node) or not isinstance(right, Node):
            raise Stop("another GEMM")
        if not self.program.batched or left not in self.values or self.values[left].form is not Form.TILE:
            raise Stop("another GEMM")
        self._check_whole_rows("another GEMM over rows")
        value = self.values[left].name
        contracted = self.program.types[value].column
        if contracted is None or len(self.widths) > 1:
            raise Stop("another GEMM")
        side = side_batched(right)
        if not same_shape(batch_of(side), self.batch):
            side = Side(right, False)
            if not same_shape(batch_of(side), self.batch):
                raise Stop("a batched GEMM over other batches")
        if side.node in self.tainted or side.node in self.values or side.node in self.moments:
            raise Stop("another GEMM that reads this Region twice")
        if side.node.meta["val"].dtype != self.first.left.node.meta["val"].dtype:
            raise Stop("a batched GEMM of another type")
        output = self._new_column(side)
        operand = self.program.operand(Source(side.node), self._right_axes(side, contracted, output))
        self.take(node, self.program.contract(value, operand, output), Form.TILE)

    # Operands from outside.

    def external(self, node: Node, shape: Sequence[Size], column: str | None, *, alone: bool = False) -> str:
        """A tensor from outside that broadcasts to a tile of this shape; `alone` takes nothing in that it is computed by."""
        if node.target is aten.expand.default:
            (node,) = node.all_input_nodes[:1]  # the operand is expanded to the Region's own shape
        constant = constant_value(node)
        if constant is not None:
            return self.program.const(constant)
        self.check_external(node)
        if (choice := two_constants(node)) is not None:
            # An additive mask made of a boolean one: reading the boolean one is less, and it is there once for all layers.
            condition, yes, no = choice
            return apply(self.program, "where", self.external(condition, shape, column), yes, no)
        assert column is not None
        if not alone:
            found = join(self, node, shape, column)
            if found is None and self.inflow:
                found = compute(self, node, shape, column)
            if found is not None:
                return found
        own = tuple(node.meta["val"].shape)
        kind = broadcast_kind(own, shape)
        if kind is None:
            raise Stop(f"{node.name} does not broadcast to the Region's shape for certain")
        leading, last = tuple(range(len(own) - 1)), (len(shape) - 1,)
        rows = self.program.rows
        sources = {
            Kind.SCALAR: (Source(node, squeeze=tuple(range(len(own)))), ()),
            Kind.ROW: (Source(node, squeeze=leading), (column,)),
            Kind.COLUMN: (Source(node, expand=(*shape[:-1], 1), squeeze=last), rows),
            Kind.TILE: (Source(node, expand=tuple(shape)), (*rows, column)),
        }
        return self.program.operand(*sources[kind])

    def _external_column(self, node: Node, shape: Sequence[Size], form: Form) -> str:
        """A tensor from outside that broadcasts to one value per row."""
        constant = constant_value(node)
        if constant is not None:
            return self.program.const(constant)
        self.check_external(node)
        own = tuple(node.meta["val"].shape)
        if all(same(size, 1) for size in own):
            return self.program.operand(Source(node, squeeze=tuple(range(len(own)))), ())
        if form is Form.COLUMN:
            own, shape = (*own, 1), (*shape, 1)
        if broadcast_kind(own, shape) is not Kind.COLUMN:
            raise Stop(f"{node.name} does not broadcast to one value per row for certain")
        if form is Form.COLUMN:
            return self.program.operand(Source(node, expand=tuple(shape[:-1])), self.program.rows)
        return self.program.operand(Source(node, expand=tuple(shape), squeeze=(len(shape) - 1,)), self.program.rows)

    def check_external(self, node: Node) -> None:
        """Raise Stop where a tensor from outside can't be an operand."""
        value = node.meta["val"]
        if node in self.tainted or node in self.values or node in self.moments:
            raise Stop(f"{node.name} depends on this Region's results")
        if value.dtype != torch.bool and value.dtype not in ACCUMULATE:
            raise Stop(f"{node.name} has type {value.dtype}")
        if value.dtype == torch.float64 and self.program.accumulate != torch.float64 and value.ndim:
            raise Stop(f"{node.name} is float64, the Region computes in float32")
        if value.device != self.first.left.node.meta["val"].device:
            raise Stop(f"{node.name} is on another device")
        if value.layout != torch.strided:
            raise Stop(f"{node.name} is not a strided tensor")


#: Ops that change no value.
VIEWS = (
    *RESHAPES,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.expand.default,
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
)


def _mean(growth: Growth, node: Node, value: str, axis: str) -> str:
    p = growth.program
    return apply(p, "div", p.reduce("sum", value, axis), p.extent(axis))


_REDUCTIONS: dict[Any, Callable[[Growth, Node, str, str], str]] = {
    aten.sum.dim_IntList: lambda growth, node, value, axis: growth.program.reduce("sum", value, axis),
    aten.amax.default: lambda growth, node, value, axis: growth.program.reduce("max", value, axis),
    aten.amin.default: lambda growth, node, value, axis: growth.program.reduce("min", value, axis),
    aten.mean.dim: _mean,
    aten.var.correction: lambda growth, node, value, axis: growth.variance_and_mean(node, value)[0],
}
_MOMENTS = (aten.var_mean.correction,)
_VARIANCES = (aten.var.correction, *_MOMENTS)
_ADDITIONS = (aten.sum.dim_IntList, aten.mean.dim)


def _name(node: Node) -> str:
    return str(node.target)
