"""`postlude.shapes.watch`: the number of compilations, and what is said about each, for every kind of guard."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from postlude.errors import RecompileLimitExceeded
from postlude.shapes import watch
from postlude.shapes.causes import Scene, explain
from postlude.shapes.watch import Watch

ROWS = torch.ones(4, 4)
SCALE = 2.0


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def compiled(fn: Any, **options: Any) -> Any:
    return torch.compile(fn, backend="eager", **options)


class Block(nn.Module):
    """A linear layer with what people swap and set in modules."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.lora = nn.Module()
        self.lora.a = nn.Parameter(torch.ones(4, 2))
        self.cache = torch.ones(3)
        self.steps = 3
        self.activation = torch.relu

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x)) @ self.lora.a * self.steps + self.cache.sum()


def block(change: Callable[[Block], object]) -> Callable[[], Watch]:
    """Two calls of a module that is changed in between."""

    def run() -> Watch:
        model = Block()
        watched = watch(compiled(model))
        watched(ROWS)
        change(model)
        watched(ROWS)
        return watched

    return run


def calls(fn: Callable[..., Any], *arguments: tuple[Any, ...], dynamic: bool | None = None) -> Callable[[], Watch]:
    """Calls of a function, one for each tuple of arguments."""

    def run() -> Watch:
        watched = watch(compiled(fn, dynamic=dynamic))
        for one in arguments:
            watched(*one)
        return watched

    return run


def under(mode: Callable[[], Any]) -> Callable[[], Watch]:
    """A call, and another one in a mode."""

    def run() -> Watch:
        watched = watch(compiled(double))
        watched(ROWS)
        with mode():
            watched(ROWS)
        return watched

    return run


def double(x: Tensor) -> Tensor:
    return x * 2


def times(x: Tensor, n: Any) -> Tensor:
    return x * n


def total(x: Tensor, *xs: Tensor, **named: Tensor) -> Tensor:
    return x + sum(t.sum() for t in xs) + sum(t.sum() for t in named.values())


def of_dict(batch: dict[str, Tensor]) -> Tensor:
    return sum(t.sum() for t in batch.values())


def of_list(xs: list[Tensor]) -> Tensor:
    return xs[0] + sum(x.sum() for x in xs)


@dataclass
class Batch:
    ids: Tensor


def of_object(batch: Batch) -> Tensor:
    return batch.ids + 1


def maybe(x: Tensor, mask: Tensor | None) -> Tensor:
    return x + 1 if mask is None else x * mask


def branching(x: Tensor) -> Tensor:
    return x * 3 if x.shape[0] > 100 else x + 1


def added(x: Tensor, y: Tensor) -> Tensor:
    return x.sum() + y.sum()


def scaled(x: Tensor) -> Tensor:
    return x * SCALE


def with_global() -> Watch:
    global SCALE
    watched = watch(compiled(scaled))
    watched(ROWS)
    SCALE = 7.0
    watched(ROWS)
    SCALE = 2.0
    return watched


def with_closure() -> Watch:
    factor = 2

    def fn(x: Tensor) -> Tensor:
        return x * factor

    watched = watch(compiled(fn))
    watched(ROWS)
    factor = 5
    watched(ROWS)
    return watched


def swap_adapter(model: Block) -> None:
    model.lora.a = nn.Parameter(torch.ones(4, 3))


