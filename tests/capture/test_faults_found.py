"""Faults that reviews found, each with the value that eager gives."""

import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.capture import Settings
from tests.capture.graphs import captured

Make = Callable[..., list[Tensor]]


@pytest.fixture
def tensors() -> Make:
    def make(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]

    return make


def same(function: Callable[..., object], inputs: list[Tensor], **keywords: object) -> None:
    module, found = captured(function, *inputs, settings=Settings(strict=True), **keywords)  # type: ignore[arg-type]
    assert found
    ours, eager = module(*inputs), function(*inputs)
    torch.testing.assert_close(ours, eager, rtol=2e-2 if inputs[0].dtype != torch.float32 else 1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "reduction",
    [
        lambda y: y.sum(-1),
        lambda y: y.mean(-1, keepdim=True),
        lambda y: y.float().logsumexp(-1).to(y.dtype),
        lambda y: y.square().sum(-1, keepdim=True),
        lambda y: y.amax(-1),
    ],
    ids=["sum", "mean", "logsumexp", "square sum", "amax"],
)
def test_regions_with_column_results_alone(reduction: Callable[[Tensor], Tensor], dtype: torch.dtype, tensors: Make) -> None:
    x, w = tensors((50, 32), (32, 48), dtype=dtype)
    module, found = captured(lambda x, w: reduction(x @ w), x, w)
    assert found[0].region is not None
    exact = reduction(x.double() @ w.double())
    own, eager = ((f - exact).norm() for f in (module(x, w).double(), reduction(x @ w).double()))
    assert own <= 2 * eager + 1e-6 * exact.norm()


def test_infinity_of_float16_is_what_eager_stores() -> None:
    x, w = torch.full((3, 32), 200.0, dtype=torch.float16), torch.full((32, 4), 200.0, dtype=torch.float16)

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = x @ w
        return y, torch.isinf(y), y > 1e5

    module, _ = captured(function, x, w)
    for ours, eager in zip(module(x, w), function(x, w), strict=True):
        assert torch.equal(ours, eager)


def test_alpha_zero_ignores_nan_in_the_product(tensors: Make) -> None:
    x, w = tensors((5, 7), (7, 6))
    x[0, 0] = torch.nan
    same(lambda b, x, w: torch.addmm(b, x, w, alpha=0).relu(), [torch.ones(6), x, w])


@pytest.mark.parametrize("compare", [torch.gt, torch.eq, torch.le])
def test_comparison_with_a_number_is_eagers(compare: Callable[[Tensor, float], Tensor]) -> None:
    x, w = torch.eye(4, dtype=torch.bfloat16), torch.full((4, 4), 0.1, dtype=torch.bfloat16)
    for settings in (Settings(), Settings(eager_rounding=True)):
        module, _ = captured(lambda x, w: compare(x @ w, 0.1), x, w, settings=settings)
        assert torch.equal(module(x, w), compare(x @ w, 0.1))


