"""The zoo with tuning: is any model slower than Inductor?

    python benchmarks/tuned_zoo.py --result tuned_zoo

Each model is compiled by Inductor and by Postlude with ``options={"tune": True}`` and a tuning database of its own, which is
empty at first. Both are timed in turn, round by round; a round counts by its median call, and what is compared is the median
of the rounds' ratios with its 95 % confidence interval (order statistics). Slower is an interval that lies below 1: then both
are timed again, and only what is slower twice counts. On a busy machine: `--threads 1 --cpu-time` times by the processor time
of the process, and `--lock FILE` holds that file's lock while models are timed, but not while they are compiled.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import statistics
import sys
import tempfile
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import zoo
from common import console, geometric_mean, save, table
from postlude.report import collecting
from postlude.select.race import Interval, median_interval
from postlude.twins import separate

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def sides(name: str, dtype: str, size: str) -> tuple[dict[str, Callable[[], object]], dict[str, int]]:
    """Ready calls of both compilers, and how many Regions each origin and winner had."""
    model, inputs = zoo.build(name, size, dtype=DTYPES[dtype])
    model.requires_grad_(False)
    torch._dynamo.reset()
    choices: dict[str, int] = {}

    def ready(**keywords: Any) -> Callable[[], object]:
        compiled: Any = torch.compile(separate(model), dynamic=False, **keywords)

        def call() -> object:
            with torch.no_grad():
                return compiled(**inputs)

        call()
        call()
        return call

    with collecting() as collection:
        calls = {"inductor": ready(), "postlude": ready(backend="postlude", options={"tune": True})}
    for captured, _ in collection.graphs:
        for one in captured:
            if one.choice is not None:
                label = f"{one.choice.winner} ({one.choice.origin})"
                choices[label] = choices.get(label, 0) + 1
    return calls, choices


def timed(calls: dict[str, Callable[[], object]], arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of a call by round."""
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    found: dict[str, list[float]] = {name: [] for name in calls}
    with ExitStack() as held:
        if arguments.lock is not None:
            file = held.enter_context(arguments.lock.open("a"))
            fcntl.flock(file, fcntl.LOCK_EX)
        for index in range(arguments.rounds):
            for name in list(calls) if index % 2 else reversed(calls):
                calls[name]()  # brings the weights back into the caches
                samples = []
                end = time.perf_counter() + arguments.seconds
                while not samples or time.perf_counter() < end:
                    begin = clock()
                    calls[name]()
                    samples.append(clock() - begin)
                found[name].append(statistics.median(samples))
    return found


def ratio(times: dict[str, list[float]]) -> Interval:
    """How many times faster Postlude is."""
    return median_interval([a / b for a, b in zip(times["inductor"], times["postlude"], strict=True)])


def measure(name: str, dtype: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One case."""
    begin = time.perf_counter()
    calls, choices = sides(name, dtype, arguments.size)
    compiled = time.perf_counter() - begin
    repeats = [timed(calls, arguments)]
    if ratio(repeats[0]).high < 1:
        repeats.append(timed(calls, arguments))
    intervals = [ratio(times) for times in repeats]
    return {
        "model": name,
        "dtype": dtype,
        "times": repeats,
        "ratios": [vars(interval) for interval in intervals],
        "slower": all(interval.high < 1 for interval in intervals),
        "choices": choices,
        "seconds_to_compile": compiled,
    }


def row(record: dict[str, Any]) -> list[str]:
    """A row of the table, of the last repeat."""
    last, times = record["ratios"][-1], record["times"][-1]
    return [
        f"{record['model']}, {record['dtype']}",
        *(f"{statistics.median(times[side]) * 1e3:.2f}" for side in ("inductor", "postlude")),
        f"{last['median']:.3f} ({last['low']:.3f} to {last['high']:.3f})",
        "slower" if record["slower"] else "",
        ", ".join(f"{count} {what}" for what, count in record["choices"].items()),
    ]


def main() -> int:
    """The command; exit code 1 where a model is slower."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(zoo.MODELS), default=list(zoo.MODELS))
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--size", choices=list(zoo.SIZES), default="base")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=0.2, help="for one side in one round")
    parser.add_argument("--cpu-time", action="store_true", help="time by the process's processor time; with --threads 1")
    parser.add_argument("--lock", type=Path, help="hold the lock of this file while models are timed")
    parser.add_argument("--result", help="name of the JSON file in benchmarks/results (default: not written)")
    arguments = parser.parse_args()
    if arguments.cpu_time and arguments.threads != 1:
        parser.error("--cpu-time adds up all threads: use it with --threads 1")
    torch.set_num_threads(arguments.threads)
    warnings.filterwarnings("ignore")
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["POSTLUDE_TUNING_DB"] = str(Path(folder) / "tuning.db")
        for name in arguments.models:
            for dtype in arguments.dtypes:
                records.append(measure(name, dtype, arguments))
                console.print("  ".join(row(records[-1])))
                save(arguments.result, {"threads": arguments.threads, "cpu_time": arguments.cpu_time, "cases": records})
    columns = ["", "Inductor, ms", "Postlude, tuned", "speed-up (95 % interval)", "", "Regions by winner"]
    mean = geometric_mean([record["ratios"][-1]["median"] for record in records])
    table(f"tuned zoo, geometric mean {mean:.3f}x Inductor", columns, [row(record) for record in records])
    return int(any(record["slower"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
