"""Many processes tune one model at once: the work of one is done, and nothing is lost.

    python benchmarks/tuning_processes.py --processes 16

Each is `postlude tune` of a small model, from an empty database. What counts as work is a measurement of a Region; the sum over
all processes is compared with what one process alone measures. The wall time of many holds what each does for itself: import
torch, and compile the model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from postlude.select.database import Database

MODEL = """
import torch
from torch import nn


def target():
    torch.manual_seed(0)
    layers = [layer for width in (64, 96, 128) for layer in (nn.Linear(width, 256), nn.GELU(), nn.Linear(256, width + 32))]
    return nn.Sequential(*layers).eval(), torch.randn(24, 64)
"""


def tune(processes: int, folder: Path) -> dict[str, Any]:
    """Let so many processes tune at once; what they did."""
    (folder / "model.py").write_text(MODEL)
    database = folder / f"{processes}.db"
    environment = {**os.environ, "POSTLUDE_TUNING_DB": str(database), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "postlude.cli", "tune", str(folder / "model.py"), "--json"]
    begin = time.perf_counter()
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    done = [process.communicate() for process in running]
    errors = [error for process, (_, error) in zip(running, done, strict=True) if process.returncode]
    records = [json.loads(output) for process, (output, _) in zip(running, done, strict=True) if not process.returncode]
    return {
        "processes": processes,
        "errors": errors,
        "measured": sum(record["measured"] for record in records),
        "regions": {record["measured"] + record["known"] for record in records},
        "rows": len(list(Database(database).entries())),
        "check": Database(database).check(),
        "seconds": time.perf_counter() - begin,
    }


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        one, many = tune(1, Path(folder)), tune(arguments.processes, Path(folder))
    for result in (one, many):
        print(
            f"{result['processes']:3} processes: {result['measured']} measurements, {result['rows']} rows,"
            f" {len(result['errors'])} errors, integrity_check {result['check']}, {result['seconds']:.0f} s"
        )
        print("".join(result["errors"]), end="", file=sys.stderr)
    print(f"work: {many['measured'] / one['measured']:.2f} of one process's")
    whole = many["rows"] == one["rows"] and many["regions"] == one["regions"] == {one["rows"]} and many["check"] == "ok"
    return 0 if whole and not many["errors"] and many["measured"] <= 1.2 * one["measured"] else 1


if __name__ == "__main__":
    sys.exit(main())
