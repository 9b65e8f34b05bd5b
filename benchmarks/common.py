"""What the benchmark scripts share: compiled modes of one model, peers, tables and the JSON record.

The clock is `postlude.demo.timing` (interleaved rounds), the machine's description is `postlude.doctor`. Every mode works
on its own copy of the model with its own code object, so that no mode walks another's guards.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._inductor.select_algorithm
from rich.console import Console
from rich.table import Table

from postlude.demo.minilm import separate_copy
from postlude.demo.timing import Timing, geometric_mean, interleave

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn

__all__ = [
    "DTYPES",
    "OWN",
    "PEERS",
    "TORCH",
    "TORCH_MODES",
    "Mode",
    "Timing",
    "arguments",
    "compile_mode",
    "console",
    "geometric_mean",
    "measured",
    "onnxruntime_session",
    "openvino_model",
    "ratio_table",
    "save",
    "speedups",
    "table",
]

RESULTS = Path(__file__).parent / "results"
# The groups that Postlude is compared with: today's best way to run the model in torch, and other runtimes.
TORCH = ("eager", "inductor", "inductor-auto")
PEERS = ("onnxruntime", "openvino")
OWN = ("postlude", "postlude-freeze")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
console = Console(width=150 if not sys.stdout.isatty() else None)


@dataclass(frozen=True)
class Mode:
    """One way to compile a module with torch.compile. `freezing` is Inductor's global setting."""

    name: str
    compile: dict[str, Any]
    freezing: bool = False


TORCH_MODES = {
    mode.name: mode
    for mode in (
        Mode("inductor", {}),
        Mode("inductor-auto", {"mode": "max-autotune-no-cudagraphs"}, freezing=True),
        Mode("postlude", {"backend": "postlude"}),
        Mode("postlude-freeze", {"backend": "postlude", "options": {"freeze": True}}),
    )
}


def compile_mode(model: nn.Module, inputs: tuple[Tensor, ...], mode: Mode) -> Callable[[], Tensor]:
    """Compile a separate copy of `model` for `inputs`, run it once and return the ready call."""
    twin = separate_copy(model)
    compiled = torch.compile(twin, fullgraph=True, dynamic=False, **mode.compile)
    # Autotuning prints a table for every GEMM on stderr, which buries the benchmark's own output.
    torch._inductor.select_algorithm.PRINT_AUTOTUNE = False
    # Dynamo reads the freezing setting from the global configuration only, while it compiles.
    with torch.no_grad(), torch._inductor.config.patch(freezing=mode.freezing):
        compiled(*inputs)

    def call() -> Tensor:
        with torch.no_grad():
            return compiled(*inputs)  # type: ignore[no-any-return]

    return call


def onnxruntime_session(model: nn.Module, inputs: tuple[Tensor, ...], threads: int) -> Callable[[], Tensor]:
    """The model in ONNX Runtime's CPU provider, all graph optimizations on, float32 only."""
    import onnxruntime

    names = [f"input{number}" for number in range(len(inputs))]
    with tempfile.NamedTemporaryFile(suffix=".onnx") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, inputs, file.name, input_names=names, opset_version=17, dynamo=False)
        graph = Path(file.name).read_bytes()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    feed = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
    return lambda: torch.from_numpy(session.run(None, feed)[0])


def openvino_model(model: nn.Module, inputs: tuple[Tensor, ...], threads: int, dtype: str) -> Callable[[], Tensor]:
    """The model in OpenVINO's CPU plugin with static shapes; `dtype` is the precision of its arithmetic."""
    import openvino

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converted = openvino.convert_model(model, example_input=inputs, input=[list(value.shape) for value in inputs])
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[dtype],
    }
    request = openvino.Core().compile_model(converted, "CPU", settings).create_infer_request()
    arrays = [value.numpy() for value in inputs]
    return lambda: torch.from_numpy(request.infer(arrays, share_inputs=True, share_outputs=True)[0])


def measured(calls: Mapping[str, Callable[[], object]], options: argparse.Namespace, **keywords: Any) -> dict[str, Timing]:
    """Interleaved timings of `calls` with the settings of the command line."""
    of_round = min if options.fastest else statistics.median
    return interleave(calls, **{"rounds": options.rounds, "seconds": options.seconds, "of_round": of_round} | keywords)


def best_of(timings: dict[str, Timing], names: Sequence[str]) -> Timing:
    """The fastest of the named timings, by median."""
    return min((timings[name] for name in names if name in timings), key=lambda timing: timing.median)


def speedups(timings: dict[str, Timing], over: Mapping[str, Sequence[str]]) -> dict[str, dict[str, float]]:
    """For each group of modes in `over`: how many times faster than the best of the group every timing is."""
    bests = {group: best_of(timings, names) for group, names in over.items() if any(name in timings for name in names)}
    return {group: {name: timing.speedup_over(best) for name, timing in timings.items()} for group, best in bests.items()}


def ratio_table(title: str, first: str, keys: Sequence[str], records: Sequence[dict[str, Any]]) -> None:
    """Print the speed-ups of Postlude's modes in `records` (labelled `keys`) over each group, with geometric means."""
    pairs = [(name, group) for name in OWN for group in ("torch", "peers") if name in records[0]["timings"]]
    rows: list[list[str]] = []
    found: dict[tuple[str, str], list[float]] = {pair: [] for pair in pairs}
    for key, record in zip(keys, records, strict=True):
        row = [key]
        for name, group in pairs:
            ratio = record["speedup_over_best"].get(group, {}).get(name)
            row.append(f"{ratio:.2f}" if ratio else "–")
            found[name, group] += [ratio] if ratio else []
        rows.append(row)
    if pairs:
        rows.append(["geometric mean", *(f"{geometric_mean(values):.3f}" if values else "–" for values in found.values())])
        table(title, [first, *(f"{name} / best of {group}" for name, group in pairs)], rows)


def arguments(description: str | None, **extra: dict[str, Any]) -> argparse.Namespace:
    """Parse the options that all scripts have, and `extra` ones (name to keywords of `add_argument`)."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2, help="threads for every mode (default 2)")
    parser.add_argument("--rounds", type=int, default=11, help="interleaved rounds (default 11)")
    parser.add_argument("--seconds", type=float, default=0.06, help="seconds for one mode in one round")
    parser.add_argument("--fastest", action="store_true", help="a round counts by its fastest call (on a busy machine)")
    parser.add_argument("--result", help="name of the JSON file in benchmarks/results (default: not written)")
    for name, keywords in extra.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **keywords)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    return options


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; the first column is text, the others numbers."""
    view = Table(title=title, title_justify="left", show_edge=False)
    for number, column in enumerate(columns):
        view.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows:
        view.add_row(*row)
    console.print(view)


def save(name: str | None, payload: dict[str, Any]) -> None:
    """Write the record with the environment and the command line to benchmarks/results/NAME.json."""
    if name is None:
        return
    from postlude.doctor import environment

    record = {
        "command": ["python", *sys.argv],
        "commit": subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=RESULTS.parent, capture_output=True, text=True, check=False
        ).stdout.strip(),
        "finished": time.strftime("%Y-%m-%d %H:%M"),
        "environment": environment(),
        **payload,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    console.print(f"wrote {path.relative_to(RESULTS.parent.parent)}")
