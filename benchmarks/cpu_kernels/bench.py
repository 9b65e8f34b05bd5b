"""Times linear + bias + gelu against torch, interleaved in one process: the fact sheet's table, with packed and natural weights.

Run `python benchmarks/cpu_kernels/bench.py [--torch eager|all] [--cold] [--seconds 1] [M,N,K ...]`.

A cell is the peer's time over ours (the minimum of interleaved repetitions each); GF/s stands next to the share of the peak
that was measured in the same run.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable

import harness
import torch
from harness import Kernel
from torch import Tensor, nn

SHAPES = [
    (1, 4096, 1024), (4, 4096, 1024), (16, 4096, 1024), (64, 1536, 384),
    (128, 1536, 384), (128, 384, 1536), (512, 4096, 1024), (1024, 384, 384),
]  # fmt: skip
Run = Callable[[], object]


def limits(pairs: bool) -> ctypes.CDLL:
    flags = [*harness.FLAGS, "-x", "c++", *(["-DPAIRS"] if pairs else [])]
    library = ctypes.CDLL(str(harness._build(harness.HERE / "limits.h", flags)))
    library.limit_products.restype = ctypes.c_float
    return library


def product_run(dtype: torch.dtype, threads: int) -> tuple[Run, float]:
    pairs = dtype == torch.bfloat16
    library, steps = limits(pairs), 40000
    return lambda: library.limit_products(ctypes.c_int64(steps), threads), steps * 12 * 16 * (4 if pairs else 2) * threads


def interleave(runs: dict[str, Run], seconds: float) -> dict[str, float]:
    """The best time of each run; all take turns, so that all meet the same noise."""
    best = dict.fromkeys(runs, float("inf"))
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter  # blind to other processes where it can be
    for run in runs.values():
        run(), run()
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop:
        for name, run in runs.items():
            for _ in range(3):
                begin = clock()
                run()
                best[name] = min(best[name], clock() - begin)
    return best


class Layer(nn.Module):
    def __init__(self, n: int, k: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(k, n, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.linear(x))


def peers(layers: list[Layer], x: Tensor, which: str) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {"eager": [lambda layer=layer: layer(x) for layer in layers]}
    if which == "all":
        torch._dynamo.reset()
        compiled = [torch.compile(layer) for layer in layers]
        found["compile"] = [lambda c=c: c(x) for c in compiled]
        for runs in found.values():
            [run() for run in runs]
        import torch._inductor.config as config

        torch._dynamo.reset()
        with config.patch(freezing=True, max_autotune=True):
            frozen = [torch.compile(layer) for layer in layers]
            [f(x) for f in frozen]
        found["auto"] = [lambda f=f: f(x) for f in frozen]
    return found


def ours(layers: list[Layer], x: Tensor, threads: int, gelu: bool) -> dict[str, list[Run]]:
    kernel = Kernel("Linear", x.dtype, GELU=int(gelu))
    out = torch.empty(x.shape[0], layers[0].linear.out_features, dtype=x.dtype)
    runs: dict[str, list[Run]] = {"packed": [], "natural": []}
    for layer in layers:
        tensors = [x, layer.linear.weight.detach(), layer.linear.bias.detach(), out]
        packed = kernel.pack(tensors[1], 1)
        assert packed is not None
        runs["packed"].append(kernel.prepare(tensors, {1: packed}, threads))
        runs["natural"].append(kernel.prepare(tensors, {}, threads))
        want = nn.functional.linear(x.double(), tensors[1].double(), tensors[2].double())
        want = nn.functional.gelu(want) if gelu else want
        for name in runs:
            out.fill_(float("nan"))
            runs[name][-1]()
            error = (out.double() - want).abs().max().item()
            assert error < (1e-2 if x.dtype == torch.bfloat16 else 1e-5), (name, error)
    return runs


def measure(shape: tuple[int, int, int], dtype: torch.dtype, arguments: argparse.Namespace) -> None:
    m, n, k = shape
    threads = torch.get_num_threads()
    size = n * k * dtype.itemsize
    count = max(1, (128 << 20) // size) if arguments.cold else 1
    with torch.inference_mode():
        layers = [Layer(n, k, dtype).eval() for _ in range(count)]
        x = torch.randn(m, k).to(dtype)
        each = ours(layers, x, threads, arguments.gelu) | peers(layers, x, arguments.torch)
        runs: dict[str, Run] = {name: (lambda walk=walk: [run() for run in walk]) for name, walk in each.items()}
        limit, products = product_run(dtype, threads)
        runs["limit"] = limit
        if arguments.cold:
            library, data = limits(False), harness.aligned_bytes(128 << 20).fill_(1)
            pointer, length = ctypes.c_void_p(data.data_ptr()), ctypes.c_int64(data.numel())
            runs["read"] = lambda: library.limit_read(pointer, length, threads)
        best = interleave(runs, arguments.seconds)
    peak, flops = products / best["limit"], 2 * m * n * k * count
    name = str(dtype).removeprefix("torch.")
    cells = [f"{name:9} {m:5},{n:5},{k:5}  peak {peak / 1e9:5.0f}"]
    for own in ("packed", "natural"):
        rate = flops / best[own]
        cells.append(f"{own} {rate / 1e9:6.1f} GF/s {100 * rate / peak:4.0f}%")
        if arguments.cold:
            bandwidth = size * count / best[own]
            limit_bytes = (128 << 20) / best["read"]
            cells.append(f"{bandwidth / 1e9:5.1f} GB/s {100 * bandwidth / limit_bytes:4.0f}% of {limit_bytes / 1e9:.0f}")
        cells += [f"{peer} {best[peer] / best[own]:5.2f}" for peer in ("eager", "compile", "auto") if peer in best]
    print(" | ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", choices=("eager", "all"), default="eager")
    parser.add_argument("--cold", action="store_true", help="walk 128 MB of layers")
    parser.add_argument("--no-gelu", dest="gelu", action="store_false", help="ours without the activation: what it costs")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--dtype", default="float32,bfloat16")
    parser.add_argument("shapes", nargs="*")
    arguments = parser.parse_args()
    shapes = [tuple(int(s) for s in text.split(",")) for text in arguments.shapes] or SHAPES
    for name in arguments.dtype.split(","):
        for shape in shapes:
            measure(shape, getattr(torch, name), arguments)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
