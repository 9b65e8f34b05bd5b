"""Kills tuners at random moments, and looks at what they leave: ``python -m tests.select.kill_tuners --count 1000``.

A tuner is a forked process that does all that tuning does with the database (make it, claim, put, release, mark, prune), as fast
as it can, with times that it makes up. It tells of each entry once that is written. After each kill the database must open, pass
SQLite's integrity check, hold each entry that was told of and no row that is none; and the next tuner must not wait for a claim
of the dead one.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch

from postlude.select.database import Database
from postlude.select.entry import Entry
from postlude.select.knowledge import forget, knowledge
from postlude.select.tune import Session, once
from tests.select.entries import ENVIRONMENT, entry

#: Tuners that run at once, and calls that they choose from.
TUNERS, CALLS = 3, 40

#: A tuner is killed after so many seconds at most.
LONGEST = 0.15

#: A claim that had to be waited for would take until its lease ends.
STUCK = 20.0


@dataclass
class Outcome:
    """What was seen."""

    kills: int = 0
    told: int = 0


def tuner(pipe: int, seed: int) -> None:
    """Tune until killed; tell of each entry that was written, by its number and a stamp."""
    forget()
    chance = random.Random(seed)
    device = torch.device(chance.choice(["cpu", "meta"]))  # tuners of one device take turns, those of two meet in the database
    for stamp in count():
        index = chance.randrange(CALLS)
        text = f"{seed} {stamp}"
        made = entry(index, fused=chance.uniform(1e-6, 3e-6), versions={"stamp": text})
        once(made.call, made.peer, ENVIRONMENT, device, Session(again=True), lambda check, made=made: made)
        os.write(pipe, f"{index} {text}\n".encode())
        if chance.random() < 0.2:
            knowledge().mark_failed(made, "cpp", "it does not build any more")
        if chance.random() < 0.05:
            knowledge().database.remove(lambda found: not isinstance(found, Entry))


def start(seed: int) -> tuple[int, int]:
    """A tuner's process and the end of its pipe."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.close(reading)
            tuner(writing, seed)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writing)
    return process, reading


def kill(processes: list[tuple[int, int]]) -> list[str]:
    """Kill tuners; the lines that they told."""
    for process, _ in processes:
        os.kill(process, signal.SIGKILL)
    lines = []
    for process, pipe in processes:
        _, status = os.waitpid(process, 0)
        if not os.WIFSIGNALED(status):
            raise AssertionError("a tuner ended before it was killed: its error stands above")
        with os.fdopen(pipe) as file:
            lines += [line for line in file.read().splitlines(keepends=True) if line.endswith("\n")]
    return lines


def check(path: Path, told: set[int]) -> None:
    """The database is whole, and has what was told."""
    database = Database(path)
    verdict = database.check()
    assert verdict == "ok", verdict
    rows = [found for _, found in database.rows()]
    broken = [found for found in rows if not isinstance(found, Entry)]
    assert not broken, broken[0]
    there = {dict(found.call.sizes)["n"] - 1 for found in rows if isinstance(found, Entry)}
    assert told <= there, f"lost: {sorted(told - there)}"


def run(kills: int, folder: Path, seed: int = 0) -> Outcome:
    """Kill so many tuners, several at a time; raises AssertionError where something is lost."""
    os.environ["POSTLUDE_TUNING_DB"] = str(folder / "tuning.db")
    chance, outcome = random.Random(seed), Outcome()
    told: set[int] = set()
    while outcome.kills < kills:
        if chance.random() < 0.05:  # from nothing again, so that making the file is met by kills too
            for file in folder.glob("tuning*"):
                file.unlink()
            told.clear()
        processes = [start(seed * 1_000_003 + outcome.kills + index) for index in range(TUNERS)]
        time.sleep(chance.uniform(0, LONGEST))
        lines = kill(processes)
        outcome.kills += len(processes)
        outcome.told += len(lines)
        told |= {int(line.split()[0]) for line in lines}
        check(folder / "tuning.db", told)
    # What the dead had claimed is free: every call can be measured at once.
    forget()
    begin = time.monotonic()
    for index in range(CALLS):
        made = entry(index)
        once(made.call, made.peer, ENVIRONMENT, torch.device("cpu"), Session(again=True), lambda check, made=made: made)
    assert time.monotonic() - begin < STUCK, "a claim of a dead process was waited for"
    check(folder / "tuning.db", set(range(CALLS)))
    return outcome


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="tuners to kill")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(arguments.count, Path(folder), arguments.seed)
    print(f"{outcome.kills} tuners killed, {outcome.told} entries written and none lost, integrity_check ok each time")


if __name__ == "__main__":
    sys.exit(main())
