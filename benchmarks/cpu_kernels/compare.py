"""Compares the kernels of two checkouts on linear + bias (+ gelu), interleaved in one process: what a change of a kernel brings.

Run `python benchmarks/cpu_kernels/compare.py FOLDER [M,N,K ...] [--threads 1]`; FOLDER is the root of the other checkout.

A cell is the other checkout's time over this one's: at the 3rd percentile, then the median. ATen is addmm, and gelu. One thread
is timed by its own clock, which other processes disturb least.
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import time
from collections.abc import Callable
from types import ModuleType

import harness
import torch
from bench import SHAPES

Run = Callable[[], object]


def harness_of(root: pathlib.Path) -> ModuleType:
    """The other checkout's module next door."""
    spec = importlib.util.spec_from_file_location("other_harness", root / "benchmarks" / "cpu_kernels" / "harness.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def interleave(runs: dict[tuple[str, str], Run], seconds: float, threads: int) -> dict[tuple[str, str], list[float]]:
    """Sorted times of each run; all take turns."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    times: dict[tuple[str, str], list[float]] = {name: [] for name in runs}
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop:
        for name, run in runs.items():
            run()
            for _ in range(2):
                begin = clock()
                run()
                times[name].append(clock() - begin)
    return {name: sorted(values) for name, values in times.items()}


def measure(shape: tuple[int, int, int], gelu: bool, other: ModuleType, arguments: argparse.Namespace) -> str:
    """One line: both forms of weights against the other checkout and ATen."""
    m, n, k = shape
    dtype = getattr(torch, arguments.dtype)
    x, w, bias = torch.randn(m, k).to(dtype), (torch.randn(n, k) / k**0.5).to(dtype), torch.randn(n).to(dtype)
    out, sums = torch.empty(m, n, dtype=dtype), torch.empty(m, n, dtype=dtype)
    product: Run = lambda: torch.addmm(bias, x, w.t(), out=sums)  # noqa: E731
    runs: dict[tuple[str, str], Run] = {("aten", ""): (lambda: torch.nn.functional.gelu(product())) if gelu else product}  # type: ignore[arg-type]
    for name, module in (("this", harness), ("other", other)):
        kernel = module.Kernel("Linear", dtype, GELU=int(gelu))
        runs[name, "packed"] = kernel.prepare([x, w, bias, out], {1: kernel.pack(w, 1)}, arguments.threads)
        runs[name, "natural"] = kernel.prepare([x, w, bias, out], {}, arguments.threads)
    times = interleave(runs, arguments.seconds, arguments.threads)

    def ratio(over: tuple[str, str], form: str) -> str:
        parts = [
            times[over][int(len(times[over]) * q)] / times["this", form][int(len(times["this", form]) * q)] for q in (0.03, 0.5)
        ]
        return " ".join(f"{part:.2f}" for part in parts)

    cells = [f"{arguments.dtype:9} {m:5},{n:5},{k:5} {'gelu' if gelu else 'bias'}"]
    for form in ("packed", "natural"):
        cells.append(f"{form}: other / this {ratio(('other', form), form)}, ATen / this {ratio(('aten', ''), form)}")
    return " | ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("shapes", nargs="*")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    other = harness_of(arguments.folder)
    shapes = [tuple(int(s) for s in text.split(",")) for text in arguments.shapes] or SHAPES
    with torch.inference_mode():
        for shape in shapes:
            for gelu in (False, True):
                print(measure(shape, gelu, other, arguments), flush=True)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
