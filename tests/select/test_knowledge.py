"""The layers of knowledge, and how compiling goes on when the database can't be used."""

import os
import sqlite3
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from postlude.ir import parse
from postlude.select import knowledge as module
from postlude.select.choice import UNFUSED
from postlude.select.database import Database
from postlude.select.entry import Entry
from postlude.select.knowledge import SHIPPED, Knowledge, TuningDatabaseWarning, knowledge, shipped
from postlude.select.subject import environment
from tests.select.entries import ENVIRONMENT, PROGRAM, call, entry


@pytest.fixture(autouse=True)
def without_shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A shipped layer of the test's own, empty at first."""
    path = tmp_path / "shipped.jsonl"
    monkeypatch.setattr(module, "SHIPPED", path)
    module.forget()
    yield path
    module.forget()


@pytest.fixture
def known(tmp_path: Path) -> Knowledge:
    return Knowledge(tmp_path / "tuning.db")


def winner(known: Knowledge, index: int = 0) -> tuple[str, str] | None:
    choice = known.choice(call(index), "inductor", ENVIRONMENT, ["cpp"])
    return None if choice is None else (choice.winner, choice.origin)


def warns_once(use: Callable[[], None], match: str) -> None:
    """Call `use`; it gives one warning in all."""
    with pytest.warns(TuningDatabaseWarning, match=match) as told:
        use()
    assert len(told) == 1


def test_all_shipped_entries_are_entries() -> None:
    lines = SHIPPED.read_text().splitlines() if SHIPPED.exists() else []
    entries = [Entry.from_json(line) for line in lines]
    assert len({entry.call.digest() for entry in entries}) == len(entries)


def test_nothing_is_known_at_first_and_nothing_is_written(known: Knowledge) -> None:
    assert known.empty
    assert winner(known) is None
    assert known.digest() == ""
    assert not known.database.path.exists()


def test_the_users_entry_goes_before_a_shipped_one(known: Knowledge, without_shipped: Path) -> None:
    ship(without_shipped, entry(0))
    with without_shipped.open("a") as file:
        file.write("no entry\n")
    assert not known.empty
    assert winner(known, 0) == ("cpp", "shipped database")
    known.put(entry(0, unfused=0.5e-6))
    assert winner(known, 0) == (UNFUSED, "user database")


def ship(path: Path, *entries: Entry) -> None:
    """Let these be the shipped entries."""
    path.write_text("".join(one.to_json() + "\n" for one in entries))
    shipped.cache_clear()


@pytest.mark.parametrize("changed", [{"torch": "2.11.0"}, {"driver": "580"}, {"generator": "of kernels with a fault mended"}])
def test_of_another_environment_a_shipped_entry_tells_only_clear_differences(
    known: Knowledge, without_shipped: Path, changed: dict[str, str]
) -> None:
    """Versions differ everywhere, and every change of a source is another hash; what was close may have turned around."""
    elsewhere = {**ENVIRONMENT, **changed}
    clear, clearly_not = (
        entry(0, incumbent=UNFUSED, environment=elsewhere),
        entry(1, fused=2e-6, unfused=1e-6, environment=elsewhere),
    )
    close = entry(2, fused=1e-6, unfused=1.03e-6, incumbent=UNFUSED, environment=elsewhere)
    by_rule = entry(3, environment=elsewhere)  # the rules choose the same
    ship(without_shipped, clear, clearly_not, close, by_rule)
    assert [winner(known, index) for index in range(4)] == [
        ("cpp", "shipped database"),
        (UNFUSED, "shipped database"),
        None,
        None,
    ]
    assert [known.kernel(call(index), ENVIRONMENT, ["cpp"]) is None for index in range(4)] == [False, False, True, True]
    assert known.choice(call(0), "inductor max_autotune", ENVIRONMENT, ["cpp"]) is None  # a faster peer was not measured
    known.mark_failed(clear, "cpp", "it does not build here")
    assert winner(known, 0) is None
    assert known.kernel(call(0), ENVIRONMENT, ["cpp"]) is None


def test_a_shipped_entry_of_another_generation_tells_nothing(known: Knowledge, without_shipped: Path) -> None:
    ship(without_shipped, entry(0, incumbent=UNFUSED, environment={**ENVIRONMENT, "generation": "cpp 0"}))
    assert winner(known) is None
    assert known.kernel(call(), ENVIRONMENT, ["cpp"]) is None


def test_an_entry_of_another_environment_or_peer_is_not_taken(known: Knowledge) -> None:
    known.put(entry(0, environment={**ENVIRONMENT, "torch": "2.11.0"}))
    known.put(entry(1, peer="inductor max_autotune"))
    assert winner(known, 0) is None
    assert winner(known, 1) is None


def test_the_fastest_kernel_is_known_whatever_it_was_compared_with(known: Knowledge) -> None:
    known.put(entry(peer="inductor max_autotune", unfused=0.5e-6))
    found = known.kernel(call(), ENVIRONMENT, ["cpp"])
    assert found is not None
    assert found[0].name == "cpp"
    assert known.kernel(call(), ENVIRONMENT, ["cute"]) is None
    assert known.kernel(call(5), ENVIRONMENT, ["cpp"]) is None