#: What is done, and of the last recompilation's cause: kind, place, origin, dimension, before, now, spec.
CASES: dict[str, tuple[Callable[[], Watch], tuple[Any, ...]]] = {
    "size": (
        calls(double, (torch.ones(4, 2),), (torch.ones(5, 2),)),
        ("size", "x", "argument", 0, "4", "5", '"x": TensorSpec([ShapeVar("x_0"), STATIC]),'),
    ),
    "two dimensions of one tensor": (
        calls(double, (torch.ones(4, 2),), (torch.ones(5, 3),)),
        ("size", "x", "argument", 0, "4", "5", '"x": TensorSpec([ShapeVar("x_0"), ShapeVar("x_1")]),'),
    ),
    "first batch of 1": (
        calls(double, (torch.ones(1, 2),), (torch.ones(3, 2),)),
        ("size", "x", "argument", 0, "1", "3", '"x": TensorSpec([ShapeVar("x_0"), STATIC]),'),
    ),
    "later batch of 1": (
        calls(double, (torch.ones(3, 2),), (torch.ones(1, 2),), dynamic=True),
        ("zero_one", "x", "argument", 0, "2 <= x.shape[0]", "x.shape[0] == 1", '"x": TensorSpec([ShapeVar("x_0"), STATIC]),'),
    ),
    "size of 0": (
        calls(double, (torch.ones(3, 2),), (torch.ones(0, 2),), dynamic=True),
        ("zero_one", "x", "argument", 0, "2 <= x.shape[0]", "x.shape[0] == 0", '"x": TensorSpec([ShapeVar("x_0"), STATIC]),'),
    ),
    "equal by chance": (
        calls(added, (torch.ones(5), torch.ones(5)), (torch.ones(6), torch.ones(8)), dynamic=True),
        (
            "equal",
            "y",
            "argument",
            0,
            "y.shape[0] == x.shape[0]",
            "y.shape[0] == 8, x.shape[0] == 6",
            '"y": TensorSpec([ShapeVar("y_0")]), "x": TensorSpec([ShapeVar("x_0")]),',
        ),
    ),
    "a branch on a size": (
        calls(branching, (torch.ones(5),), (torch.ones(200),), dynamic=True),
        (
            "condition",
            "x",
            "argument",
            0,
            "2 <= x.shape[0] <= 100",
            "x.shape[0] == 200",
            '"x": TensorSpec([ShapeVar("x_0")]),',
        ),
    ),
    "in *args": (
        calls(total, (ROWS, torch.ones(2)), (ROWS, torch.ones(3))),
        ("size", "xs[0]", "argument", 0, "2", "3", '"*args": [TensorSpec([ShapeVar("xs_0_0")])],'),
    ),
    "in a dict": (
        calls(of_dict, ({"a": torch.ones(2)},), ({"a": torch.ones(3)},)),
        ("size", "batch['a']", "argument", 0, "2", "3", '"batch": DictSpec({"a": TensorSpec([ShapeVar("batch_a_0")])}),'),
    ),
    "in a list": (
        calls(of_list, ([ROWS, torch.ones(2)],), ([ROWS, torch.ones(3)],)),
        ("size", "xs[1]", "argument", 0, "2", "3", '"xs": SeqSpec([STATIC, TensorSpec([ShapeVar("xs_1_0")])]),'),
    ),
    "in a dataclass": (
        calls(of_object, (Batch(torch.ones(2)),), (Batch(torch.ones(3)),)),
        ("size", "batch.ids", "argument", 0, "2", "3", '"batch": ObjectSpec({"ids": TensorSpec([ShapeVar("batch_ids_0")])}),'),
    ),
    "integer": (calls(times, (ROWS, 3), (ROWS, 4)), ("integer", "n", "argument", None, "3", "4", '"n": IntVar("n"),')),
    "float": (calls(times, (ROWS, 0.5), (ROWS, 0.25)), ("value", "n", "argument", None, "0.5", "0.25", "")),
    "type": (calls(times, (ROWS, ROWS.clone()), (ROWS, 0.5)), ("type", "n", "argument", None, "torch.Tensor", "float", "")),
    "None": (calls(maybe, (ROWS, None), (ROWS, torch.ones(4))), ("none", "mask", "argument", None, "None", "Tensor", "")),
    "length": (
        calls(of_list, ([ROWS],), ([ROWS, torch.ones(2)],)),
        ("length", "xs", "argument", None, "1", "2", ""),
    ),
    "keys": (
        calls(of_dict, ({"a": ROWS},), ({"b": ROWS},)),
        ("keys", "batch", "argument", None, "'a'", "['b']", ""),
    ),
    "rank": (calls(double, (ROWS,), (ROWS[None],)), ("rank", "x", "argument", None, "2", "3", "")),
    "dtype": (calls(double, (ROWS,), (ROWS.double(),)), ("dtype", "x", "argument", None, "Float", "Double", "")),
    "device": (calls(double, (ROWS,), (ROWS.to("meta"),)), ("device", "x", "argument", None, "CPU", "Meta", "")),
    "stride": (calls(double, (ROWS,), (ROWS.t(),)), ("stride", "x", "argument", 0, "4", "1", "")),
    "requires_grad": (
        calls(double, (ROWS,), (ROWS.clone().requires_grad_(),)),
        ("requires_grad", "x", "argument", None, "False", "True", ""),
    ),
    "same tensor twice": (calls(added, (ROWS, ROWS.clone()), (ROWS, ROWS)), ("aliasing", "", "", None, '["x", "y"]', "", "")),
    "LoRA of another rank": (block(swap_adapter), ("size", "self.lora.a", "attribute", 1, "2", "3", "")),
    "a tensor of the module": (
        block(lambda model: setattr(model, "cache", torch.ones(5))),
        ("size", "self.cache", "attribute", 0, "3", "5", ""),
    ),
    "an integer of the module": (
        block(lambda model: setattr(model, "steps", 5)),
        ("integer", "self.steps", "attribute", None, "3", "5", ""),
    ),
    "a function of the module": (
        block(lambda model: setattr(model, "activation", torch.tanh)),
        ("identity", "self.activation", "attribute", None, None, "builtin_function_or_method", ""),
    ),
    "global": (with_global, ("value", "SCALE", "global", None, "2.0", "7.0", "")),
    "closure": (with_closure, ("integer", "factor", "closure", None, "2", "5", "")),
    "grad mode": (under(torch.no_grad), ("modes", "", "", None, "grad_mode", "", "")),
    "autocast": (under(lambda: torch.autocast("cpu")), ("modes", "", "", None, "autocast(cpu)_enabled", "", "")),
}


