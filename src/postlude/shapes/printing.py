"""Specs as code: what `repr` prints evaluates to an equal spec. And the one line of spec that describes one argument."""

from __future__ import annotations

import keyword
from collections import Counter
from collections.abc import Iterator
from typing import Any

from postlude.shapes import spec as specs
from postlude.shapes.expressions import Expression, IntVar, Names, Relation
from postlude.shapes.places import Place

_WIDTH = 120


def code(spec: object) -> str:
    """A spec, or a part of one, as one Python expression. A variable that stands in two places is named in the first."""
    return _Printer(spec).text(spec, "")


def line(place: Place | str, spec: specs.IntermediateSpec) -> str:
    """The entry of a ParamsSpec that gives a spec to one place: ``"batch": DictSpec({"ids": TensorSpec([...])}),``.

    Args:
        place: an argument or something within one: ``x``, ``batch['ids']``, ``out.states[1]``.
        spec: what is to be said about it.

    Raises:
        SpecError: the text of the place is none.
    """
    at = Place.parse(place) if isinstance(place, str) else place
    for step in reversed(at.steps):
        if step.attribute is not None:
            spec = specs.ObjectSpec({step.attribute: spec})
        elif isinstance(step.item, str):
            spec = specs.DictSpec({step.item: spec})
        else:
            spec = specs.SeqSpec([specs.STATIC] * int(step.item or 0) + [spec])
    return f'"{at.argument}": {" ".join(code(spec).split())},'


def dimension_line(place: Place | str, rank: int, dim: int, variable: IntVar | None = None) -> str:
    """The entry of a ParamsSpec that lets one dimension of a tensor vary.

    Args:
        place: where the tensor is, as in `line`.
        rank: its number of dimensions.
        dim: which of them varies.
        variable: what it is to be; by default a `ShapeVar` named after the place and the dimension.
    """
    at = Place.parse(place) if isinstance(place, str) else place
    dims: list[specs.LeafIntSpec] = [specs.STATIC] * rank
    dims[dim] = variable if variable is not None else specs.ShapeVar(f"{at.identifier}_{dim}")
    return line(at, specs.TensorSpec(dims))


def variables(spec: object) -> Iterator[IntVar]:
    """Every variable of a spec in the order of printing, each as often as it stands there."""
    if isinstance(spec, (Expression, Relation)):
        yield from spec.variables()
    elif isinstance(spec, specs.ShapesSpec):
        yield from variables(spec.params)
        for assumption in spec.assumptions:
            yield from variables(assumption)
    elif isinstance(spec, specs.ParamsSpec):
        for entry in (*spec.named.values(), *spec.varargs, *spec.varkw.values()):
            yield from variables(entry)
    elif isinstance(spec, (specs.ObjectSpec, specs.DictSpec)):
        for entry in spec.entries.values():
            yield from variables(entry)
    elif isinstance(spec, (specs.SeqSpec, specs.TensorSpec)):
        for entry in spec:
            yield from variables(entry)


def unique_names(found: Iterator[IntVar]) -> dict[IntVar, str]:
    """A name for each variable that no other has, and that the code around it does not use."""
    names: dict[IntVar, str] = {}
    taken = {*specs.__all__, *keyword.kwlist}
    for variable in found:
        if variable in names:
            continue
        name, number = variable.name, 1
        while name in taken:
            number += 1
            name = f"{variable.name}_{number}"
        names[variable] = name
        taken.add(name)
    return names


class _Printer:
    def __init__(self, spec: object) -> None:
        self.names = unique_names(variables(spec))
        self.uses = Counter(variables(spec))
        self.defined: set[IntVar] = set()

    def text(self, spec: Any, indent: str) -> str:
        if spec is specs.STATIC:
            return "STATIC"
        if isinstance(spec, Relation):
            return spec.source(_Defining(self))
        if isinstance(spec, Expression):
            return spec.source(_Defining(self))
        if isinstance(spec, specs.TensorSpec):
            return f"TensorSpec([{', '.join(self.text(dim, '') for dim in spec)}])"
        if isinstance(spec, (specs.DictSpec, specs.ObjectSpec)):
            return f"{type(spec).__name__}({self.mapping(spec.entries, indent)})"
        if isinstance(spec, specs.SeqSpec):
            return f"SeqSpec({self.sequence(spec.entries, indent)})"
        if isinstance(spec, specs.ParamsSpec):
            return f"ParamsSpec({self.params(spec, indent)})"
        if isinstance(spec, specs.ShapesSpec):
            return self.top(spec, indent)
        return repr(spec)

    def top(self, spec: specs.ShapesSpec, indent: str) -> str:
        inner = indent + "    "
        arguments = [self.params(spec.params, inner)]
        if spec.assumptions:
            arguments.append("assumptions=" + self.sequence(spec.assumptions, inner))
        if spec.guard_free:
            arguments.append("guard_free=True")
        return _lay("ShapesSpec(", arguments, ")", indent)

    def params(self, spec: specs.ParamsSpec, indent: str) -> str:
        inner = indent + "    "
        items = [f"{_key(name)}: {self.text(entry, inner)}" for name, entry in spec.named.items()]
        if spec.varargs:
            items.append('"*args": ' + self.sequence(spec.varargs, inner))
        if spec.varkw:
            items.append('"**kwargs": ' + self.mapping(spec.varkw, inner))
        return _lay("{", items, "}", indent)

    def mapping(self, entries: dict[Any, Any], indent: str) -> str:
        return _lay("{", [f"{_key(key)}: {self.text(entry, indent + '    ')}" for key, entry in entries.items()], "}", indent)

    def sequence(self, entries: tuple[Any, ...], indent: str) -> str:
        return _lay("[", [self.text(entry, indent + "    ") for entry in entries], "]", indent)


class _Defining(Names):
    """The names of variables; where a variable stands for the first time, its definition."""

    def __init__(self, printer: _Printer) -> None:
        self.printer = printer

    def __getitem__(self, variable: IntVar) -> str:
        printer = self.printer
        if printer.uses[variable] == 1:
            return variable.definition()
        name = printer.names[variable]
        if variable in printer.defined:
            return name
        printer.defined.add(variable)
        return f"({name} := {variable.definition()})"

    def __iter__(self) -> Iterator[IntVar]:
        return iter(self.printer.names)

    def __len__(self) -> int:
        return len(self.printer.names)


def _key(key: str | int) -> str:
    return '"' + key + '"' if isinstance(key, str) and key.isprintable() and not {'"', "\\"} & set(key) else repr(key)


def _lay(opening: str, items: list[str], closing: str, indent: str) -> str:
    """Items on one line, or one a line where they are too long for that."""
    flat = opening + ", ".join(items) + closing
    if len(indent) + len(flat) <= _WIDTH and "\n" not in flat:
        return flat
    return opening + "".join(f"\n{indent}    {item}," for item in items) + f"\n{indent}{closing}"
