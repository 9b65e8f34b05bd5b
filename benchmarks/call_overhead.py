"""What one fused op costs beyond its arithmetic: chains of tiny layers, short and long, Inductor and Postlude.

A layer is an 8 x 8 linear with ReLU: an extern GEMM call and a pointwise kernel for Inductor, one Region for Postlude. The
difference between a long and a short chain, divided by the number of layers between them, is free of what a call of a
compiled function costs as a whole (guards, argument handling); that part is in the second column.
"""

from __future__ import annotations

import statistics

import torch
from torch import Tensor, nn

from common import TORCH_MODES, arguments, compile_mode, measured, save, table

SHORT, LONG = 4, 36
BACKENDS = ("inductor", "postlude")


class Chain(nn.Module):
    """Tiny layers one after the other."""

    def __init__(self, layers: int, relu: bool) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        """Apply all layers."""
        for linear in self.linears:
            x = linear(x).relu() if self.relu else linear(x)
        return x


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__, backends={"nargs": "+", "choices": BACKENDS, "default": list(BACKENDS)})
    torch.manual_seed(0)
    x = torch.randn(8, 8)
    chains = {(depth, relu): Chain(depth, relu).eval().requires_grad_(False) for depth in (SHORT, LONG) for relu in (True, False)}
    calls = {}
    for backend in options.backends:
        for (depth, relu), chain in chains.items():
            # Layers without an activation show what Inductor's bare extern call costs.
            if relu or backend == "inductor":
                calls[backend, depth, relu] = compile_mode(chain, (x,), TORCH_MODES[backend])
    timings = measured({str(key): call for key, call in calls.items()}, options, seconds=options.seconds / 3, warm=20)
    rows, record = [], {}
    for backend, relu in dict.fromkeys((backend, relu) for backend, _, relu in calls):
        short, long = (timings[str((backend, depth, relu))].rounds for depth in (SHORT, LONG))
        layer = statistics.median((b - a) / (LONG - SHORT) for a, b in zip(short, long, strict=True)) * 1e6
        fixed = statistics.median(short) * 1e6 - SHORT * layer
        name = f"{backend}, {'linear + relu' if relu else 'linear'}"
        record[name] = {"layer_us": layer, "fixed_us": fixed}
        rows.append([name, f"{layer:.2f}", f"{fixed:.1f}"])
    table("Tiny layers, microseconds", ["mode", "per layer", "per call of the function"], rows)
    save(options.result, {"overhead": record})


if __name__ == "__main__":
    main()
