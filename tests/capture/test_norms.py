"""An RMSNorm between products becomes a factor of each row behind the second, or stays, for a reason that is told."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.capture import Captured, Settings
from postlude.capture.grow import Growth
from postlude.capture.rewrite import Plan
from postlude.ir import Reduce
from postlude.select.choice import UNFUSED, Choice
from tests.capture.graphs import captured

pytestmark = pytest.mark.usefixtures("tiles")

ROWS, WIDTH = 80, 32


def llama_norm(h: Tensor, g: Tensor) -> Tensor:
    wide = h.float() if h.dtype != torch.float64 else h
    return g * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(h.dtype)


def gemma_norm(h: Tensor, g: Tensor) -> Tensor:
    wide = h.float() if h.dtype != torch.float64 else h
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + g.to(wide.dtype))).to(h.dtype)


def torch_norm(h: Tensor, g: Tensor) -> Tensor:
    return F.rms_norm(h, (h.shape[-1],), g, 1e-6)


def plain_norm(h: Tensor, g: Tensor) -> Tensor:
    return F.rms_norm(h, (h.shape[-1],), None, 1e-6)


NORMS = [llama_norm, gemma_norm, torch_norm, plain_norm]


def tensors(dtype: torch.dtype = torch.bfloat16, rows: tuple[int, ...] = (2, ROWS // 2)) -> list[Tensor]:
    """x, residual, w, g, and two weights behind the norm."""
    torch.manual_seed(0)
    x, residual = torch.randn(*rows, WIDTH), torch.randn(*rows, WIDTH)
    w, gate, up = (torch.randn(n, WIDTH) / WIDTH**0.5 for n in (WIDTH, 48, 48))
    return [t.to(dtype) for t in (x, residual, w, torch.rand(WIDTH) + 0.5, gate, up)]


def block(norm: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """Projection, residual, norm, gated pair."""

    def function(x: Tensor, residual: Tensor, w: Tensor, g: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        h = residual + F.linear(x, w)
        y = norm(h, g)
        return h, F.silu(F.linear(y, gate)) * F.linear(y, up)

    return function


def deferred(found: list[Captured]) -> int:
    """How many Regions give sums of rows."""
    return sum(any(isinstance(s, Reduce) and s.axis == "n" for s in one.region.body) for one in found if one.region)


def relative(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


def check(function: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor], wanted: int) -> list[Captured]:
    rewritten, found = captured(function, *inputs, settings=Settings(strict=True))
    assert deferred(found) == wanted
    exact = function(*(t.double() for t in inputs))
    for got, eager, reference in zip(rewritten(*inputs), function(*inputs), exact, strict=True):
        assert relative(got, reference) <= 1.02 * relative(eager, reference) + torch.finfo(got.dtype).eps / 8
    return found


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("rows", [(ROWS,), (2, ROWS // 2)])
def test_a_norm_between_products_disappears(norm, rows: tuple[int, ...]) -> None:  # type: ignore[no-untyped-def]
    found = check(block(norm), tensors(rows=rows), 1)
    assert len(found) == 2
    first, second = (one.region for one in found)
    assert first is not None
    assert second is not None
    assert [(y.axes, y.dtype) for y in first.yields] == [(("m", "n"), torch.bfloat16)] * 2 + [(("m",), torch.float32)]
    assert [operand.axes for operand in second.operands if "k" not in operand.axes] == [("m",)]
    assert not any("rsqrt" in name for name in found[1].absorbed)


def test_products_with_biases_and_three_of_them() -> None:
    def function(x: Tensor, residual: Tensor, w: Tensor, g: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        y = llama_norm(residual + F.linear(x, w), g)
        return F.linear(y, q, q[:, 0]), F.linear(y, k), F.linear(y, k[:8], k[:8, 1])

    check(function, tensors(), 1)


def test_large_rows() -> None:
    """Near the type's maximum squares overflow: the norm is 0, and so is what is made of it; with an infinity it is NaN."""
    inputs = tensors()
    x, residual, *_ = inputs
    largest = torch.finfo(torch.bfloat16).max
    x.zero_()
    residual[0, 0], residual[0, 1], residual[0, 2] = largest, 1e19, -1e18
    residual[0, 3, 5], residual[0, 4, 6], residual[0, 5, 7] = torch.inf, torch.nan, -torch.inf
    residual[0, 6] = 1e-30
    residual[0, 7] = 0.0
    rewritten, found = captured(block(llama_norm), *inputs, settings=Settings(strict=True))
    assert deferred(found) == 1
    for got, wanted in zip(rewritten(*inputs), block(llama_norm)(*inputs), strict=True):
        assert torch.equal(got.isnan(), wanted.isnan())
        torch.testing.assert_close(got, wanted, rtol=4e-2, atol=4e-2, equal_nan=True)
    assert rewritten(*inputs)[1][0, 3:6].isnan().all()
    assert (rewritten(*inputs)[1][0, 0] == 0).all()


