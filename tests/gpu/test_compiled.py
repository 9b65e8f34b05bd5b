"""Whole functions through torch.compile on a GPU: right, as accurate as eager, compiled once, graph-safe."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from postlude.ir import to_text
from postlude.report import collecting

Function = Callable[..., Tensor]


class Gated(nn.Module):
    """SwiGLU with a residual and an RMSNorm before it."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Plain(nn.Module):
    """Linear, activation, linear with bias."""

    def __init__(self, width: int, inner: int, activation: Function = F.gelu) -> None:
        super().__init__()
        self.up, self.down, self.activation = nn.Linear(width, inner), nn.Linear(inner, width), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


def relative(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


def on_gpu(module: nn.Module, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return module.to("cuda", dtype)


def compare(module: nn.Module, x: Tensor, **options: object) -> None:
    """The compiled module's error against float64 is at most eager's."""
    compiled = torch.compile(module, backend="postlude", **options)
    with torch.no_grad():
        exact = copy.deepcopy(module).double()(x.double())
        eager, ours = relative(module(x), exact), relative(compiled(x), exact)
    assert ours <= 1.02 * eager + torch.finfo(x.dtype).eps / 8


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
    "mish": F.mish,
    "hardswish": F.hardswish,
}


@pytest.mark.parametrize("rows", [1, 3, 16, 64, 65, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gated_mlp(rows: int, dtype: torch.dtype) -> None:
    compare(on_gpu(Gated(256, 688), dtype), torch.randn(rows, 256, device="cuda", dtype=dtype))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("rows", [1, 33, 257])
def test_activations(name: str, rows: int) -> None:
    compare(on_gpu(Plain(256, 512, ACTIVATIONS[name])), torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16))


@pytest.mark.parametrize(("width", "inner"), [(250, 517), (8, 8), (1024, 1), (257, 33)])
def test_awkward_widths(width: int, inner: int) -> None:
    """Rows that no bulk copy can start at: another kernel takes them."""
    for rows in (1, 7, 100):
        compare(on_gpu(Plain(width, inner)), torch.randn(rows, width, device="cuda", dtype=torch.bfloat16))


def test_misaligned_and_strided_views() -> None:
    module = on_gpu(Plain(256, 512))
    flat = torch.randn(200 * 300 + 64, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(module, backend="postlude")
    with torch.no_grad():
        for offset in (0, 1, 3, 8):
            for rows in (5, 150):
                x = flat[offset:].as_strided((rows, 256), (300, 1))
                torch.testing.assert_close(compiled(x), module(x), rtol=2e-2, atol=2e-2)


def test_one_compile_serves_every_batch() -> None:
    module = on_gpu(Gated(256, 688))
    with collecting() as collection, torch._inductor.config.patch(force_disable_caches=True), torch.no_grad():
        compiled = torch.compile(module, backend="postlude", dynamic=True)
        for rows in (7, 2, 64, 65, 500, 33):
            x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
            torch.testing.assert_close(compiled(x), module(x), rtol=2e-2, atol=2e-2)
    assert len(collection.graphs) == 1
    assert any(one.region for one in collection.graphs[0][0])


def test_regions_are_used_at_all() -> None:
    for rows in (4, 1024):
        torch._dynamo.reset()
        with collecting() as collection, torch._inductor.config.patch(force_disable_caches=True), torch.no_grad():
            torch.compile(on_gpu(Gated(1024, 2048)), backend="postlude")(
                torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
            )
        assert any(one.region for graph, _ in collection.graphs for one in graph)


@pytest.mark.parametrize("rows", [4, 300])
def test_reduce_overhead(rows: int) -> None:
    module = on_gpu(Gated(256, 688))
    compiled = torch.compile(module, backend="postlude", mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
            torch.testing.assert_close(compiled(x).clone(), module(x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("rows", [4, 300])
def test_a_graph_that_the_user_captures(rows: int) -> None:
    module = on_gpu(Gated(256, 688))
    compiled = torch.compile(module, backend="postlude")
    x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        compiled(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = compiled(x)
        for _ in range(3):
            x.copy_(torch.randn_like(x))
            graph.replay()
            torch.testing.assert_close(result, module(x), rtol=2e-2, atol=2e-2)


def test_streams() -> None:
    """Kernels run on the current stream: what another stream is still writing is not read."""
    module = on_gpu(Plain(1024, 4096))
    compiled = torch.compile(module, backend="postlude")
    x = torch.randn(128, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        compiled(x)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            y = x
            for _ in range(20):
                y = compiled(y) * 0.5 + x
        stream.synchronize()
        wanted = x
        for _ in range(20):
            wanted = module(wanted) * 0.5 + x
    torch.testing.assert_close(y, wanted, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("rows", [8, 200])
def test_gradients_under_autocast(rows: int) -> None:
    module = Gated(256, 688).cuda()
    x = torch.randn(rows, 256, device="cuda")
    compiled = torch.compile(module, backend="postlude")
    exact = copy.deepcopy(module).double()
    exact(x.double()).square().mean().backward()
    errors = []
    for run in (module, compiled):
        module.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(x)
        loss.float().square().mean().backward()
        errors.append([relative(p.grad, e.grad) for p, e in zip(module.parameters(), exact.parameters(), strict=True)])
    for eager, ours in zip(*errors, strict=True):
        assert ours <= 1.1 * eager + 1e-3


@pytest.mark.parametrize("rows", [(300,), (4, 128)])
@pytest.mark.parametrize("activation", [F.relu, F.gelu])
def test_gradients_of_biases_are_sums_of_the_kernel_before(rows: tuple[int, ...], activation: Function) -> None:
    """The same kernel stores the gradient behind an activation and adds it up; ReLU saves truth values."""
    module = on_gpu(Plain(256, 1024, activation))
    x = torch.randn(*rows, 256, device="cuda", dtype=torch.bfloat16)
    exact = copy.deepcopy(module).double()
    exact(x.double()).square().mean().backward()
    errors = []
    with collecting() as collection, torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(module, backend="postlude", options={"fuse_all": True})
        for run in (module, compiled):
            module.zero_grad()
            run(x).float().square().mean().backward()
            errors.append([relative(p.grad, e.grad) for p, e in zip(module.parameters(), exact.parameters(), strict=True)])
    assert any("reduce sum m" in to_text(one.region) for graph, _ in collection.graphs for one in graph if one.region)
    for eager, ours in zip(*errors, strict=True):
        assert ours <= 1.1 * eager + 1e-3


def test_totals_of_rows_and_columns() -> None:
    w = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)

    def layer(x: Tensor) -> tuple[Tensor, ...]:
        y = F.relu(F.linear(x, w))
        return y, y.float().square().mean(-1), y.amax(-1), y.sum(0)

    compiled = torch.compile(layer, backend="postlude", options={"fuse_all": True}, dynamic=True)
    for rows in (300, 129, 2000):
        x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
        for got, wanted in zip(compiled(x), layer(x), strict=True):
            torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-1)
    for got, wanted in zip(compiled(x[:0]), layer(x[:1] * 0), strict=True):
        assert not got.numel() or torch.equal(got, wanted)  # sums over no rows are 0


def test_heads_that_lie_beside_each_other() -> None:
    """Operands and results of a batched product whose batch is two dimensions in memory."""

    def products(q: Tensor, k: Tensor) -> Tensor:
        q, k = (x.unflatten(-1, (8, 64)).transpose(1, 2) for x in (q, k))
        return F.gelu(q @ k.transpose(-1, -2))

    compiled = torch.compile(products, backend="postlude", options={"fuse_all": True})
    q, k = (torch.randn(2, 256, 512, device="cuda", dtype=torch.bfloat16) / 8 for _ in range(2))
    torch.testing.assert_close(compiled(q, k), products(q, k), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("shape", [(0, 256), (3, 0, 256)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    module = on_gpu(Plain(256, 512))
    with torch.no_grad():
        result = torch.compile(module, backend="postlude")(torch.randn(shape, device="cuda", dtype=torch.bfloat16))
    assert result.shape == (*shape[:-1], 256)


def test_special_values_stay_in_their_rows() -> None:
    module = on_gpu(Plain(256, 512))
    for rows in (4, 200):
        x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
        x[1, 3], x[2, 5] = float("nan"), float("inf")
        with torch.no_grad():
            got, wanted = torch.compile(module, backend="postlude")(x), module(x)
        assert torch.equal(got.isnan(), wanted.isnan())
        ordinary = [0, *range(3, rows)]
        torch.testing.assert_close(got[ordinary], wanted[ordinary], rtol=2e-2, atol=2e-2)


def test_tuned() -> None:
    module = on_gpu(Gated(1024, 2048))
    x = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16)
    compare(module, x, options={"tune": True})


def test_more_than_two_billion_elements() -> None:
    """Offsets of 64 bits: the last rows are as right as the first."""
    rows = (1 << 31) // 4096 + 1000
    x = torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16)
    w, b = torch.randn(4096, 64, device="cuda", dtype=torch.bfloat16), torch.randn(4096, device="cuda", dtype=torch.bfloat16)

    def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gelu(F.linear(x, w, b))

    with torch.no_grad():
        result = torch.compile(layer, backend="postlude", options={"fuse_all": True})(x, w, b)
        assert result.numel() > 1 << 31
        for part in (slice(0, 500), slice(rows // 2, rows // 2 + 500), slice(rows - 500, rows)):
            torch.testing.assert_close(result[part], layer(x[part], w, b), rtol=2e-2, atol=2e-2)


def test_more_products_than_a_grid_has_columns() -> None:
    """A launch's second dimension ends at 65535: batches don't."""
    left, right = torch.randn(70_000, 8, 16, device="cuda").bfloat16(), torch.randn(70_000, 16, 8, device="cuda").bfloat16()

    def products(left: Tensor, right: Tensor) -> Tensor:
        return F.relu(torch.bmm(left, right)) + 1

    compiled = torch.compile(products, backend="postlude", options={"fuse_all": True})
    torch.testing.assert_close(compiled(left, right), products(left, right), rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_second_gpu() -> None:
    module = on_gpu(Gated(256, 688)).to("cuda:1")
    compiled = torch.compile(module, backend="postlude")
    with torch.no_grad():
        for rows in (4, 300):
            x = torch.randn(rows, 256, device="cuda:1", dtype=torch.bfloat16)
            torch.testing.assert_close(compiled(x), module(x), rtol=2e-2, atol=2e-2)
