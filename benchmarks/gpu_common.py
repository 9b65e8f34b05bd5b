"""What the GPU benchmarks share: CUDA graphs, interleaved timing by events, and the description of the machine."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclass(frozen=True)
class Time:
    """Median over rounds in µs, and the interquartile range over it."""

    microseconds: float
    spread: float


def graph_of(function: Callable[[], Any], warm_up: int = 3) -> Callable[[], None]:
    """A function's GPU work as a CUDA graph: what is timed is the GPU's, not the host's."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def interleave(sides: Mapping[str, Callable[[], Any]], rounds: int = 15, repeats: int = 10) -> dict[str, Time]:
    """Time several functions in turn, `repeats` calls back to back in each round, in an order that changes."""
    names = list(sides)
    times: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds + 1):
        for name in names if index % 2 else reversed(names):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(repeats):
                sides[name]()
            end.record()
            end.synchronize()
            if index:  # the first warms up
                times[name].append(begin.elapsed_time(end) * 1e3 / repeats)
    return {name: _time(values) for name, values in times.items()}


def _time(values: Sequence[float]) -> Time:
    ordered, median = sorted(values), statistics.median(values)
    return Time(median, (ordered[3 * len(ordered) // 4] - ordered[len(ordered) // 4]) / median)


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over norm of the reference, in float64."""
    wide = reference.double()
    return float(((result.double() - wide).norm() / wide.norm()).item())


def machine() -> dict[str, str]:
    """What the numbers hold for."""
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options that every GPU benchmark has."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--out", type=Path, help="write the record there, as JSON")
    return options


def save(path: Path | None, record: dict[str, Any]) -> None:
    """Write the record if a path was given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": machine(), **record}, indent=1) + "\n")
