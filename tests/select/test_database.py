"""The database file: nothing is lost, whatever happens to it or to those who write it."""

import os
import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from postlude.select import database as module
from postlude.select.database import (
    Database,
    ForeignFileError,
    NewerDatabaseError,
    NoFileError,
    default_path,
    is_corrupt,
    new_owner,
    on_network,
)
from postlude.select.entry import Entry
from postlude.select.knowledge import Knowledge, TuningDatabaseWarning
from tests.select import kill_tuners
from tests.select.entries import entry

AS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "a folder?" / "tuning.db")


def in_children(count: int, work: Callable[[int], None]) -> list[int]:
    """Run `work` in forked processes at once; their exit codes."""
    children = []
    for index in range(count):
        child = os.fork()
        if child == 0:
            try:
                work(index)
                os._exit(0)
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(1)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def test_there_is_no_file_before_something_is_written(database: Database) -> None:
    assert database.get(entry().key) is None
    assert list(database.rows()) == list(database.decisions()) == list(database.of_region("")) == []
    assert database.check() == "ok"
    assert not database.path.parent.exists()


def test_what_is_put_in_is_found(database: Database) -> None:
    for index in range(3):
        database.put(entry(index))
    first = entry(0)
    assert database.get(first.key) == first
    assert database.find(first.call.digest(), first.key[2]) == first
    assert {e.key for e in database.entries()} == {entry(index).key for index in range(3)}
    assert len(database.of_region(first.call.region)) == 3
    assert database.path.stat().st_mode & 0o077 == 0
    assert database.path.parent.stat().st_mode & 0o077 == 0


