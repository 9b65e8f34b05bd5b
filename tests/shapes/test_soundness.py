"""What a spec must not lose: guards that it does not imply, and what Dynamo was told for one compilation only."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
import torch
import torch.fx.experimental._config as symbolic_config
from torch import Tensor
from torch._dynamo.callback import CallbackTrigger, callback_handler
from torch._dynamo.testing import CompileCounter
from torch.testing._internal.two_tensor import TwoTensor

from postlude.shapes import DictSpec, ObjectSpec, ShapeVar, ShapeViolation, TensorSpec, dynamic_spec

b = ShapeVar("b", max=64)
ROWS = {"x": TensorSpec([b, 4])}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def test_a_rule_that_no_argument_tells_implies_no_guard() -> None:
    """Without p and q nothing is known of y, so the guard of the branch must stay."""
    p, q = ShapeVar("p", min=4), ShapeVar("q", min=4)

    def branching(y: Tensor, p: Tensor | None = None, q: Tensor | None = None) -> Tensor:
        return y + 1 if y.shape[0] >= 8 else y - 1

    compiled = torch.compile(
        dynamic_spec({"y": TensorSpec([p + q]), "p": TensorSpec([p]), "q": TensorSpec([q])})(branching), backend="eager"
    )
    for size in (9, 12, 5):
        y = torch.zeros(size)
        torch.testing.assert_close(compiled(y), branching(y))


def test_a_key_that_is_called_like_a_parameter_is_not_that_parameter() -> None:
    def branching(x: Tensor, d: dict[str, Tensor]) -> Tensor:
        return x + 1 if d["x"].shape[0] == x.shape[0] else x - 1

    spec = {"x": TensorSpec([ShapeVar("b", min=2)])}
    compiled = torch.compile(dynamic_spec(spec)(branching), backend="eager", dynamic=True)
    for sizes in [(6, 6), (5, 5), (6, 7), (7, 6)]:
        x, d = torch.zeros(sizes[0]), {"x": torch.zeros(sizes[1])}
        torch.testing.assert_close(compiled(x, d), branching(x, d))


@dataclass
class State:
    x: Tensor | None


@pytest.mark.parametrize("kind", ["dict", "object"])
def test_a_function_that_consumes_its_arguments_and_breaks_the_graph(kind: str) -> None:
    """The rest is compiled while they are not there any more."""

    def consume(state: dict[str, Tensor]) -> Tensor:
        x = state.pop("x")
        torch._dynamo.graph_break()
        return x + 1

    def empty(state: State) -> Tensor:
        x, state.x = state.x, None
        torch._dynamo.graph_break()
        assert x is not None
        return x + 1

    spec = {"state": (DictSpec if kind == "dict" else ObjectSpec)(ROWS)}
    compiled = torch.compile(dynamic_spec(spec)(consume if kind == "dict" else empty), backend=(counter := CompileCounter()))
    for size in (3, 1, 5):
        x = torch.zeros(size, 4)
        torch.testing.assert_close(compiled({"x": x} if kind == "dict" else State(x)), x + 1)
    assert counter.frame_count == 2  # out of its arguments a tensor is one like others: the second size is what makes it dynamic


def test_nothing_stays_where_another_thread_compiles_a_backward_meanwhile() -> None:
    """Dynamo announces the end of the last compilation only, of whatever kind and in whatever thread it is."""
    begun, ended = threading.Event(), threading.Event()

    def other() -> None:
        with callback_handler.install_callbacks(CallbackTrigger.LAZY_BACKWARD, "other"):
            begun.set()
            ended.wait(60)

    thread = threading.Thread(target=other)

    def backend(module: torch.fx.GraphModule, inputs: list[object]) -> torch.fx.GraphModule:
        assert symbolic_config.backed_size_oblivious  # type: ignore[attr-defined]
        thread.start()
        assert begun.wait(60)
        return module

    x = torch.zeros(3, 4)
    try:
        torch.compile(dynamic_spec(ROWS)(lambda x: x + 1), backend=backend)(x)
        assert not symbolic_config.backed_size_oblivious  # type: ignore[attr-defined]
        assert not vars(x)
    finally:
        ended.set()
        thread.join()


def test_marks_on_what_a_tensor_wraps() -> None:
    compiled = torch.compile(dynamic_spec(ROWS)(lambda x: x + 1), backend=(counter := CompileCounter()))
    for size in (3, 5):
        x = TwoTensor(torch.zeros(size, 4), torch.zeros(size, 4))
        compiled(x)
        assert not vars(x.a)
        assert not vars(x.b)
    assert counter.frame_count == 1


@pytest.mark.parametrize("free", [False, True], ids=["backed", "guard_free"])
@pytest.mark.parametrize("parent", ["none", "backed", "guard_free"])
def test_a_function_with_a_spec_within_another(parent: str, free: bool) -> None:
    """Also where nothing can be asked of the sizes; a call that breaks the inner spec is told which."""
    child = dynamic_spec(ROWS, guard_free=free)(lambda x: x + 1)

    def outer(x: Tensor) -> Tensor:
        return child(x) * 2

    if parent != "none":
        outer = dynamic_spec({"x": TensorSpec([ShapeVar("n", max=128), 4])}, guard_free=parent == "guard_free")(outer)
    compiled = torch.compile(outer, backend=(counter := CompileCounter()), dynamic=True if parent == "none" else None)
    for size in (3, 5, 64):
        torch.testing.assert_close(compiled(torch.ones(size, 4)), torch.full((size, 4), 4.0))
    assert counter.frame_count == 1
    if parent == "guard_free":
        with pytest.raises(AssertionError, match="<= 64"):
            compiled(torch.ones(65, 4))
    else:
        with pytest.raises(ShapeViolation, match="b <= 64"):
            compiled(torch.ones(65, 4))


def test_a_broken_spec_within_a_whole_graph_is_named() -> None:
    child = dynamic_spec(ROWS)(lambda x: x + 1)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"breaks the shape spec of .*<lambda>"):
        torch.compile(lambda x: child(x) * 2, backend="eager", fullgraph=True)(torch.ones(65, 4))