@pytest.mark.parametrize("name", CASES)
def test_says_what_changed_where_it_comes_from_and_which_line_of_spec_prevents_it(name: str) -> None:
    run, (kind, place, origin, dimension, before, now, spec) = CASES[name]
    watched = run()
    assert [len(watched.compiles), len(watched.recompiles)] == [2, 1], name
    cause = watched.recompiles[0].cause
    assert (cause.kind, cause.place, cause.origin, cause.dimension) == (kind, place, origin, dimension)
    assert before is None or (cause.before, cause.now, cause.spec) == (before, now, spec)
    assert cause.what
    assert cause.advice
    assert cause.what[:40] in str(watched)
    assert cause.advice in " ".join(str(watched).split())


def test_an_inference_tensor_is_told_from_a_normal_one() -> None:
    with torch.inference_mode():
        inference = torch.ones(4, 4)
    watched = watch(compiled(double))
    with torch.no_grad():
        watched(ROWS)
        watched(inference)
    cause = watched.recompiles[0].cause
    assert (cause.kind, cause.before, cause.now) == ("inference", "a normal tensor", "an inference tensor")


def test_growing_lengths_compile_once_for_a_size_and_once_for_all() -> None:
    watched = watch(compiled(double))
    for length in range(2, 12):
        watched(torch.ones(length))
    assert watched.counts() == {"double": 2}
    assert watched.calls == 10
    assert watched.spec().endswith('ShapesSpec({"x": TensorSpec([ShapeVar("x_0")])})')


def test_the_spec_names_all_that_varied_not_only_what_failed_first() -> None:
    watched = watch(compiled(lambda x, y, n: x.sum() * n + y.sum()))
    watched(torch.ones(4, 2), torch.ones(3), 2)
    watched(torch.ones(5, 2), torch.ones(6), 3)
    expected = 'ShapesSpec({"x": TensorSpec([ShapeVar("x_0"), STATIC]), "y": TensorSpec([ShapeVar("y_0")]), "n": IntVar("n")})'
    assert watched.spec().partition("\n")[2] == expected


def test_values_behind_a_graph_break_are_no_arguments() -> None:
    def broken(x: Tensor) -> Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    watched = watch(compiled(broken))
    watched(torch.ones(4))
    watched(torch.ones(5))
    assert len(watched.compiles) == 4
    first, behind = (one.cause for one in watched.recompiles)
    assert (first.place, first.origin) == ("x", "argument")
    assert (behind.place, behind.origin, behind.spec) == ("y", "local", "")
    assert "graph break" in behind.advice


def test_each_earlier_compilation_has_its_own_reason() -> None:
    watched = watch(compiled(double, dynamic=False))
    for size in (4, 5, 6):
        watched(torch.ones(size))
    assert [cause.before for cause in watched.recompiles[-1].causes] == ["5", "4"]


