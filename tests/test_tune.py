"""`options={"tune": True}`: what is measured decides, is kept, and is found again."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

from postlude.capture import Captured
from postlude.errors import KernelBuildError, MeasurementFailed
from postlude.report import collecting
from postlude.select import measure as measure_module
from postlude.select import tune
from postlude.select.choice import UNFUSED
from postlude.select.entry import Entry, Measured
from postlude.select.knowledge import forget, knowledge
from postlude.select.measure import Measurement
from postlude.select.variants import Variant
from tests.test_backend import Block


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _compile(
    x: Tensor, module: nn.Module | None = None, *, caches: bool = False, **options: Any
) -> tuple[Tensor, list[Captured]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    compiled = torch.compile(module or Block(), backend="postlude", options={"tune": True, **options})
    with collecting() as collection, torch._inductor.config.patch(force_disable_caches=not caches), torch.no_grad():
        result = compiled(x)
    return result, [one for graph, _ in collection.graphs for one in graph]


def _entries() -> list[Entry]:
    return list(knowledge().database.entries())


def measured(fused: float, unfused: float) -> Callable[..., Measurement]:
    """A measurement that is made up: of Inductor's code and of a kernel."""
    candidates = (
        Measured(Variant("cpp"), fused, fused, fused),
        Measured(Variant(UNFUSED), unfused, unfused, unfused),
    )
    return lambda *args, **kwargs: Measurement("cpp" if fused <= unfused else UNFUSED, candidates, 9, 3, 0)


def test_regions_are_measured_inside_a_compilation_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Block(), torch.randn(6, 24)
    result, captured = _compile(x, module)
    torch.testing.assert_close(result, module(x), rtol=1e-5, atol=1e-5)
    assert len(captured) == len(_entries()) == 2
    for one in captured:
        assert one.choice is not None
        assert one.choice.origin == "measured"
        assert [candidate.name for candidate in one.choice.candidates] == ["cpp", UNFUSED]
        assert all(candidate.seconds is not None and 0 < candidate.seconds < 1 for candidate in one.choice.candidates)
        assert one.choice.unfused == (one.region is None)
    for entry in _entries():
        assert entry.incumbent == "cpp"
        assert entry.sizes["m"] == 6
        assert dict(entry.call.sizes)["m"] == 8
        assert entry.sets >= 3
        assert entry.environment["torch"] == torch.__version__.split("+")[0]
    # From here on nothing is measured: not with the option, for another number of rows of the bucket, nor without it.
    monkeypatch.setattr(tune, "measure", pytest.fail)
    for rows, options in ((6, {}), (8, {}), (6, {"tune": False})):
        _, again = _compile(torch.randn(rows, 24), module, **options)
        assert [one.choice and (one.choice.winner, one.choice.origin) for one in again] == [
            (one.choice and one.choice.winner, "user database") for one in captured
        ]


@pytest.mark.parametrize("fused", [1.0, 1.2])
def test_a_slower_region_goes_back_to_inductor(fused: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "measure", measured(fused, 1.1))
    module, x = Block(), torch.randn(6, 24)
    for options in ({}, {"tune": False}):
        result, captured = _compile(x, module, **options)
        assert [one.region is not None for one in captured] == [fused < 1.1] * 2
        torch.testing.assert_close(result, module(x), rtol=1e-5, atol=1e-5)
    if fused > 1.1:
        assert captured[0].reason == "measured: 1200000.0 µs fused, 1100000.0 µs in Inductor"


