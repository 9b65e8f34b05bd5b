"""`postlude.shapes.bucketed`: the function sees declared sizes only, and nobody else sees that it does."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from postlude.errors import OutputSizesUnknown, ShapeViolation, SpecError
from postlude.shapes import DictSpec, ObjectSpec, SeqSpec, ShapesSpec, ShapeVar, TensorSpec
from postlude.shapes.bucketed import bucketed

SIZES = {"b": (1, 2, 4), "s": (4, 8)}


class Seen:
    """A function that keeps the arguments of its last real call."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.__wrapped__ = fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not any(type(arg).__name__ == "FakeTensor" for arg in (*args, *kwargs.values())):
            self.args, self.kwargs = args, kwargs
        return self.fn(*args, **kwargs)


def rows(x: Tensor) -> Tensor:
    return x * 2


def attention(x: Tensor, mask: Tensor) -> Tensor:
    scores = (x @ x.mT).masked_fill(~mask[:, None], -torch.inf)
    return scores.softmax(-1).nan_to_num() @ x


@settings(max_examples=60, deadline=None)
@given(b=st.integers(0, 4), s=st.integers(0, 8), fill=st.integers(-3, 3))
def test_results_are_those_of_the_unpadded_call_whatever_the_padding(b: int, s: int, fill: int) -> None:
    seen = Seen(attention)
    fast = bucketed(seen, SIZES, spec="b s d, b s", fill={"x": fill, "mask": False})
    x, mask = torch.randn(b, s, 3), torch.ones(b, s, dtype=torch.bool)
    result = fast(x, mask)
    assert result.shape == (b, s, 3)
    torch.testing.assert_close(result, attention(x, mask))
    assert seen.args[0].shape[:2] in [(n, length) for n in SIZES["b"] for length in SIZES["s"]]
    assert torch.equal(seen.args[0][:b, :s], x)
    assert torch.equal(seen.args[0][b:], torch.full_like(seen.args[0][b:], fill))
    assert not seen.args[1][:, s:].any()


def test_a_call_of_a_declared_size_is_not_touched() -> None:
    seen = Seen(rows)
    x = torch.randn(2, 4)
    bucketed(seen, SIZES, spec="b s")(x)
    assert seen.args[0] is x


def test_a_range_rounds_up() -> None:
    seen = Seen(rows)
    fast = bucketed(seen, {"s": range(64, 257, 64)}, spec="_ s")
    for length, rounded in ((1, 64), (64, 64), (65, 128), (200, 256)):
        assert fast(torch.ones(3, length)).shape == (3, length)
        assert seen.args[0].shape == (3, rounded)


def test_beyond_the_largest_size() -> None:
    with pytest.raises(ShapeViolation, match=r"s <= 8, the largest of the bucketed sizes of s") as raised:
        bucketed(rows, SIZES, spec="b s")(torch.ones(3, 9))
    assert (raised.value.argument, raised.value.dimension, raised.value.value, raised.value.rule) == ("x", 1, 9, "s <= 8")
    seen = Seen(rows)
    assert bucketed(seen, SIZES, spec="b s", beyond="run")(torch.ones(3, 9)).shape == (3, 9)
    assert seen.args[0].shape == (4, 9), "what is within its sizes is padded all the same"


def test_a_call_that_breaks_the_spec_is_an_error_that_names_it() -> None:
    fast = bucketed(attention, SIZES, spec="b s d, b s")
    with pytest.raises(ShapeViolation, match="mask") as raised:
        fast(torch.ones(2, 3, 3), torch.ones(2, 4, dtype=torch.bool))
    assert (raised.value.argument, raised.value.dimension, raised.value.value) == ("mask", 1, 4)


