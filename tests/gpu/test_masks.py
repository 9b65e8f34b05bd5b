"""A causal mask that a model computes is not read, and values and gradients are what they are with it."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    at = torch.arange(query.shape[2], device=query.device)
    mask = (at[None, :] <= at[:, None])[None, None].expand(query.shape[0], 1, -1, -1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


@pytest.mark.parametrize("length", [64, 200, 1024])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION])
def test_as_accurate_as_with_the_mask(length: int, dynamic: bool, backend: SDPBackend) -> None:
    inputs = [torch.randn(2, 8, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    weight = torch.randn(2, 8, length, 64, device="cuda", dtype=torch.bfloat16)
    exact = attend(*wide)
    exact_gradients = torch.autograd.grad((exact * weight).sum(), wide)
    torch._dynamo.reset()
    with sdpa_kernel(backend):
        for compiled in (attend, torch.compile(attend, backend="postlude", dynamic=dynamic)):
            result = compiled(*inputs)
            gradients = torch.autograd.grad((result * weight).sum(), inputs)
            for one, reference in zip((result, *gradients), (exact, *exact_gradients), strict=True):
                assert float((one.double() - reference).norm() / reference.norm()) < 6e-3
        with torch.no_grad():  # every score is needed or not, but none is computed and thrown away
            torch.compile(attend, backend="postlude", dynamic=dynamic)(*inputs)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                torch.compile(attend, backend="postlude", dynamic=dynamic)(*inputs)
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert not any("triton" in name for name in names), f"a mask was computed: {names}"
