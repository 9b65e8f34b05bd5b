"""Backward graphs on devices whose kernels own tiles: derivatives are computed where the gradient meets them."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_module, make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule

from postlude.capture import Captured, Settings, capture
from postlude.ir import Region
from tests.capture.graphs import captured

pytestmark = pytest.mark.usefixtures("tiles")


class Layers(nn.Module):
    """Linear, activation, linear, with biases."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.activation = nn.Linear(32, 64), nn.Linear(64, 32), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class Gated(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((32, 64), (32, 64), (64, 32)))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def train(module: nn.Module, x: Tensor) -> tuple[list[Captured], list[list[Tensor]]]:
    """What capture makes of the backward graph; results and gradients of the rewritten module, of eager, and in float64."""
    graphs: list[list[Captured]] = []

    def compile(graph: GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        graphs.append(capture(graph.graph, Settings(strict=True)))
        graph.recompile()
        return make_boxed_func(graph.forward)

    twin = copy.deepcopy(module)
    rewritten = aot_module(
        twin,
        fw_compiler=compile,
        bw_compiler=compile,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    torch.manual_seed(1)
    upstream, found = torch.randn(*x.shape[:-1], 32).to(x.dtype), []
    wide = copy.deepcopy(module).double()
    for one, run, dtype in ((twin, rewritten, x.dtype), (module, module, x.dtype), (wide, wide, torch.float64)):
        leaf = x.detach().to(dtype).requires_grad_()
        result = run(leaf)
        found.append([result, *torch.autograd.grad(result, [leaf, *one.parameters()], upstream.to(dtype))])
    return graphs[1], found


def region_with(found: list[Captured], op: str) -> Region:
    (region,) = (one.region for one in found if one.region and any(op in name for name in one.absorbed))
    return region


def as_accurate(found: list[list[Tensor]]) -> None:
    for ours, eager, exact in zip(*[[t.detach() for t in one] for one in found], strict=True):
        error, allowed = (float((value.double() - exact).norm() / exact.norm()) for value in (ours, eager))
        # Of sums in float32 both errors are a unit in the last place or less, in an order that neither side chooses.
        slack = torch.finfo(ours.dtype).eps / (1 if ours.dtype is torch.float32 else 8)
        assert error <= 1.05 * allowed + slack


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", [F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.silu, F.mish, F.softplus])
@pytest.mark.parametrize("shape", [(24,), (2, 12)])
def test_a_derivative_is_computed_from_the_saved_input(activation, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """In the type in which it was saved, as the only tile that the kernel reads beside its product's operands."""
    backward, found = train(Layers(activation).to(dtype), torch.randn(*shape, 32).to(dtype))
    region = region_with(backward, "mul")
    tiles = [operand.dtype for operand in region.operands if operand.axes == ("m", "n")]
    assert tiles == [dtype]
    assert [y.axes for y in region.yields] == [("m", "n"), ("n",)], "the gradient, and that of the bias"
    as_accurate(found)


def test_both_gradients_of_a_gated_pair_are_results_of_one_kernel() -> None:
    backward, found = train(Gated().bfloat16(), torch.randn(2, 12, 32).bfloat16())
    region = region_with(backward, "mul")
    assert [operand.dtype for operand in region.operands if operand.axes == ("m", "n")] == [torch.bfloat16] * 2
    assert [(y.axes, y.dtype) for y in region.yields] == [(("m", "n"), torch.bfloat16)] * 2
    # dx of the two: the sum stands in the epilogue of one of the products.
    assert sum("aten.add.Tensor" in one.absorbed for one in backward) == 1
    as_accurate(found)


def test_the_derivative_of_relu_reads_what_was_saved() -> None:
    """The activation is saved for the next weight's gradient; that it is positive is no tensor of its own."""
    backward, found = train(Layers(F.relu).bfloat16(), torch.randn(24, 32).bfloat16())
    region = region_with(backward, "where")
    assert [operand.dtype for operand in region.operands if operand.axes == ("m", "n")] == [torch.bfloat16]
    as_accurate(found)


def test_a_tensor_that_is_stored_anyway_is_read() -> None:
    """Computing it again would read two tensors in its place."""

    def function(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        gate = torch.tanh(a) * b
        return (x @ w) * gate, gate @ w.t()

    inputs = [torch.randn(*shape) for shape in ((24, 32), (32, 64), (24, 64), (24, 64))]
    rewritten, found = captured(function, *inputs, settings=Settings(strict=True))
    region = region_with(found, "mul")
    assert sum(operand.axes == ("m", "n") for operand in region.operands) == 1
    for got, wanted in zip(rewritten(*inputs), function(*inputs), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_the_judge_may_want_it_read() -> None:
    from postlude.capture.grow import Growth
    from postlude.capture.rewrite import Plan
    from postlude.select.choice import UNFUSED, Choice

    def judge(plan: Plan, growth: Growth) -> Choice | None:
        return Choice(UNFUSED, "rule", "too much in one kernel") if growth.tiles else None

    def function(x: Tensor, w: Tensor, a: Tensor) -> Tensor:
        return (x @ w) * torch.tanh(a)

    inputs = [torch.randn(*shape) for shape in ((24, 32), (32, 64), (24, 64))]
    rewritten, (one,) = captured(function, *inputs, settings=Settings(strict=True), judge=judge)
    assert one.region is not None
    assert "aten.mul.Tensor" in one.absorbed
    torch.testing.assert_close(rewritten(*inputs), function(*inputs), rtol=1e-5, atol=1e-5)
