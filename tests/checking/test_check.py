"""`postlude.check` on small models: what it says when all is well, and when something is not."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import postlude
from postlude import runtime
from postlude.checking import machine
from postlude.checking.faults import planted
from postlude.checking.regions import Inspection
from postlude.checking.result import Check
from postlude.checking.sides import Runner
from postlude.checking.state import State, same_bits
from postlude.errors import CheckError
from postlude.loading import Inputs
from postlude.targets.base import Kernel
from tests.checking.models import Caching, Nested, Restless, Stack, stack


def check(model: Callable[..., Any], inputs: Any, **keywords: Any) -> Check:
    return postlude.check(model, inputs, **{"seconds": 0.02, "compile_times": False, "max_slowdown": 1e9} | keywords)


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions are compared, not timed: Inductor need not compile each."""
    monkeypatch.setattr(Inspection, "measure", lambda self, progress: None)


@pytest.fixture(scope="module")
def trained() -> Check:
    model, inputs = stack(training=True)
    return check(model, inputs)


def test_a_sound_model_passes_with_its_gradients(trained: Check) -> None:
    assert trained.passed, trained.failures
    assert trained.training
    assert trained.reference == "the model in float64"
    names = {row.name for row in trained.tensors}
    assert {"output", "gradient of blocks.0.up.weight", "gradient of blocks.2.down.bias"} <= names
    assert all(set(row.errors) == {"eager", "inductor", "postlude"} for row in trained.tensors)
    assert all(0 < row.errors["eager"].relative < 1e-5 for row in trained.tensors if row.name == "output")
    assert "as accurate as eager" in trained.verdict
    assert "bit for bit" in trained.verdict


def test_every_region_is_named_and_measured(trained: Check) -> None:
    forward = [region.name for region in trained.regions if not region.backward]
    assert forward == [f"blocks.{layer}.{name}" for layer in range(3) for name in ("up", "down")]
    assert any(region.backward for region in trained.regions)
    for region in trained.regions:
        assert region.flops > 0
        assert region.traffic > 0
        assert region.badness <= 1
        assert region.program.startswith("region(")
        assert region.source
        assert set(region.seconds) >= {"postlude"}
    up = trained.regions[0]
    assert set(up.seconds) == {"eager", "inductor", "postlude"}
    assert up.flops == 2 * 6 * 32 * 64
    assert up.against == "nodes"
    assert len(trained.kinds()) < len(trained.regions)  # equal layers are one kind
    assert trained.roofs is not None
    assert trained.roofs.flops > trained.roofs.memory / 100


def test_the_result_is_json(trained: Check) -> None:
    record = json.loads(trained.to_json())
    assert record["schema"] == 1
    assert record["passed"] is True
    assert record["speeds"][0]["latencies"]["postlude"]["median"] > 0
    assert record["worst_region"] == trained.worst_region.name  # type: ignore[union-attr]
    assert "Infinity" not in trained.to_json()
    assert "Postlude" in str(trained)


@pytest.mark.parametrize("name", ["blocks.1.up", "blocks.2.down"])
@pytest.mark.usefixtures("untimed")
def test_a_planted_fault_is_named(name: str) -> None:
    model, inputs = stack()
    with planted(name) as changed:
        found = check(model, inputs)
    assert set(changed) == {name}
    assert not found.passed
    assert found.worst_region is not None
    assert found.worst_region.name == name
    assert found.worst_region.blame == "capture"  # its kernel does what its program says, which is not what the model says
    assert [region.name for region in found.regions if region.badness > 1] == [name]
    (output,) = found.tensors
    assert not output.kept
    assert name in found.verdict
    assert check(model, inputs).passed


@pytest.mark.usefixtures("untimed")
def test_a_planted_fault_in_a_backward_graph_is_named() -> None:
    model, inputs = stack(training=True)
    with planted("backward of blocks.1.down", factor=1.05):
        found = check(model, inputs)
    assert found.worst_region is not None
    assert found.worst_region.name.startswith("backward of blocks.1.down")
    assert all(row.name.startswith("gradient") for row in found.tensors if not row.kept)


@pytest.mark.usefixtures("untimed")
def test_a_wrong_kernel_is_told_from_a_wrong_program(monkeypatch: pytest.MonkeyPatch) -> None:
    make = runtime._make

    def wrong(device: str, program: str, *others: Any) -> Kernel:
        kernel = make(device, program, *others)
        if "erf" not in program:
            return kernel

        def call(*tensors: Tensor) -> None:
            kernel(*tensors)
            tensors[-1].mul_(1.001)

        return call

    monkeypatch.setattr(runtime, "_make", wrong)
    model, inputs = stack()
    runtime.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        found = check(model, inputs)
    runtime.reset()
    assert {(region.name, region.blame) for region in found.regions if region.badness > 1} == {
        (f"blocks.{layer}.up", "kernel") for layer in range(3)
    }


