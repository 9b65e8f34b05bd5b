"""Kills tuning runs with SIGKILL at random moments, and looks at what they leave in the database.

    python benchmarks/tuning_kills.py --count 1000

A run is what `postlude tune` does for a small model: it compiles it, times every Region against Inductor's code for the same
nodes, and writes each measurement. Races are shorter than usual, so that writes, which a kill could harm, come often. Runs are
forked from a process that has imported torch and has compiled the kernels once. A run is killed after a time drawn uniformly
from 0 to what a whole run takes. After each kill the database must open, pass SQLite's integrity check, and hold no row that is
none, each row that it held before, and each that the run told of. Now and then a run begins without a database, so that making
the file is met too.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Before torch: processes that compile for Inductor can't be shared by forks, nor can OpenMP's threads.
os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}

import torch
from torch import nn

from postlude.loading import Example, Inputs
from postlude.select import race, tune
from postlude.select.database import Database
from postlude.select.entry import Entry
from postlude.select.knowledge import forget
from postlude.tuning import tune as tune_example

#: Seconds for each candidate of a race, and least rounds: the values of a usual run are 0.5 and 9.
PATIENCE, LEAST = 0.002, 3

#: A run that begins without a database is one of so many.
AFRESH = 12

#: One of so many runs is left to end, since what it takes changes with what else the machine does.
WHOLE = 20

#: A run that has not ended after so many times the usual duration waits for something that it should not.
STUCK = 20


@dataclass
class Outcome:
    """What was seen."""

    kills: int = 0
    ended: int = 0
    told: int = 0
    most_rows: int = 0


def example() -> Example:
    """A model of three Regions that differ."""
    torch.manual_seed(0)
    layers = (nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
    return Example("layers", nn.Sequential(*layers).eval(), (Inputs((torch.randn(4, 16),)),))


def run(model: Example, pipe: int | None = None) -> None:
    """Measure every Region, also those that are known; tell of each row that was written."""
    told: set[str] = set()

    def heard(done: int, total: int) -> None:
        session = tune.session()
        for key in session.measured if session is not None else ():
            if key[0] not in told:
                told.add(key[0])
                if pipe is not None:
                    os.write(pipe, f"{key[0]}\n".encode())

    done = tune_example(model, again=True, heard=heard)
    assert done.ended == "done", done.ended


def start(model: Example) -> tuple[int, int]:
    """A run's process and the end of its pipe."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        code = 1
        try:
            os.close(reading)
            forget()
            run(model, writing)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    return process, reading


def finish(process: int, pipe: int, wait: float) -> tuple[int, set[str]]:
    """Kill a run after so many seconds, unless it has ended; how it ended, and which rows it told of."""
    end = time.monotonic() + wait
    while (found := os.waitpid(process, os.WNOHANG))[0] == 0:
        if time.monotonic() >= end:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            found = os.waitpid(process, 0)
            break
        time.sleep(min(0.002, max(end - time.monotonic(), 0)))
    with os.fdopen(pipe) as file:
        lines = file.read().splitlines(keepends=True)
    return found[1], {line.strip() for line in lines if line.endswith("\n")}


def look(path: Path, expected: set[str]) -> set[str]:
    """The rows that are there, by their calls' digests.

    Raises:
        AssertionError: the database is not whole, or has not all that it should.
    """
    database = Database(path)
    verdict = database.check()
    assert verdict == "ok", verdict
    rows = list(database.rows())
    broken = [found for _, found in rows if not isinstance(found, Entry)]
    assert not broken, broken[0]
    there = {key[0] for key, _ in rows}
    assert expected <= there, f"lost: {sorted(expected - there)}"
    assert not list(path.parent.glob("*corrupt*")), "a run took the database for corrupt"
    return there


def kill_runs(count: int, folder: Path, seed: int = 0) -> Outcome:
    """Kill so many runs; raises AssertionError where something is lost, or a run fails by itself."""
    path = folder / "tuning.db"
    os.environ["POSTLUDE_TUNING_DB"] = str(path)
    race.PATIENCE, race.LEAST = PATIENCE, LEAST
    torch.set_num_threads(1)
    model, chance, outcome = example(), random.Random(seed), Outcome()
    run(model)  # compiles the kernels
    process, pipe = start(model)
    begin = time.monotonic()
    status, _ = finish(process, pipe, 600)
    assert status == 0, "a run failed: its error stands above"
    usual = time.monotonic() - begin
    rows, shown, number = look(path, set()), time.monotonic(), 0
    while outcome.kills < count:
        number += 1
        if chance.randrange(AFRESH) == 0:
            for file in folder.glob("tuning*"):
                file.unlink()
            rows = set()
        begin = time.monotonic()
        process, pipe = start(model)
        whole = number % WHOLE == 0
        status, told = finish(process, pipe, 600 if whole else chance.uniform(0, usual))
        assert os.WIFSIGNALED(status) or status == 0, "a run failed: its error stands above"
        outcome.kills += os.WIFSIGNALED(status)
        outcome.ended += not os.WIFSIGNALED(status)
        if whole:
            usual = time.monotonic() - begin
        outcome.told += len(told)
        rows = look(path, rows | told)
        outcome.most_rows = max(outcome.most_rows, len(rows))
        if time.monotonic() - shown > 60:
            shown = time.monotonic()
            print(f"{outcome.kills} killed, {outcome.told} rows told of, none lost", flush=True)
    # What the dead had claimed is free, and nothing is left that stops a whole run.
    process, pipe = start(model)
    status, told = finish(process, pipe, STUCK * usual + 60)
    assert status == 0, "a run after the last kill did not end"
    look(path, rows | told)
    return outcome


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="runs to kill")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outcome = kill_runs(arguments.count, Path(folder), arguments.seed)
    print(
        f"{outcome.kills} runs killed ({outcome.ended} ended before), {outcome.told} rows told of and none lost (at most"
        f" {outcome.most_rows} at once), integrity_check ok each time; {time.monotonic() - begin:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
