"""A Region under construction: operands tied to graph nodes, and statements."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from postlude.capture.sizes import Size
from postlude.ir import OPS, Apply, Const, Contract, Extent, Operand, Reduce, Region, Round, Statement, Type, Yield
from postlude.ir.region import ROW_AXES


@dataclass(frozen=True)
class Source:
    """A tensor of the graph as an operand: `node`, expanded to `expand` if given, then without dimensions `squeeze`."""

    node: Node
    expand: tuple[Size, ...] | None = None
    squeeze: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[Node, str, tuple[int, ...]]:
        """Identity; symbolic sizes have no hash."""
        return self.node, str(self.expand), self.squeeze


class Program:
    """Collects a Region's parts. Values are referred to by name; their types are known at once."""

    def __init__(self, *, batched: bool, accumulate: torch.dtype) -> None:
        self.batched = batched
        self.accumulate = accumulate
        self.operands: list[Operand] = []
        self.sources: list[Source] = []
        self.body: list[Statement] = []
        self.types: dict[str, Type] = {}
        #: The column axes whose contractions a value depends on, through reductions too.
        self.origins: dict[str, frozenset[str]] = {}
        self._count = 0
        self._known: dict[object, str] = {}
        self._axes: dict[str, int] = {}

    @property
    def rows(self) -> tuple[str, ...]:
        """Axes of the rows."""
        return ("b", "m") if self.batched else ("m",)

    def axis(self, role: str) -> str:
        """A new axis name: role ``"n"`` for columns, ``"k"`` for contracted axes."""
        count = self._axes.get(role, 0)
        self._axes[role] = count + 1
        return f"{role}{count or ''}"

    def operand(self, source: Source, axes: Sequence[str], dtype: torch.dtype | None = None, blocks: tuple[int, ...] = ()) -> str:
        """The operand that stands for `source` with these axes, made once; `dtype` says what bytes are codes of."""
        key = (source.key, tuple(axes), blocks)
        if key not in self._known:
            name = self._fresh()
            dtype = dtype or source.node.meta["val"].dtype
            self.operands.append(Operand(name, tuple(axes), dtype, blocks))
            self.sources.append(source)
            ordered = tuple(a for a in ROW_AXES if a in axes) + tuple(a for a in axes if a not in ROW_AXES)
            self.types[name] = Type(ordered, "bool" if dtype == torch.bool else "float")
            self.origins[name] = frozenset()
            self._known[key] = name
        return self._known[key]

    def contract(self, left: str, right: str, column: str, scale: str | None = None, shift: str | None = None) -> str:
        """Append a contraction; `column` is the right side's column axis. Codes on the right have a scale and perhaps a shift."""
        name = self._fresh()
        self.types[name] = Type((*self.rows, column), "float")
        self.origins[name] = frozenset((column,))
        self.body.append(Contract(name, left, right, self.accumulate, scale, shift))
        return name

    def apply(self, op: str, *inputs: str) -> str:
        """Append an elementwise op."""
        union = {axis for name in inputs for axis in self.types[name].axes}
        axes = tuple(a for a in ROW_AXES if a in union) + tuple(sorted(union - set(ROW_AXES)))
        return self._append(Apply(self._fresh(), op, inputs), Type(axes, OPS[op].result))

    def reduce(self, kind: str, value: str, axis: str | None = None) -> str:
        """Append a reduction over an axis of a tile, by default over its columns."""
        axes = self.types[value].axes
        axis = axis or axes[-1]
        return self._append(Reduce(self._fresh(), kind, axis, value), Type(tuple(a for a in axes if a != axis), "float"))

    def round(self, dtype: torch.dtype, value: str) -> str:
        """Append a rounding to `dtype`."""
        return self._append(Round(self._fresh(), dtype, value), self.types[value])

    def unrounded(self, value: str, dtype: torch.dtype) -> str:
        """The value before a rounding to `dtype`, for a result that rounds to it anyway."""
        return next((s.input for s in self.body if s.name == value and isinstance(s, Round) and s.dtype == dtype), value)

    def const(self, value: float) -> str:
        """Append a literal."""
        return self._append(Const(self._fresh(), float(value)), Type((), "float"))

    def extent(self, axis: str) -> str:
        """Append the size of an axis."""
        return self._append(Extent(self._fresh(), axis), Type((), "float"))

    def truncate(self, statements: int, operands: int) -> None:
        """Drop what was appended after the program had these many statements and operands."""
        dropped = {operand.name for operand in self.operands[operands:]}
        self._known = {key: name for key, name in self._known.items() if name not in dropped}
        del self.body[statements:], self.operands[operands:], self.sources[operands:]

    def region(self, yields: Sequence[Yield]) -> Region:
        """The Region with these results."""
        used = {axis for operand in self.operands for axis in operand.axes}
        axes = (*self.rows, *sorted(used - set(ROW_AXES)))
        return Region(axes, tuple(self.operands), tuple(self.body), tuple(yields))

    def _append(self, statement: Statement, type: Type) -> str:
        self.types[statement.name] = type
        self.origins[statement.name] = frozenset().union(*(self.origins[name] for name in statement.inputs))
        self.body.append(statement)
        return statement.name

    def _fresh(self) -> str:
        self._count += 1
        return f"v{self._count - 1}"
