"""Seconds until MiniLM's first result, in fresh processes: Inductor and Postlude, with empty caches and with full ones.

Each round makes new cache folders for each back-end, and starts two processes one after the other on them: the first is cold,
the second warm. Counted is the first call of the compiled model; importing torch and loading the model are not.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from common import arguments, compile_mode, console, save, table

BACKENDS = ("inductor", "postlude")


def worker(backend: str, dtype: str, threads: int) -> None:
    """Compile and run once in this process; prints the seconds as JSON."""
    from common import DTYPES, TORCH_MODES
    from postlude.demo import minilm

    torch.set_num_threads(threads)
    model = minilm.load(DTYPES[dtype])
    inputs = minilm.Tokenizer().filled(minilm.corpus(), 8, 128).arguments
    with torch.no_grad():
        model(*inputs)
    start = time.perf_counter()
    compile_mode(model, inputs, TORCH_MODES[backend])
    print(json.dumps({"seconds": time.perf_counter() - start}))


def first_call(backend: str, dtype: str, threads: int, caches: Path) -> float:
    """Seconds of the first call in a new process that uses these cache folders."""
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "POSTLUDE_CACHE_DIR": str(caches / "postlude"),
    }
    command = [sys.executable, __file__, "--worker", backend, "--dtype", dtype, "--threads", str(threads)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the process for {backend} failed:\n{done.stderr}")
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def main() -> None:
    """Run the rounds, or one worker."""
    options = arguments(
        __doc__,
        worker={"choices": BACKENDS, "help": "used by the script itself"},
        dtype={"choices": ["float32", "bfloat16"], "default": "float32"},
        backends={"nargs": "+", "choices": BACKENDS, "default": list(BACKENDS)},
        repeat={"type": int, "default": 3, "help": "rounds (default 3)"},
    )
    if options.worker:
        worker(options.worker, options.dtype, options.threads)
        return
    seconds: dict[str, dict[str, list[float]]] = {name: {"cold": [], "warm": []} for name in options.backends}
    for number in range(options.repeat):
        for backend in options.backends if number % 2 == 0 else reversed(options.backends):
            with tempfile.TemporaryDirectory() as caches:
                for state in ("cold", "warm"):
                    took = first_call(backend, options.dtype, options.threads, Path(caches))
                    seconds[backend][state].append(took)
                    console.print(f"  round {number + 1}, {backend}, {state}: {took:.1f} s")
    medians = {name: {state: statistics.median(values) for state, values in of.items()} for name, of in seconds.items()}
    rows = [[name, f"{of['cold']:.2f}", f"{of['warm']:.2f}"] for name, of in medians.items()]
    record: dict[str, object] = {"dtype": options.dtype, "seconds": seconds, "medians": medians}
    if len(medians) == 2:
        cold = [ours / theirs for ours, theirs in zip(seconds["postlude"]["cold"], seconds["inductor"]["cold"], strict=True)]
        # The bar for a warm start is against Inductor's cold one too: what a user waited for before.
        warm = [ours / theirs for ours, theirs in zip(seconds["postlude"]["warm"], seconds["postlude"]["cold"], strict=True)]
        record["postlude_cold_over_inductor_cold"] = statistics.median(cold)
        record["postlude_warm_over_postlude_cold"] = statistics.median(warm)
        rows.append(["postlude / inductor", f"{statistics.median(cold):.2f}", ""])
        rows.append(["postlude warm / cold", "", f"{statistics.median(warm):.2f}"])
    table(f"MiniLM {options.dtype}: seconds of the first call", ["backend", "cold", "warm"], rows)
    save(options.result, record)


if __name__ == "__main__":
    main()
