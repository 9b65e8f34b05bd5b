"""A spec from examples: what differed between calls varies, and what changed together is one variable."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from postlude.errors import SpecError
from postlude.shapes.expressions import Expression, IntVar, ShapeVar
from postlude.shapes.places import Place
from postlude.shapes.spec import STATIC, DictSpec, IntermediateSpec, ObjectSpec, ParamsSpec, SeqSpec, ShapesSpec, TensorSpec

#: From how many different values on a relation with an offset is believed: through two points there is always a line.
_ENOUGH = 3


def infer(
    examples: Sequence[Mapping[str, Any] | Sequence[Any]],
    function: Callable[..., Any] | None = None,
    *,
    guard_free: bool = False,
) -> ShapesSpec:
    """A spec that all examples keep to. It prints as code, to be read, corrected and kept.

    Sizes that were the same in all examples are static. Sizes that were always equal to each other are one variable; one that was
    always the same multiple of another, or (where three examples or more differ) always another plus a number, or the sum of
    two, is written so.

    Args:
        examples: calls: dicts of arguments by name, or sequences of positional arguments.
        function: the function or module that was called; needed for positional arguments.
        guard_free: as in `ShapesSpec`.

    Raises:
        SpecError: there are fewer than two examples, or they differ in more than sizes.
    """
    if len(examples) < 2:
        raise SpecError(f"there are {len(examples)} examples to infer from", "two or more, that differ in what varies")
    calls = [_by_name(example, function) for example in examples]
    sizes = _Sizes(len(calls))
    names = list(dict.fromkeys(name for call in calls for name in call))
    trees = {name: sizes.collect(Place(name), [call.get(name) for call in calls]) for name in names}
    known = sizes.solve()
    entries = {name: _spec(tree, known) for name, tree in trees.items()}
    return ShapesSpec(ParamsSpec({name: entry for name, entry in entries.items() if entry is not STATIC}), guard_free=guard_free)


def _by_name(example: Mapping[str, Any] | Sequence[Any], function: Callable[..., Any] | None) -> dict[str, Any]:
    if isinstance(example, Mapping):
        return dict(example)
    if function is None:
        raise SpecError("there is an example of positional arguments, and no function", "infer(examples, function)")
    target = function.forward if isinstance(function, torch.nn.Module) else function
    return dict(inspect.signature(target).bind(*example).arguments)


@dataclasses.dataclass
class _Node:
    """A part of the arguments: a size by its number, or parts by name, index or dimension."""

    kind: type | None
    parts: dict[Any, _Node] = dataclasses.field(default_factory=dict)
    size: int | None = None


class _Sizes:
    """Every size of the arguments, with its values in all examples (None where an example has not got it)."""

    def __init__(self, examples: int) -> None:
        self.examples = examples
        self.columns: list[tuple[int | None, ...]] = []
        self.names: list[str] = []
        self.kinds: list[type[IntVar]] = []

    def collect(self, place: Place, values: list[Any]) -> _Node:
        there = [value for value in values if value is not None]
        first = there[0] if there else None
        if isinstance(first, torch.Tensor):
            self.demand(place, there, torch.Tensor)
            if len({value.dim() for value in there}) > 1:
                raise SpecError(f"{place} has different numbers of dimensions in the examples", "tensors of one rank")
            node = _Node(TensorSpec)
            for dim in range(first.dim()):
                column = tuple(None if value is None else int(value.shape[dim]) for value in values)
                node.parts[dim] = self.add(column, f"{place.identifier}_{dim}", ShapeVar)
            return node
        if isinstance(first, int) and not isinstance(first, bool):
            self.demand(place, there, int)
            return self.add(tuple(values), place.identifier, IntVar)
        if dataclasses.is_dataclass(first):
            self.demand(place, there, type(first))
            keys: Sequence[Any] = [field.name for field in dataclasses.fields(first)]
            return self.parts(ObjectSpec, place.attribute, keys, [_none_or(getattr, value) for value in values])
        if isinstance(first, Mapping):
            self.demand(place, there, Mapping)
            keys = [key for key in first if isinstance(key, (str, int)) and all(key in value for value in there)]
            return self.parts(DictSpec, place.item, keys, [_none_or(lambda v, key: v[key], value) for value in values])
        if isinstance(first, (list, tuple)):
            self.demand(place, there, (list, tuple))
            keys = range(min(map(len, there)))
            return self.parts(SeqSpec, place.item, keys, [_none_or(lambda v, key: v[key], value) for value in values])
        return _Node(None)

    def parts(self, kind: type, step: Callable[[Any], Place], keys: Sequence[Any], getters: list[Callable[[Any], Any]]) -> _Node:
        return _Node(kind, {key: self.collect(step(key), [get(key) for get in getters]) for key in keys})

    def demand(self, place: Place, values: list[Any], kind: Any) -> None:
        for value in values:
            if not isinstance(value, kind):
                raise SpecError(f"{place} is of different types in the examples", "arguments that differ in sizes only")

    def add(self, column: tuple[int | None, ...], name: str, kind: type[IntVar]) -> _Node:
        self.columns.append(column)
        self.names.append(name)
        self.kinds.append(kind)
        return _Node(None, size=len(self.columns) - 1)

    def solve(self) -> list[Expression | None]:
        """What each size is: static, a variable, or made of variables that were found before; small ones are found first."""
        found: list[Expression | None] = [STATIC] * len(self.columns)
        variables: list[tuple[tuple[int | None, ...], Expression]] = []
        order = sorted(range(len(self.columns)), key=lambda index: sum(abs(value or 0) for value in self.columns[index]))
        # Sizes that every example has come first: what depends on others should depend on these.
        for index in sorted(order, key=lambda index: None in self.columns[index]):
            column = self.columns[index]
            if len({value for value in column if value is not None}) < 2:
                continue
            explained = _explain(column, variables)
            if explained is None:
                explained = self.kinds[index](self.names[index])
                variables.append((column, explained))
            found[index] = explained
        return found


def _none_or(get: Callable[[Any, Any], Any], value: Any) -> Callable[[Any], Any]:
    return lambda key: None if value is None else get(value, key)


def _explain(column: tuple[int | None, ...], variables: list[tuple[tuple[int | None, ...], Expression]]) -> Expression | None:
    """A column in terms of variables that are known in every example that has it."""
    rows = [index for index, value in enumerate(column) if value is not None]
    usable = [(known, variable) for known, variable in variables if all(known[row] is not None for row in rows)]
    points = [[(known[row], column[row]) for row in rows] for known, _ in usable]
    for pairs, (_, variable) in zip(points, usable, strict=True):
        if all(x == y for x, y in pairs):
            return variable
    for pairs, (_, variable) in zip(points, usable, strict=True):
        line = _line(pairs)  # type: ignore[arg-type]
        if line is not None:
            slope, offset = line
            scaled = variable if slope == 1 else slope * variable
            return scaled if offset == 0 else scaled + offset
    if len({column[row] for row in rows}) >= _ENOUGH:
        for (a, first), (b, second) in itertools.combinations(usable, 2):
            if all(a[row] + b[row] == column[row] for row in rows):  # type: ignore[operator]
                return first + second
    return None


def _line(pairs: list[tuple[int, int]]) -> tuple[int, int] | None:
    """Whole numbers slope >= 1 and offset of a line through all points; without offset where there are few of them."""
    distinct = sorted(set(pairs))
    if len({x for x, _ in distinct}) < 2 or len({x for x, _ in distinct}) != len(distinct):
        return None
    (x0, y0), (x1, y1) = distinct[:2]
    slope, remainder = divmod(y1 - y0, x1 - x0)
    offset = y0 - slope * x0
    if remainder or slope < 1 or any(slope * x + offset != y for x, y in distinct):
        return None
    if offset and len(distinct) < _ENOUGH:
        return None
    return slope, offset


def _spec(node: _Node, known: list[Expression | None]) -> IntermediateSpec:
    if node.size is not None:
        return known[node.size]
    parts = {key: _spec(part, known) for key, part in node.parts.items()}
    if all(part is STATIC for part in parts.values()):
        return STATIC
    if node.kind is TensorSpec:
        return TensorSpec([known[part.size] for part in node.parts.values() if part.size is not None])
    if node.kind is SeqSpec:
        last = max(key for key, part in parts.items() if part is not STATIC)
        return SeqSpec([parts[key] for key in range(last + 1)])
    named = {key: part for key, part in parts.items() if part is not STATIC}
    return ObjectSpec(named) if node.kind is ObjectSpec else DictSpec(named)
