"""Training steps on a GPU: what becomes of backward graphs, and gradients as near to float64 as eager's."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from postlude.capture.gemm import by_name
from postlude.ir import Region
from postlude.report import collecting


class Gelu(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Swiglu(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((width, inner), (width, inner), (inner, width)))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Chain(nn.Module):
    """Projection, residual, RMSNorm, gated pair, projection, residual."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.first, self.norm, self.gated = nn.Linear(width, width), nn.RMSNorm(width, eps=1e-6), Swiglu(width, inner)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        stream = x + self.first(x)
        return stream + self.gated(self.norm(stream))


def relative(value: Tensor, exact: Tensor) -> float:
    return float(((value.double() - exact).norm() / exact.norm()).detach())


def regions_of(run: Callable[[], object]) -> list[Region]:
    with collecting() as collection, torch._inductor.config.patch(force_disable_caches=True):
        run()
    return [one.region for graph, _ in collection.graphs for one in graph if one.region]


@pytest.mark.parametrize("make", [Gelu, Swiglu, Chain])
@pytest.mark.parametrize("shape", [(300,), (2, 192)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients(make: Callable[[int, int], nn.Module], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    module = make(256, 688).to("cuda", dtype)
    x, upstream = (torch.randn(*shape, 256, device="cuda", dtype=dtype) for _ in range(2))
    compiled = torch.compile(module, backend="postlude", options={"fuse_all": True})
    wide = copy.deepcopy(module).double()
    found = []
    for one, run in ((wide, wide), (module, module), (module, compiled)):
        leaf = x.to(next(one.parameters()).dtype).requires_grad_()
        result = run(leaf)
        found.append([result, *torch.autograd.grad(result, [leaf, *one.parameters()], upstream.to(result.dtype))])
    for exact, eager, ours in zip(*found, strict=True):
        assert relative(ours, exact) <= 1.05 * relative(eager, exact) + torch.finfo(dtype).eps / 8


def test_derivatives_read_what_was_saved() -> None:
    """No tile in float32, and both gradients of a gated pair from one product."""
    module = Swiglu(512, 1024).to("cuda", torch.bfloat16)
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(module, backend="postlude")
    regions = regions_of(lambda: compiled(x).sum().backward())
    tiles = [[o.dtype for o in region.operands if o.axes == ("m", "n")] for region in regions]
    assert [torch.bfloat16] * 2 in tiles
    assert not any(torch.float32 in dtypes for dtypes in tiles)


@pytest.mark.parametrize("rows", [(512,), (2, 300)])
def test_a_norm_between_products_disappears(rows: tuple[int, ...]) -> None:
    module = Chain(512, 1024).to("cuda", torch.bfloat16)
    x = torch.randn(*rows, 512, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(module, backend="postlude", options={"fuse_all": True})
    with torch.no_grad():
        regions = regions_of(lambda: compiled(x))
        exact = copy.deepcopy(module).double()(x.double())
        assert relative(compiled(x), exact) <= 1.02 * relative(module(x), exact) + 1e-3
    assert any([y.axes for y in region.yields] == [("m", "n"), ("m", "n"), ("m",)] for region in regions)
    assert any([o.axes for o in region.operands if "k" not in o.axes] == [("m",)] for region in regions)


@pytest.mark.parametrize("backend", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION])
def test_the_gradient_of_attention_skips_what_a_causal_mask_hides(backend: SDPBackend) -> None:
    """In training the mask would be saved for the backward graph, where nothing tells what it is."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        at = torch.arange(query.shape[2], device=query.device)
        mask = (at[None, :] <= at[:, None])[None, None].expand(query.shape[0], 1, -1, -1)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    inputs = [torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    seen: list[dict[str, object]] = []

    def look(graph: torch.fx.Graph) -> None:
        calls = [node for node in graph.nodes if node.op == "call_function" and "scaled_dot_product" in str(node.target)]
        seen.extend(by_name(node) for node in calls)

    patch = torch._inductor.config.patch(force_disable_caches=True, post_grad_custom_post_pass=look)
    with sdpa_kernel(backend), patch:
        compiled = torch.compile(attend, backend="postlude")
        wide = [x.detach().double().requires_grad_() for x in inputs]
        upstream = torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16)
        ours = torch.autograd.grad(compiled(*inputs), inputs, upstream)
    for one, exact in zip(ours, torch.autograd.grad(attend(*wide), wide, upstream.double()), strict=True):
        assert relative(one, exact) < 6e-3
    assert len(seen) == 2, "forward and backward"
    assert all(given.get("is_causal") and given.get("attn_bias") is None for given in seen)
