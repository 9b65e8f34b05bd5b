"""Which calls break a spec, what the error says, and that the generated check and the rules agree on all others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from postlude.shapes import (
    STATIC,
    DictSpec,
    IntVar,
    ObjectSpec,
    SeqSpec,
    ShapesSpec,
    ShapeVar,
    ShapeViolation,
    SpecError,
    TensorSpec,
    dynamic_spec,
)
from postlude.shapes.expressions import COMPARISONS, OPERATORS, Expression


def tensor(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


@dataclasses.dataclass
class Holder:
    inner: Any


def function(x: Any, y: Any = None, n: Any = 3, *args: Any, flag: Any = None, **kwargs: Any) -> str:
    return "called"


B, S, N = ShapeVar("b", min=1, max=8), ShapeVar("s", multiple_of=4), IntVar("n", min=-2, max=9)
T = TensorSpec

#: What is violated: the spec, the call, and the argument, dimension, value and rule that the error names.
VIOLATIONS: dict[str, tuple[Any, Callable[[], Any], str, int | None, object, str]] = {
    "not a tensor": ({"x": T([B])}, lambda f: f(3), "x", None, "int", "a tensor of 1 dimensions"),
    "no tensor at all": ({"x": T([B])}, lambda f: f(None), "x", None, "NoneType", "a tensor of 1 dimensions"),
    "too few dimensions": ({"x": T([B, 4])}, lambda f: f(tensor(2)), "x", None, 1, "a tensor of 2 dimensions"),
    "too many dimensions": ({"x": T([])}, lambda f: f(tensor(2)), "x", None, 1, "a tensor of 0 dimensions"),
    "another fixed size": ({"x": T([B, 4])}, lambda f: f(tensor(2, 5)), "x", 1, 5, "4"),
    "below the least size": ({"x": T([B])}, lambda f: f(tensor(0)), "x", 0, 0, "b >= 1"),
    "above the greatest size": ({"x": T([STATIC, B])}, lambda f: f(tensor(0, 9)), "x", 1, 9, "b <= 8"),
    "no multiple": ({"x": T([S])}, lambda f: f(tensor(6)), "x", 0, 6, "s % 4 == 0"),
    "one variable in one tensor": ({"x": T([B, B])}, lambda f: f(tensor(2, 3)), "x", 1, 3, "b"),
    "one variable in two tensors": ({"x": T([B]), "y": T([B])}, lambda f: f(tensor(2), tensor(3)), "y", 0, 3, "b"),
    "one variable in a tensor and an integer": ({"x": T([B]), "n": B}, lambda f: f(tensor(2), n=3), "n", None, 3, "b"),
    "a multiple of a variable": ({"x": T([B]), "y": T([2 * B])}, lambda f: f(tensor(2), tensor(5)), "y", 0, 5, "2 * b"),
    "a variable and a number": ({"x": T([B]), "y": T([B - 1])}, lambda f: f(tensor(2), tensor(2)), "y", 0, 2, "b - 1"),
    "a sum of variables": ({"x": T([B, S, B + S])}, lambda f: f(tensor(2, 4, 7)), "x", 2, 7, "b + s"),
    "a product of variables": ({"x": T([B, S]), "y": T([B * S])}, lambda f: f(tensor(2, 4), tensor(9)), "y", 0, 9, "b * s"),
    "a quotient": ({"x": T([B]), "y": T([B // 3])}, lambda f: f(tensor(7), tensor(3)), "y", 0, 3, "b // 3"),
    "a remainder": ({"x": T([B]), "y": T([B % 3])}, lambda f: f(tensor(7), tensor(2)), "y", 0, 2, "b % 3"),
    "a multiple of nothing else": ({"x": T([2 * B + 1])}, lambda f: f(tensor(6)), "x", 0, 6, "2 * b + 1"),
    "a multiple out of range": ({"x": T([2 * B])}, lambda f: f(tensor(18)), "x", 0, 18, "b <= 8"),
    "a sum with one unknown": ({"x": T([B, B + S])}, lambda f: f(tensor(2, 5)), "x", 1, 5, "s % 4 == 0"),
    "another fixed number": ({"n": 3}, lambda f: f(0, n=4), "n", None, 4, "3"),
    "below the least number": ({"n": N}, lambda f: f(0, n=-3), "n", None, -3, "n >= -2"),
    "above the greatest number": ({"n": N}, lambda f: f(0, n=10), "n", None, 10, "n <= 9"),
    "a float for an integer": ({"n": N}, lambda f: f(0, n=2.0), "n", None, "float", "an integer"),
    "a truth value for an integer": ({"n": N}, lambda f: f(0, n=True), "n", None, "bool", "an integer"),
    "not a dict": ({"x": DictSpec({"a": T([B])})}, lambda f: f([tensor(2)]), "x", None, "list", "a dict with 'a'"),
    "a key that is not there": ({"x": DictSpec({"a": T([B])})}, lambda f: f({"b": 1}), "x", None, None, "a dict with 'a'"),
    "an entry of a dict": ({"x": DictSpec({"a": T([B])})}, lambda f: f({"a": tensor(9)}), "x['a']", 0, 9, "b <= 8"),
    "not a sequence": ({"x": SeqSpec([T([B])])}, lambda f: f({0: 1}), "x", None, "dict", "a list or tuple of 1 elements or more"),
    "too short a sequence": ({"x": SeqSpec([3, 3])}, lambda f: f([3]), "x", None, 1, "a list or tuple of 2 elements or more"),
    "an element of a sequence": ({"x": SeqSpec([STATIC, T([B])])}, lambda f: f((0, tensor(0))), "x[1]", 0, 0, "b >= 1"),
    "no such attribute": ({"x": ObjectSpec({"a": 3})}, lambda f: f(Holder(1)), "x", None, None, "an object with the attributes a"),  # noqa: E501
    "an attribute": ({"x": ObjectSpec({"inner": T([B])})}, lambda f: f(Holder(tensor(9))), "x.inner", 0, 9, "b <= 8"),
    "deep inside": (
        {"x": ObjectSpec({"inner": DictSpec({"a": SeqSpec([T([4])])})})},
        lambda f: f(Holder({"a": [tensor(5)]})),
        "x.inner['a'][0]", 0, 5, "4",
    ),
    "more positional arguments": ({"*args": [T([B])]}, lambda f: f(0, None, 3, tensor(9)), "args[0]", 0, 9, "b <= 8"),
    "too few positional arguments": ({"*args": [T([B])]}, lambda f: f(0), "args", None, 0, "a list or tuple of 1 elements or more"),  # noqa: E501
    "keyword arguments": ({"**kwargs": {"z": T([B])}}, lambda f: f(0, z=tensor(9)), "kwargs['z']", 0, 9, "b <= 8"),
    "no such keyword argument": ({"**kwargs": {"z": T([B])}}, lambda f: f(0), "kwargs", None, None, "a dict with 'z'"),
    "a keyword-only argument": ({"flag": T([B])}, lambda f: f(0, flag=tensor(9)), "flag", 0, 9, "b <= 8"),
    "an optional tensor": ({"x": T([B]), "y": T([B])}, lambda f: f(tensor(2), y=tensor(1)), "y", 0, 1, "b"),
    **{
        f"an assumption, {symbol}": (
            ShapesSpec({"x": T([B, STATIC]), "n": N}, assumptions=[COMPARISONS[symbol](N, 2 * B)]),
            lambda f, n=n: f(tensor(2, 0), n=n),
            "n", None, n, f"n {symbol} 2 * b",
        )
        for symbol, n in {"==": 5, "!=": 4, "<": 4, "<=": 5, ">": 4, ">=": 3}.items()
    },
    "an assumption of divisibility": (
        ShapesSpec({"x": T([B])}, assumptions=[B % 2 == 0]), lambda f: f(tensor(3)), "x", 0, 3, "b % 2 == 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", VIOLATIONS)
def test_the_error_names_what_is_wrong(kind: str) -> None:
    spec, call, argument, dimension, value, rule = VIOLATIONS[kind]
    checked = dynamic_spec(spec)(function)
    with pytest.raises(ShapeViolation) as raised:
        call(checked)
    error = raised.value
    assert (error.argument, error.dimension, error.value, error.rule) == (argument, dimension, value, rule)
    for part in ("function", argument, rule):
        assert part in str(error)


def test_an_argument_that_is_none_by_default_may_be_left_out() -> None:
    checked = dynamic_spec(ShapesSpec({"x": T([B]), "y": T([B, S]), "flag": T([S])}, assumptions=[S <= 4 * B]))(function)
    for arguments in ({}, {"y": tensor(2, 4)}, {"flag": tensor(8)}, {"y": tensor(2, 8), "flag": tensor(8)}, {"y": None}):
        assert checked(tensor(2), **arguments) == "called"
    for arguments in ({"y": tensor(2, 12)}, {"flag": tensor(12)}, {"y": tensor(2, 4), "flag": tensor(8)}, {"flag": tensor(2)}):
        with pytest.raises(ShapeViolation):
            checked(tensor(2), **arguments)


def test_the_signature_stays() -> None:
    def odd(type: Any, /, inner: Any = 7, *len: Any, int: Any = (), **dict: Any) -> Any:
        return type.shape, inner, len, int, dict

    checked = dynamic_spec({"type": T([B, STATIC]), "*args": [STATIC, N], "**kwargs": {"list": IntVar("m", max=9)}})(odd)
    assert checked(tensor(1, 2), 4, None, 5, list=6) == ((1, 2), 4, (None, 5), (), {"list": 6})
    with pytest.raises(ShapeViolation, match=r"dict\['list'\] = 10"):
        checked(tensor(1, 2), 4, None, 5, list=10)


def test_a_wrapper_gets_what_was_passed_and_no_more() -> None:
    import functools

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    checked = dynamic_spec({"x": T([B]), "n": N})(wrapper)
    x = tensor(2)
    assert checked(x=x) == ((), {"x": x})
    assert checked(x, n=4) == ((x,), {"n": 4})
    with pytest.raises(ShapeViolation, match="n <= 9"):
        checked(x, None, 10)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"z": T([B])}, "parameter 'z', which .*function does not have"),
        ({"x": T([B * S])}, "no call tells the value of b"),
        (ShapesSpec({"x": T([B])}, assumptions=[S < B]), "no call tells the value of s"),
        ({"x": T([B // 2])}, "no call tells the value of b"),
        (7, "the spec is 7"),
    ],
)
def test_specs_that_are_not_of_the_function(spec: Any, expected: str) -> None:
    with pytest.raises(SpecError, match=expected):
        dynamic_spec(spec)(function)


def test_a_function_without_variable_arguments() -> None:
    with pytest.raises(SpecError, match=r"'\*args', which .*does not take"):
        dynamic_spec({"*args": [N]})(lambda x: x)


def test_one_spec_for_a_function() -> None:
    with pytest.raises(SpecError, match="has a spec already"):
        dynamic_spec({"x": T([B])})(dynamic_spec({"x": T([B])})(function))


# Random specs: sizes of two tensors and an integer, made of up to three variables that tell themselves.


@st.composite
def variables(draw: st.DrawFn) -> list[ShapeVar]:
    made = []
    for name in draw(st.sampled_from([["a"], ["a", "b"], ["a", "b", "c"]])):
        low, step = draw(st.integers(0, 3)), draw(st.integers(1, 3))
        high = draw(st.none() | st.integers(6, 9))
        made.append(ShapeVar(name, min=low, max=high, multiple_of=step))
    return made


def expressions(leaves: list[ShapeVar]) -> st.SearchStrategy[Any]:
    atoms = st.sampled_from(leaves) | st.integers(1, 3)
    triples = st.tuples(st.sampled_from(list(OPERATORS)), atoms, atoms)
    return triples.map(lambda made: OPERATORS[made[0]][0](made[1], made[2]))


@st.composite
def specs(draw: st.DrawFn) -> tuple[ShapesSpec, list[Any], list[Any], list[ShapeVar]]:
    found = draw(variables())
    entry = st.none() | st.integers(0, 6) | st.sampled_from(found) | expressions(found)
    dims = [*found, *draw(st.lists(entry, max_size=2))]
    other = [value if not isinstance(value, int) or value >= 0 else -value for value in draw(st.lists(entry, max_size=2))]
    symbols = st.sampled_from(list(COMPARISONS))
    pairs = draw(st.lists(st.tuples(symbols, st.sampled_from(found), st.sampled_from(found) | st.integers(0, 6)), max_size=2))
    dims = [abs(value) if type(value) is int else value for value in dims]
    relations = [COMPARISONS[symbol](left, right) for symbol, left, right in pairs]
    return ShapesSpec({"x": T(dims), "y": T(other), "n": found[0]}, assumptions=relations), dims, other, found


def holds(spec: ShapesSpec, dims: list[Any], other: list[Any], found: list[ShapeVar], x: list[int], y: list[int], n: int) -> bool:
    """Whether a call keeps to a spec, from the definition: the values of variables are the first sizes of x."""
    values = dict(zip(found, x, strict=False))
    for variable, value in values.items():
        if value < variable.min or (variable.max is not None and value > variable.max) or value % variable.multiple_of:  # type: ignore[operator]
            return False
    try:
        for entry, size in [*zip(dims, x, strict=True), *zip(other, y, strict=True), (found[0], n)]:
            wanted = entry.evaluate(values) if isinstance(entry, Expression) else entry
            if wanted is not None and wanted != size:
                return False
        return all(relation.evaluate(values) for relation in spec.assumptions)
    except ZeroDivisionError:
        return False


@settings(max_examples=250, deadline=None)
@given(specs(), st.data())
def test_calls_are_accepted_exactly_when_the_rules_hold(made: Any, data: st.DataObject) -> None:
    spec, dims, other, found = made
    checked = dynamic_spec(spec)(lambda x, y, n: "called")
    for _ in range(4):
        values = {variable: data.draw(st.integers(0, 9)) for variable in found}

        def size(entry: Any, values: dict[Any, int] = values) -> int:
            """Mostly the size that the spec wants, so that calls are accepted often enough."""
            try:
                wanted = entry.evaluate(values) if isinstance(entry, Expression) else entry
            except ZeroDivisionError:
                wanted = 0
            drawn = data.draw(st.sampled_from([wanted, wanted, wanted, 2]))
            return drawn if isinstance(drawn, int) and drawn >= 0 else 1

        x, y, n = [size(entry) for entry in dims], [size(entry) for entry in other], size(found[0])
        if holds(spec, dims, other, found, x, y, n):
            assert checked(tensor(*x), tensor(*y), n) == "called"
        else:
            with pytest.raises(ShapeViolation):
                checked(tensor(*x), tensor(*y), n)


def test_the_generated_check_decides_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted calls don't take the slow way."""
    checked = dynamic_spec(ShapesSpec({"x": T([B, S, 2 * S - B]), "n": N}, assumptions=[N <= S]))(function)
    monkeypatch.setitem(checked.__globals__, "__doubt", pytest.fail)
    assert checked(tensor(2, 4, 6), n=4) == "called"