@pytest.mark.usefixtures("untimed")
def test_the_model_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    model = Restless().train()
    x = torch.randn(4, 8, requires_grad=True)
    model.linear.weight.grad = gradient = torch.ones_like(model.linear.weight)
    before, attributes, generator = copy.deepcopy(model.state_dict()), dict(vars(model)), torch.get_rng_state()
    found = check(model, (x,))
    assert all(same_bits(value, before[name]) for name, value in model.state_dict().items())
    assert vars(model) == attributes
    assert model.linear.weight.grad is gradient
    assert x.grad is None
    assert torch.equal(torch.get_rng_state(), generator)
    assert found.draws  # its dropout
    assert not found.tensors
    assert found.reference.startswith("none: the model draws random numbers")
    assert "random numbers" in found.verdict


@pytest.mark.usefixtures("untimed")
def test_nested_outputs_are_named_by_their_path() -> None:
    torch.manual_seed(0)
    found = check(Nested().eval(), torch.randn(4, 16))
    assert [row.name for row in found.tensors] == ["logits", "more[0]", "more[1][0]", "index", "scale"]
    assert found.passed, found.failures


@pytest.mark.usefixtures("untimed")
def test_several_sets_of_inputs_count_their_compilations() -> None:
    model, _ = stack()
    found = check(model, [torch.randn(6, 32), (torch.randn(9, 32),), {"x": torch.randn(12, 32)}])
    assert [speed.input_set for speed in found.speeds] == [0, 1, 2]
    assert found.input_sets == ["float32[6, 32]", "float32[9, 32]", "x=float32[12, 32]"]
    for side in ("inductor", "postlude"):
        compiling = found.sides[side].compiling
        assert compiling is not None
        # The second size makes the number of rows a symbol, and the third needs nothing new; arguments by name do.
        assert 2 <= compiling.compiles <= 3
    assert len(found.sides["postlude"].memory) == 3


@pytest.mark.usefixtures("untimed")
def test_checks_do_not_use_up_the_limit_of_compilations() -> None:
    """Modules of torch itself share one code object, on which compilations are counted."""
    torch.manual_seed(0)
    for _ in range(3):
        model = nn.Sequential(nn.Linear(32, 16), nn.ReLU()).eval()
        found = check(model, [torch.randn(6, 32), torch.randn(9, 32)])
        assert [region.name for region in found.regions] == ["0"]
        assert found.sides["postlude"].compiling.compiles == 2  # type: ignore[union-attr]
    for rows in range(2, 12):
        assert postlude.explain(nn.Sequential(nn.Linear(32, 16)), torch.randn(rows, 32)).gemms == 1


@pytest.mark.usefixtures("untimed")
def test_compile_times_of_a_model_of_this_process() -> None:
    model, inputs = stack()
    found = check(model, inputs, compile_times=True)
    for side in ("inductor", "postlude"):
        compiling = found.sides[side].compiling
        assert compiling is not None
        assert compiling.cold is not None
        assert compiling.warm is not None
        assert 0 < compiling.warm < compiling.cold


@pytest.mark.usefixtures("untimed")
def test_a_function_with_its_own_backward_pass() -> None:
    model, inputs = stack(training=True)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    found = check(step, inputs)
    names = [row.name for row in found.tensors]
    assert "output" in names
    assert any("gradient of" in name and "up.weight" in name for name in names)
    assert found.passed, found.failures
    assert model.blocks[0].up.weight.grad is None


@pytest.mark.usefixtures("untimed")
def test_limits_are_what_was_asked_for() -> None:
    model, inputs = stack()
    found = check(model, inputs, max_error=1e-12, max_slowdown=1e-9)
    assert not found.passed
    assert any("where 1.0e-12 were allowed" in failure for failure in found.failures)
    assert any("times are allowed" in failure for failure in found.failures)
    assert found.verdict.startswith("Do not ship this")


@pytest.mark.usefixtures("untimed")
def test_a_model_that_float64_does_not_run() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            if x.dtype == torch.float64:
                raise NotImplementedError("no kernel for double")
            return self.linear(x).relu()

    torch.manual_seed(0)
    found = check(Picky().bfloat16().eval(), torch.randn(4, 16, dtype=torch.bfloat16))
    assert found.reference.startswith(
        "the model in float32; it does not run in float64: NotImplementedError: no kernel for double"
    )
    assert found.passed, found.failures
    assert 0 < found.tensors[0].errors["eager"].relative < 0.1