def test_gradients_go_through_padding_and_cut() -> None:
    layer = nn.Linear(3, 5)
    x = torch.randn(3, 3, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    bucketed(layer, {"n": (8,)}, spec="n 3")(x).pow(2).sum().backward()
    grads = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    layer(y).pow(2).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    for found, parameter in zip(grads, layer.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad)


@dataclass
class Batch:
    ids: Tensor
    name: str = "batch"


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def structured(batch: Batch, extra: dict[str, Any], pair: Pair, n: int) -> dict[str, Any]:
    return {"ids": batch.ids + n, "list": [extra["x"][0] * 2, batch.name], "pair": Pair(pair.second, pair.first), "none": None}


def test_inputs_and_results_may_be_nested() -> None:
    b = ShapeVar("b")
    spec = {
        "batch": ObjectSpec({"ids": TensorSpec([b])}),
        "extra": DictSpec({"x": SeqSpec([TensorSpec([2, b])])}),
        "pair": SeqSpec([TensorSpec([b, 2]), TensorSpec([b])]),
        "n": b,
    }
    batch, extra, pair = Batch(torch.arange(3)), {"x": [torch.ones(2, 3)], "y": 1}, Pair(torch.ones(3, 2), torch.zeros(3))
    seen = Seen(structured)
    found = bucketed(seen, {"b": (4,)}, spec=spec, fill={"batch.ids": 7, "extra": -1})(batch, extra, pair, n=3)
    assert torch.equal(seen.args[0].ids, torch.tensor([0, 1, 2, 7]))
    assert torch.equal(seen.args[1]["x"][0][:, 3], torch.tensor([-1.0, -1.0]))
    assert isinstance(seen.args[2], Pair)
    assert seen.args[3] == 4, "an integer that is a bucketed size is that of the padded call"
    assert torch.equal(found["ids"], torch.tensor([4, 5, 6]))
    assert found["list"][0].shape == (2, 3)
    assert found["list"][1] == "batch"
    assert isinstance(found["pair"], Pair)
    assert [t.shape for t in found["pair"]] == [(3,), (3, 2)]
    assert found["none"] is None
    assert batch.ids.shape == (3,), "the caller's objects are as they were"
    assert extra["x"][0].shape == (2, 3)


def test_sizes_that_are_computed_from_variables_are_padded_to_their_new_values() -> None:
    seen = Seen(lambda x, y: (x, y))
    fast = bucketed(seen, {"n": (4,)}, spec="n, 2*n+1", outputs="n, 2*n+1")
    x, y = torch.arange(3), torch.arange(7)
    first, second = fast(x, y)
    assert [t.shape[0] for t in seen.args] == [4, 9]
    assert torch.equal(first, x)
    assert torch.equal(second, y)


def test_equal_numbers_are_not_taken_for_the_same_size() -> None:
    weight = torch.randn(4, 4)  # 4 is the declared size too
    fast = bucketed(lambda x: (x @ weight, weight), {"b": (4,)}, spec="b 4")
    product, same = fast(torch.ones(3, 4))
    assert product.shape == (3, 4)
    assert same.shape == (4, 4)


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (lambda x: torch.cat([x, x]), "dimension 0 depends on b but is not it"),
        (lambda x: x.reshape(-1), "dimension 0 depends on"),
        (lambda x: x[:, 1:], "dimension 1 depends on s but is not it"),
        (lambda x: x[x > 0], "failure with fake tensors"),
        (lambda x: slice(x, None), "a slice in the results"),
    ],
)
def test_what_can_not_be_cut_for_certain_must_be_declared(fn: Any, told: str) -> None:
    with pytest.raises(OutputSizesUnknown, match=told):
        bucketed(fn, SIZES, spec={"x": TensorSpec([ShapeVar("b"), ShapeVar("s")])})(torch.ones(3, 3))


