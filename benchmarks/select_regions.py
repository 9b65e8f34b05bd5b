"""Where a Region pays on this machine: each kind of Region against Inductor's best code for the same nodes, over many shapes.

The heuristic in src/postlude/select is fitted on this table. A ratio above 1 means that Postlude is faster.

    python benchmarks/select_regions.py --dtype float32 --result select_regions_float32
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import DTYPES, arguments, console, geometric_mean, measured, save, table

SHAPES = [
    (384, 384),
    (1536, 384),
    (384, 1536),
    (1024, 1024),
    (4096, 1024),
    (1024, 4096),
    (64, 64),
    (10, 256),
    (3, 2048),
    (8192, 256),
]
ROWS = (1, 4, 16, 64, 256, 1024)


class Linear(nn.Module):
    """A linear layer, what follows it, and what that needs."""

    def __init__(self, n: int, k: int, follow: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear, self.gate, self.norm = nn.Linear(k, n), nn.Linear(k, n), nn.LayerNorm(n)
        self.follow = follow

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.follow(self, x, residual)


FORMS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "plain": lambda layer, x, residual: layer.linear(x),
    "gelu": lambda layer, x, residual: F.gelu(layer.linear(x)),
    "residual+norm": lambda layer, x, residual: layer.norm(residual + layer.linear(x)),
    "swiglu": lambda layer, x, residual: F.silu(layer.gate(x)) * layer.linear(x),
    "softmax": lambda layer, x, residual: layer.linear(x).softmax(-1),
}


def main() -> None:
    options = arguments(
        __doc__,
        dtype={"choices": list(DTYPES), "default": "float32"},
        forms={"nargs": "*", "choices": list(FORMS), "default": list(FORMS)},
    )
    dtype = DTYPES[options.dtype]
    rows, records = [], []
    for form in options.forms:
        for n, k in SHAPES:
            torch._dynamo.reset()
            layer = Linear(n, k, FORMS[form]).to(dtype).eval()
            modes = {
                "postlude": torch.compile(layer, backend="postlude", dynamic=True, options={"fuse_all": True}),
                "inductor": torch.compile(layer, dynamic=True),
                "eager": layer,
            }
            cells = []
            for m in ROWS:
                x, residual = torch.randn(m, k).to(dtype), torch.randn(m, n).to(dtype)
                with torch.no_grad():
                    timings = measured(
                        {name: lambda f=f, x=x, residual=residual: f(x, residual) for name, f in modes.items()}, options
                    )
                best = min(timings["inductor"].median, timings["eager"].median)
                ratio = best / timings["postlude"].median
                spread = max(t.spread for t in timings.values())
                cells.append(f"{ratio:.2f}")
                records.append({"form": form, "n": n, "k": k, "m": m, "ratio": ratio, "spread": spread,
                                "milliseconds": {name: t.median * 1e3 for name, t in timings.items()}})  # fmt: skip
            console.print(f"{form} {n}x{k}: {' '.join(cells)}")
            rows.append([f"{form} {n}x{k}", *cells])
    table(f"{options.dtype}: best of eager and Inductor / Postlude, natural weights", ["n x k", *map(str, ROWS)], rows)
    console.print(
        f"geometric mean {geometric_mean([r['ratio'] for r in records]):.2f}, least {min(r['ratio'] for r in records):.2f}"
    )
    save(options.result, {"records": records})


if __name__ == "__main__":
    main()
