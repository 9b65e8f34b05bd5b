"""What a spec demands of one function's calls, as a flat list, and which rule a call breaks.

This is the meaning of a spec. `generate` turns the same list into the code that every call runs; where that code doubts a call,
the slow way here decides, and words the error.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from postlude.errors import ShapeViolation, SpecError
from postlude.shapes.expressions import Binary, Constant, Expression, IntVar, Relation, expression
from postlude.shapes.places import Place
from postlude.shapes.printing import unique_names, variables
from postlude.shapes.spec import DictSpec, IntermediateSpec, ObjectSpec, SeqSpec, ShapesSpec, TensorSpec


@dataclass(frozen=True)
class Container:
    """Something at a place that must be of a kind, and hold what the spec names."""

    place: Place
    kind: str
    keys: tuple[str | int, ...]


@dataclass(frozen=True)
class TensorRule:
    """A tensor of so many dimensions at a place."""

    place: Place
    rank: int


@dataclass(frozen=True)
class ScalarRule:
    """An integer at a place."""

    place: Place


@dataclass(frozen=True)
class Measure:
    """A size (or an integer argument, where there is no dimension) that an expression gives."""

    place: Place
    dimension: int | None
    expression: Expression

    def __str__(self) -> str:
        return f"{self.place}" if self.dimension is None else f"{self.place}.shape[{self.dimension}]"


@dataclass
class Rules:
    """All rules of one function.

    Attributes:
        function: its name.
        kinds: what must be where, in the order of the spec.
        measures: what sizes must be.
        relations: the assumptions.
        optional: arguments that may be None or left out, with all that is in them: their default is None.
        names: a name for each variable.
    """

    function: str
    guard_free: bool
    kinds: list[Container | TensorRule | ScalarRule] = field(default_factory=list)
    measures: list[Measure] = field(default_factory=list)
    relations: tuple[Relation, ...] = ()
    optional: frozenset[str] = frozenset()
    names: dict[IntVar, str] = field(default_factory=dict)

    def text(self, rule: Expression | Relation) -> str:
        return rule.source(self.names)


def rules_for(spec: ShapesSpec, signature: inspect.Signature, function: str) -> Rules:
    """The rules that a spec gives a function of this signature.

    Raises:
        SpecError: it names parameters that the function does not have, or variables whose values no call would tell.
    """
    parameters = signature.parameters
    kinds = {parameter.kind: name for name, parameter in parameters.items()}
    varargs, varkw = kinds.get(inspect.Parameter.VAR_POSITIONAL), kinds.get(inspect.Parameter.VAR_KEYWORD)
    known = [name for name in parameters if name not in (varargs, varkw)]
    for name in spec.params.named:
        if name not in known:
            raise SpecError(f"there is a parameter {name!r}, which {function} does not have", f"one of {', '.join(known)}")
    for key, entries, found in (("*args", spec.params.varargs, varargs), ("**kwargs", spec.params.varkw, varkw)):
        if entries and found is None:
            raise SpecError(f"there is {key!r}, which {function} does not take", f"one of {', '.join(known)}")

    rules = Rules(function, spec.guard_free, names=unique_names(variables(spec)), relations=spec.assumptions)
    rules.optional = frozenset(
        name for name, entry in spec.params.named.items() if entry is not None and parameters[name].default is None
    )
    for name, entry in spec.params.named.items():
        _flatten(rules, Place(name), entry)
    if spec.params.varargs:
        _flatten(rules, Place(varargs or ""), SeqSpec(spec.params.varargs))
    if spec.params.varkw:
        _flatten(rules, Place(varkw or ""), DictSpec(spec.params.varkw))

    told = set(steps(rules))
    for variable in variables(spec):
        if variable not in told:
            raise SpecError(
                f"no call tells the value of {rules.names[variable]}, which stands in no size by itself",
                "each variable, or a multiple of it plus what other variables tell, to be the size of some dimension",
            )
    return rules


def _flatten(rules: Rules, place: Place, spec: IntermediateSpec) -> None:
    if spec is None:
        return
    if isinstance(spec, TensorSpec):
        rules.kinds.append(TensorRule(place, len(spec)))
        for index, dim in enumerate(spec):
            if (found := expression(dim)) is not None:
                rules.measures.append(Measure(place, index, found))
    elif isinstance(spec, (DictSpec, ObjectSpec)):
        step = place.item if isinstance(spec, DictSpec) else place.attribute
        rules.kinds.append(Container(place, "dict" if isinstance(spec, DictSpec) else "object", tuple(spec.entries)))
        for key, entry in spec.items():
            _flatten(rules, step(key), entry)
    elif isinstance(spec, SeqSpec):
        rules.kinds.append(Container(place, "sequence", tuple(range(len(spec)))))
        for index, entry in enumerate(spec):
            _flatten(rules, place.item(index), entry)
    elif (found := expression(spec)) is not None:
        rules.kinds.append(ScalarRule(place))
        rules.measures.append(Measure(place, None, found))


def steps(rules: Rules, absent: frozenset[str] = frozenset()) -> dict[IntVar, tuple[Measure, int, Expression]]:
    """How each variable's value is found, in an order in which it can be.

    A measure that is `coefficient * variable + rest`, where all variables of `rest` are known, tells the variable.

    Args:
        rules: the rules.
        absent: arguments that the call does not have.

    Returns:
        The measure, the coefficient and the rest, for each variable that the call tells.
    """
    there = [measure for measure in rules.measures if measure.place.argument not in absent]
    # What is always there tells first, so that as little as possible depends on arguments that may be absent.
    there.sort(key=lambda measure: measure.place.argument in rules.optional)
    found: dict[IntVar, tuple[Measure, int, Expression]] = {}
    for simple in (True, False):
        progress = True
        while progress:
            progress = False
            for measure in there:
                unknown = {variable for variable in measure.expression.variables() if variable not in found}
                if len(unknown) != 1 or (simple and not isinstance(measure.expression, IntVar)):
                    continue
                (variable,) = unknown
                solved = linear(measure.expression, variable)
                if solved is not None and solved[0] != 0:
                    found[variable] = (measure, *solved)
                    progress = True
    return found


def linear(expression: Expression, variable: IntVar) -> tuple[int, Expression] | None:
    """An expression as `coefficient * variable + rest`, the rest without the variable; None where it has not that form."""
    if expression is variable:
        return 1, Constant(0)
    if variable not in set(expression.variables()):
        return 0, expression
    if not isinstance(expression, Binary) or expression.symbol not in "+-*":
        return None
    left, right = linear(expression.left, variable), linear(expression.right, variable)
    if left is None or right is None:
        return None
    if expression.symbol == "*":
        for factor, other in ((expression.left, right), (expression.right, left)):
            if isinstance(factor, Constant):
                return factor.value * other[0], factor * other[1]
        return None
    sign = 1 if expression.symbol == "+" else -1
    return left[0] + sign * right[0], Binary(expression.symbol, left[1], right[1])


def values_of(rules: Rules, arguments: Mapping[str, Any]) -> dict[IntVar, Any]:
    """The value of every variable in a call that keeps to the rules. Sizes may be SymInts."""
    found: dict[IntVar, Any] = {}
    for variable, (measure, coefficient, rest) in steps(rules, absent_arguments(rules, arguments)).items():
        found[variable] = (size_of(measure, arguments) - rest.evaluate(found)) // coefficient
    return found


def size_of(measure: Measure, arguments: Mapping[str, Any]) -> Any:
    """What is measured, in a call's arguments."""
    value = measure.place.find(arguments)
    return value if measure.dimension is None else value.shape[measure.dimension]


