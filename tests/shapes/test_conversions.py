"""Other ways to write a spec: the short form, examples, torch's own specs, torch.export's dynamic_shapes and marks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo import mark_dynamic
from torch._dynamo.decorators import mark_unbacked
from torch.export import Dim

from postlude.shapes import (
    STATIC,
    DictSpec,
    IntVar,
    ObjectSpec,
    ParamsSpec,
    SeqSpec,
    ShapesSpec,
    ShapeVar,
    ShapeViolation,
    SpecError,
    TensorSpec,
    dynamic_spec,
    from_dynamic_shapes,
    from_marks,
    from_torch,
    infer,
    mark,
    parse,
    to_dynamic_shapes,
)
from tests.shapes.functions import Batch

torch_specs = pytest.importorskip("torch.fx.experimental.dynamic_spec") if torch.__version__ >= "2.13" else None
needs_torch_specs = pytest.mark.skipif(torch_specs is None, reason="torch has no specs before 2.13")


# The short form


def test_short_form() -> None:
    b, s, d, n = ShapeVar("b"), ShapeVar("s"), ShapeVar("d"), IntVar("n")
    expected = ShapesSpec(
        {
            "x": TensorSpec([b, s, d]),
            "w": TensorSpec([d]),
            "mask": TensorSpec([b, 2 * s + 1, 64, STATIC]),
            "n": n,
            "scale": TensorSpec([]),
        }
    )
    text = "b s d, d, , mask: b 2*s+1 64 _, n: int(n), scale: () -> b s d"
    assert parse(text, ["self", "x", "w", "other", "mask", "n"]) == expected
    assert parse("..., a", ["x", "y"], guard_free=True) == ShapesSpec({"y": TensorSpec([ShapeVar("a")])}, guard_free=True)


@pytest.mark.parametrize("text", ["a b, c", "x: a, x: b", "a+", "f(a)", "1.5", "x: a-b-", "a%0"])
def test_what_is_no_short_form(text: str) -> None:
    with pytest.raises(SpecError):
        parse(text, ["x"])


def test_the_short_form_decorates() -> None:
    @dynamic_spec("b d, d -> b d")
    def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x * w

    assert scaled(torch.ones(2, 3), torch.ones(3)).shape == (2, 3)
    with pytest.raises(ShapeViolation, match="d = 3"):
        scaled(torch.ones(2, 3), torch.ones(4))


# Examples


def example(b: int, s: int, p: int, n: int) -> dict[str, Any]:
    return {
        "x": torch.empty(b, s, 8),
        "mask": None if n == 2 else torch.empty(b, p + s),
        "twice": [torch.empty(2 * b), 3, {"next": torch.empty(s + 1)}],
        "cache": Batch(torch.empty(b, p), torch.empty(4)),
        "n": n,
        "name": "model",
    }


def test_infer() -> None:
    spec = infer([example(2, 5, 11, 1), example(3, 7, 20, 2), example(5, 6, 19, 3), example(4, 9, 12, 4)])
    b, s, p, n = ShapeVar("x_0"), ShapeVar("x_1"), ShapeVar("cache_ids_1"), IntVar("n")
    assert spec == ShapesSpec(
        {
            "x": TensorSpec([b, s, STATIC]),
            "mask": TensorSpec([b, s + p]),
            "twice": SeqSpec([TensorSpec([2 * b]), STATIC, DictSpec({"next": TensorSpec([s + 1])})]),
            "cache": ObjectSpec({"ids": TensorSpec([b, p])}),
            "n": n,
        }
    )


def test_two_examples_show_no_offsets() -> None:
    spec = infer([(torch.empty(2, 4), torch.empty(5)), (torch.empty(3, 6), torch.empty(6))], lambda x, y: x)
    a, b = ShapeVar("x_0"), ShapeVar("y_0")
    assert spec == ShapesSpec({"x": TensorSpec([a, 2 * a]), "y": TensorSpec([b])})


def test_all_examples_keep_to_what_is_inferred() -> None:
    calls = [example(2, 5, 11, 1), example(3, 7, 20, 2), example(5, 6, 19, 3)]
    checked = dynamic_spec(infer(calls))(lambda x, twice, cache, n, name, mask=None: "called")
    assert [checked(**call) for call in calls] == ["called"] * 3


@pytest.mark.parametrize(
    ("examples", "expected"),
    [
        ([{"x": 1}], "there are 1 examples"),
        ([{"x": 1}, {"x": torch.empty(1)}], "x is of different types"),
        ([{"x": torch.empty(1)}, {"x": torch.empty(1, 1)}], "x has different numbers of dimensions"),
        ([(1,), (2,)], "no function"),
    ],
)
def test_what_can_not_be_inferred(examples: list[Any], expected: str) -> None:
    with pytest.raises(SpecError, match=expected):
        infer(examples)


# torch's own specs


@needs_torch_specs
def test_specs_of_torch_are_accepted() -> None:
    t = torch_specs
    assert t is not None
    batch, n, hidden = t.ShapeVar("batch", max=64, optimization_hint=8), t.IntVar("n", min=-5), t.ShapeVar("hidden", min=1)
    spec = t.ShapesSpec(
        t.ParamsSpec(
            {
                "x": t.TensorSpec([batch, t.STATIC, 4]),
                "n": n,
                "rest": t.SeqSpec(
                    [t.DictSpec({"a": t.TensorSpec([batch * 2 + 1])}), t.ObjectSpec({"w": t.TensorSpec([hidden * 3])})]
                ),
                "*args": [t.TensorSpec([batch // 2])],
                "**kwargs": {"k": t.TensorSpec([batch - n])},
            }
        ),
        assumptions=[batch % 2 == 0, n <= batch, n != 3],
    )
    found = from_torch(spec)
    assert found.guard_free
    b, m, h = ShapeVar("batch", max=64, optimization_hint=8), IntVar("n", min=-5), ShapeVar("hidden", min=1)
    expected = ParamsSpec(
        {
            "x": TensorSpec([b, STATIC, 4]),
            "n": m,
            "rest": SeqSpec([DictSpec({"a": TensorSpec([b * 2 + 1])}), ObjectSpec({"w": TensorSpec([h * 3])})]),
            "*args": [TensorSpec([b // 2])],
            "**kwargs": {"k": TensorSpec([b + m * -1])},
        }
    )
    # Sympy orders sums and products as it likes, so what is compared is what they are worth.
    for mine, theirs in ((expected.named["x"], found.params.named["x"]), (expected.named["n"], found.params.named["n"])):
        assert repr(mine) == repr(theirs)

    def function(x: Any, n: Any, rest: Any, *args: Any, **kwargs: Any) -> str:
        return "called"

    class Weights:
        def __init__(self, size: int) -> None:
            self.w = torch.empty(size)

    checked = dynamic_spec(spec)(function)

    def call(b: int = 6, n: int = 2, twice: int = 13, w: int = 9, half: int = 3, less: int = 4) -> str:
        rest = [{"a": torch.empty(twice)}, Weights(w)]
        result: str = checked(torch.empty(b, 7, 4), n, rest, torch.empty(half), k=torch.empty(less))
        return result

    assert call() == "called"
    wrong: list[dict[str, int]] = [{"twice": 12}, {"w": 8}, {"w": 0}, {"half": 2}, {"less": 5}, {"b": 66}, {"n": 7}]
    wrong += [{"b": 7, "twice": 15, "less": 5}, {"n": 3, "less": 3}]
    for change in wrong:
        with pytest.raises(ShapeViolation):
            call(**change)


@needs_torch_specs
def test_a_dict_of_torchs_specs() -> None:
    t = torch_specs
    assert t is not None
    batch = t.ShapeVar("batch")
    checked = dynamic_spec({"x": t.TensorSpec([batch, 4]), "y": t.TensorSpec([batch])})(lambda x, y: "called")
    assert checked(torch.empty(2, 4), torch.empty(2)) == "called"
    with pytest.raises(ShapeViolation):
        checked(torch.empty(2, 4), torch.empty(3))


# torch.export's dynamic_shapes


def test_to_dynamic_shapes_and_back() -> None:
    b, s = ShapeVar("b", min=1, max=16), ShapeVar("s")
    spec = ShapesSpec({"x": TensorSpec([b, STATIC, 4]), "parts": DictSpec({"y": TensorSpec([2 * b + 1]), "z": TensorSpec([s])})})
    x, parts = torch.empty(2, 3, 4), {"y": torch.empty(5), "z": torch.empty(7)}
    shapes = to_dynamic_shapes(spec, lambda x, parts: x, (x, parts))
    assert shapes["x"][1] is shapes["x"][2] is Dim.STATIC
    assert (shapes["x"][0].__name__, shapes["x"][0].min, shapes["x"][0].max) == ("b", 1, 16)
    again = from_dynamic_shapes(shapes)
    expected = {"x": TensorSpec([b, STATIC, STATIC]), "parts": DictSpec({"y": TensorSpec([2 * b + 1]), "z": TensorSpec([s])})}
    assert again == ShapesSpec(expected)


def test_from_dynamic_shapes() -> None:
    b = Dim("b", max=8)
    spec = from_dynamic_shapes(
        {"x": {0: b, 2: Dim.AUTO}, "y": (b, None), "z": [{0: b * 3}, None], "n": Dim.DYNAMIC, "flag": None}
    )
    mine = ShapeVar("b", max=8)
    assert spec == ShapesSpec(
        {
            "x": TensorSpec([mine, STATIC, ShapeVar("x_2")]),
            "y": TensorSpec([mine, STATIC]),
            "z": SeqSpec([TensorSpec([3 * mine]), STATIC]),
            "n": IntVar("n"),
        }
    )
    with pytest.raises(SpecError, match="by parameter"):
        from_dynamic_shapes([{0: b}])  # type: ignore[arg-type]


# Marks


def test_marks_there_and_back() -> None:
    x, y = torch.empty(3, 4), torch.empty(4)
    a, b = ShapeVar("a"), ShapeVar("b")
    spec = ShapesSpec({"x": TensorSpec([a, b]), "y": TensorSpec([b])})
    mark(spec, lambda x, y: x, x, y)
    assert x._dynamo_dynamic_indices == {0, 1}  # type: ignore[attr-defined]
    assert from_marks({"x": x, "y": y}) == ShapesSpec(
        {"x": TensorSpec([ShapeVar("x_0"), ShapeVar("x_1")]), "y": TensorSpec([ShapeVar("y_0")])}
    )
    with pytest.raises(ShapeViolation):
        mark(spec, lambda x, y: x, x, torch.empty(5))


def test_from_marks_of_every_kind() -> None:
    x, y, z = torch.empty(3, 4), torch.empty(4), torch.empty(2)
    mark_dynamic(x, 1, min=2, max=9)
    mark_unbacked(y, 0)
    spec = from_marks({"x": x, "y": y, "z": z})
    expected = {"x": TensorSpec([STATIC, ShapeVar("x_1", min=2, max=9)]), "y": TensorSpec([ShapeVar("y_0")])}
    assert spec == ShapesSpec(expected, guard_free=True)
