"""Kernels do not specialise: with symbolic sizes a graph has the same Regions, and each is built once for all of them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from postlude import runtime
from postlude.backend import RegionPass
from postlude.ir import to_text
from postlude.report import collecting
from postlude.select import tune
from postlude.select.knowledge import knowledge
from postlude.shapes import ShapeVar, TensorSpec, dynamic_spec, watch
from postlude.targets import cpp
from tests.test_tune import measured


class Layer(nn.Module):
    """Attention with a mask, and a projection with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (f(x).view(batch, length, 2, 8).transpose(1, 2) for f in (self.q, self.k, self.v))
        mask = mask[:, None, None, :].expand(batch, 1, length, length)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.o(attended.transpose(1, 2).reshape(batch, length, 16))


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def inputs(batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, length, 16), torch.rand(batch, length) > 0.2


def declared(module: nn.Module, **limits: int) -> nn.Module:
    batch, length = ShapeVar("batch"), ShapeVar("length", **limits)
    return dynamic_spec({"x": TensorSpec([batch, length, 16]), "mask": TensorSpec([batch, length])})(module)


def regions(module: nn.Module, *args: Tensor, **options: Any) -> list[Any]:
    """What became of each GEMM of the graph that one call compiles."""
    compiled = torch.compile(module, backend="postlude", options=options, fullgraph=True)
    with collecting() as collection, torch._inductor.config.patch(force_disable_caches=True), torch.no_grad():
        compiled(*args)
    return [one for graph, _ in collection.graphs for one in graph]


def test_every_region_is_built_once_and_serves_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime.reset()
    loaded, asked = [], []
    load, choice = cpp.load, knowledge().choice
    monkeypatch.setattr(cpp, "load", lambda region, *rest: loaded.append(to_text(region)) or load(region, *rest))
    knowledge().prepare()
    monkeypatch.setattr(knowledge(), "choice", lambda call, *rest: asked.append(call.region) or choice(call, *rest))
    model = Layer().eval()
    watched = watch(torch.compile(declared(model), backend="postlude", fullgraph=True))
    with torch.no_grad():
        for batch, length in ((3, 5), (2, 7), (4, 33), (2, 200), (5, 2)):
            x, mask = inputs(batch, length)
            torch.testing.assert_close(watched(x, mask), Layer.forward(model, x, mask), rtol=1e-4, atol=1e-5)
    assert len(watched.compiles) == 1
    assert len(loaded) == len(set(loaded)) == 3, "q, k and v; attention; the projection behind it"
    assert sorted(asked) == sorted(loaded), "on a CPU the database is asked when the graph is compiled, once for each Region"


def test_symbolic_sizes_are_fused_like_plain_ones() -> None:
    found = {}
    for how in ("plain", "declared"):
        torch._dynamo.reset()
        captured = regions(Layer().eval() if how == "plain" else declared(Layer().eval()), *inputs(3, 5))
        found[how] = [to_text(one.region) if one.region else one.reason for one in captured]
    assert found["plain"] == found["declared"]
    assert len(found["plain"]) == 3


class Projection(nn.Module):
    """One product with an epilogue."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 24)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(x))


class Judged(Exception):
    """All is decided; what Inductor makes of it is not asked."""


def test_one_bucket_that_loses_decides_for_a_graph_that_serves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured: 8 rows are faster as a Region, 500 in Inductor's code."""
    choices = []

    def finish(self: RegionPass, graph: Any, captured: list[Any], is_inference: bool) -> None:
        choices.append(captured[0].choice)
        raise Judged

    def judged(module: nn.Module, rows: int, **options: Any) -> Any:
        torch._dynamo.reset()
        # Undone by pytest's monkeypatch, the setting would be gone: it is an alias of another module's.
        uncached = torch._inductor.config.patch(force_disable_caches=True)
        with uncached, pytest.raises(Exception, match="Judged"), torch.no_grad():
            torch.compile(module, backend="postlude", options=options, fullgraph=True)(torch.randn(rows, 16))
        return choices.pop()

    monkeypatch.setattr(RegionPass, "finish", finish)
    for rows, seconds in ((8, 1.0), (500, 3.0)):
        monkeypatch.setattr(tune, "measure", measured(seconds, 2.0))
        assert judged(Projection(), rows, tune=True).unfused == (seconds > 2.0)
    monkeypatch.setattr(tune, "measure", pytest.fail)
    # Ranges reach the graph where sizes are unbacked symbols.
    for most, guard_free, unfused in ((None, False, True), (64, True, False), (512, True, True)):
        spec = {"x": TensorSpec([ShapeVar("rows", max=most), 16])}
        choice = judged(dynamic_spec(spec, guard_free=guard_free)(Projection()), 8)
        assert choice.unfused == unfused, most
        assert not unfused or choice.reason.startswith("sizes vary, and for m = 512 measured: ")