def test_wal_is_used_but_not_on_network_file_systems(database: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def journal(path: Path) -> str:
        Database(path).put(entry())
        with module.closing(sqlite3.connect(path)) as connection:
            return str(connection.execute("PRAGMA journal_mode").fetchone()[0])

    assert journal(database.path) == "wal"
    monkeypatch.setattr(module, "on_network", lambda folder: True)
    assert journal(tmp_path / "network.db") == "delete"
    assert Database(tmp_path / "network.db").get(entry().key) == entry()


def test_network_file_systems_are_known_by_their_mounts(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"/dev/sda / ext4 rw 0 0\nserver:/home {tmp_path} nfs4 rw 0 0\n/dev/sdb {tmp_path}/local\\040disk xfs rw 0 0\n"
    )
    assert on_network(tmp_path / "deep" / "er", str(mounts))
    assert not on_network(tmp_path / "local disk" / "deep", str(mounts))
    assert not on_network(Path("/etc"), str(mounts))
    assert not on_network(tmp_path, str(tmp_path / "no such file"))


def test_merging_keeps_what_was_measured_later(database: Database) -> None:
    new, old = "2026-01-02T00:00:00+00:00", "2026-01-01T23:00:00-05:00"  # the second is later, for all its text
    database.put(entry(0, at=new))
    database.put(entry(1, at=old))
    merged = database.merge([entry(0, at=old), entry(1, at=new), entry(2)])
    assert (merged.added, merged.replaced, merged.older, merged.total) == (1, 1, 1, 3)
    assert {dict(e.call.sizes)["n"]: e.at for e in database.entries()} == {1: old, 2: old, 3: entry().at}


def test_a_failure_is_marked_once_and_kept_beside_others(database: Database) -> None:
    database.put(entry())
    database.mark_failed(entry(), "cpp", "error: one\nand more")
    database.mark_failed(entry(), "unfused", "x" * 1000)
    database.mark_failed(entry(), "no such candidate", "?")
    found = database.get(entry().key)
    assert found is not None
    assert found.failed == {"cpp": "error: one", "unfused": "x" * 300}
    database.put(entry())  # measured again: it builds
    assert database.get(entry().key) == entry()


def test_decisions_change_with_what_graphs_depend_on(database: Database) -> None:
    database.put(entry(fused=1e-6))
    before = list(database.decisions())
    database.put(entry(fused=1.1e-6))
    assert list(database.decisions()) == before  # another time, the same decision
    database.put(entry(fused=9e-6))
    assert list(database.decisions()) != before
    database.put(entry(fused=1e-6))
    assert list(database.decisions()) == before
    assert database.remove(lambda found: True) == 1
    database.put(entry(fused=1e-6))
    assert list(database.decisions()) != before  # what was removed is measured again


def test_a_row_under_another_key_or_of_another_form_is_no_entry(database: Database) -> None:
    database.put(entry(0))
    database.put(entry(1))
    with module.closing(sqlite3.connect(database.path)) as connection:
        connection.execute("UPDATE entries SET entry = ? WHERE call = ?", (entry(1).to_json(), entry(0).key[0]))
        connection.execute("UPDATE entries SET entry = CAST(x'7bff' AS TEXT) WHERE call = ?", (entry(1).key[0],))
        connection.commit()
    assert [type(found).__name__ for _, found in database.rows()] == ["EntryError", "EntryError"]
    assert database.get(entry(0).key) is None
    assert list(database.entries()) == []
    assert database.remove(lambda found: not isinstance(found, Entry)) == 2


# Claims --------------------------------------------------------------------------------------------------------------


def test_a_claim_is_one_owners_until_it_ends(database: Database) -> None:
    key, mine, yours = entry().key, new_owner(), new_owner()
    assert database.claim(key, mine)
    assert database.claim(key, mine)  # renewed
    assert not database.claim(key, yours)
    database.release(key, yours)  # not theirs
    assert not database.claim(key, yours)
    database.release(key, mine)
    assert database.claim(key, yours)
    database.put(entry())  # an entry ends a claim
    assert database.claim(key, mine)


def test_a_claim_ends_with_its_lease_and_with_its_process(database: Database) -> None:
    key = entry().key
    assert database.claim(key, new_owner(), lease=0.05)
    assert not database.claim(key, new_owner())
    time.sleep(0.06)
    assert database.claim(key, new_owner(), lease=0.0)
    assert in_children(1, lambda index: database.claim(key, new_owner()) or os._exit(2)) == [0]
    mine = new_owner()
    assert database.claim(key, mine)  # the child is dead
    database.release(key, mine)
    elsewhere = new_owner().replace(module._machine().split()[0], "another-machine")
    assert database.claim(key, elsewhere)
    assert not database.claim(key, mine)  # nobody here can see whether that process lives


# Faults --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["the first page", "empty", "a page"])
def test_a_corrupt_file_is_moved_aside_and_what_can_be_read_of_it_is_kept(damage: str, database: Database) -> None:
    entries = [entry(index) for index in range(200)]
    database.merge(entries)
    if damage == "the first page":
        spoil(database.path)
    elif damage == "empty":
        database.path.write_bytes(b"")
    else:
        content = bytearray(database.path.read_bytes())
        leaves = [
            at for at in range(0, len(content), 4096) if content[at] == 10 and b"postlude-tuning" in content[at : at + 4096]
        ]
        middle = leaves[len(leaves) // 2]
        content[middle : middle + 4096] = b"\xff" * 4096
        database.path.write_bytes(content)
    with pytest.raises(sqlite3.DatabaseError) as error:
        list(database.rows())
    assert is_corrupt(error.value)
    before = database.path.read_bytes()
    aside = database.set_aside()
    assert aside is not None
    assert aside.read_bytes()[: len(before)] == before
    assert database.check() == "ok"
    saved = list(database.entries())
    assert all(found in entries for found in saved)
    if damage == "a page":
        assert len(saved) > 50
    assert database.set_aside() is None  # there is a good one now
    database.put(entry())
    assert database.get(entry().key) == entry()


def test_what_is_no_file_is_neither_used_nor_moved(tmp_path: Path) -> None:
    """A device that is read as a database seems to be an empty one, and root may move it."""
    os.mkfifo(tmp_path / "pipe.db")
    (tmp_path / "folder.db").mkdir()
    for name, reason in (("pipe.db", "no regular file"), ("folder.db", "a folder")):
        database = Database(tmp_path / name)
        uses = (lambda: list(database.rows()), lambda: database.put(entry()), lambda: database.remove(bool), database.set_aside)  # noqa: B023
        for use in uses:
            with pytest.raises(NoFileError, match=reason) as error:
                use()
            assert not is_corrupt(error.value)
        with pytest.warns(TuningDatabaseWarning, match=reason):
            Knowledge(tmp_path / name).put(entry())
    assert {path.name for path in tmp_path.iterdir() if path.suffix == ".db"} == {"pipe.db", "folder.db"}


def spoil(path: Path) -> None:
    """Break the first page, but for the definitions of its tables, which say whose it is."""
    content = path.read_bytes()
    path.write_bytes(b"no database, " + content[13:])


@pytest.mark.parametrize("kind", ["a text", "another database", "another database with a table of a name of ours"])
def test_a_file_that_is_not_ours_is_refused_and_left_as_it_is(kind: str, database: Database) -> None:
    database.path.parent.mkdir()
    if kind == "a text":
        database.path.write_text("What I must not forget" * 100)
    else:
        with module.closing(sqlite3.connect(database.path)) as connection:
            connection.execute("CREATE TABLE identity (a)" if "ours" in kind else "CREATE TABLE other (a)")
    before = database.path.read_bytes()
    for use in (lambda: list(database.rows()), lambda: database.put(entry()), database.check, database.set_aside):
        with pytest.raises(ForeignFileError, match="no tuning database of Postlude's, and was left as it is") as error:
            use()
        assert not is_corrupt(error.value)
    assert database.path.read_bytes() == before
    assert not list(database.path.parent.glob("*corrupt*"))


def test_in_our_own_folder_whatever_is_broken_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTLUDE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("POSTLUDE_TUNING_DB")
    database = Database(default_path())
    database.put(entry())
    database.path.write_bytes(b"\xff" * 5000)
    aside = database.set_aside()
    assert aside is not None
    assert aside.read_bytes() == b"\xff" * 5000
    database.put(entry())
    assert list(database.entries()) == [entry()]


def test_of_many_that_find_it_corrupt_one_moves_it_aside(database: Database) -> None:
    database.put(entry())
    spoil(database.path)

    def work(index: int) -> None:
        database.set_aside()
        database.put(entry(index))

    assert in_children(8, work) == [0] * 8
    assert len(list(database.path.parent.glob("*corrupt*"))) == 1
    assert len(list(database.entries())) == 8


def test_a_file_of_a_newer_version_is_left_alone(database: Database) -> None:
    database.put(entry())
    with module.closing(sqlite3.connect(database.path)) as connection:
        connection.execute("PRAGMA user_version = 99")
    for use in (lambda: database.get(entry().key), lambda: database.put(entry())):
        with pytest.raises(NewerDatabaseError, match="newer version") as error:
            use()
        assert not is_corrupt(error.value)
    assert not issubclass(NewerDatabaseError, ForeignFileError)


def test_a_database_in_a_folder_that_takes_no_files_is_read(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it was baked into an image: neither WAL nor its index can be made."""
    database.put(entry())
    connected = Database._connected

    def refuses(self: Database, parameters: str) -> sqlite3.Connection:
        if "immutable" not in parameters:
            raise sqlite3.OperationalError("unable to open database file")
        return connected(self, parameters)

    monkeypatch.setattr(Database, "_connected", refuses)
    with pytest.raises(sqlite3.OperationalError):
        database.get(entry().key)  # the folder is writable: that is another fault
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert database.get(entry().key) == entry()


@pytest.mark.skipif(AS_ROOT, reason="root may write everywhere")
def test_a_folder_that_takes_no_files_is_read(database: Database) -> None:
    database.put(entry())
    database.path.parent.chmod(0o500)
    try:
        assert database.get(entry().key) == entry()
    finally:
        database.path.parent.chmod(0o700)


def test_a_transaction_of_somebody_else_is_waited_for_and_no_longer(database: Database) -> None:
    database.put(entry())
    impatient = Database(database.path, patience=0.1)
    with module.closing(sqlite3.connect(database.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert impatient.get(entry().key) == entry()  # readers don't wait
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            impatient.put(entry(1))
        other.execute("ROLLBACK")
    impatient.put(entry(1))


def test_a_disk_that_is_full_leaves_the_database_as_it_was(database: Database) -> None:
    database.put(entry())
    with module.closing(sqlite3.connect(database.path)) as connection:
        (pages,) = connection.execute("PRAGMA page_count").fetchone()

    class Full(Database):
        def _connected(self, parameters: str) -> sqlite3.Connection:
            connection = super()._connected(parameters)
            connection.execute(f"PRAGMA max_page_count = {pages}")
            return connection

    with pytest.raises(sqlite3.OperationalError, match="full"):
        Full(database.path).merge([entry(index, versions={"filler": "x" * 9000}) for index in range(1, 9)])
    assert list(database.entries()) == [entry()]
    assert database.check() == "ok"


def test_many_processes_write_one_database_from_nothing(database: Database) -> None:
    def work(index: int) -> None:
        for number in range(10):
            database.put(entry(index * 10 + number))
            assert database.get(entry(index * 10 + number).key) is not None

    assert in_children(16, work) == [0] * 16
    assert len(list(database.entries())) == 160
    assert database.check() == "ok"
    assert {path.suffix for path in database.path.parent.iterdir()} <= {".db", ".lock", ".db-wal", ".db-shm"}


def test_killed_tuners_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTLUDE_TUNING_DB", "")
    outcome = kill_tuners.run(30, tmp_path)
    assert outcome.kills >= 30
    assert outcome.told > 0


def test_where_the_database_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POSTLUDE_TUNING_DB", "~/own.db")
    assert default_path() == Path.home() / "own.db"
    monkeypatch.delenv("POSTLUDE_TUNING_DB")
    monkeypatch.setenv("POSTLUDE_CACHE_DIR", str(tmp_path))
    assert default_path() == tmp_path / "tuning" / "tuning.db"
    monkeypatch.chdir(tmp_path)
    for variable, place in (("POSTLUDE_TUNING_DB", ""), ("POSTLUDE_CACHE_DIR", "tuning/tuning.db")):
        monkeypatch.setenv(variable, "~no such user/x")  # as a shell takes it
        assert default_path() == tmp_path / "~no such user/x" / place
        monkeypatch.delenv(variable)


def test_an_entry_of_another_environment_is_another_row(database: Database) -> None:
    """Two installations that share a folder don't take turns in measuring."""
    other = replace(entry(), environment={"torch": "2.14.1", "generator": "1"})
    database.put(entry())
    database.put(other)
    assert database.get(entry().key) == entry()
    assert database.get(other.key) == other
