"""One token through norm and products: one kernel, as near to float64 as eager."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


def norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def projections(x: Tensor, g: Tensor, w: Tensor, u: Tensor) -> Tensor:
    y = norm(x, g)
    return torch.cat([F.linear(y, w), F.linear(y, u), F.linear(y, w + 1)], -1)


def columns(x: Tensor, g: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """Weights that do not lie along k."""
    return norm(x, g) @ w.t().contiguous() + x[..., : w.shape[0]]


@pytest.mark.parametrize("function", [projections, columns])
@pytest.mark.parametrize(("n", "k"), [(1024, 4096), (250, 1000), (40, 72)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 3000.0])
def test_as_accurate_as_eager(function, n: int, k: int, dtype: torch.dtype, scale: float) -> None:  # type: ignore[no-untyped-def]
    torch._dynamo.reset()
    x = torch.randn(1, 1, k, device="cuda", dtype=dtype) * scale
    g = torch.rand(k, device="cuda", dtype=dtype) + 0.5
    w, u = (torch.randn(n, k, device="cuda", dtype=dtype) / k**0.5 for _ in range(2))
    exact = function(*(t.double() for t in (x, g, w, u)))
    compiled = torch.compile(function, backend="postlude")
    with torch.no_grad():
        eager, ours = function(x, g, w, u), compiled(x, g, w, u)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            compiled(x, g, w, u)
    errors = [float((result.double() - exact).norm() / exact.norm()) for result in (eager, ours)]
    assert errors[1] <= 1.05 * errors[0] + 1e-4
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert not any("rsqrt" in name for name in names), f"the norm had a kernel of its own: {names}"
