"""`options={"tune": True}`: what is measured decides."""

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from postlude.capture.grow import Growth
from postlude.capture.rewrite import Plan
from postlude.report import collecting
from postlude.select import judge
from postlude.select.measure import Timing
from tests.test_backend import Block


def _compile(x: Tensor) -> tuple[Tensor, list[str]]:
    torch._dynamo.reset()
    compiled = torch.compile(Block(), backend="postlude", options={"tune": True})
    with collecting() as collection, torch._inductor.config.patch(force_disable_caches=True), torch.no_grad():
        result = compiled(x)
    return result, [one.reason for graph, _ in collection.graphs for one in graph]


def test_regions_are_timed_inside_a_compilation() -> None:
    x = torch.randn(6, 24)
    judge._timings.clear()
    result, reasons = _compile(x)
    torch.testing.assert_close(result, Block()(x), rtol=1e-5, atol=1e-5)
    assert len(judge._timings) == 2
    for (_, timing), reason in zip(judge._timings.items(), reasons, strict=True):
        assert 0 < timing.fused < 1
        assert 0 < timing.unfused < 1
        assert bool(reason) == (not timing.pays)


def test_a_device_is_part_of_what_was_measured() -> None:
    """The same Region, shapes and strides on a CPU and on two GPUs are three measurements."""
    with FakeTensorMode():
        devices = ("cpu", "cuda:0", "cuda:1")
        assert len({judge._description(torch.empty(2, 3, device=device)) for device in devices}) == 3


@pytest.mark.parametrize(("fused", "kept"), [(1.0, True), (1.04, True), (1.2, False)])
def test_a_slower_region_goes_back_to_inductor(fused: float, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(plan: Plan, growth: Growth) -> Timing:
        return Timing(fused, 1.0, 0.1)

    judge._timings.clear()
    monkeypatch.setattr(judge, "measure", measured)
    x = torch.randn(6, 24)
    result, reasons = _compile(x)
    judge._timings.clear()
    assert [not reason for reason in reasons] == [kept, kept]
    torch.testing.assert_close(result, Block()(x), rtol=1e-5, atol=1e-5)
