"""What `dynamic_spec` goes around, and what is then still as it was: methods of every kind, pickles, arguments left out."""

from __future__ import annotations

import copy
import functools
import gc
import linecache
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from postlude.errors import SpecError
from postlude.shapes import IntVar, ShapeVar, ShapeViolation, TensorSpec, dynamic_spec, export, make_fx, mark, parse, spec_of
from tests.shapes.functions import Mlp

ROWS = {"x": TensorSpec([ShapeVar("b", max=64), 8])}


class Methods:
    @dynamic_spec(ROWS)
    @staticmethod
    def static_inside(x: Tensor) -> Tensor:
        return x + 1

    @staticmethod
    @dynamic_spec(ROWS)
    def static_outside(x: Tensor) -> Tensor:
        return x + 1

    @dynamic_spec("b 8")
    @classmethod
    def class_inside(cls, x: Tensor) -> Tensor:
        return x + 1

    @classmethod
    @dynamic_spec("b 8")
    def class_outside(cls, x: Tensor) -> Tensor:
        return x + 1

    @dynamic_spec("b 8")
    def plain(self, x: Tensor) -> Tensor:
        return x + 1

    partial = staticmethod(dynamic_spec(ROWS)(functools.partial(lambda x, y: x + y, y=1)))


@pytest.mark.parametrize("name", ["static_inside", "static_outside", "class_inside", "class_outside", "plain", "partial"])
def test_methods(name: str) -> None:
    method = getattr(Methods(), name)
    torch.testing.assert_close(method(torch.zeros(3, 8)), torch.ones(3, 8))
    with pytest.raises(ShapeViolation, match=r"x\.shape\[1\] = 7"):
        method(torch.zeros(3, 7))


@pytest.mark.parametrize("target", [property(lambda self: 1), nn.Linear, 3, torch.add], ids=["property", "class", "3", "builtin"])
def test_what_has_no_signature_of_its_own(target: Any) -> None:
    with pytest.raises(SpecError, match="a function whose signature Python knows"):
        dynamic_spec({})(target)


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def test_wrappers() -> None:
    """Errors of missing arguments name the function; a function may have no parameters at all."""

    def takes(x: Tensor) -> Tensor:
        return x

    for function in (takes, wrapped(takes)):
        with pytest.raises(TypeError, match=r"takes\(\) missing 1 required positional argument: 'x'"):
            dynamic_spec(ROWS)(function)()
    assert dynamic_spec({})(wrapped(lambda: 1))() == 1


def test_pickles() -> None:
    model = dynamic_spec(ROWS)(Mlp())
    x = torch.randn(3, 8)
    loaded = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(loaded(x), model(x))
    assert spec_of(loaded) == spec_of(model)
    with pytest.raises(ShapeViolation):
        loaded(torch.zeros(65, 8))
    # Copies share the class, so that what is compiled for one may serve the other.
    assert type(copy.deepcopy(model)) is type(model)


def test_a_forward_that_was_replaced() -> None:
    model = Mlp()
    before = model.forward
    model.forward = lambda x: before(x) + 1
    decorated = dynamic_spec(ROWS)(model)
    x = torch.randn(3, 8)
    torch.testing.assert_close(decorated(x), before(x) + 1)
    with pytest.raises(ShapeViolation):
        decorated(torch.zeros(65, 8))
    torch.testing.assert_close(export(decorated, (x,)).module()(torch.zeros(5, 8)), before(torch.zeros(5, 8)) + 1)
    with pytest.raises(ShapeViolation):
        decorated(torch.zeros(65, 8))


def test_an_integer_with_a_default_may_be_left_out() -> None:
    def scale(x: Tensor, n: int = 2) -> Tensor:
        return x * n

    decorated = dynamic_spec("b, n: int(n)")(scale)
    x = torch.ones(3)
    torch.testing.assert_close(make_fx(decorated)(x)(x), x * 2)
    torch.testing.assert_close(export(decorated, (x,)).module()(torch.ones(5)), torch.full((5,), 2.0))
    mark(parse("b, n: int(n)", ["x", "n"]), scale, x)
    assert x._dynamo_dynamic_indices == {0}  # type: ignore[attr-defined]


def test_a_nested_tensor_without_sizes() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)])
    with pytest.raises(ShapeViolation, match="nested tensor without sizes"):
        dynamic_spec(ROWS)(lambda x: x)(nested)


@pytest.mark.parametrize("given", [{"max": float("inf")}, {"min": "0"}, {"multiple_of": 2.0}, {"min": True}, {"name": 4}])
def test_variables_of_something_else_than_integers(given: dict[str, Any]) -> None:
    for kind in (ShapeVar, IntVar):
        with pytest.raises(ValueError, match=r"was expected|is not"):
            kind(**{"name": "n", **given})


def test_generated_source_goes_with_its_function() -> None:
    gc.collect()
    before = set(linecache.cache)
    decorated = dynamic_spec(ROWS)(lambda x: x)
    assert set(linecache.cache) - before
    del decorated
    gc.collect()
    assert not set(linecache.cache) - before


def test_lower_bounds_in_an_exported_program() -> None:
    """torch.export leaves out the least ones, as the documentation says: a change there is to be told there."""
    for least, rejected in ((1, []), (2, []), (3, [0, 1, 2])):
        decorated = dynamic_spec({"x": TensorSpec([ShapeVar("n", min=least), 4])})(lambda x: x.sum())
        module = export(decorated, (torch.ones(5, 4),)).module()
        for size in range(4):
            if size in rejected:
                with pytest.raises(AssertionError, match=r"x\.size\(\)\[0\] >= 3"):
                    module(torch.ones(size, 4))
            else:
                module(torch.ones(size, 4))
