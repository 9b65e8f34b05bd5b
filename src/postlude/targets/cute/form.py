"""Which Regions this target has kernels for, and what the parts of each group are to a kernel.

A group is one GEMM: `left [m, k]` times `right [n, k]`. Two contractions of one left operand are one GEMM too, whose accumulator
holds pairs of columns (`paired`): the gate and the value of a SwiGLU.
"""

import keyword
import re
from dataclasses import dataclass
from functools import lru_cache

import torch

from postlude.ir import Apply, Contract, Group, Operand, Reduce, Region, Yield
from postlude.ir.region import DTYPE_NAMES
from postlude.targets.cute.ops import EXPRESSIONS


class UnsupportedRegion(Exception):
    """This target has no kernel of the Region's form; the message says why."""


#: Types that the tensor cores multiply here.
MULTIPLIED = (torch.bfloat16, torch.float16)

#: Types of what the epilogue reads and stores. Truth values are bytes to a kernel.
STORED = (torch.bfloat16, torch.float16, torch.float32, torch.bool)


@dataclass(frozen=True)
class Argument:
    """A tensor that a group's kernel takes: an operand, or a result.

    Attributes:
        name: its name in the generated code.
        position: its index among the Region's operands and results.
        kind: ``left``, ``right``, ``row``, ``col``, ``tile``, ``scalar``, ``result``, or what only the second kernel sees, which
            adds what tiles leave of a reduction: ``vector`` (an operand) or ``total`` (a result).
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
        reductions: over rows and columns, of values that depend on no other reduction.
    """

    group: Group
    arguments: tuple[Argument, ...]
    paired: bool
    reverse: bool
    reductions: tuple[Reduce, ...]

    @property
    def crowded(self) -> bool:
        """Whether the epilogue keeps much in registers: parts of reductions, or several tiles that it reads."""
        return bool(self.reductions) or len(self.of_kind("tile")) > 1

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
    r"v\d+|result\d*|extent_\w+|total\w*|acc\w*|D|c|f|gemm|stream|workspace|parts|(launch|epilogue|finish)\w*|run|cute|cutlass|cuda"
    r"|unpack|interleave|permute|one_batch"
)


def _python_name(name: str) -> str:
    """A Region's name as a Python name that nothing else in a generated module has."""
    usable = name.isidentifier() and not keyword.iskeyword(name) and not _TAKEN.fullmatch(name)
    return name if usable else f"operand_{name}"


def _form(region: Region, group: Group, reverse: bool) -> Form:
    first = group.contractions[0]
    if group.feeds or any(c.left not in region.operand_index for c in group.contractions):
        raise UnsupportedRegion("a contraction of a computed tile (attention) is not one GEMM")
    reductions = tuple(s for s in group.statements if isinstance(s, Reduce))
    for reduction in reductions:
        _check_reduction(region, group, reduction)
    for statement in group.statements:
        if statement.name in group.reduced and {"m", group.column} <= set(region.types[statement.name].axes):
            raise UnsupportedRegion(f"%{statement.name} depends on whole rows or columns, which lie in several tiles")
        if isinstance(statement, Apply) and statement.op not in EXPRESSIONS:
            raise UnsupportedRegion(f"op {statement.op!r} has no expression")
    if len(group.contractions) > 2 or any(c.left != first.left for c in group.contractions):
        raise UnsupportedRegion("a kernel computes one contraction, or two of the same left operand")
    arguments = [*_contracted(region, group), *_epilogue(region, group), *_results(region, group)]
    paired = len(group.contractions) == 2
    form = Form(group, tuple(sorted(arguments, key=lambda a: a.position)), paired, paired and reverse, reductions)
    if form.paired:
        _check_paired(region, form)
    return form


def _check_reduction(region: Region, group: Group, reduction: Reduce) -> None:
    if reduction.input in group.reduced or not {"m", group.column} <= set(region.types[reduction.input].axes):
        raise UnsupportedRegion(f"%{reduction.name} reduces %{reduction.input}, which is no tile")
    if reduction.axis == "m" and reduction.kind != "sum":
        raise UnsupportedRegion(f"%{reduction.name} is a {reduction.kind} over rows; kernels add them")


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
    in_tiles = {i for s in group.statements if s.name not in group.reduced or isinstance(s, Reduce) for i in s.inputs}
    behind = {i for s in group.statements if s.name in group.reduced for i in s.inputs}
    arguments = []
    for operand in region.operands:
        if operand.name in in_tiles | behind:
            if operand.dtype not in STORED:
                raise UnsupportedRegion(f"an operand of type {DTYPE_NAMES[operand.dtype]} can't be read in an epilogue")
            type = region.types[operand.name]
            kind = {(False, False): "scalar", (False, True): "row", (True, False): "col", (True, True): "tile"}[
                type.has_rows, type.column is not None
            ]
            if kind == "scalar" and operand.axes:
                raise UnsupportedRegion(f"operand %{operand.name} differs from batch to batch only")
            if kind != "scalar" and operand.name not in in_tiles:
                kind = "vector"
            arguments.append(_argument(region, operand, kind))
    return arguments


def _argument(region: Region, operand: Operand, kind: str) -> Argument:
    return Argument(_python_name(operand.name), region.operand_index[operand.name], kind, operand.axes, operand.dtype)


def _results(region: Region, group: Group) -> list[Argument]:
    return [_result(region, group, index, result) for index, result in group.yields]


def _result(region: Region, group: Group, index: int, result: Yield) -> Argument:
    if result.dtype not in STORED:
        raise UnsupportedRegion(f"a result of type {DTYPE_NAMES[result.dtype]} can't be stored")
    kind = "total" if result.value in group.reduced else "result"
    name = f"result{index}" if len(region.yields) > 1 else "result"
    return Argument(name, len(region.operands) + index, kind, result.axes, result.dtype, result.order)


def _check_paired(region: Region, form: Form) -> None:
    for right in form.of_kind("right"):
        if right.axes[-1] == form.group.column:
            raise UnsupportedRegion("the right operands of a pair lie along k in memory, these lie along n")
    for result in form.of_kind("result"):
        if result.dtype not in MULTIPLIED or result.order not in ((), tuple(range(len(result.order)))):
            raise UnsupportedRegion("a pair stores 16-bit results in their natural order")
