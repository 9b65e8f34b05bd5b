"""Data classes of the Region: statements, values' types, and the groups that targets work by."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from postlude.ir.ops import OPS, ValueType

#: Axis names of rows: a batch of any number of tensor dimensions, and the rows of one GEMM.
ROW_AXES = ("b", "m")

#: Types that torch's stubs do not know.
INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
UINT4: torch.dtype = torch.uint4  # type: ignore[attr-defined]

#: Storage types by their short name in the text form. Those of weights that are kept in few bits follow bool; only a contraction
#: reads them.
DTYPES: dict[str, torch.dtype] = {
    "f32": torch.float32,
    "f64": torch.float64,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "bool": torch.bool,
    "i8": torch.int8,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
    "e8m0": torch.float8_e8m0fnu,
    "f4e2m1": torch.float4_e2m1fn_x2,
    "i4": INT4,
    "u4": UINT4,
}
#: Types of which two numbers share a byte, the first in its lower half: tensors of bytes, with half the columns.
PAIRS = (torch.float4_e2m1fn_x2, INT4, UINT4)

#: Types of 8 bits or less whose numbers are codes.
CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, *PAIRS)

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Type:
    """What a value depends on (`axes`, in the order b, m, column) and whether it is a number or a truth value."""

    axes: tuple[str, ...]
    value: ValueType

    @property
    def column(self) -> str | None:
        """The column axis, or None for a scalar or a column of rows."""
        return self.axes[-1] if self.axes and self.axes[-1] not in ROW_AXES else None

    @property
    def has_rows(self) -> bool:
        """Whether the value differs from row to row."""
        return "m" in self.axes


@dataclass(frozen=True)
class Operand:
    """A tensor argument. `axes` name its trailing dimensions in memory order of dimensions (not of strides).

    `blocks`, where given, say for each axis how many neighbours on it share an element: the scales of a weight [n, k] in
    blocks of 16 columns are ``[n, k/16]``.
    """

    name: str
    axes: tuple[str, ...]
    dtype: torch.dtype
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Contract:
    """Matrix product of `left` (has the rows; an operand or a computed tile) and `right` (an operand).

    `scale` and `shift`, operands in blocks along the contracted axis, say what the codes of `right` stand for:
    ``(right - shift) * scale``.
    """

    name: str
    left: str
    right: str
    accumulate: torch.dtype
    scale: str | None = None
    shift: str | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values read."""
        return (self.left, self.right, *(name for name in (self.scale, self.shift) if name is not None))


@dataclass(frozen=True)
class Apply:
    """An elementwise op of `ir.ops.OPS`, broadcasting by axes."""

    name: str
    op: str
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class Reduce:
    """Reduction over a whole axis, the columns or the rows `m`: `kind` is a key of `ir.ops.REDUCTIONS`."""

    name: str
    kind: str
    axis: str
    input: str

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values read."""
        return (self.input,)


@dataclass(frozen=True)
class Round:
    """Rounding of a value to a storage type, and back."""

    name: str
    dtype: torch.dtype
    input: str

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values read."""
        return (self.input,)


@dataclass(frozen=True)
class Const:
    """A literal, rounded to the type of the arithmetic where it is used."""

    name: str
    value: float

    @property
    def inputs(self) -> tuple[str, ...]:
        """A constant reads nothing."""
        return ()


@dataclass(frozen=True)
class Extent:
    """The size of an axis as a number."""

    name: str
    axis: str

    @property
    def inputs(self) -> tuple[str, ...]:
        """An extent reads nothing."""
        return ()


Statement = Contract | Apply | Reduce | Round | Const | Extent


def behind(statements: Iterable[Statement], names: Iterable[str]) -> set[str]:
    """Names of those of the statements that these values are, or are computed from."""
    by_name = {statement.name: statement for statement in statements}
    found: set[str] = set()
    stack = list(names)
    while stack:
        name = stack.pop()
        if name in by_name and name not in found:
            found.add(name)
            stack.extend(by_name[name].inputs)
    return found


@dataclass(frozen=True)
class Yield:
    """One result: value `value`, rounded once to `dtype`, as a dense tensor with `axes`.

    `order` lists the tensor's dimensions from the outermost to the innermost in memory; empty means the order of the
    dimensions. With a batch (B, H), ``(0, 2, 1, 3)`` stores attention's heads beside each other, as its users read them.
    """

    axes: tuple[str, ...]
    dtype: torch.dtype
    value: str
    order: tuple[int, ...] = ()


@dataclass(frozen=True)
class Group:
    """The contractions that share one column axis, and the part of the program over it.

    Attributes:
        column: the column axis.
        contractions: in program order.
        statements: all other statements that the group's results need, in program order. A statement without a
            column axis (a constant, a sum of scalars) stands in each group that uses it.
        yields: (index in `Region.yields`, yield) of the results that this group stores.
        feeds: name of the tile that the next group contracts, or None.
    """

    column: str
    contractions: tuple[Contract, ...]
    statements: tuple[Statement, ...]
    yields: tuple[tuple[int, Yield], ...]
    feeds: str | None

    def behind(self, names: Iterable[str]) -> set[str]:
        """Those of the statements that these values are, or are computed from."""
        return behind(self.statements, names)

    @cached_property
    def reduced(self) -> frozenset[str]:
        """Those of the statements that are reductions, or are computed from one."""
        found: set[str] = set()
        for statement in self.statements:
            if isinstance(statement, Reduce) or not found.isdisjoint(statement.inputs):
                found.add(statement.name)
        return frozenset(found)


