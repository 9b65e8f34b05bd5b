"""Writes the parts that all kernels of a Region share: arguments, addresses, loads, and the elementwise programs as functions.

A function takes index tensors of rows and columns that broadcast against each other, so it does not know which kernel calls it,
nor which way a tile lies. The text is for people too (`explain` shows it): each line carries the statement of the Region that it
stands for. `p_` is the pointer to an operand, `s_` its stride along an axis, `r0` the first result, `v` a value.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from postlude.ir import Apply, Const, Contract, Extent, Group, Region, Round, Statement, sensitive, to_text
from postlude.targets.triton.codegen_ops import EXPRESSIONS, POWERS, PRECISE

#: Storage types as Triton names them.
TYPES: dict[torch.dtype, str] = {
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
    torch.bool: "tl.int1",
}

_COMMENT_COLUMN = 64
_AXIS_ORDER = "bmkn"


@dataclass(frozen=True)
class Stride:
    """An integer argument: how `tensor` (operands first, then results) moves in memory along `axis`.

    Where an axis stands for dimensions that no single stride describes, it has an `inner` size, and an `outer` stride for
    what goes beyond it, besides its `step`.
    """

    tensor: int
    axis: str
    part: str = "step"


class Writer:
    """Writes the parts of one module.

    Args:
        region: the Region.
        rows: rows that the `gemv` kernel computes.
        split: (tensor, axis) pairs of which the axis stands for dimensions that no single stride describes.
        chained: whether kernels start before the kernel ahead in the stream has ended.
    """

    def __init__(self, region: Region, rows: int, split: frozenset[tuple[int, str]], chained: bool) -> None:
        self.region = region
        self.rows = rows
        self.split = split
        self.chained = chained
        self.constants = {s.name: s.value for s in region.body if isinstance(s, Const)}
        self.contracted = {name for c in region.contractions for name in c.inputs}
        texts = to_text(region, lines=True).splitlines()[1 + len(region.operands) :]
        self.comments = {s.name: text.strip() for s, text in zip(region.body, texts, strict=False)}

    # What the kernels take ------------------------------------------------------------------------------------------------

    @cached_property
    def pointers(self) -> tuple[str, ...]:
        """Names of the pointers: operands, then results."""
        return (*(f"p_{o.name}" for o in self.region.operands), *(f"r{i}" for i in range(len(self.region.yields))))

    @cached_property
    def sizes(self) -> tuple[str, ...]:
        """Axes whose sizes the kernels take. The batch stands among them as `b`."""
        return tuple(axis for axis in self.region.axes if axis != "b" or self.region.batched)

    def strides_of(self, tensor: int) -> Iterator[Stride]:
        """The strides of one tensor, by axes in a fixed order."""
        for axis in sorted(self.axes_of(tensor), key=lambda a: _AXIS_ORDER.index(a[0])):
            yield Stride(tensor, axis)
            if (tensor, axis) in self.split:
                yield from (Stride(tensor, axis, "inner"), Stride(tensor, axis, "outer"))

    def axes_of(self, tensor: int) -> tuple[str, ...]:
        """The axes of an operand or result."""
        count = len(self.region.operands)
        return self.region.operands[tensor].axes if tensor < count else self.region.yields[tensor - count].axes

    def name(self, stride: Stride) -> str:
        """The argument's name."""
        count = len(self.region.operands)
        of = f"s_{self.region.operands[stride.tensor].name}" if stride.tensor < count else f"r{stride.tensor - count}"
        return f"{of}_{stride.axis}{'' if stride.part == 'step' else '_' + stride.part}"

    def at(self, tensor: int, index: dict[str, str]) -> str:
        """The address of a tensor's element, or of many, for an index along each axis."""
        terms = [self.pointers[tensor]]
        for axis in sorted(self.axes_of(tensor), key=lambda a: _AXIS_ORDER.index(a[0])):
            step, at = self.name(Stride(tensor, axis)), index[axis]
            if (tensor, axis) in self.split:
                inner, outer = (self.name(Stride(tensor, axis, part)) for part in ("inner", "outer"))
                terms.append(f"{at} // {inner} * {outer} + {at} % {inner} * {step}")
            else:
                terms.append(f"{at} * {step}")
        return " + ".join(terms)

    # The epilogue ---------------------------------------------------------------------------------------------------------

    def read(self, group: Group) -> list[int]:
        """Operands that a group's epilogue reads, by their position."""
        used = {name for s in group.statements for name in s.inputs}
        return [i for i, o in enumerate(self.region.operands) if o.name in used and o.name not in self.contracted]

    def early(self, group: Group) -> list[int]:
        """Of these, the ones that are loaded before the sum is computed: few values, for which no program then waits."""
        return [t for t in self.read(group) if "m" not in self.region.operands[t].axes]

    def loads(self, group: Group, cols: str) -> Iterator[str]:
        """The early loads. They are converted later, where they are needed: that is where a GPU waits."""
        for tensor in self.early(group):
            yield f"early_{self.region.operands[tensor].name} = {self.load(tensor, {'b': 'batch', group.column: cols}, cols)}"

    def load(self, tensor: int, index: dict[str, str], cols: str) -> str:
        """The load of an operand that the epilogue reads."""
        masks = {"m": "(rows < m)", **{axis: f"({cols} < {axis})" for axis in index if axis[0] == "n"}}
        mask = " & ".join(masks[axis] for axis in self.region.operands[tensor].axes if axis in masks)
        # A scalar too is loaded as a tile, of one element, so that all values have two dimensions.
        at = self.at(tensor, index) + ("" if mask else " + tl.zeros([1, 1], tl.int32)")
        return f"tl.load({at}{mask and ', mask=' + mask})"

    def arguments(self, group: Group) -> list[str]:
        """What an epilogue takes besides its indices and accumulators, under the names that the kernels have too."""
        count = len(self.region.operands)
        early = self.early(group)
        tensors = [*(t for t in self.read(group) if t not in early), *(count + index for index, _ in group.yields)]
        extents = {s.axis for s in group.statements if isinstance(s, Extent)}
        sizes = [axis for axis in self.sizes if axis in extents | {"m", group.column}]
        values = [f"early_{self.region.operands[t].name}" for t in early]
        return [*values, *sizes, *(a for t in tensors for a in (self.pointers[t], *(self.name(s) for s in self.strides_of(t))))]

    def call(self, function: str, group: Group, rows: str, cols: str, accumulators: list[str]) -> str:
        """A call of a group's function."""
        batch = ["batch"] if self.region.batched else []
        return f"{function}({', '.join([*batch, rows, cols, *accumulators, *self.arguments(group)])})"

    def function(self, name: str, group: Group, returns: str | None = None) -> str:
        """A group's program: loads what it reads, computes, rounds each result once and stores it, or returns a value."""
        n, type = group.column, self.arithmetic(group)
        batch = ["batch"] if self.region.batched else []
        accumulators = [value(c.name) for c in group.contractions]
        lines = ["@triton.jit"]
        lines += definition(name, [*batch, "rows", "cols", *accumulators, *self.arguments(group)])
        index = {"b": "batch", "m": "rows", n: "cols"}
        masks = {"m": "(rows < m)", n: f"(cols < {n})"}
        for tensor in self.read(group):
            operand = self.region.operands[tensor]
            loaded = f"early_{operand.name}" if tensor in self.early(group) else self.load(tensor, index, "cols")
            lines.append(f"    {value(operand.name)} = {loaded}{'' if operand.dtype == torch.bool else f'.to({type})'}")
        precise = sensitive(group) if type == "tl.float32" else ()
        for statement in group.statements:
            code = f"    {value(statement.name)} = {self.expression(statement, type, precise=statement.name in precise)}"
            lines.append(f"{code:<{_COMMENT_COLUMN}}  # {self.comments[statement.name]}")
        for index_, result in group.yields:
            at = self.at(len(self.region.operands) + index_, index)
            rounded = f"{value(result.value)}.to({TYPES[result.dtype]})"
            lines.append(f"    tl.store({at}, {rounded}, mask={masks['m']} & {masks[n]})")
        if returns is not None:
            lines.append(f"    return {value(returns)}")
        return "\n".join(lines) + "\n"

    def expression(self, statement: Statement, type: str, *, precise: bool) -> str:
        """The expression of one statement."""
        if isinstance(statement, Const):
            return f"tl.full([1, 1], {_literal(statement.value)}, {type})"
        if isinstance(statement, Extent):
            return f"tl.full([1, 1], {statement.axis}, {type})"
        if isinstance(statement, Round):
            return f"{value(statement.input)}.to({TYPES[statement.dtype]}).to({type})"
        assert isinstance(statement, Apply)
        inputs = [value(name) for name in statement.inputs]
        if statement.op == "pow" and (power := POWERS.get(self.constants.get(statement.inputs[1], math.nan))):
            return power.format(*inputs)
        expressions = EXPRESSIONS | PRECISE if precise else EXPRESSIONS
        return expressions[statement.op].format(*inputs, type=type)

    def arithmetic(self, group: Group) -> str:
        """Type of a group's arithmetic."""
        return TYPES[group.contractions[0].accumulate]

    def contracted_axis(self, contraction: Contract) -> str:
        """The axis that is summed over."""
        return self.region.contraction_axes(contraction)[0]


def value(name: str) -> str:
    return f"v{name}" if name.isdigit() else f"v_{name}"


def _literal(value: float) -> str:
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def load(address: str, mask: str) -> str:
    return f"tl.load({address}, mask={mask}, other=0.0)"


def indented(lines: Iterable[str], levels: int = 1, before: Iterable[str] = ()) -> list[str]:
    return [*before, *("    " * levels + line for line in lines)]


def definition(name: str, arguments: list[str]) -> list[str]:
    """The head of a function, its arguments broken into lines."""
    lines = [f"def {name}("]
    line = "   "
    for argument in arguments:
        if len(line) + len(argument) > 118:
            lines.append(line)
            line = "   "
        line += f" {argument},"
    return [*lines, line, "):"]