def test_floor_division_is_eagers() -> None:
    x, w = torch.eye(3), torch.tensor([[1.0, 0.3, 0.6]] * 3)
    module, _ = captured(lambda x, w: (x @ w) // 0.1, x, w)
    assert torch.equal(module(x, w), (x @ w) // 0.1)


def test_full_is_rounded_to_its_own_type(tensors: Make) -> None:
    x, w = tensors((5, 7), (7, 6), dtype=torch.bfloat16)

    def function(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).float() * 0 + torch.full((6,), 0.1, dtype=torch.bfloat16)

    module, _ = captured(function, x, w)
    assert torch.equal(module(x, w), function(x, w))


def test_double_tensor_of_one_value_keeps_its_promotion(tensors: Make) -> None:
    x, w = tensors((5, 7), (7, 6))
    same(lambda x, w: (x @ w) + torch.full((6,), 0.1, dtype=torch.float64), [x, w])


def test_low_part_survives_views(tensors: Make) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return y - y.unsqueeze(0).bfloat16().float().squeeze(0)

    same(function, tensors((5, 7), (7, 6)))
    same(lambda x, w: (x @ w) + (-(x @ w)).bfloat16().float(), tensors((5, 7), (7, 6)))


BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda q: q + q.exp().cumsum(0),
    "flip": lambda q: q + q.relu().flip(0),
    "sum over rows": lambda q: q - q.exp().sum(0, keepdim=True).expand(q.shape),
    "layer norm": lambda q: F.layer_norm(q, q.shape[-1:]),
    "row sum": lambda q: q.sum(-1, keepdim=True),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_gate_with_something_in_between(between: str, tensors: Make) -> None:
    function = BETWEEN[between]
    same(lambda x, a, b: (x @ a) * function(x @ b), tensors((5, 7), (7, 6), (7, 6)))


@pytest.mark.parametrize("length", range(10, 19))
def test_gate_at_the_end_of_reach(length: int, tensors: Make) -> None:
    def function(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y, q = x @ a, x @ b
        early, late = q.cumsum(0), q
        for _ in range(length):
            late = late.sin()
        return y * (early + late)

    same(function, tensors((5, 7), (7, 6), (7, 6)))


def test_more_results_than_the_op_has(tensors: Make) -> None:
    def function(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        q = x @ b
        outputs = [torch.sin(q * i) for i in range(1, 15)]
        total = q.cumsum(0)
        return (x @ a) * q + total, *outputs

    inputs = tensors((5, 7), (7, 6), (7, 6))
    same(function, inputs)
    _, found = captured(function, *inputs)
    assert all(one.region is not None for one in found)


@pytest.mark.parametrize("shapes", [((5, 7), (7, 0)), ((0, 7), (7, 6)), ((5, 0), (0, 6)), ((0, 0), (0, 0))], ids=str)
def test_empty_shapes(shapes: tuple[tuple[int, ...], ...], tensors: Make) -> None:
    same(lambda x, w: torch.relu(x @ w + 1), tensors(*shapes))


def test_column_of_a_batch_in_another_order(tensors: Make) -> None:
    q, k = tensors((2, 3, 32, 8), (2, 3, 16, 8))
    other = torch.randn(2, 32, 3, 1).permute(0, 2, 1, 3)
    same(lambda q, k, other: other + (q @ k.transpose(-1, -2)).amax(-1, keepdim=True), [q, k, other])


def test_attention_for_training_is_computed_once(tensors: Make) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        return output, logsumexp

    inputs = tensors((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4))
    same(attention, inputs)
    module, _ = captured(attention, *inputs)
    targets = [str(n.target) for n in module.graph.nodes if n.op == "call_function"]
    assert not [target for target in targets if "scaled_dot_product" in target]
    for ours, eager in zip(module(*inputs), attention(*inputs), strict=True):
        assert ours.stride() == eager.stride()


def test_siblings_that_do_not_fit_together_are_taken_alone(tensors: Make) -> None:
    def function(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return (x @ a) * (x @ b).sum(-1, keepdim=True)

    inputs = tensors((5, 7), (7, 6), (7, 3))
    same(function, inputs)
    _, found = captured(function, *inputs)
    assert all(one.region is not None for one in found)


def test_order_of_seeded_random_numbers_is_kept() -> None:
    def function(x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(x @ a)
        dropped = F.dropout(y, 0.5)
        return y + torch.rand(6), dropped

    inputs = torch.randn(5, 7), torch.randn(7, 6)
    results = []
    for backend, options in (("postlude", {"fuse_all": True}), ("inductor", None)):  # 2.11's Inductor has an order of its own
        with torch._inductor.config.patch(fallback_random=True, force_disable_caches=True):
            torch._dynamo.reset()
            torch.manual_seed(0)
            results.append(torch.compile(function, backend=backend, options=options)(*inputs))
    for ours, inductors in zip(*results, strict=True):
        torch.testing.assert_close(ours, inductors)


def test_a_fault_of_ours_does_not_reach_the_user(monkeypatch: pytest.MonkeyPatch, tensors: Make) -> None:
    def broken(growth: object) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(sys.modules["postlude.capture.capture"], "plan", broken)
    x, w = tensors((5, 7), (7, 6))
    with pytest.warns(UserWarning, match="Please report"):
        module, found = captured(lambda x, w: torch.relu(x @ w), x, w)
    assert "a fault" in found[0].reason
    torch.testing.assert_close(module(x, w), torch.relu(x @ w))


COPIES: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "clone": lambda y: (y, y.clone()),
    "clone of a view": lambda y: (y, y[None].clone()),
    "view of the source": lambda y: (y.view(-1), y.clone()),
    "reshaped rows": lambda y: (y.view(5, 1, 6), y.view(5, 1, 6).clone()),
    "view of a clone": lambda y: (y, y.clone().view(-1)),
    "power of one": lambda y: (y, y**1),
    "column": lambda y: (s := y.sum(-1), s.clone()),
}


@pytest.mark.parametrize("copies", COPIES)
def test_copies_have_memory_of_their_own(copies: str, tensors: Make) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: COPIES[copies](torch.relu(x @ w)), backend="postlude", options={"fuse_all": True})
    x, w = tensors((5, 7), (7, 6))
    first, second = compiled(x, w)
    expected = second.clone()
    first.fill_(7)
    assert torch.equal(second, expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, a, b: F.cosine_similarity(x @ a, x @ b, dim=-1),
        lambda x, a, b: F.normalize(x @ a, dim=-1) * F.normalize(x @ b, dim=-1),
        lambda x, a, b: F.silu(x @ b) * F.rms_norm(x @ a, (6,)),
        lambda x, a, b: F.kl_div((x @ a).log_softmax(-1), (x @ b).softmax(-1), reduction="none").sum(-1),
        lambda x, a, b: (x @ a) * (x @ b).sin().cos().sin().cos().sin().cos().sin().cos().sin().cos() * (x @ b).relu().cumsum(0),
    ],
)
def test_gates_of_normalised_projections(function: Callable[..., Tensor], tensors: Make) -> None:
    same(function, tensors((5, 7), (7, 6), (7, 6)))


def test_long_gate_that_multiplies_on_its_way(tensors: Make) -> None:
    def function(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        first, other = x @ a, x @ b
        gate = other
        for _ in range(20):
            gate = torch.tanh(gate) * 0.5 + other * 0.1
        return first * gate

    same(function, tensors((5, 7), (7, 6), (7, 6)))


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, w: (x @ w).view(7, 0).sum(-1), ((3, 4), (4, 0))),
        (lambda q, k: torch.softmax(q @ k.mT, -1) @ k, ((2, 0, 8), (2, 5, 8))),
        (lambda q, k: torch.softmax(q @ k.mT, -1) @ k, ((2, 5, 8), (2, 0, 8))),
    ],
)
def test_views_and_attention_without_elements(
    function: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...], tensors: Make
) -> None:
    same(function, tensors(*shapes))


