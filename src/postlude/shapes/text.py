"""The short form of a spec: ``"b s d, d -> b s d"``, in the manner of jaxtyping."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from postlude.errors import SpecError
from postlude.shapes.expressions import OPERATORS, Expression, IntVar, ShapeVar
from postlude.shapes.spec import STATIC, IntermediateSpec, LeafIntSpec, ShapesSpec, TensorSpec

_SYMBOLS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%"}
_FORM = "arguments like `b s 64, y: 2*b _, int(n)`"


def parse(text: str, parameters: Sequence[str], *, guard_free: bool = False) -> ShapesSpec:
    """A spec from its short form.

    One entry for each argument, separated by commas: the dimensions of a tensor, separated by spaces. A name is a variable, the
    same wherever it stands; a number is that size; ``_`` is static; ``2*n``, ``a+b`` are arithmetic, without spaces. ``int(n)``
    is an integer argument. Nothing, or ``...``, leaves an argument static, and ``()`` is a tensor without dimensions. ``y: b d``
    names the argument, which otherwise is the next one. What follows ``->`` is for the reader.

    Args:
        text: the short form.
        parameters: the function's parameters in order; a first one called self or cls does not count.
        guard_free: as in `ShapesSpec`.

    Raises:
        SpecError: it is not of this form, or has more entries than there are parameters.
    """
    names = [name for index, name in enumerate(parameters) if index or name not in ("self", "cls")]
    reader = _Reader(text)
    entries: dict[str, IntermediateSpec] = {}
    for position, entry in enumerate(text.partition("->")[0].split(",")):
        named, colon, shape = entry.rpartition(":")
        if not colon and position >= len(names):
            raise SpecError(f"{text!r} has more entries than there are parameters", f"at most {len(names)}: {', '.join(names)}")
        name = named.strip() if colon else names[position]
        if name in entries:
            raise SpecError(f"{text!r} describes {name!r} twice", "one entry for an argument")
        if shape.strip() not in ("", "..."):
            entries[name] = reader.entry(shape.strip())
    return ShapesSpec(entries, guard_free=guard_free)


class _Reader:
    """One text: its variables by name. A variable of dimensions is not negative."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.variables: dict[str, IntVar] = {}

    def entry(self, shape: str) -> IntermediateSpec:
        if shape == "()":
            return TensorSpec([])
        if shape.startswith("int(") and shape.endswith(")"):
            return self.read(shape[4:-1], IntVar)
        return TensorSpec([self.read(dim, ShapeVar) for dim in shape.split()])

    def read(self, text: str, kind: type[IntVar]) -> LeafIntSpec:
        if text == "_":
            return STATIC
        try:
            return self.value(ast.parse(text, mode="eval").body, kind)
        except (SyntaxError, ValueError, TypeError, ZeroDivisionError) as error:
            raise SpecError(f"{text!r} in {self.text!r}", _FORM) from error

    def value(self, node: ast.expr, kind: type[IntVar]) -> Expression | int:
        if isinstance(node, ast.Name):
            return self.variables.setdefault(node.id, kind(node.id))
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _SYMBOLS:
            operation = OPERATORS[_SYMBOLS[type(node.op)]][0]
            result: Expression | int = operation(self.value(node.left, kind), self.value(node.right, kind))
            return result
        raise ValueError(ast.unparse(node))