def test_a_cached_graph_is_not_taken_when_the_choice_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor finds graphs by a key in which what is known has its part."""
    monkeypatch.setattr(tune, "measure", measured(1.0, 2.0))
    module, x = Block(), torch.randn(6, 24)
    with fresh_cache():
        _, first = _compile(x, module, caches=True)
        assert [one.region is not None for one in first] == [True, True]
        _compile(x, module, caches=True)  # by the key with what was measured
        assert _compile(x, module, caches=True)[1] == []  # found: no pass was run
        for entry in _entries():
            knowledge().put(replace(entry, winner=UNFUSED))
        result, changed = _compile(x, module, caches=True)
        assert [one.region for one in changed] == [None, None]
        torch.testing.assert_close(result, module(x), rtol=1e-5, atol=1e-5)
        assert _compile(x, module, caches=True)[1] == []
        knowledge().database.remove(lambda found: True)
        assert [one.region is not None for one in _compile(x, module, caches=True)[1]] == [True, True]  # measured again


def test_packed_weights_are_another_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    packings = []

    def measure(plan: Any, names: Any, incumbent: Any, packing: Any, check: Any) -> Measurement:
        packings.append(packing)
        return measured(1.0, 2.0)()

    monkeypatch.setattr(tune, "measure", measure)
    module, x = Block(), torch.randn(6, 24)
    for freeze in (False, True, True):
        _compile(x, module, freeze=freeze)
    assert [bool(packing.operands) for packing in packings] == [False, False, True, True]
    assert sorted(entry.call.packed for entry in _entries()) == [False, False, True, True]


def test_packed_weights_are_measured_packed() -> None:
    module, x = nn.Linear(96, 64), torch.randn(6, 96)
    result, captured = _compile(x, module, freeze=True)
    torch.testing.assert_close(result, module(x), rtol=1e-5, atol=1e-5)
    (entry,) = _entries()
    assert entry.call.packed
    assert entry.measured("cpp").seconds is not None, entry.measured("cpp").error
    assert captured[0].choice is not None


def test_inductors_settings_are_part_of_what_is_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "measure", measured(1.0, 2.0))
    _compile(torch.randn(6, 24))
    _compile(torch.randn(6, 24), max_autotune=True)
    assert sorted({entry.peer for entry in _entries()}) == ["inductor", "inductor max_autotune"]


def test_a_kernel_that_does_not_build_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: object) -> None:
        raise KernelBuildError("kernel.cpp", "g++ kernel.cpp", "an error")

    monkeypatch.setattr(Variant, "load", load)
    module, x = Block(), torch.randn(6, 24)
    result, captured = _compile(x, module)
    torch.testing.assert_close(result, module(x), rtol=1e-5, atol=1e-5)
    assert [one.reason for one in captured] == ["measured: no kernel could be built"] * 2
    assert all("KernelBuildError" in str(entry.measured("cpp").error) for entry in _entries())


def test_where_nothing_can_be_measured_the_rule_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*args: object) -> None:
        raise MeasurementFailed(RuntimeError("out of memory"))

    monkeypatch.setattr(tune, "measure", measure)
    with pytest.warns(UserWarning, match="could not measure a Region, cpp is taken"):
        _, captured = _compile(torch.randn(6, 24))
    assert [one.choice and (one.choice.winner, one.choice.origin) for one in captured] == [("cpp", "rule")] * 2
    assert captured[0].choice is not None
    assert "RuntimeError: out of memory" in captured[0].choice.reason
    assert _entries() == []


def test_a_choice_that_fails_to_build_later_falls_back_and_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler is taken away after tuning: the model runs, and the next compilation leaves the nodes to Inductor."""
    from postlude.targets import cpp

    monkeypatch.setattr(tune, "measure", measured(1.0, 2.0))
    module, x = Block(), torch.randn(6, 24)
    _compile(x, module)

    def load(*args: object) -> None:
        raise KernelBuildError("kernel.cpp", "g++ kernel.cpp", "an error")

    monkeypatch.setattr(cpp, "load", load)
    with pytest.warns(UserWarning, match="Until then this kernel is interpreted"):
        result, captured = _compile(x, module, tune=False)
    torch.testing.assert_close(result, module(x), rtol=1e-5, atol=1e-5)
    assert [one.region is not None for one in captured] == [True, True]
    assert all(list(entry.failed) == ["cpp"] for entry in _entries())
    forget()
    result, captured = _compile(x, module, tune=False)
    torch.testing.assert_close(result, module(x), rtol=1e-5, atol=1e-5)
    assert [one.region for one in captured] == [None, None]
    assert captured[0].reason.startswith("cpp can't be used here")


def test_a_fault_in_measuring_a_kernel_is_none_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no kernel's fault says nothing against it: the rule holds, and nothing is remembered."""

    def fails(*args: object) -> None:
        raise TypeError("a fault of ours")

    monkeypatch.setattr(measure_module, "_with_op", fails)
    with pytest.warns(UserWarning, match="TypeError: a fault of ours"):
        _, captured = _compile(torch.randn(6, 24))
    assert [one.region is not None for one in captured] == [True, True]
    assert _entries() == []


class Heads(nn.Module):
    """Three projections of one input: a Region with three results."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).view(2, 7, 4, 8).transpose(1, 2) for f in (self.q, self.k, self.v))
        return torch.softmax(q @ k.transpose(2, 3), -1) @ v


def test_regions_of_several_results_and_attention_are_measured() -> None:
    module, x = Heads(), torch.randn(2, 7, 32)
    result, _ = _compile(x, module)
    torch.testing.assert_close(result, module(x), rtol=1e-5, atol=1e-5)
    assert {entry.call.region.count("yield") for entry in _entries()} >= {1, 3}
    for entry in _entries():
        assert entry.measured("cpp").seconds is not None, entry.measured("cpp").error


def test_sizes_that_vary_are_measured_at_those_of_the_example() -> None:
    torch._dynamo.reset()
    module = nn.Sequential(nn.Linear(32, 48), nn.ReLU())
    compiled = torch.compile(module, backend="postlude", options={"tune": True}, dynamic=True)
    with torch.no_grad():
        for rows in (5, 70):
            x = torch.randn(rows, 32)
            torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-5)
    (entry,) = _entries()
    assert entry.sizes["m"] == 5
    assert entry.measured("cpp").seconds is not None, entry.measured("cpp").error
