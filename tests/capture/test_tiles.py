"""Capture for devices whose kernels own tiles, not rows: where a Region ends, and what it stores."""

import pytest
import torch
from torch import Tensor, nn

from postlude.capture import Settings
from postlude.capture.grow import Growth
from postlude.capture.rewrite import Plan
from postlude.ir.region import Apply, Reduce
from postlude.select.choice import UNFUSED, Choice
from tests.capture.graphs import captured

pytestmark = pytest.mark.usefixtures("tiles")


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def residual_and_norm(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    stream = x @ w.t() + residual
    return stream, rms_norm(stream, weight)


def test_what_a_norm_reads_is_computed_in_the_norm() -> None:
    """The residual stream is stored anyway: its conversion to float32 and its square would be two more tensors."""
    x, w, residual, weight = torch.randn(6, 24), torch.randn(40, 24), torch.randn(6, 40), torch.randn(40)
    inputs = tuple(t.bfloat16() for t in (x, w, residual, weight))
    function, found = captured(residual_and_norm, *inputs, settings=Settings(strict=True))
    (one,) = found
    assert one.region is not None
    assert [y.dtype for y in one.region.yields] == [torch.bfloat16]
    assert [s.op for s in one.region.body if isinstance(s, Apply)] == ["add"]
    assert any("computes it as well" in reason for reason in one.stops.values())
    for got, wanted in zip(function(*inputs), residual_and_norm(*inputs), strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


def test_an_activation_before_a_norm_stays() -> None:
    """Storing the product instead of what gelu makes of it would not be less."""
    x, w = torch.randn(6, 24), torch.randn(40, 24)

    def function(x: Tensor, w: Tensor) -> Tensor:
        return nn.functional.layer_norm(nn.functional.gelu(x @ w.t()), (40,))

    rewritten, (one,) = captured(function, x, w, settings=Settings(strict=True))
    assert one.region is not None
    assert len(one.region.yields) == 1
    assert "erf" in [s.op for s in one.region.body if isinstance(s, Apply)]
    assert not any(isinstance(s, Reduce) for s in one.region.body)
    torch.testing.assert_close(rewritten(x, w), function(x, w), rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_norm_ends_a_region_where_it_stores_least() -> None:
    """Behind the product there are float32 tiles for the norm's own kernel; the sum for the norm's weight stays."""
    x, w, h, rstd, weight = torch.randn(6, 24), torch.randn(24, 40), torch.randn(6, 40), torch.rand(6, 1), torch.randn(40)
    inputs = (x.bfloat16(), w.bfloat16(), h.bfloat16(), rstd, weight.bfloat16())

    def function(x: Tensor, w: Tensor, h: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        gradient, wide = x @ w, h.float()
        inner = (gradient * weight).float()
        total = (inner * wide).sum(-1, keepdim=True)
        of_weight = (gradient * (wide * rstd).bfloat16()).sum(0)
        return (inner * rstd + wide * (total * -0.5 * rstd.pow(3) / 20)).bfloat16(), of_weight

    rewritten, (one,) = captured(function, *inputs, settings=Settings(strict=True))
    assert one.region is not None
    assert [(y.axes, y.dtype) for y in one.region.yields] == [(("m", "n"), torch.bfloat16), (("n",), torch.bfloat16)]
    for got, wanted in zip(rewritten(*inputs), function(*inputs), strict=True):
        torch.testing.assert_close(got, wanted, rtol=3e-2, atol=3e-1)


def test_attention_and_written_out_softmax_are_left_whole() -> None:
    """With more queries than a kernel of few has rows for."""
    q, k, v = (torch.randn(2, 4, 24, 16) for _ in range(3))

    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        attention = nn.functional.scaled_dot_product_attention(q, k, v)
        return attention, torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1) @ v

    rewritten, found = captured(function, q, k, v, settings=Settings(strict=True))
    assert not any(isinstance(s, Reduce) for one in found if one.region for s in one.region.body)
    assert any("many tiles" in one.reason for one in found)
    for got, wanted in zip(rewritten(q, k, v), function(q, k, v), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def reductions_of(found: list) -> list[tuple[str, str]]:
    return [(s.kind, s.axis) for one in found if one.region for s in one.region.body if isinstance(s, Reduce)]


@pytest.mark.parametrize("leading", [(6,), (2, 3)])
def test_the_gradient_of_a_bias_is_a_result(leading: tuple[int, ...]) -> None:
    """What AOTAutograd makes of a linear layer before an activation: the gradient of the sum is stored, and added up."""
    x, w, kept = torch.randn(*leading, 24), torch.randn(24, 40), torch.randn(*leading, 40)

    def function(x: Tensor, w: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inner = (x.reshape(-1, 24) @ w).reshape(kept.shape) * (1 - kept * kept)
        flat = inner.reshape(-1, 40)
        return inner, flat.sum([0], keepdim=True).view(40).to(torch.bfloat16), inner.sum([*range(inner.ndim - 1)])

    rewritten, found = captured(function, x, w, kept, settings=Settings(strict=True))
    assert reductions_of(found) == [("sum", "m")]
    assert sorted(len(y.axes) for y in found[0].region.yields) == [1, 1, 2]
    for got, wanted in zip(rewritten(x, w, kept), function(x, w, kept), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_totals_of_rows_and_what_is_made_of_them_are_results() -> None:
    x, w = torch.randn(6, 24), torch.randn(40, 24)

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = x @ w.t()
        return y, torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5), y.amax(-1), y.mean(0)

    rewritten, found = captured(function, x, w, settings=Settings(strict=True))
    assert sorted(reductions_of(found)) == [("max", "n"), ("sum", "m"), ("sum", "n")]
    for got, wanted in zip(rewritten(x, w), function(x, w), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_a_batch_is_added_product_by_product() -> None:
    x, w = torch.randn(2, 3, 6, 24), torch.randn(2, 3, 24, 40)

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = torch.matmul(x, w).relu()
        return y, y.sum(-2), y.sum(-2, keepdim=True).clone(), y.sum(-1), y.sum((0, 1, 2))

    rewritten, found = captured(function, x, w, settings=Settings(strict=True))
    assert sorted(set(reductions_of(found))) == [("sum", "m"), ("sum", "n")]
    assert any("all rows" in reason for one in found for reason in one.stops.values())
    for got, wanted in zip(rewritten(x, w), function(x, w), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-4)


def test_a_reduction_that_meets_its_rows_again_is_left_to_their_kernel() -> None:
    x, w = torch.randn(6, 24), torch.randn(40, 24)

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = torch.relu(x @ w.t())
        return y, y.sum(0), torch.softmax(y, -1)

    rewritten, found = captured(function, x, w, settings=Settings(strict=True))
    assert reductions_of(found) == [("sum", "m")]
    for got, wanted in zip(rewritten(x, w), function(x, w), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_variances_take_two_passes() -> None:
    x, w = torch.randn(6, 24), torch.randn(40, 24)

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(x @ w.t())
        return y, y.var(-1)

    rewritten, found = captured(function, x, w, settings=Settings(strict=True))
    assert reductions_of(found) == []
    for got, wanted in zip(rewritten(x, w), function(x, w), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_totals_that_are_not_wanted_leave_the_product() -> None:
    """A refusal of the reductions is not one of the Region without them."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(x @ w.t())
        return y, y.sum(0)

    inputs = torch.randn(6, 24), torch.randn(40, 24)

    def judge(plan: Plan, growth: Growth) -> Choice | None:
        return Choice(UNFUSED, "rule", "no totals") if any(isinstance(s, Reduce) for s in plan.region.body) else None

    for wanted in (True, False):
        rewritten, (one,) = captured(
            function, *inputs, settings=Settings(strict=True), judge=(lambda plan, growth: None) if wanted else judge
        )
        assert one.region is not None
        assert any(isinstance(s, Reduce) for s in one.region.body) == wanted
        assert "tanh" in [s.op for s in one.region.body if isinstance(s, Apply)]
        for got, expected in zip(rewritten(*inputs), function(*inputs), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
