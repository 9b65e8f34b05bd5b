"""Grouped-query attention reads keys and values as they lie, and gives what eager gives."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    batch, heads, length, width = key.shape
    key, value = (
        x[:, :, None].expand(batch, heads, groups, length, width).reshape(batch, heads * groups, length, width)
        for x in (key, value)
    )
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None and query.shape[2] > 1)


@pytest.mark.parametrize("lengths", [(1, 256), (1, 77), (128, 128), (200, 200)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION])
def test_as_accurate_as_eager(lengths: tuple[int, int], masked: bool, backend: SDPBackend) -> None:
    if masked and backend is SDPBackend.FLASH_ATTENTION:
        pytest.skip("FlashAttention takes no mask")
    queries, keys = lengths
    query = torch.randn(2, 16, queries, 64, device="cuda", dtype=torch.bfloat16)
    # A cache is read in part, and a projection's heads lie beside each other.
    key = torch.randn(2, 4, keys + 8, 64, device="cuda", dtype=torch.bfloat16)[:, :, :keys]
    value = torch.randn(2, keys, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    mask = torch.rand(2, 1, queries, keys, device="cuda") > 0.2 if masked else None
    if mask is not None:
        mask[..., 0] = True
    exact = attend(query.double(), key.double(), value.double(), mask)
    with sdpa_kernel(backend), torch.no_grad():
        eager = attend(query, key, value, mask)
        ours = torch.compile(attend, backend="postlude")(query, key, value, mask)
    errors = [float((x.double() - exact).norm() / exact.norm()) for x in (eager, ours)]
    assert errors[1] <= 1.05 * errors[0] + 1e-4
