"""The Region's text form: `to_text` and `parse` are exact inverses.

The text is the `program` argument of the op `postlude::region`, so on one line it holds no quote, backslash or newline:
generated wrapper code pastes it between quotes.
"""

import re
from collections.abc import Callable

import torch

from postlude.ir.ops import OPS, REDUCTIONS
from postlude.ir.region import (
    DTYPE_NAMES,
    DTYPES,
    Apply,
    Const,
    Contract,
    Extent,
    Operand,
    Reduce,
    Region,
    Round,
    Statement,
    Yield,
)


class RegionSyntaxError(ValueError):
    """A Region's text does not parse."""


def to_text(region: Region, *, lines: bool = False) -> str:
    """Print a Region, on one line, or one statement a line for people."""
    parts = [f"region({', '.join(region.axes)})"]
    parts += [f"%{o.name} = operand {_axes(o.axes, o.blocks)} {DTYPE_NAMES[o.dtype]}" for o in region.operands]
    parts += [f"%{s.name} = {_PRINT[type(s)](s)}" for s in region.body]
    parts += [f"yield {_axes(y.axes)} {DTYPE_NAMES[y.dtype]} %{y.value}{_order(y.order)}" for y in region.yields]
    return "\n  ".join(parts) if lines else "; ".join(parts)


def parse(text: str) -> Region:
    """Read what `to_text` prints, either form.

    Raises:
        RegionSyntaxError: names the statement that does not parse, and what was expected. Whether names, axes and types
            fit together is the verifier's to say.
    """
    statements = [part.strip() for part in re.split(r"[;\n]", text) if part.strip()]
    header = re.fullmatch(r"region\(([\w, ]*)\)", statements[0]) if statements else None
    if header is None:
        raise RegionSyntaxError(f"a Region starts with 'region(axes)', got {text[:60]!r}")
    axes = tuple(re.findall(r"\w+", header[1]))
    operands: list[Operand] = []
    body: list[Statement] = []
    yields: list[Yield] = []
    for part in statements[1:]:
        if match := re.fullmatch(rf"yield {_AXES} (\w+) {_NAME}(?: order ([\d ]+))?", part):
            order = tuple(int(number) for number in (match[4] or "").split())
            yields.append(Yield(_split(match[1]), _dtype(match[2], part), match[3], order))
        elif match := re.fullmatch(rf"{_NAME} = operand \[([\w, /]*)\] (\w+)", part):
            operands.append(Operand(match[1], *_blocked(match[2], part, _dtype(match[3], part))))
        elif match := re.fullmatch(rf"{_NAME} = (\w+)(.*)", part):
            body.append(_statement(match[1], match[2], match[3].strip(), part))
        else:
            raise RegionSyntaxError(f"expected '%name = ...' or 'yield ...', got {part!r}")
    return Region(axes, tuple(operands), tuple(body), tuple(yields))


_NAME = r"%(\w+)"
_AXES = r"\[([\w, ]*)\]"

_PRINT: dict[type, Callable[..., str]] = {
    Contract: lambda s: (
        f"contract %{s.left}, %{s.right}{f' shifted %{s.shift}' if s.shift else ''}{f' scaled %{s.scale}' if s.scale else ''}"
        f" : {DTYPE_NAMES[s.accumulate]}"
    ),
    Apply: lambda s: f"{s.op} {', '.join('%' + name for name in s.inputs)}",
    Reduce: lambda s: f"reduce {s.kind} {s.axis} %{s.input}",
    Round: lambda s: f"round_to {DTYPE_NAMES[s.dtype]} %{s.input}",
    Const: lambda s: f"const {s.value!r}",
    Extent: lambda s: f"extent {s.axis}",
}


def _axes(axes: tuple[str, ...], blocks: tuple[int, ...] = ()) -> str:
    sizes = blocks or (1,) * len(axes)
    return f"[{', '.join(axis if size == 1 else f'{axis}/{size}' for axis, size in zip(axes, sizes, strict=True))}]"


def _order(order: tuple[int, ...]) -> str:
    return f" order {' '.join(map(str, order))}" if order else ""


def _split(axes: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", axes))


def _blocked(axes: str, part: str, dtype: torch.dtype) -> tuple[tuple[str, ...], torch.dtype, tuple[int, ...]]:
    names: list[str] = []
    sizes: list[int] = []
    for one in filter(None, (axis.strip() for axis in axes.split(","))):
        match = re.fullmatch(r"(\w+)(?:/([1-9]\d*))?", one)
        if match is None:
            raise RegionSyntaxError(
                f"{one!r} is no axis in {part!r}; expected a name, or a name and the size of its blocks: k/16"
            )
        names.append(match[1])
        sizes.append(int(match[2] or 1))
    return tuple(names), dtype, tuple(sizes) if any(size != 1 for size in sizes) else ()


def _dtype(name: str, part: str) -> torch.dtype:
    if name not in DTYPES:
        raise RegionSyntaxError(f"unknown type {name!r} in {part!r}; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def _statement(name: str, word: str, rest: str, part: str) -> Statement:
    form = rf"{_NAME}, {_NAME}(?: shifted {_NAME})?(?: scaled {_NAME})? : (\w+)"
    if word == "contract" and (match := re.fullmatch(form, rest)):
        return Contract(name, match[1], match[2], _dtype(match[5], part), scale=match[4], shift=match[3])
    if word == "reduce" and (match := re.fullmatch(rf"(\w+) (\w+) {_NAME}", rest)) and match[1] in REDUCTIONS:
        return Reduce(name, match[1], match[2], match[3])
    if word == "round_to" and (match := re.fullmatch(rf"(\w+) {_NAME}", rest)):
        return Round(name, _dtype(match[1], part), match[2])
    if word == "const" and re.fullmatch(r"[-+.\w]+", rest):
        try:
            return Const(name, float(rest))
        except ValueError:
            raise RegionSyntaxError(f"{rest!r} is not a number in {part!r}") from None
    if word == "extent" and re.fullmatch(r"\w+", rest):
        return Extent(name, rest)
    if word in OPS and re.fullmatch(rf"{_NAME}(, {_NAME})*", rest):
        return Apply(name, word, tuple(re.findall(_NAME, rest)))
    raise RegionSyntaxError(f"no statement of a Region has the form {part!r}")