@dataclass(frozen=True)
class Region:
    """Operands, program and results of one fused kernel. See docs/design.md for the meaning of the parts."""

    axes: tuple[str, ...]
    operands: tuple[Operand, ...]
    body: tuple[Statement, ...]
    yields: tuple[Yield, ...]

    @property
    def batched(self) -> bool:
        """Whether the contractions are batched."""
        return "b" in self.axes

    @property
    def row_axes(self) -> tuple[str, ...]:
        """Axes of the rows: ``("m",)`` or ``("b", "m")``."""
        return ("b", "m") if self.batched else ("m",)

    @property
    def coded(self) -> bool:
        """Whether a contraction reads codes: a weight that is kept in 8 bits or less."""
        return any(self.operands[self.operand_index[c.right]].dtype in CODES for c in self.contractions)

    @cached_property
    def contractions(self) -> tuple[Contract, ...]:
        """All contractions in program order."""
        return tuple(s for s in self.body if isinstance(s, Contract))

    @cached_property
    def operand_index(self) -> dict[str, int]:
        """Position of each operand by its name."""
        return {operand.name: index for index, operand in enumerate(self.operands)}

    @cached_property
    def types(self) -> dict[str, Type]:
        """Type of every value by its name. Meaningful only for a Region that passes `verify`."""
        types: dict[str, Type] = {}
        for operand in self.operands:
            types[operand.name] = Type(self._ordered(operand.axes), "bool" if operand.dtype == torch.bool else "float")
        for statement in self.body:
            types[statement.name] = self._type(statement, types)
        return types

    def contraction_axes(self, contraction: Contract) -> tuple[str, str]:
        """(contracted axis, column axis) of a contraction."""
        left, right = set(self.types[contraction.left].axes), set(self.types[contraction.right].axes)
        (contracted,) = (left & right) - set(ROW_AXES)
        (column,) = right - left - set(ROW_AXES)
        return contracted, column

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups in an order in which each follows the group that feeds it."""
        columns: dict[str, list[Contract]] = {}
        for contraction in self.contractions:
            columns.setdefault(self.contraction_axes(contraction)[1], []).append(contraction)
        by_name = {s.name: s for s in self.body}
        position = {s.name: i for i, s in enumerate(self.body)}
        fed = {c.left for c in self.contractions if c.left in by_name}
        groups = []
        for column, contractions in columns.items():
            feeds = next((name for name in fed if self.types[name].column == column), None)
            # A result without a column axis (a reduction) is stored by the group whose axis it was reduced over.
            stored = tuple((i, y) for i, y in enumerate(self.yields) if self._column_of(y.value) == column)
            needed: set[str] = set()
            stack = [y.value for _, y in stored] + ([feeds] if feeds else [])
            while stack:
                name = stack.pop()
                statement = by_name.get(name)
                if statement is None or name in needed or isinstance(statement, Contract):
                    continue
                needed.add(name)
                stack.extend(statement.inputs)
            statements = tuple(by_name[name] for name in sorted(needed, key=position.__getitem__))
            groups.append(Group(column, tuple(contractions), statements, stored, feeds))
        return tuple(groups)

    def _column_of(self, name: str) -> str | None:
        """The column axis that a value has or was reduced from."""
        own = self.types[name].column
        if own is not None:
            return own
        statement = {s.name: s for s in self.body}.get(name)
        if isinstance(statement, Reduce) and statement.axis not in ROW_AXES:
            return statement.axis
        if statement is None:
            return None
        return next((c for c in map(self._column_of, statement.inputs) if c is not None), None)

    def _ordered(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        rows = tuple(axis for axis in ROW_AXES if axis in axes)
        return rows + tuple(axis for axis in axes if axis not in ROW_AXES)

    def _type(self, statement: Statement, types: dict[str, Type]) -> Type:
        if isinstance(statement, Const | Extent):
            return Type((), "float")
        if isinstance(statement, Contract):
            left, right = types[statement.left].axes, types[statement.right].axes
            shared = set(left) & set(right)
            column = tuple(axis for axis in right if axis not in left and axis not in ROW_AXES)
            return Type(tuple(a for a in left if a in ROW_AXES or a not in shared) + column, "float")
        if isinstance(statement, Reduce):
            return Type(tuple(a for a in types[statement.input].axes if a != statement.axis), "float")
        union = {axis for name in statement.inputs for axis in types[name].axes}
        rows = tuple(axis for axis in ROW_AXES if axis in union)
        axes = rows + tuple(sorted(union - set(ROW_AXES)))
        if isinstance(statement, Round):
            return Type(axes, "float")
        return Type(axes, OPS[statement.op].result)
