"""One new token against a cache: as near to float64 as eager, in one kernel."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.gpu.test_heads import attend


def step(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None) -> Tensor:
    return attend(query, key, value, visible).transpose(1, 2).reshape(query.shape[0], 1, -1)


def case(batch: int, heads: int, length: int, width: int, dtype: torch.dtype, masked: bool) -> list[Tensor | None]:
    query = torch.randn(batch, 1, 16, width, device="cuda", dtype=dtype).transpose(1, 2)
    key = torch.randn(batch, heads, length + 8, width, device="cuda", dtype=dtype)[:, :, :length]
    value = torch.randn(batch, length, heads, width, device="cuda", dtype=dtype).transpose(1, 2)
    visible = torch.arange(length, device="cuda")[None, None, None, :] <= torch.randint(length, (batch, 1, 1, 1), device="cuda")
    return [query, key, value, visible if masked else None]


@pytest.mark.parametrize("backend", [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize(
    ("batch", "heads", "length", "width"),
    [(1, 4, 256, 128), (3, 16, 77, 64), (16, 2, 1000, 128), (1, 1, 9000, 96), (2, 8, 2, 64)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_as_accurate_as_eager(backend: SDPBackend, batch: int, heads: int, length: int, width: int, dtype: torch.dtype) -> None:
    for masked in (True, False):
        if masked and backend is SDPBackend.FLASH_ATTENTION:
            continue
        inputs = case(batch, heads, length, width, dtype, masked)
        exact = step(*(x.double() if x is not None and x.is_floating_point() else x for x in inputs))  # type: ignore[arg-type]
        torch._dynamo.reset()
        with sdpa_kernel(backend), torch.no_grad():
            eager = step(*inputs)  # type: ignore[arg-type]
            compiled = torch.compile(step, backend="postlude")
            ours = [compiled(*inputs) for _ in range(3)]
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                compiled(*inputs)
        errors = [float((x.double() - exact).norm() / exact.norm()) for x in (eager, ours[0])]
        assert errors[1] <= 1.05 * errors[0] + 1e-4
        assert torch.equal(ours[0], ours[2]), "parts are joined in the same order each time"
        names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        assert "attention" in names, names


def test_a_graph_of_steps() -> None:
    """Replays of a CUDA graph give what a call gives."""
    inputs = case(1, 4, 3000, 128, torch.bfloat16, True)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), torch.no_grad():
        compiled = torch.compile(step, backend="postlude")
        expected = compiled(*inputs).clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = compiled(*inputs)
        for _ in range(3):
            found.zero_()
            graph.replay()
            assert torch.equal(found, expected)
