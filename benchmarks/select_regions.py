"""Where a Region pays on this machine: each kind of Region against Inductor's code for the same nodes, over many shapes.

The heuristic in src/postlude/select is fitted on this table. A ratio above 1 means that Postlude is faster.

    python benchmarks/select_regions.py --dtype float32 --result select_regions_float32
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import DTYPES, arguments, best_of, console, geometric_mean, measured, save, separate_copy, table

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

    def __init__(self, n: int, k: int, follow: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.gate, self.norm = nn.Linear(k, n), nn.Linear(k, n), nn.LayerNorm(n)
        self.follow = follow

    def forward(self, x: Tensor, residual: Tensor) -> Any:
        return self.follow(self, x, residual)


FORMS: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "plain": lambda layer, x, residual: layer.linear(x),
    "gelu": lambda layer, x, residual: F.gelu(layer.linear(x)),
    "residual+norm": lambda layer, x, residual: layer.norm(residual + layer.linear(x)),
    "swiglu": lambda layer, x, residual: F.silu(layer.gate(x)) * layer.linear(x),
    "siblings": lambda layer, x, residual: (layer.linear(x), layer.gate(x)),
    "softmax": lambda layer, x, residual: layer.linear(x).softmax(-1),
}


def size(text: str) -> tuple[int, int]:
    """``NxK``."""
    n, k = text.split("x")
    return int(n), int(k)


def modes_of(layer: nn.Module) -> dict[str, Callable[..., Any]]:
    """The layer in every mode. `fuse_all` keeps each Region, also one that the heuristic would leave to Inductor."""
    own: dict[str, Any] = {"backend": "postlude", "options": {"fuse_all": True}}
    frozen: dict[str, Any] = {"backend": "postlude", "options": {"fuse_all": True, "freeze": True}}
    settings: dict[str, dict[str, Any]] = {"postlude": own, "postlude-freeze": frozen, "inductor": {}, "inductor-freeze": {}}
    compiled = {name: torch.compile(separate_copy(layer), dynamic=True, **how) for name, how in settings.items()}
    return compiled | {"eager": layer}


#: Each mode of Postlude, and what it is compared with: Inductor's code is what a Region replaces.
PEERS = {"postlude": ("inductor",), "postlude-freeze": ("inductor", "inductor-freeze")}


def main() -> None:
    options = arguments(
        __doc__,
        dtype={"choices": list(DTYPES), "default": "float32"},
        forms={"nargs": "*", "choices": list(FORMS), "default": list(FORMS)},
        sizes={"nargs": "*", "type": size, "default": SHAPES, "metavar": "NxK"},
        rows={"nargs": "*", "type": int, "default": ROWS},
    )
    dtype = DTYPES[options.dtype]
    prepared = []
    with torch.no_grad():
        for form in options.forms:
            for n, k in options.sizes:
                torch._dynamo.reset()
                layer = Linear(n, k, FORMS[form]).to(dtype).eval().requires_grad_(False)
                modes = modes_of(layer)
                inputs = [(torch.randn(m, k).to(dtype), torch.randn(m, n).to(dtype)) for m in options.rows]
                for pair in inputs:
                    for name, call in modes.items():
                        with torch._inductor.config.patch(freezing=name == "inductor-freeze"):
                            for _ in range(4):  # freezing watches the weights before it packs them
                                call(*pair)
                prepared.append((f"{form} {n}x{k}", modes, inputs))
    rows: dict[str, list[list[str]]] = {mode: [] for mode in PEERS}
    records = []
    for label, modes, inputs in prepared:
        cells: dict[str, list[str]] = {mode: [] for mode in PEERS}
        with torch.no_grad():
            for pair in inputs:
                calls = {name: lambda f=f, pair=pair: f(*pair) for name, f in modes.items()}
                timings = measured(calls, options)
                ratios = {mode: best_of(timings, peers).median / timings[mode].median for mode, peers in PEERS.items()}
                for mode, ratio in ratios.items():
                    cells[mode].append(f"{ratio:.2f}")
                records.append(
                    {
                        "layer": label,
                        "rows": len(pair[0]),
                        "ratios": ratios,
                        "spread": max(t.spread for t in timings.values()),
                        "milliseconds": {name: t.median * 1e3 for name, t in timings.items()},
                    }
                )
        for mode in PEERS:
            rows[mode].append([label, *cells[mode]])
        console.print(f"{label}: {' '.join(cells['postlude'])} | {' '.join(cells['postlude-freeze'])}")
    for mode, peers in PEERS.items():
        table(f"{options.dtype}: {' or '.join(peers)} / {mode}", ["n x k", *map(str, options.rows)], rows[mode])
        ratios = [record["ratios"][mode] for record in records]
        console.print(f"geometric mean {geometric_mean(ratios):.2f}, least {min(ratios):.2f}")
    console.print(f"median of the spreads {statistics.median(record['spread'] for record in records):.0%}")
    save(options.result, {"records": records})


if __name__ == "__main__":
    main()
