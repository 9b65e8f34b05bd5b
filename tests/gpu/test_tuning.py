"""Tuning on a GPU: candidates of several targets, in CUDA graphs, and the winner is the kernel that runs."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.report import collecting
from postlude.select import rows, tune
from postlude.select.clock import cold_sets, cycle, last_cache
from postlude.select.database import Database
from postlude.select.entry import Entry
from postlude.select.subject import applies
from postlude.targets.base import available


def compiled_choice(x: Tensor, w: Tensor, b: Tensor, **options: Any) -> tuple[Tensor, Any]:
    torch._dynamo.reset()
    function = torch.compile(lambda x: F.gelu(F.linear(x, w, b)), backend="postlude", options=options)
    with collecting() as collection, torch._inductor.config.patch(force_disable_caches=True), torch.no_grad():
        result = function(x)
    ((captured,),) = [graph for graph, _ in collection.graphs]
    return result, captured.choice


@pytest.fixture
def layer() -> tuple[Tensor, Tensor]:
    w, b = torch.randn(4096, 4096, device="cuda"), torch.randn(4096, device="cuda")
    return w.bfloat16() / 64, b.bfloat16()


@pytest.mark.parametrize("m", [1, 8, 2048])
def test_every_target_is_measured_and_the_winner_runs(
    m: int, layer: tuple[Tensor, Tensor], tuning_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(m, 4096, device="cuda").bfloat16()
    result, choice = compiled_choice(x, *layer, tune=True)
    torch.testing.assert_close(result, F.gelu(F.linear(x, *layer)), rtol=2e-2, atol=2e-2)
    (entry,) = Database(tuning_database).entries()
    assert choice.origin == "measured"
    assert choice.winner == entry.winner
    targets = {c.variant.target for c in entry.candidates if c.seconds is not None}
    assert targets >= {"unfused", *(name for name in available("cuda") if name != "blas")}, entry
    assert len(entry.candidates) > 3
    for candidate in entry.candidates:
        # 32 MB of weights at 5 TB/s, which no cache holds, take 6 µs; nothing takes a second.
        assert candidate.seconds is None or 5e-6 < candidate.seconds < 1e-2, candidate
    assert applies(entry.call, entry.environment)

    launched: list[str] = []
    known = rows.ByRows.known

    def looked_up(self: rows.ByRows, tensors: Any) -> str | None:
        launched.append(str(known(self, tensors)))
        return launched[-1] if launched[-1] != "None" else None

    monkeypatch.setattr(rows.ByRows, "known", looked_up)
    monkeypatch.setattr(tune, "measure", pytest.fail)
    result, again = compiled_choice(x, *layer)
    torch.testing.assert_close(result, F.gelu(F.linear(x, *layer)), rtol=2e-2, atol=2e-2)
    assert (again.winner, again.origin) == (entry.winner, "user database")
    fused = entry.best(lambda variant: variant.target != "unfused")
    assert fused is not None
    assert launched == ([] if again.unfused else [fused.variant.name])


def test_each_measured_configuration_gives_right_results(layer: tuple[Tensor, Tensor], tuning_database: Path) -> None:
    """A candidate that was measured is one that was right: its results were compared."""
    x = torch.randn(96, 4096, device="cuda").bfloat16()
    compiled_choice(x, *layer, tune=True)
    (entry,) = Database(tuning_database).entries()
    errors = {c.variant.name: c.error for c in entry.candidates if c.error}
    assert not any("differs from Inductor's" in str(error) for error in errors.values()), errors
    assert Entry.from_json(entry.to_json()) == entry


def test_a_cycle_reads_from_memory() -> None:
    """Copies of tensors that together are larger than L2 run at the speed of memory, not of the cache."""
    device = torch.device("cuda")
    size = 4 << 20
    sets = [[torch.zeros(size, dtype=torch.uint8, device=device)] for _ in range(cold_sets(device, size))]
    assert len(sets) * size >= 2 * last_cache(device)
    into = torch.empty(size, dtype=torch.uint8, device=device)
    cold, warm = cycle(into.copy_, sets), cycle(into.copy_, sets[:1] * len(sets))
    times = [(cold(), warm()) for _ in range(20)]
    assert sorted(c / w for c, w in times)[10] > 1.05