def test_what_failed_is_not_chosen_again(known: Knowledge, without_shipped: Path) -> None:
    known.put(entry(0))
    known.mark_failed(entry(0), "cpp", "it does not build")
    assert winner(known, 0) == (UNFUSED, "user database")
    without_shipped.write_text(entry(1).to_json())
    shipped.cache_clear()
    known.mark_failed(entry(1), "cpp", "it does not build")  # a shipped one: noted in the user's
    assert winner(known, 1) == (UNFUSED, "user database")


def test_a_region_that_does_not_build_is_marked_in_all_its_sizes(known: Knowledge) -> None:
    region = parse(PROGRAM)
    here = environment("cpu", region)
    for index in range(3):
        known.put(entry(index, environment=here))
    known.put(entry(3))
    known.mark_region_failed(region, PROGRAM, "cpu", "cpp", "no memory")
    assert sorted(bool(found.failed) for found in known.database.entries()) == [False, True, True, True]


def test_graphs_are_compiled_anew_when_a_decision_changes(known: Knowledge) -> None:
    known.put(entry(0))
    before = known.digest()
    known.put(entry(0, fused=1.2e-6))
    assert known.digest() == before
    known.mark_failed(entry(0), "cpp", "no")
    assert known.digest() != before


# Faults --------------------------------------------------------------------------------------------------------------


def spoil(path: Path) -> None:
    """Break the first page of a database, but for the definitions of its tables, which say whose it is."""
    content = path.read_bytes()
    path.write_bytes(b"no database, " + content[13:])


def test_a_file_that_is_not_ours_is_left_alone_with_one_warning(known: Knowledge) -> None:
    known.database.path.write_text("What I must not forget")

    def use() -> None:
        assert winner(known, 0) is None
        known.put(entry(1))

    warns_once(use, "can't be used: it is no tuning database of Postlude's, and was left as it is.*chosen by the rules")
    assert winner(known, 1) == ("cpp", "user database")  # remembered until the process ends
    assert known.database.path.read_text() == "What I must not forget"
    assert len(list(known.database.path.parent.iterdir())) == 1


def test_a_corrupt_database_is_one_warning_and_work_goes_on(known: Knowledge) -> None:
    known.put(entry(0))
    spoil(known.database.path)

    def use() -> None:
        assert winner(known, 0) is None
        known.put(entry(1))
        spoil(known.database.path)
        known.put(entry(2))

    warns_once(use, "is corrupt .* moved to")
    assert winner(known, 2) == ("cpp", "user database")
    assert len(list(known.database.path.parent.glob("*corrupt*"))) == 2


class Failing(Database):
    """A database whose reads or writes fail."""

    def __init__(self, path: Path, message: str, *, reads: bool) -> None:
        super().__init__(path)
        self.message, self.fails = message, ("mode=ro", "mode=rw") if reads else ("mode=rw",)

    def _connected(self, parameters: str) -> sqlite3.Connection:
        if parameters in self.fails:
            raise sqlite3.OperationalError(self.message)
        return super()._connected(parameters)


@pytest.mark.parametrize("message", ["database or disk is full", "attempt to write a readonly database", "database is locked"])
def test_what_can_not_be_written_is_remembered_with_one_warning(message: str, known: Knowledge) -> None:
    known.put(entry(0))
    known.database = Failing(known.database.path, message, reads=False)

    def use() -> None:
        known.put(entry(1))
        known.put(entry(2))
        known.mark_failed(entry(0), "cpp", "no")
        assert known.claim(entry(3).key, "owner")

    warns_once(use, message)
    assert [winner(known, index) for index in range(3)] == [("cpp", "user database")] * 3
    assert known.kernel(call(1), ENVIRONMENT, ["cpp"]) is not None
    assert known.digest() != Knowledge(known.database.path).digest()


def test_what_can_not_be_read_leaves_the_rules_with_one_warning(known: Knowledge) -> None:
    known.put(entry(0))
    known.database = Failing(known.database.path, "disk I/O error", reads=True)

    def use() -> None:
        assert winner(known, 0) is None
        assert winner(known, 0) is None
        assert known.digest() == ""
        known.put(entry(1))

    warns_once(use, "disk I/O error")
    assert winner(known, 1) == ("cpp", "user database")


def test_a_folder_that_can_not_be_made_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    known = Knowledge(tmp_path / "file" / "tuning.db")
    with pytest.warns(TuningDatabaseWarning, match="can't be written"):
        known.put(entry(0))
    assert winner(known, 0) == ("cpp", "user database")


def test_a_newer_database_is_neither_read_nor_written(known: Knowledge) -> None:
    known.put(entry(0))
    with sqlite3.connect(known.database.path) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.warns(TuningDatabaseWarning, match="newer version of Postlude"):
        assert winner(known, 0) is None
    assert known.database.path.exists()


def test_a_fork_uses_the_database_on(tuning_database: Path) -> None:
    knowledge().put(entry(0))
    child = os.fork()
    if child == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            knowledge().put(entry(1))
            os._exit(0 if winner(knowledge(), 0) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(list(Database(tuning_database).entries())) == 2
    assert replace(entry(1)) in list(Database(tuning_database).entries())
