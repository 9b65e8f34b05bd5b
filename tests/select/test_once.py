"""Many processes that want to know the same: each call is measured once. Times are made up; what is shared is real."""

import os
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from postlude.select import tune
from postlude.select.entry import Entry
from postlude.select.knowledge import forget, knowledge
from postlude.select.tune import BudgetSpent, Session, measuring, once
from tests.select.entries import ENVIRONMENT, entry
from tests.select.test_database import in_children

CPU = torch.device("cpu")


def measured_once(index: int, log: Path, session: Session | None = None, seconds: float = 0.01) -> Entry:
    """The entry of a call; a measurement takes a moment and is noted in a file."""
    made = entry(index)

    def measured(check: object) -> Entry:
        with log.open("a") as file:
            file.write(f"{index}\n")
        time.sleep(seconds)
        return made

    return once(made.call, made.peer, ENVIRONMENT, CPU, session or Session(), measured)


@pytest.mark.parametrize("devices", ["one device", "a device each"])
def test_sixteen_processes_do_the_work_of_one(devices: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    if devices == "a device each":  # ranks of one machine: the database tells what the others do
        monkeypatch.setattr(tune, "_identity", lambda device: f"test-{os.getpid()}")

    def work(rank: int) -> None:
        forget()
        session = Session()
        for index in range(8):
            assert measured_once(index, log, session) == entry(index)
        assert len(session.measured) + len(session.known) == 8

    assert in_children(16, work) == [0] * 16
    assert Counter(log.read_text().split()) == {str(index): 1 for index in range(8)}
    assert len(list(knowledge().database.entries())) == 8


def test_what_a_killed_process_was_at_is_measured_by_the_next(tmp_path: Path, tuning_database: Path) -> None:
    log = tmp_path / "log"
    child = os.fork()
    if child == 0:
        measured_once(0, log, seconds=60)
        os._exit(1)
    while not log.exists():
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    begin = time.monotonic()
    assert measured_once(0, log) == entry(0)
    assert time.monotonic() - begin < 5


def test_a_measurement_that_fails_leaves_no_claim(tmp_path: Path) -> None:
    def fails(check: object) -> Entry:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        once(entry(0).call, "inductor", ENVIRONMENT, CPU, Session(), fails)
    assert measured_once(0, tmp_path / "log") == entry(0)


def test_again_measures_what_is_known_and_only_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    measured_once(0, log)
    session = Session(again=True)
    for _ in range(3):
        measured_once(0, log, session)
    assert log.read_text().split() == ["0", "0"]
    assert list(session.measured) == [entry(0).key]
    assert not session.known


def test_a_budget_ends_waiting_too(tmp_path: Path) -> None:
    session = Session(deadline=time.monotonic() + 0.2)
    child = os.fork()
    if child == 0:
        with measuring(CPU):
            (tmp_path / "held").touch()
            time.sleep(60)
        os._exit(0)
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    try:
        with pytest.raises(BudgetSpent):
            measured_once(0, tmp_path / "log", session)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert not (tmp_path / "log").exists()


def test_progress_never_runs_ahead_of_what_there_is() -> None:
    heard: list[tuple[int, int]] = []
    session = Session(heard=lambda done, total: heard.append((done, total)))
    with session.graph(3):
        session.judged(2)
        session.judged(2)
    with session.graph(2):
        pass
    assert heard == [(0, 3), (2, 3), (3, 3), (3, 3), (3, 5), (5, 5)]
