"""Specs are data that print as the code that makes them."""

import pytest

import postlude.shapes as shapes
from postlude.shapes import (
    STATIC,
    DictSpec,
    IntVar,
    ObjectSpec,
    ParamsSpec,
    Place,
    SeqSpec,
    ShapesSpec,
    ShapeVar,
    SpecError,
    TensorSpec,
    dimension_line,
    line,
)

NAMES = {name: getattr(shapes, name) for name in shapes.__all__}


def evaluate(text: str) -> object:
    return eval(text, dict(NAMES))


def many_things() -> ShapesSpec:
    batch = ShapeVar("batch", min=1, max=64, optimization_hint=8)
    other_batch = ShapeVar("batch", multiple_of=4)
    n = IntVar("n", min=-3)
    lonely, keyword = ShapeVar(), ShapeVar("lambda")
    return ShapesSpec(
        {
            "x": TensorSpec([batch, STATIC, 2 * (n + 1) - batch // 3]),
            "n": n,
            "options": DictSpec({"ids": TensorSpec([other_batch, lonely]), 3: 7, 'a"b': STATIC}),
            "out": ObjectSpec({"states": SeqSpec([TensorSpec([]), TensorSpec([keyword, keyword])])}),
            "*args": [other_batch, STATIC],
            "**kwargs": {"y": TensorSpec([batch - (n - 1)])},
        },
        assumptions=[batch <= other_batch, n % 2 == 0, batch * 2 != n, -n < 5],
        guard_free=True,
    )


def test_what_is_printed_evaluates_to_an_equal_spec() -> None:
    spec = many_things()
    again = evaluate(repr(spec))
    assert again == spec
    assert repr(again) == repr(spec)


@pytest.mark.parametrize(
    "spec",
    [ShapesSpec(), ParamsSpec({"x": 3}), TensorSpec([]), SeqSpec([]), DictSpec({}), ObjectSpec({"a": ShapeVar("a")})],
)
def test_every_class_prints_as_code(spec: object) -> None:
    assert evaluate(repr(spec)) == spec


def test_expected_text() -> None:
    n = ShapeVar("n")
    spec = ShapesSpec({"x": TensorSpec([n, STATIC]), "y": TensorSpec([2 * n, 8])}, assumptions=[n % 2 == 0])
    assert repr(spec) == (
        'ShapesSpec({"x": TensorSpec([(n := ShapeVar("n")), STATIC]), "y": TensorSpec([2 * n, 8])}, assumptions=[n % 2 == 0])'
    )


def test_specs_differ_where_their_variables_are_shared_differently() -> None:
    a, b = ShapeVar("n"), ShapeVar("n")
    assert TensorSpec([a, a]) == TensorSpec([b, b])
    assert TensorSpec([a, a]) != TensorSpec([a, b])
    assert TensorSpec([a]) != TensorSpec([ShapeVar("n", max=3)])
    assert ShapesSpec({"x": TensorSpec([a])}) != ShapesSpec({"x": TensorSpec([a])}, guard_free=True)


def test_operators_keep_their_order() -> None:
    a, b = IntVar("a"), IntVar("b")
    for expression in (a - (b - 1), (a - b) - 1, a * (b + 2), a * b + 2, -(a + b) % 3, a // (b * 2), 7 // a - 1, a - -1, a * -2):
        again = eval(repr(expression).replace('IntVar("a")', "a"), {"a": a, "b": b})
        for values in ({a: 5, b: 3}, {a: 2, b: 7}, {a: -4, b: 1}):
            assert again.evaluate(values) == expression.evaluate(values)


def test_a_relation_has_no_truth_value() -> None:
    a = ShapeVar("a")
    with pytest.raises(TypeError, match="assumptions"):
        bool(a < 3)
    with pytest.raises(TypeError, match="two assumptions"):
        _ = 1 < a < 3
    with pytest.raises(TypeError, match="truth value"):
        _ = a and 1


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("x", '"x": TensorSpec([ShapeVar("x_0"), STATIC]),'),
        ("batch['ids']", '"batch": DictSpec({"ids": TensorSpec([ShapeVar("batch_ids_0"), STATIC])}),'),
        (
            "out.states[1]",
            '"out": ObjectSpec({"states": SeqSpec([STATIC, TensorSpec([ShapeVar("out_states_1_0"), STATIC])])}),',
        ),
    ],
)
def test_the_line_for_a_dimension(place: str, expected: str) -> None:
    assert dimension_line(place, 2, 0) == expected
    assert str(Place.parse(place)) == place
    assert evaluate("ParamsSpec({" + expected + "})")


def test_the_line_for_a_scalar() -> None:
    assert line("n", IntVar("n")) == '"n": IntVar("n"),'


@pytest.mark.parametrize("text", ["", "x +", "f(x)", "x[i]", "3", "x[0:1]"])
def test_what_is_no_place(text: str) -> None:
    with pytest.raises(SpecError, match="place"):
        Place.parse(text)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: TensorSpec(["b"]),
        lambda: TensorSpec([-1]),
        lambda: TensorSpec([True]),
        lambda: DictSpec({1.5: STATIC}),
        lambda: ObjectSpec({"a": "b"}),
        lambda: SeqSpec([object()]),
        lambda: ParamsSpec({"*more": STATIC}),
        lambda: ParamsSpec({"*args": TensorSpec([])}),
        lambda: ParamsSpec({"**kwargs": []}),
        lambda: ShapesSpec({"x": 3}, assumptions=[True]),
        lambda: ShapeVar("a", min=-1),
        lambda: ShapeVar("a b"),
        lambda: IntVar("a", multiple_of=0),
        lambda: IntVar("a", min=5, max=7, multiple_of=8),
        lambda: IntVar("a", max=7, optimization_hint=8),
    ],
)
def test_what_makes_no_sense_is_said_at_once(wrong) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r"expected|expression|identifier|negative|multiple|hint"):
        wrong()
