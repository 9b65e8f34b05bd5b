"""What a spec costs per call: a small MLP with a shape spec against torch.compile's default dynamic shapes, on a CPU.

    python benchmarks/shapes_overhead.py [--backend inductor] [--rounds 300] [--result shapes_overhead]

Whole calls of the compiled module are timed, in turn, in one process: default (dynamic after the second shape), dynamic=True, a
spec with backed symbols, a guard-free one, and eager. Each round times a burst of calls of every side; ratios are of one round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from common import save, table
from postlude.shapes import ShapesSpec, ShapeVar, TensorSpec, dynamic_spec

SIZE = 16
CALLS = 8
BATCHES = (2, 4, 7)


def mlp() -> nn.Module:
    """A module with code of its own, so that no side walks the guards of another."""

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(nn.functional.gelu(self.up(x)))

    Mlp.forward.__code__ = Mlp.forward.__code__.replace()
    torch.manual_seed(0)
    return Mlp()


def sides(backend: str) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    batch = ShapeVar("batch", max=1024)
    made: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "default": torch.compile(mlp(), backend=backend),
        "dynamic=True": torch.compile(mlp(), backend=backend, dynamic=True),
    }
    for guard_free in (False, True):
        spec = ShapesSpec({"x": TensorSpec([batch, SIZE])}, guard_free=guard_free)
        made["guard-free spec" if guard_free else "spec"] = torch.compile(dynamic_spec(spec)(mlp()), backend=backend)
    made["eager"] = mlp()
    return made


def measure(backend: str, rounds: int) -> dict[str, list[float]]:
    """Microseconds per call, a value for each round."""
    made = sides(backend)
    inputs = [torch.randn(size, SIZE) for size in BATCHES]
    times: dict[str, list[float]] = {name: [] for name in made}
    for side in made.values():
        for size in (3, 5, *BATCHES):
            side(torch.randn(size, SIZE))
    for turn in range(rounds):
        names = list(made)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            side = made[name]
            for x in inputs:
                side(x)
            start = time.perf_counter()
            for _ in range(CALLS):
                for x in inputs:
                    side(x)
            times[name].append((time.perf_counter() - start) / (CALLS * len(inputs)) * 1e6)
    return times


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--backend", default="inductor")
    arguments.add_argument("--rounds", type=int, default=300)
    arguments.add_argument("--result")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        times = measure(options.backend, options.rounds)
    rows, record = [], {}
    for name, values in times.items():
        low, middle, high = statistics.quantiles([one / other for one, other in zip(values, times["default"], strict=True)], n=4)
        median = statistics.median(values)
        record[name] = {"median_us": median, "least_us": min(values), "ratio": middle, "quartiles": [low, high]}
        rows.append([name, f"{median:.2f}", f"{min(values):.2f}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}"])
    title = f"MLP {SIZE}-{SIZE}-{SIZE}, {options.backend}: microseconds per call"
    table(title, ["", "median", "least", "of default", "quartiles"], rows)
    save(options.result, {"shapes_overhead": {"backend": options.backend, "sides": record}})


if __name__ == "__main__":
    main()