def violation(rules: Rules, arguments: Mapping[str, Any]) -> ShapeViolation | None:
    """The first rule that a call breaks, as an error; None where it keeps to all of them.

    Args:
        rules: the rules of the function.
        arguments: its arguments by parameter, as `inspect.BoundArguments.arguments` has them.
    """
    absent = absent_arguments(rules, arguments)
    for rule in rules.kinds:
        if rule.place.argument not in absent and (wrong := _wrong_kind(rule, arguments)) is not None:
            found, value, expected = wrong
            return ShapeViolation(rules.function, found, expected, argument=str(rule.place), value=value, rule=expected)
    return _wrong_value(rules, arguments, absent)


def _wrong_kind(rule: Container | TensorRule | ScalarRule, arguments: Mapping[str, Any]) -> tuple[str, object, str] | None:
    """What is found, its value, and what was expected, where something is not of its kind."""
    try:
        value = rule.place.find(arguments)
    except (LookupError, AttributeError, TypeError):
        return f"nothing at {rule.place}", None, _expected(rule)
    name = type(value).__name__
    if isinstance(rule, TensorRule):
        if not isinstance(value, torch.Tensor):
            return f"{rule.place} of type {name}", name, _expected(rule)
        if value.is_nested and value.layout is torch.strided:
            return f"{rule.place}, a nested tensor without sizes", name, _expected(rule)
        if value.dim() != rule.rank:
            return f"{rule.place} of {value.dim()} dimensions", value.dim(), _expected(rule)
    elif isinstance(rule, ScalarRule):
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            return f"{rule.place} of type {name}", name, _expected(rule)
    elif rule.kind == "sequence":
        if not isinstance(value, (list, tuple)):
            return f"{rule.place} of type {name}", name, _expected(rule)
        if len(value) < len(rule.keys):
            return f"{rule.place} of {len(value)} elements", len(value), _expected(rule)
    elif rule.kind == "dict":
        if not isinstance(value, Mapping):
            return f"{rule.place} of type {name}", name, _expected(rule)
        for key in rule.keys:
            if key not in value:
                return f"{rule.place} without {key!r}", None, _expected(rule)
    else:
        for key in rule.keys:
            if not hasattr(value, str(key)):
                return f"{rule.place} of type {name} without {key}", None, _expected(rule)
    return None