def test_a_limit_is_an_error_before_the_compilation_and_says_what_prevents_it() -> None:
    compilations = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        compilations.append(graph)
        return graph

    watched = watch(torch.compile(double, backend=backend, dynamic=False), limit=1)
    watched(torch.ones(4, 2))
    watched(torch.ones(5, 2))
    with pytest.raises(RecompileLimitExceeded) as raised:
        watched(torch.ones(6, 2))
    assert len(compilations) == len(watched.compiles) == 2
    message = str(raised.value)
    assert "double" in message
    assert "argument x: dimension 0 was 5, is 6" in message
    assert "argument x: dimension 0 was 4, is 5" in message
    assert '"x": TensorSpec([ShapeVar("x_0"), STATIC])' in message
    watched.limit = None
    assert torch.equal(watched(torch.ones(6, 2)), torch.full((6, 2), 2.0)), "the function works on"


def test_no_recompilation_is_allowed_with_a_limit_of_0() -> None:
    watched = watch(compiled(double), limit=0)
    watched(torch.ones(4))
    watched(torch.ones(4))
    with pytest.raises(RecompileLimitExceeded):
        watched(torch.ones(5))
    with pytest.raises(ValueError, match="limit=-1"):
        watch(double, limit=-1)


def test_a_function_that_dynamo_gives_up_is_told() -> None:
    with torch._dynamo.config.patch(recompile_limit=2):
        watched = watch(compiled(double, dynamic=False))
        for size in (4, 5, 6, 7):
            watched(torch.ones(size))
    assert [len(watched.compiles), len(watched.given_up)] == [2, 1]
    assert "limit" in watched.given_up[0].failed
    assert "gave up 1 time" in str(watched)


def test_a_block_listens_to_all_that_is_compiled_in_it_and_to_nothing_after_it() -> None:
    one, other = compiled(double), compiled(branching)
    with watch() as seen:
        one(torch.ones(4))
        torch._dynamo.reset()  # drops callbacks of others; nothing of this
        other(torch.ones(4))
    one(torch.ones(4))
    assert seen.counts() == {"double": 1, "branching": 1}
    assert "2 compilations" in repr(seen)
    with pytest.raises(TypeError, match="wraps no function"):
        seen(ROWS)


def test_watches_within_one_another_each_see_it() -> None:
    inner = watch(compiled(double))
    with watch() as outer:
        inner(torch.ones(4))
        inner(torch.ones(5))
    assert len(inner.recompiles) == len(outer.recompiles) == 1


def test_another_thread_is_not_listened_to() -> None:
    fn = compiled(double)
    with watch() as seen:
        thread = threading.Thread(target=fn, args=(torch.ones(4),))
        thread.start()
        thread.join()
    assert not seen.compiles


def test_a_watched_module_stands_in_for_the_module() -> None:
    model = Block()
    model.compile(backend="eager")
    watched = watch(model)
    watched(ROWS)
    assert watched.counts() == {"Block.forward": 1}
    assert watched.linear is model.linear
    assert [name for name, _ in watched.named_children()] == ["linear", "lora"]
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = watched.nothing_of_this_name


def test_what_is_not_compiled_is_said_to_be_so() -> None:
    watched = watch(double)
    watched(ROWS)
    assert str(watched).startswith("Nothing was compiled in 1 call")


def test_an_error_of_the_users_is_the_users_and_no_compilation() -> None:
    def wrong(x: Tensor) -> Tensor:
        return x @ torch.ones(7, 7)

    watched = watch(compiled(wrong))
    with pytest.raises(Exception, match="7"):
        watched(ROWS)
    assert not watched.compiles


@pytest.mark.parametrize(
    "reason",
    ["0/0: __dtensor_spec_1234", "0/1: Unexpected recompilation: runtime guards failed", "0/0: f(x) == 3 and g(y)", "0/0: "],
)
def test_what_it_does_not_know_is_said_in_dynamos_words(reason: str) -> None:
    cause = explain(reason, Scene(double.__code__, {"x": ROWS}, globals(), {}))
    assert (cause.kind, cause.reason, cause.advice, cause.spec) == ("other", reason, "", "")
