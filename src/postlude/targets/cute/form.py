"""Which Regions this target has kernels for, and what the parts of each group are to a kernel.

A group is one GEMM: `left [m, k]` times `right [n, k]`. Two contractions of one left operand are one GEMM too, whose accumulator
holds pairs of columns (`paired`): the gate and the value of a SwiGLU.
"""

import keyword
import re
from dataclasses import dataclass
from functools import lru_cache

import torch

from postlude.ir import Apply, Contract, Extent, Group, Operand, Reduce, Region, Yield
from postlude.ir.region import DTYPE_NAMES
from postlude.targets.cute.ops import EXPRESSIONS


class UnsupportedRegion(Exception):
    """This target has no kernel of the Region's form; the message says why."""


#: Types that the tensor cores multiply here.
MULTIPLIED = (torch.bfloat16, torch.float16)

#: Types of what the epilogue reads and stores.
STORED = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Argument:
    """A tensor that a group's kernel takes: an operand, or a result.

    Attributes:
        name: its name in the generated code.
        position: its index among the Region's operands and results.
        kind: ``left``, ``right``, ``row``, ``col``, ``tile``, ``scalar`` or ``result``.
        axes: names of its dimensions.
        dtype: its storage type.
        order: order of the dimensions in memory, for a result.
    """

    name: str
    position: int
    kind: str
    axes: tuple[str, ...]
    dtype: torch.dtype
    order: tuple[int, ...] = ()


@dataclass(frozen=True)
class Form:
    """A group as its kernel sees it.

    Attributes:
        group: the group.
        arguments: the tensors that the kernel takes, operands first, in the Region's order.
        paired: whether it is two contractions in one.
        reverse: whether the pair's second right operand lies below the first in memory.
    """

    group: Group
    arguments: tuple[Argument, ...]
    paired: bool
    reverse: bool

    def of_kind(self, *kinds: str) -> tuple[Argument, ...]:
        """The arguments of these kinds, in order."""
        return tuple(a for a in self.arguments if a.kind in kinds)


@lru_cache(maxsize=1024)
def forms(region: Region, reverse: bool = False) -> tuple[Form, ...]:
    """The kernels of a Region, one for each group.

    Raises:
        UnsupportedRegion: there is none for one of the groups.
    """
    return tuple(_form(region, group, reverse) for group in region.groups)


_TAKEN = re.compile(
    r"v\d+|result\d*|extent_\w+|acc\w*|D|c|f|gemm|stream|launch\w*|epilogue\w*|run|cute|cutlass|cuda|unpack|interleave"
)


def _python_name(name: str) -> str:
    """A Region's name as a Python name that nothing else in a generated module has."""
    usable = name.isidentifier() and not keyword.iskeyword(name) and not _TAKEN.fullmatch(name)
    return name if usable else f"operand_{name}"


def _form(region: Region, group: Group, reverse: bool) -> Form:
    first = group.contractions[0]
    if group.feeds or any(c.left not in region.operand_index for c in group.contractions):
        raise UnsupportedRegion("a contraction of a computed tile (attention) is not one GEMM")
    for statement in group.statements:
        if isinstance(statement, Reduce):
            raise UnsupportedRegion(f"%{statement.name} reduces whole rows, which lie in several tiles")
        if isinstance(statement, Apply) and statement.op not in EXPRESSIONS:
            raise UnsupportedRegion(f"op {statement.op!r} has no expression")
    if len(group.contractions) > 2 or any(c.left != first.left for c in group.contractions):
        raise UnsupportedRegion("a kernel computes one contraction, or two of the same left operand")
    arguments = [*_contracted(region, group), *_epilogue(region, group), *_results(region, group)]
    paired = len(group.contractions) == 2
    form = Form(group, tuple(sorted(arguments, key=lambda a: a.position)), paired, paired and reverse)
    if form.paired:
        _check_paired(region, form)
    return form


def _contracted(region: Region, group: Group) -> list[Argument]:
    found = {}
    for contraction in group.contractions:
        _check_types(region, contraction)
        for kind, name in (("left", contraction.left), ("right", contraction.right)):
            operand = region.operands[region.operand_index[name]]
            found[kind, name] = _argument(region, operand, kind)
    if len(group.contractions) == 2 and len(found) != 3:
        raise UnsupportedRegion("both contractions of a pair have the same right operand")
    return list(found.values())


def _check_types(region: Region, contraction: Contract) -> None:
    left, right = (region.operands[region.operand_index[name]].dtype for name in contraction.inputs)
    if left != right or left not in MULTIPLIED or contraction.accumulate != torch.float32:
        given = f"{DTYPE_NAMES[left]} with {DTYPE_NAMES[right]} : {DTYPE_NAMES[contraction.accumulate]}"
        raise UnsupportedRegion(f"kernels multiply bf16 or f16 operands and accumulate in f32, got {given}")


def _epilogue(region: Region, group: Group) -> list[Argument]:
    read = {name for s in group.statements for name in s.inputs} | {y.value for _, y in group.yields}
    arguments = []
    for operand in region.operands:
        if operand.name in read:
            if operand.dtype not in STORED:
                raise UnsupportedRegion(f"an operand of type {DTYPE_NAMES[operand.dtype]} can't be read in an epilogue")
            type = region.types[operand.name]
            kind = {(False, False): "scalar", (False, True): "row", (True, False): "col", (True, True): "tile"}[
                type.has_rows, type.column is not None
            ]
            if kind == "scalar" and operand.axes:
                raise UnsupportedRegion(f"operand %{operand.name} differs from batch to batch only")
            arguments.append(_argument(region, operand, kind))
    return arguments


def _argument(region: Region, operand: Operand, kind: str) -> Argument:
    return Argument(_python_name(operand.name), region.operand_index[operand.name], kind, operand.axes, operand.dtype)


def _results(region: Region, group: Group) -> list[Argument]:
    return [_result(region, index, result) for index, result in group.yields]


def _result(region: Region, index: int, result: Yield) -> Argument:
    if result.dtype not in STORED:
        raise UnsupportedRegion(f"a result of type {DTYPE_NAMES[result.dtype]} can't be stored")
    if region.types[result.value].column is None:
        raise UnsupportedRegion(f"result %{result.value} is no tile")
    name = f"result{index}" if len(region.yields) > 1 else "result"
    return Argument(name, len(region.operands) + index, "result", result.axes, result.dtype, result.order)


def _check_paired(region: Region, form: Form) -> None:
    for right in form.of_kind("right"):
        if right.axes[-1] == form.group.column:
            raise UnsupportedRegion("the right operands of a pair lie along k in memory, these lie along n")
    for tile in form.of_kind("tile"):
        raise UnsupportedRegion(f"a pair reads no tile, this one reads %{tile.name}")
    if any(isinstance(s, Extent) for s in form.group.statements):
        raise UnsupportedRegion("a pair knows no extent")
    for result in form.of_kind("result"):
        if result.dtype not in MULTIPLIED or result.order not in ((), tuple(range(len(result.order)))):
            raise UnsupportedRegion("a pair stores 16-bit results in their natural order")
