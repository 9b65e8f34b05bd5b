"""The function that stands in front of a function with a spec, as generated Python source.

It has the signature of that function, checks the whole spec in straight-line code without a single Python call, and calls the
function. Where the check fails, or meets something that it does not know (a SymInt), the slow way in `rules` decides.
"""

from __future__ import annotations

import inspect
import keyword
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from postlude.shapes.expressions import IntVar
from postlude.shapes.places import Place
from postlude.shapes.rules import Container, Rules, ScalarRule, TensorRule, steps

_KINDS = inspect.Parameter
_MOST_OPTIONAL = 6
#: Globals of the generated code. Underscores, since a parameter may be called `type` or `inner`.
BUILTINS = {f"__{kind.__name__}": kind for kind in (Tensor, Mapping, isinstance, type, len, int, dict, list, tuple)}
_CAUGHT = "(TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)"


def front(rules: Rules, signature: inspect.Signature, *, own: bool, inlined: bool = False) -> str:
    """Source of a function `front` that checks a call and makes it.

    Its globals are to be `BUILTINS`, `__inner` (the function), `__doubt` (called with the arguments by name), and `__hook`,
    `__hooks` and `__register`: a hook that must be in a list, and what puts it there. Where it is inlined, `__unbacked` instead,
    which tells whether sizes are unbacked.

    Args:
        rules: what is checked.
        signature: the function's.
        own: whether the function's code has this signature. If not, it is a wrapper that takes anything and passes it on, and so
            must this function: what was not passed is not passed on.
        inlined: whether it is for Dynamo, within another function that is compiled. Then nobody needs the hook. Of unbacked sizes
            nothing can be asked: `__inner`, if it has this signature, is to state the conditions.
    """
    writer = _Writer(rules, signature, "__unbacked() or " if inlined and own else "")
    optional = tuple(sorted(rules.optional))
    # Of very many optional arguments there are too many sets: then the slow way decides.
    check = writer.check(optional) if len(optional) <= _MOST_OPTIONAL else [f"{writer.fine} = False"]
    arguments = ", ".join(f"{name!r}: {name}" for name in signature.parameters)
    body = ["try:", *("    " + line for line in check), f"except {_CAUGHT}:", f"    {writer.fine} = False"]
    body += [f"if not {writer.fine}:", f"    __doubt({{{arguments}}})"]
    if not inlined:
        body += ["if __hook not in __hooks:", "    __register()"]
    if own:
        return _function("front", signature, [*body, f"return __inner({_passed(signature)})"])
    names = "".join(f"{name}, " for name in signature.parameters)
    passed_on = [f"({names}) = __bind(*__args, **__kwargs)", *body, "return __inner(*__args, **__kwargs)"]
    return (
        _function("__bind", signature, [f"return ({names})"])
        + "\n    ".join(["def front(*__args, **__kwargs):", *passed_on])
        + "\n"
    )


def facts(rules: Rules, signature: inspect.Signature, *, marked: bool) -> str:
    """Source of a function `stated` that tells a tracer what a spec says of symbolic sizes, then calls `__inner`.

    Its global `__check` is torch._check.

    Args:
        rules: what is told.
        signature: the function's.
        marked: whether dimensions of one variable are one symbol anyway.
    """
    body: list[str] = []
    names: dict[IntVar, str] = {}

    def state(text: str, *places: Place) -> None:
        given = sorted({place.argument for place in places} & rules.optional)
        condition = " and ".join(f"{name} is not None" for name in given)
        body.append(f"if {condition}: __check({text})" if given else f"__check({text})")

    order = steps(rules)
    for variable, (measure, coefficient, rest) in order.items():
        if measure.expression is variable:
            names[variable] = str(measure)
        else:
            text = f"{measure} - ({rest.source(names)})"
            names[variable] = f"(({text}) // {coefficient})"
            if coefficient not in (1, -1):
                state(f"({text}) % {coefficient} == 0", measure.place, *(order[other][0].place for other in rest.variables()))
        for text in _range(variable, names[variable], never_negative=measure.dimension is not None):
            state(text, measure.place)
    for measure in rules.measures:
        shared = marked and isinstance(measure.expression, IntVar) and measure.dimension is not None
        involved = list(measure.expression.variables())
        text = measure.expression.source(names)
        if involved and str(measure) != text and not (shared and order[involved[0]][0].dimension is not None):
            state(f"{measure} == {text}", measure.place, *(order[variable][0].place for variable in involved))
    for relation in rules.relations:
        state(relation.source(names), *(order[variable][0].place for variable in relation.variables()))
    return _function("stated", signature, [*body, f"return __inner({_passed(signature)})"])


def _function(name: str, signature: inspect.Signature, body: list[str]) -> str:
    return "\n    ".join([f"def {name}({_parameters(signature)}):", *body]) + "\n"