def test_unbacked_width(tensors: Make) -> None:
    torch._dynamo.reset()
    x, w = tensors((5, 7), (7, 6))
    torch._dynamo.decorators.mark_unbacked(w, 1)
    compiled = torch.compile(
        lambda x, w: torch.relu(x @ w).softmax(-1), backend="postlude", fullgraph=True, options={"fuse_all": True}
    )
    torch.testing.assert_close(compiled(x, w), torch.relu(x @ w).softmax(-1))


def test_program_too_large_for_a_kernel_is_left_to_inductor(tensors: Make) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        values = [torch.sin(x @ w * (i + 1.0)) for i in range(34)]
        return torch.stack([v / v.sum(-1, keepdim=True) for v in values]).sum(0)

    torch._dynamo.reset()
    x, w = tensors((5, 7), (7, 6))
    torch.testing.assert_close(torch.compile(function, backend="postlude")(x, w), function(x, w), rtol=1e-3, atol=1e-3)


def test_a_size_that_the_graph_has_no_node_for() -> None:
    """The number of nonzero elements is no input's size: what needs it was found out when the graph was rewritten already."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(torch.nonzero(x[:, 0] > 0).float().expand(-1, 8) @ w)

    x, w = torch.randn(20, 8), torch.randn(8, 8)
    rewritten, (found,) = captured(function, x, w, dynamic=True, settings=Settings(strict=True))
    assert "no node for the size" in found.reason
    torch.testing.assert_close(rewritten(x, w), function(x, w))
