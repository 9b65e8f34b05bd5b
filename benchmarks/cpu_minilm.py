"""MiniLM sentence embedding on a CPU: eager, Inductor, ONNX Runtime, OpenVINO and Postlude, interleaved in one process.

For each dtype and each (batch, length): median milliseconds per call of every mode, Postlude's speed-up over the best mode of
torch and over the best peer, and the largest error of any output element against float64 with the same weights. At the end
geometric means. Tokens are real text without padding; the attention mask is passed, as a tokenizer would.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

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
from postlude.demo import minilm
from read_bandwidth import limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

POINTS = ((1, 16), (1, 128), (32, 32), (8, 128))
MODES = (*TORCH, *PEERS, *OWN)
GROUPS = {"torch": TORCH, "peers": PEERS}


def prepare(
    name: str, model: minilm.SentenceEncoder, exact: minilm.SentenceEncoder, tokens: minilm.Tokens, dtype: str, threads: int
) -> Callable[[], Tensor] | None:
    """The ready call of one mode, or None where the mode does not exist for this dtype or is not installed."""
    inputs = tokens.arguments
    if name in TORCH_MODES:
        return compile_mode(model, inputs, TORCH_MODES[name])
    if name == "eager":

        def eager() -> Tensor:
            with torch.no_grad():
                return model(*inputs)  # type: ignore[no-any-return]

        return eager
    try:
        if name == "openvino":
            return openvino_model(exact, inputs, threads, dtype)
        return onnxruntime_session(exact, inputs, threads) if dtype == "float32" else None
    except ImportError as error:
        console.print(f"  {name} is left out: {error}")
        return None


def measure(dtype: str, modes: list[str], options: Any) -> list[dict[str, Any]]:
    """Measure every point in one dtype."""
    tokenizer, corpus = minilm.Tokenizer(), minilm.corpus()
    model = minilm.load(DTYPES[dtype], options.attention)
    single = minilm.load(torch.float32, options.attention)
    reference = minilm.load(DTYPES[dtype], options.attention).double()  # the same weights, exact arithmetic
    records = []
    for batch, length in options.points:
        torch._dynamo.reset()
        tokens = tokenizer.filled(corpus, batch, length)
        calls, compile_seconds = {}, {}
        for name in modes:
            start = time.perf_counter()
            call = prepare(name, model, single, tokens, dtype, options.threads)
            if call is None:
                continue
            call()
            compile_seconds[name] = time.perf_counter() - start
            calls[name] = call
            console.print(f"  {dtype} ({batch}, {length}) {name} ready in {compile_seconds[name]:.1f} s")
        with torch.no_grad():
            exact = reference(*tokens.arguments)
        errors = {name: float((call().double() - exact).abs().max()) for name, call in calls.items()}
        timings = measured(calls, options)
        record: dict[str, Any] = {
            "dtype": dtype,
            "batch": batch,
            "length": length,
            "timings": {name: timing.record() for name, timing in timings.items()},
            "errors": errors,
            "ready_seconds": compile_seconds,
        }
        record["speedup_over_best"] = speedups(timings, GROUPS)
        records.append(record)
    return records


def show(dtype: str, records: list[dict[str, Any]], modes: list[str]) -> None:
    """Print the tables of one dtype."""
    shown = [name for name in modes if any(name in record["timings"] for record in records)]
    rows, errors = [], []
    for record in records:
        point = f"({record['batch']}, {record['length']})"
        timings = record["timings"]
        row = [point]
        for name in shown:
            timing = timings.get(name)
            row.append(f"{timing['median_ms']:.2f} ±{timing['spread']:.0%}" if timing else "–")
        rows.append(row)
        errors.append([point, *(f"{record['errors'].get(name, float('nan')):.1e}" for name in shown)])
    table(f"MiniLM {dtype}: median ms per call ± spread", ["(batch, length)", *shown], rows)
    ratio_table(f"MiniLM {dtype}: speed-up", "(batch, length)", [row[0] for row in rows], records)
    table(f"MiniLM {dtype}: largest error against float64", ["(batch, length)", *shown], errors)


def main() -> None:
    """Run what the command line asks for."""
    options = arguments(
        __doc__,
        dtypes={"nargs": "+", "choices": list(DTYPES), "default": list(DTYPES)},
        points={"nargs": "+", "type": lambda text: tuple(map(int, text.split(","))), "default": POINTS, "metavar": "B,L"},
        modes={"nargs": "+", "choices": MODES, "default": list(MODES)},
        attention={"choices": ["sdpa", "eager"], "default": "sdpa", "help": "attention code of the model"},
    )
    records = []
    machine = limits(options.threads)
    for dtype in options.dtypes:
        part = measure(dtype, options.modes, options)
        show(dtype, part, options.modes)
        records += part
    machine = {name: max(value, machine[name]) for name, value in limits(options.threads).items()}
    read = machine["read_gigabytes_per_second"]
    console.print(f"limits in this run: {machine['gflops']:.0f} GFLOP/s in float32, memory read {read:.0f} GB/s")
    save(options.result, {"limits": machine, "attention": options.attention, "points": records})


if __name__ == "__main__":
    main()
