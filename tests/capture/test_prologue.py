"""A norm of one row is taken into the product that reads it, where nobody else does."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from postlude.capture import Captured, Settings
from postlude.ir import Contract, Region
from postlude.ir.region import Reduce
from postlude.select.choice import UNFUSED, Choice
from tests.capture.graphs import captured

pytestmark = pytest.mark.usefixtures("tiles")


def llama_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def gemma_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + weight.float())).to(x.dtype)


def torch_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def tensors(rows: int = 1) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((1, rows, 48), (48,), (40, 48), (24, 48))
    return [torch.randn(shape).bfloat16() for shape in shapes]


def norms(found: list[Captured]) -> list[bool]:
    """Of each Region, whether it computes what it multiplies."""
    regions = [one.region for one in found if one.region is not None]
    return [_computes(region) for region in regions]


def _computes(region: Region) -> bool:
    lefts = {s.left for s in region.body if isinstance(s, Contract)} - set(region.operand_index)
    assert bool(lefts) == any(isinstance(s, Reduce) for s in region.body)
    return bool(lefts)


@pytest.mark.parametrize("norm", [llama_norm, gemma_norm, torch_norm])
def test_the_norm_of_one_row(norm) -> None:  # type: ignore[no-untyped-def]
    def function(x: Tensor, g: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = norm(x * 1.5, g)
        return F.silu(F.linear(y, w)), F.linear(y, u), x * 1.5

    inputs = tensors()
    rewritten, found = captured(function, *inputs, settings=Settings(strict=True))
    assert norms(found) == [True]
    assert any("rsqrt" in name for name in found[0].absorbed)
    exact = function(*(t.double() for t in inputs))
    for got, eager, wanted in zip(rewritten(*inputs), function(*inputs), exact, strict=True):
        ours, theirs = ((t.double() - wanted).norm() / wanted.norm() for t in (got, eager))
        assert ours <= 1.05 * theirs + 1e-4


def test_a_gate_beside_it() -> None:
    def function(x: Tensor, g: Tensor, w: Tensor, u: Tensor) -> Tensor:
        y = llama_norm(x, g)
        return F.silu(F.linear(y, w)) * F.linear(y, u)

    x, g, w, _ = tensors()
    _, found = captured(function, x, g, w, w.flip(0), settings=Settings(strict=True))
    assert norms(found) == [True]


@pytest.mark.parametrize("norm", [llama_norm, torch_norm])
def test_several_rows_keep_their_norm(norm) -> None:  # type: ignore[no-untyped-def]
    _, found = captured(lambda x, g, w, u: F.linear(norm(x, g), w), *tensors(2), settings=Settings(strict=True))
    assert norms(found) == [False]


def test_a_norm_that_is_needed_elsewhere_stays() -> None:
    def function(x: Tensor, g: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        y = llama_norm(x, g)
        return F.linear(y, w), y

    _, found = captured(function, *tensors(), settings=Settings(strict=True))
    assert norms(found) == [False]


def test_a_scale_that_is_needed_elsewhere_stays() -> None:
    def function(x: Tensor, g: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        r = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return F.linear((x.float() * r).to(x.dtype), w), r

    _, found = captured(function, *tensors(), settings=Settings(strict=True))
    assert norms(found) == [False]


def test_rounding_as_eager_keeps_the_norm_apart() -> None:
    settings = Settings(strict=True, eager_rounding=True)
    _, found = captured(lambda x, g, w, u: F.linear(llama_norm(x, g), w), *tensors(), settings=settings)
    assert norms(found) == [False]


def test_what_is_no_norm_stays_apart() -> None:
    _, found = captured(lambda x, g, w, u: F.linear(F.silu(x) * g, w), *tensors(), settings=Settings(strict=True))
    assert norms(found) == [False]


def test_where_no_kernel_computes_it_the_product_is_alone() -> None:
    """A refusal of the Region with its norm is not one of the product."""
    inputs = tensors()
    _, found = captured(
        lambda x, g, w, u: F.gelu(F.linear(llama_norm(x, g), w)),
        *inputs,
        settings=Settings(strict=True),
        judge=lambda plan, growth: Choice(UNFUSED, "rule", "no norms here") if growth.prologue else None,
    )
    assert norms(found) == [False]