def test_declared_results() -> None:
    def halved(x: Tensor) -> dict[str, Any]:
        return {"a": x[:, ::2], "b": x.sum(), "c": [x.t()]}

    x = torch.randn(3, 5)
    outputs = {"a": TensorSpec([ShapeVar("b"), (ShapeVar("s") + 1) // 2]), "c": [TensorSpec([ShapeVar("s"), ShapeVar("b")])]}
    found = bucketed(halved, SIZES, spec="b s", outputs=outputs)(x)
    assert torch.equal(found["a"], x[:, ::2])
    assert torch.equal(found["c"][0], x.t())
    with pytest.raises(OutputSizesUnknown, match="no tensor at"):
        bucketed(halved, SIZES, spec="b s", outputs={"d": TensorSpec([ShapeVar("b")])})(x)
    with pytest.raises(OutputSizesUnknown, match="2 dimensions, 1 in"):
        bucketed(halved, SIZES, spec="b s", outputs={"a": TensorSpec([ShapeVar("b")])})(x)
    with pytest.raises(OutputSizesUnknown, match=r"shape \(4, 4\)"):
        bucketed(halved, SIZES, spec="b s", outputs={"a": TensorSpec([ShapeVar("b"), ShapeVar("s")])})(x)
    with pytest.raises(SpecError, match="'z'"):
        bucketed(halved, SIZES, spec="b s", outputs="z")


def test_a_function_that_depends_on_its_size_in_another_way_at_other_sizes_is_found_out() -> None:
    with pytest.raises(OutputSizesUnknown, match="expected"):
        bucketed(lambda x: x[:6], {"n": (4, 5, 100)}, spec={"x": TensorSpec([ShapeVar("n")])}, outputs="n")(torch.ones(80))


def test_what_the_function_writes_to_its_argument_arrives_at_the_callers() -> None:
    def accumulate(x: Tensor, cache: Tensor) -> Tensor:
        cache += x
        return cache.sum(1)

    x, cache = torch.ones(3, 2), torch.zeros(3, 2)
    found = bucketed(accumulate, {"b": (4,)}, spec="b 2, b 2")(x, cache)
    assert torch.equal(cache, torch.ones(3, 2))
    assert torch.equal(found, torch.full((3,), 2.0))


class Stateful(nn.Module):
    """Keeps what a fake call must not leave behind."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("last", torch.zeros(1))
        self.calls = 0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.calls += 1
        self.last = x
        self.kept = x
        return self.norm(x) if mask is None else self.norm(x) * mask


def test_finding_the_results_sizes_leaves_nothing_in_the_module() -> None:
    model = Stateful()
    bucketed(model, {"b": (4, 8)}, spec="b 3, b 3")(torch.ones(3, 3))
    assert model.calls == 1
    assert type(model.last) is type(model.kept) is Tensor
    assert model.norm.num_batches_tracked == 1
    assert type(model.norm.running_mean) is Tensor


def test_a_write_to_what_is_no_argument_is_refused_before_it_happens() -> None:
    cache = torch.zeros(3)

    def fn(x: Tensor) -> Tensor:
        cache.add_(1)
        return x + 1

    with pytest.raises(OutputSizesUnknown, match="neither an argument nor the module's"):
        bucketed(fn, {"b": (4, 8)}, spec="b")(torch.ones(3))
    assert not cache.any()
    assert bucketed(fn, {"b": (4, 8)}, spec="b", outputs="b")(torch.ones(3)).shape == (3,)
    assert torch.equal(cache, torch.ones(3))


def test_arguments_may_be_left_out_and_named() -> None:
    model = Stateful().eval()
    fast = bucketed(model, {"b": (4, 8)}, spec="b 3, b 3")
    x = torch.randn(3, 3)
    torch.testing.assert_close(fast(x=x), model(x))
    torch.testing.assert_close(fast(x, mask=x), model(x, x))
    assert fast.calls == model.calls, "the module's attributes are there"


def test_a_compiled_module_compiles_once_for_each_declared_size_and_is_warm_beforehand() -> None:
    shapes = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        shapes.append(next(tuple(t.shape) for t in inputs if t.ndim == 2 and not isinstance(t, nn.Parameter)))
        return graph

    torch._dynamo.reset()
    layer = nn.Linear(3, 5)
    fast = bucketed(torch.compile(layer, backend=backend, dynamic=False), {"n": (2, 4, 8)}, spec="n 3")
    with torch.no_grad():
        fast.warm_up(torch.ones(3, 3))
        assert sorted(shapes) == [(2, 3), (4, 3), (8, 3)]
        for n in range(9):
            x = torch.randn(n, 3)
            torch.testing.assert_close(fast(x), layer(x))
    assert len(shapes) == 3


def test_check_says_whether_padding_has_an_influence() -> None:
    x = torch.randn(3, 3)
    bucketed(rows, SIZES, spec="b s").check(x)
    with pytest.raises(AssertionError):
        bucketed(lambda x: x - x.mean(0), {"b": (4,)}, spec={"x": TensorSpec([ShapeVar("b"), 3])}).check(x + 5)


def test_inference_mode() -> None:
    with torch.inference_mode():
        x = torch.randn(3, 3)
        assert torch.equal(bucketed(rows, SIZES, spec="b s")(x), x * 2)


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"sizes": {"z": (1,)}}, "sizes= names 'z'; expected one of the variables b, s"),
        ({"sizes": {"b": ()}}, "ascending"),
        ({"sizes": {"b": (4, 2)}}, "ascending"),
        ({"sizes": {"b": (-1, 2)}}, "ascending"),
        ({"spec": ShapesSpec({"x": TensorSpec([ShapeVar("b", max=3), ShapeVar("s")])})}, "sizes with b <= 3"),
        ({"fill": {"y": 0}}, "fill= names 'y'; expected one of x"),
        ({"spec": None}, "there is none"),
    ],
)
def test_wrong_declarations(keywords: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        bucketed(rows, **{"sizes": SIZES, "spec": "b s"} | keywords)
