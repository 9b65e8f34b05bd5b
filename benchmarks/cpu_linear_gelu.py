"""GEMM + bias + erf-GELU on a CPU, hot and cold: eager, Inductor, ONNX Runtime, OpenVINO and Postlude, interleaved.

`hot` repeats one layer. `cold` walks 128 MB or more of layers of one size, so that weights come from memory; a column tells
how much of the read limit (a plain read loop over as many bytes, in the same rounds) the fastest mode of Postlude reaches.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from common import (
    DTYPES,
    OWN,
    PEERS,
    TORCH,
    TORCH_MODES,
    arguments,
    compile_mode,
    console,
    measured,
    onnxruntime_session,
    openvino_model,
    ratio_table,
    save,
    speedups,
    table,
)
from read_bandwidth import reader

SIZES = (
    (1, 4096, 1024),
    (4, 4096, 1024),
    (16, 4096, 1024),
    (64, 1536, 384),
    (128, 1536, 384),
    (128, 384, 1536),
    (512, 4096, 1024),
    (1024, 384, 384),
)
COLD_SIZES = ((1, 4096, 1024), (4, 4096, 1024), (16, 4096, 1024), (1, 16384, 4096))
COLD_BYTES = 128 << 20
MODES = (*TORCH, *PEERS, *OWN)
GROUPS = {"torch": TORCH, "peers": PEERS}


class Layers(nn.Module):
    """Independent layers, each with an input of its own, so that nothing but the layer itself can be fused."""

    def __init__(self, layers: int, n: int, k: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(k, n) for _ in range(layers))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Apply each layer to its input."""
        return tuple(nn.functional.gelu(linear(x)) for linear, x in zip(self.linears, inputs, strict=True))


def calls_of(model: Layers, inputs: tuple[Tensor, ...], modes: list[str], options: Any) -> dict[str, Any]:
    """The ready calls of all modes that exist for this dtype and are installed."""
    dtype = str(inputs[0].dtype).removeprefix("torch.")
    calls: dict[str, Any] = {}
    for name in modes:
        if name in TORCH_MODES:
            calls[name] = compile_mode(model, inputs, TORCH_MODES[name])
        elif name == "eager":
            calls[name] = lambda: model(*inputs)
        elif len(inputs) == 1:
            single, values = copy.deepcopy(model).float(), (inputs[0].float(),)
            try:
                if name == "openvino":
                    calls[name] = openvino_model(single, values, options.threads, dtype)
                elif dtype == "float32":
                    calls[name] = onnxruntime_session(single, values, options.threads)
            except ImportError as error:
                console.print(f"{name} is left out: {error}")
    return calls


def measure(dtype: str, size: tuple[int, int, int], modes: list[str], options: Any, *, cold: bool) -> dict[str, Any]:
    """Measure one size, hot or cold."""
    torch._dynamo.reset()
    m, n, k = size
    element = torch.empty((), dtype=DTYPES[dtype]).element_size()
    layers = max(1, -(-COLD_BYTES // (n * k * element))) if cold else 1
    torch.manual_seed(0)
    model = Layers(layers, n, k).to(DTYPES[dtype]).eval().requires_grad_(False)
    inputs = tuple(torch.randn(m, k, dtype=DTYPES[dtype]) for _ in range(layers))
    with torch.no_grad():
        calls = calls_of(model, inputs, modes, options)
        if cold:
            weights = torch.empty(layers * n * k, dtype=DTYPES[dtype]).normal_()
            calls["read"] = reader(weights, options.threads)
        # Weights need about five passes until they are back in the last-level cache.
        timings = measured(calls, options, warm=1 if cold else 6)
    record: dict[str, Any] = {
        "dtype": dtype,
        "size": size,
        "cold": cold,
        "layers": layers,
        "speedup_over_best": speedups(timings, GROUPS),
        "timings": {name: timing.record() for name, timing in timings.items()},
        "gflops": {name: 2 * m * n * k * layers / timing.median / 1e9 for name, timing in timings.items() if name != "read"},
    }
    if cold:
        record["of_read_limit"] = {name: timing.speedup_over(timings["read"]) for name, timing in timings.items()}
        record["read_gigabytes_per_second"] = layers * n * k * element / timings["read"].median / 1e9
    return record


def show(title: str, records: list[dict[str, Any]], modes: list[str]) -> None:
    """Print one table: milliseconds of a layer, Postlude's speed-up over the best mode of torch."""
    shown = [name for name in modes if any(name in record["timings"] for record in records)]
    own = [name for name in OWN if name in shown]
    reads = own if records[0]["cold"] else []
    columns = ["M, N, K", *shown, *(f"{name} of read limit" for name in reads)]
    rows = []
    for record in records:
        row = [", ".join(map(str, record["size"]))]
        for name in shown:
            timing = record["timings"].get(name)
            row.append(f"{timing['median_ms'] / record['layers']:.3f} ±{timing['spread']:.0%}" if timing else "–")
        row += [f"{record['of_read_limit'][name]:.0%}" for name in reads]
        rows.append(row)
    table(f"{title}: ms per layer", columns, rows)
    ratio_table(f"{title}: speed-up", "M, N, K", [row[0] for row in rows], records)


def main() -> None:
    """Run what the command line asks for."""
    options = arguments(
        __doc__,
        dtypes={"nargs": "+", "choices": list(DTYPES), "default": list(DTYPES)},
        modes={"nargs": "+", "choices": MODES, "default": list(MODES)},
        only={"choices": ["hot", "cold"], "help": "measure only one of the two"},
    )
    records = []
    for dtype in options.dtypes:
        for cold, sizes in ((False, SIZES), (True, COLD_SIZES)):
            if options.only == ("hot" if cold else "cold"):
                continue
            part = [measure(dtype, size, options.modes, options, cold=cold) for size in sizes]
            show(f"{dtype}, {'cold' if cold else 'hot'}", part, options.modes)
            records += part
    save(options.result, {"sizes": records})


if __name__ == "__main__":
    main()