def _parameters(signature: inspect.Signature) -> str:
    """The parameters as source; every default is None, and to be set afterwards."""
    plain = [
        parameter.replace(annotation=_KINDS.empty, default=None if parameter.default is not _KINDS.empty else _KINDS.empty)
        for parameter in signature.parameters.values()
    ]
    return str(inspect.Signature(plain))[1:-1]


def _passed(signature: inspect.Signature) -> str:
    shapes: dict[Any, str] = {_KINDS.VAR_POSITIONAL: "*{0}", _KINDS.VAR_KEYWORD: "**{0}", _KINDS.KEYWORD_ONLY: "{0}={0}"}
    return ", ".join(shapes.get(p.kind, "{0}").format(name) for name, p in signature.parameters.items())


class _Writer:
    """Lines of the check, with a local name for everything that is looked at."""

    def __init__(self, rules: Rules, signature: inspect.Signature, unless: str) -> None:
        self.rules = rules
        self.unless = unless
        self.taken = {*signature.parameters, *keyword.kwlist}
        self.fine = self.name("fine")
        self.locals: dict[object, str] = {}

    def name(self, wanted: str) -> str:
        """A name of the function's own."""
        name = wanted
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name

    def local(self, thing: object, wanted: str) -> str:
        """The local name of a place, a size or a variable."""
        if thing not in self.locals:
            self.locals[thing] = self.name(wanted)
        return self.locals[thing]

    def check(self, undecided: tuple[str, ...], absent: frozenset[str] = frozenset()) -> list[str]:
        """A straight line for each set of optional arguments that a call may have."""
        if not undecided:
            return self.straight(absent)
        first, *others = undecided
        without = self.check(tuple(others), absent | {first})
        given = self.check(tuple(others), absent)
        return [f"if {first} is None:", *("    " + line for line in without), "else:", *("    " + line for line in given)]

    def straight(self, absent: frozenset[str]) -> list[str]:
        lines: list[str] = []
        conditions: list[str] = []
        for rule in self.rules.kinds:
            if rule.place.argument not in absent:
                self.look(rule, lines, conditions)
        names: dict[IntVar, str] = {}
        for variable, (measure, coefficient, rest) in steps(self.rules, absent).items():
            size = self.size(measure.place, measure.dimension)
            if measure.expression is variable:
                names[variable] = size
            else:
                names[variable] = self.local(variable, self.rules.names[variable])
                lines.append(f"{names[variable]} = ({size} - ({rest.source(names)})) // {coefficient}")
            conditions += _range(variable, names[variable], never_negative=measure.dimension is not None)
        for measure in self.rules.measures:
            if measure.place.argument in absent or not all(v in names for v in measure.expression.variables()):
                continue
            size, expected = self.size(measure.place, measure.dimension), measure.expression.source(names)
            if size != expected:
                conditions.append(f"{size} == {expected}")
        for relation in self.rules.relations:
            if all(variable in names for variable in relation.variables()):
                conditions.append(relation.source(names))
        return [*lines, f"{self.fine} = {self.unless}{' and '.join(conditions) or True}"]

    def look(self, rule: Container | TensorRule | ScalarRule, lines: list[str], conditions: list[str]) -> None:
        """What a rule is about, in local names."""
        here = self.at(rule.place, lines)
        if isinstance(rule, ScalarRule):
            conditions.append(f"__type({here}) is __int")
        elif isinstance(rule, TensorRule):
            conditions.append(f"__isinstance({here}, __Tensor)")
            sizes = "".join(f"{self.size(rule.place, dimension)}, " for dimension in range(rule.rank))
            lines.append(f"{sizes or '()'} = {here}.shape")
        elif rule.kind == "sequence":
            conditions += [f"__isinstance({here}, (__list, __tuple))", f"__len({here}) >= {len(rule.keys)}"]
        elif rule.kind == "dict":
            conditions += [f"__isinstance({here}, (__dict, __Mapping))", *(f"{key!r} in {here}" for key in rule.keys)]
        else:
            lines += [f"{here}.{key}" for key in rule.keys]

    def at(self, place: Place, lines: list[str]) -> str:
        """The local name of what is at a place."""
        if not place.steps:
            return place.argument
        if place not in self.locals or not any(line.startswith(f"{self.locals[place]} = ") for line in lines):
            parent = self.at(Place(place.argument, place.steps[:-1]), lines)
            lines.append(f"{self.local(place, place.identifier)} = {parent}{place.steps[-1]}")
        return self.locals[place]

    def size(self, place: Place, dimension: int | None) -> str:
        if dimension is None:
            return place.argument if not place.steps else self.locals[place]
        return self.local((place, dimension), f"{place.identifier}_{dimension}")


def _range(variable: IntVar, name: str, *, never_negative: bool) -> list[str]:
    conditions = []
    if variable.min is not None and not (never_negative and variable.min <= 0):
        conditions.append(f"{name} >= {variable.min}")
    if variable.max is not None:
        conditions.append(f"{name} <= {variable.max}")
    if variable.multiple_of != 1:
        conditions.append(f"{name} % {variable.multiple_of} == 0")
    return conditions
