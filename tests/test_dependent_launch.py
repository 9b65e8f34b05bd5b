"""Inductor's scheduler, beside Regions and without."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor import config, scheduler
from torch._inductor.virtualized import V

import postlude  # noqa: F401
from postlude import backend, dependent_launch


def function(x: Tensor, w: Tensor) -> Tensor:
    y = F.relu(x @ w)
    return torch.cumsum(torch.sin(y) + 1, 0) + y.sum(1, keepdim=True)


def last_nodes(name: str, monkeypatch: Any) -> list[object]:
    """What the scheduler says came last, as each node's kernel is generated."""
    seen = []
    original = scheduler.Scheduler.enter_context

    def look(self: Any, node: Any) -> None:
        seen.append(self.previous_node)
        original(self, node)

    monkeypatch.setattr(scheduler.Scheduler, "enter_context", look)
    torch._dynamo.reset()
    with config.patch(force_disable_caches=True):
        torch.compile(function, backend=name)(torch.randn(8, 16), torch.randn(16, 8))
    return seen


def test_no_kernel_relies_on_what_came_before_it(monkeypatch: Any) -> None:
    dependent_launch.install()
    plain = last_nodes("inductor", monkeypatch)
    assert any(plain), "the property gives Inductor what it is given"
    ours = last_nodes("postlude", monkeypatch)
    assert ours
    assert not any(ours)


def test_the_setting_lasts_for_one_graph(monkeypatch: Any) -> None:
    """Kernels start early where the graph has Regions on a GPU, and the user has not said otherwise."""
    during: list[bool] = []
    enabled: list[bool] = []

    class Watching(backend.RegionPass):
        def __call__(self, graph: Any, is_inference: bool | None = None) -> None:
            super().__call__(graph, is_inference)
            dependent_launch.enable()
            during.append(config.triton.enable_pdl)
            enabled.append(self.chains)

    def compile_with(options: dict[str, Any] | None) -> None:
        torch._dynamo.reset()
        with config.patch(force_disable_caches=True):
            run = torch.compile(function, backend=lambda m, i: backend.compile_graph(m, i, None, options, Watching))
            run(torch.randn(8, 16), torch.randn(16, 8))
        assert not config.triton.enable_pdl

    compile_with(None)
    compile_with({"triton.enable_pdl": False})
    assert during == [True, True]
    assert enabled == [True, False]
    assert not hasattr(V.graph, "postlude_regions")


def test_the_setting_is_part_of_the_key_of_cached_graphs() -> None:
    passes = [backend.RegionPass(backend.Options()) for _ in range(2)]
    passes[1].chains = True
    assert passes[0].uuid() != passes[1].uuid()