def test_a_side_that_fails_is_a_row_not_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from postlude.checking.sides import Settings

    compile_side = Settings.compile

    def broken(self: Settings, side: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if side != failing:
            return compile_side(self, side, function)

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("no compiler today\nand more lines")

        return refuse

    monkeypatch.setattr(Settings, "compile", broken)
    model, inputs = stack()
    failing = "inductor"
    found = check(model, inputs)
    assert found.sides["inductor"].failed == "RuntimeError: no compiler today"
    assert found.passed, found.failures
    assert set(found.speeds[0].speedups) == {"eager"}
    assert "no compiler today" in str(found)
    failing = "postlude"
    found = check(model, inputs)
    assert not found.passed
    assert found.verdict == "Postlude does not run this model: RuntimeError: no compiler today."
    assert not found.regions
    assert "no compiler today" in found.to_html()


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (Stack().eval(), torch.randn(2, 5), "fails in eager, before anything is compiled, for set 0 of the inputs: RuntimeError"),
        (Stack().eval(), [torch.randn(2, 32), torch.randn(2, 5)], "for set 1 of the inputs"),
        (lambda x: None, torch.randn(2), "output has no tensors"),
        (lambda x: "text", torch.randn(2), "output has no tensors"),
    ],
)
def test_a_model_with_nothing_to_compare(model: Callable[..., Any], inputs: Any, message: str) -> None:
    with pytest.raises(CheckError, match=message):
        check(model, inputs)


def test_a_cache_is_never_told_to_be_slower_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {1: 1.0, 64: 1e6}  # something else ran while the small copies did
    monkeypatch.setattr(machine, "_fastest_copy", lambda into, source, copies: seconds[copies])
    found = machine.roofs(torch.device("cpu"), torch.float32)
    assert found.cache == found.memory == machine.MEMORY_BYTES["cpu"]


def test_a_model_without_a_product_has_no_regions() -> None:
    found = check(lambda x: x.relu() + 1, torch.randn(8))
    assert found.passed, found.failures
    assert not found.regions
    assert found.roofs is None
    assert "Region" not in str(found)
    assert "each kernel" not in str(found)
    for text in (" ".join(str(found).split()), found.to_html()):
        assert "No matrix multiplication was fused" in text


def test_a_model_that_fills_a_cache_is_put_back_before_each_call(untimed: None) -> None:
    model = Caching().eval()
    found = check(model, torch.randn(3, 16))
    assert found.passed, found.failures
    assert found.speeds[0].latencies["postlude"].calls > 4  # more than the cache has rows
    assert int(model.position) == 0
    assert not model.layers[0][0].any()
    assert model.heard == []


def test_a_model_that_fails_when_it_is_called_again_is_a_clear_error(untimed: None) -> None:
    linear, left = nn.Linear(16, 16).eval(), [object()] * 4

    def model(x: Tensor) -> Tensor:
        left.pop()  # raises in the fifth call; three were made to look for random numbers
        return torch.relu(linear(x))

    with pytest.raises(CheckError, match="set 0 of the inputs: IndexError: pop from empty list"):
        check(model, torch.randn(3, 16))


def test_what_inductor_computes_otherwise_is_no_fault_of_postlude(untimed: None) -> None:
    """Of NaN times 0 it makes 0, in its own code as in ours."""
    torch.manual_seed(0)
    w = torch.randn(16, 24)

    def model(x: Tensor) -> Tensor:
        return torch.relu(x @ w) / 0 * 0

    found = check(model, torch.randn(8, 16))
    (row,) = found.tensors
    assert row.errors["postlude"].astray == row.errors["inductor"].astray > row.errors["eager"].astray == 0
    assert row.kept
    assert row.shared
    assert found.passed, found.failures
    assert "torch.compile computes output otherwise than eager, in both" in found.verdict
    assert "as Inductor's" in str(found)
    strict = check(model, torch.randn(8, 16), max_error=1.0)
    assert not strict.passed


def test_a_fault_of_ours_is_not_excused_by_inductor(untimed: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU()).eval()
    with planted("0", factor=1.5):
        found = check(model, torch.randn(8, 16))
    assert not found.passed
    assert not any(row.shared for row in found.tensors)


def test_sparse_outputs_are_compared(untimed: None) -> None:
    linear = nn.Linear(16, 16).eval()

    found = check(lambda x: torch.relu(linear(x)).to_sparse(), torch.randn(3, 16))
    assert found.passed, found.failures
    assert [row.shape for row in found.tensors] == [(3, 16)]


def test_inputs_are_copied_as_they_lie_and_once() -> None:
    inputs = (torch.randn(8, 32)[::2, ::2], torch.randn(1, 16).expand(4, 16), torch.randn(16, 4).T, torch.randn(0, 16))
    state = State(torch.relu)
    for given in inputs:
        runner = Runner(torch.add, Inputs((given, given)), state, False)
        one, other = runner.fresh().args
        assert one is other
        assert one is not given
        assert one.data_ptr() != given.data_ptr() or not given.numel()
        assert one.stride() == given.stride()
        assert torch.equal(one, given)