def refusal(function: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor], part: str) -> None:
    found = check(function, inputs, 0)
    assert any(part in reason for one in found for reason in one.stops.values()), [one.stops for one in found]


def test_a_norm_that_is_a_result_stays() -> None:
    def function(x: Tensor, residual: Tensor, w: Tensor, g: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        y = llama_norm(residual + F.linear(x, w), g)
        return y, F.linear(y, gate)

    refusal(function, tensors(), "more than products read")


def test_a_norm_that_is_read_before_its_weight_stays() -> None:
    def function(x: Tensor, residual: Tensor, w: Tensor, g: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        h = residual + F.linear(x, w)
        wide = h.float() if h.dtype != torch.float64 else h
        scaled = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(h.dtype)
        return F.linear(g * scaled, gate), scaled.sum(0)

    check(function, tensors(), 0)


def test_a_norm_on_the_right_stays() -> None:
    def function(x: Tensor, residual: Tensor, w: Tensor, g: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        y = llama_norm(residual + F.linear(x, w), g)
        return (F.linear(y, y),)

    refusal(function, tensors(rows=(ROWS,)), "more than products read")


def test_types_without_the_range() -> None:
    refusal(block(llama_norm), tensors(torch.float16), "without the range")


def test_few_rows() -> None:
    refusal(block(llama_norm), tensors(rows=(4,)), "few rows")


def test_rows_whose_number_varies() -> None:
    inputs = tensors()
    rewritten, found = captured(block(llama_norm), *inputs, dynamic=True, settings=Settings(strict=True))
    assert deferred(found) == 0
    for got, wanted in zip(rewritten(*inputs), block(llama_norm)(*inputs), strict=True):
        assert relative(got, wanted.double()) < 1e-2


def test_other_dimensions_and_other_norms_stay() -> None:
    def columns(x: Tensor, residual: Tensor, w: Tensor, g: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        h = residual + F.linear(x, w)
        return (F.linear(h * torch.rsqrt(h.pow(2).mean(-2, keepdim=True) + 1e-6), gate),)

    def two_streams(x: Tensor, residual: Tensor, w: Tensor, g: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        h = residual + F.linear(x, w)
        other = h + 1
        return h, F.linear(other * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6), gate)

    def centred(x: Tensor, residual: Tensor, w: Tensor, g: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        return (F.linear(F.layer_norm(residual + F.linear(x, w), (WIDTH,), g), gate),)

    for function in (columns, two_streams, centred):
        check(function, tensors(), 0)


def test_shared_weights_and_two_norms_of_one_stream() -> None:
    def function(x: Tensor, residual: Tensor, w: Tensor, g: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        h = residual + F.linear(x, w)
        one, two = llama_norm(h, g), llama_norm(h, g * 2)
        return h, F.linear(one, gate), F.linear(two, up)

    rewritten, _ = captured(function, *(inputs := tensors()), settings=Settings(strict=True))
    exact = function(*(t.double() for t in inputs))
    for got, eager, reference in zip(rewritten(*inputs), function(*inputs), exact, strict=True):
        assert relative(got, reference) <= 1.02 * relative(eager, reference) + torch.finfo(got.dtype).eps / 8


def test_training_keeps_what_it_saves() -> None:
    """The norm is saved for the gradient of the weight behind it, so it is needed as it is."""

    def function(x: Tensor, residual: Tensor, w: Tensor, g: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        h = residual + F.linear(x, w)
        y = llama_norm(h, g)
        return F.linear(y, gate), y.reshape(-1, WIDTH)

    refusal(function, tensors(), "more than products read")


def test_where_the_judge_refuses_one_side_the_graph_is_as_it_was() -> None:
    def judge(plan: Plan, growth: Growth) -> Choice | None:
        reduces = any(isinstance(s, Reduce) for s in plan.region.body)
        return Choice(UNFUSED, "rule", "no totals") if reduces else None

    inputs = tensors()
    rewritten, found = captured(block(llama_norm), *inputs, settings=Settings(strict=True), judge=judge)
    plain, _ = captured(block(llama_norm), *inputs, settings=Settings(strict=True, eager_rounding=False), judge=judge)
    assert any("computes for less" in reason for one in found for reason in one.stops.values())
    assert not any("operand [m] " in str(one.region) for one in found)
    for got, wanted in zip(rewritten(*inputs), plain(*inputs), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_with_eager_rounding_nothing_is_deferred() -> None:
    rewritten, found = captured(block(llama_norm), *(inputs := tensors()), settings=Settings(strict=True, eager_rounding=True))
    assert deferred(found) == 0
    for got, wanted in zip(rewritten(*inputs), block(llama_norm)(*inputs), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)