def _expected(rule: Container | TensorRule | ScalarRule) -> str:
    if isinstance(rule, TensorRule):
        return f"a tensor of {rule.rank} dimensions"
    if isinstance(rule, ScalarRule):
        return "an integer"
    if rule.kind == "sequence":
        return f"a list or tuple of {len(rule.keys)} elements or more"
    keys = ", ".join(map(repr if rule.kind == "dict" else str, rule.keys))
    return f"a dict with {keys}" if rule.kind == "dict" else f"an object with the attributes {keys}"


def _wrong_value(rules: Rules, arguments: Mapping[str, Any], absent: frozenset[str]) -> ShapeViolation | None:
    order = steps(rules, absent)
    values: dict[IntVar, Any] = {}

    def where(variables: Iterable[IntVar]) -> str:
        known = {variable: order[variable][0] for variable in variables}
        texts = [f"{rules.names[variable]} = {values[variable]} (from {measure})" for variable, measure in known.items()]
        return f", with {' and '.join(texts)}" if texts else ""

    def wrong(measure: Measure, rule: str, explanation: str = "") -> ShapeViolation:
        size = size_of(measure, arguments)
        argument, dimension = str(measure.place), measure.dimension
        found = f"{measure} = {size}"
        return ShapeViolation(
            rules.function, found, f"{rule}{explanation}", argument=argument, dimension=dimension, value=size, rule=rule
        )

    for variable, (measure, coefficient, rest) in order.items():
        rested = size_of(measure, arguments) - rest.evaluate(values)
        if rested % coefficient:
            others = [other for other in measure.expression.variables() if other is not variable]
            return wrong(measure, rules.text(measure.expression), f" for an integer {rules.names[variable]}" + where(others))
        values[variable] = rested // coefficient
        if (broken := variable.broken_rule(values[variable])) is not None:
            shown = "" if measure.expression is variable else f", with {variable.name} = {values[variable]}"
            return wrong(measure, broken, shown)
    for measure in rules.measures:
        if measure.place.argument in absent or not all(v in values for v in measure.expression.variables()):
            continue
        try:
            expected = measure.expression.evaluate(values)
        except ZeroDivisionError:
            expected = None
        if size_of(measure, arguments) != expected:
            text = rules.text(measure.expression)
            explanation = "" if isinstance(measure.expression, Constant) else f" = {expected}"
            return wrong(measure, text, explanation + where(measure.expression.variables()))
    for relation in rules.relations:
        involved = list(relation.variables())
        if not all(variable in values for variable in involved):
            continue
        try:
            met = relation.evaluate(values)
        except ZeroDivisionError:
            met = False
        if not met:
            return wrong(order[involved[0]][0], rules.text(relation), where(involved))
    return None


def bound_arguments(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by parameter, with the defaults of those that it leaves out."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def absent_arguments(rules: Rules, arguments: Mapping[str, Any]) -> frozenset[str]:
    """Arguments that a call has left out, or given as None, where the spec lets it."""
    return frozenset(name for name in rules.optional if arguments.get(name) is None)
