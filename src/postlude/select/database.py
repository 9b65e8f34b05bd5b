"""The tuning database: SQLite, one row for each entry, in the user's cache folder.

    entries    one measurement each (entry.py), by call, peer and environment
    claims     calls that some process is measuring right now
    identity   a random text that changes when entries are removed

Rules, each for a reason:

- A connection lives for one operation. There are few of them, and so nothing has to be said about threads and forks.
- A write is one transaction. A process killed at any moment leaves the database as it was before, or as it is after.
- The file appears whole: it is made under another name and linked to its own. So nobody ever meets it half made.
- WAL, so that readers and the writer don't wait for each other; the ordinary journal on network file systems, where WAL is not
  safe, and wherever SQLite can't have it.
- A claim names its process. It ends with that process, or after its lease where the process can't be seen from here. Two
  processes that measure the same thing are a waste and no error.
- A database of ours that is corrupt is moved aside under another name, never removed, and salvaged as far as rows can be read.
  Any other file is left as it is: whoever named it by mistake wants it back.

Nothing here decides what to do when the disk or the file fails: see knowledge.py.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from postlude import cache
from postlude.select.choice import UNFUSED
from postlude.select.entry import Entry, EntryError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

#: Version of the tables.
_SCHEMA_VERSION = 1

_SCHEMA = f"""
CREATE TABLE entries (
    call TEXT NOT NULL, peer TEXT NOT NULL, environment TEXT NOT NULL,
    device TEXT NOT NULL, region TEXT NOT NULL, unfused INTEGER NOT NULL, at TEXT NOT NULL, entry TEXT NOT NULL,
    PRIMARY KEY (call, peer, environment)
) WITHOUT ROWID;
CREATE INDEX decisions ON entries (call, peer, environment, unfused);
CREATE INDEX regions ON entries (region);
CREATE TABLE claims (
    call TEXT NOT NULL, peer TEXT NOT NULL, environment TEXT NOT NULL, owner TEXT NOT NULL, until REAL NOT NULL,
    PRIMARY KEY (call, peer, environment)
) WITHOUT ROWID;
CREATE TABLE identity (text TEXT NOT NULL);
PRAGMA user_version = {_SCHEMA_VERSION};
"""

#: Seconds to wait for another process's transaction. One takes some milliseconds.
PATIENCE = 10.0

#: Seconds that a claim holds where nobody can see whether its process lives. It is renewed before each candidate.
LEASE = 120.0

#: Most characters of an error that are kept.
_ERROR = 300

_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "fuse"}
)

#: SQLite's codes of a file that is corrupt, or no database.
_CORRUPT = (11, 26)

#: A part of our tables' definitions, which SQLite keeps as text at the beginning of the file.
_SIGN, _HEAD = b"call TEXT NOT NULL, peer TEXT NOT NULL, environment TEXT NOT NULL", 1 << 16

#: What names an entry: the call's digest, the peer, the environment's digest.
Key = tuple[str, str, str]


class NewerDatabaseError(sqlite3.DatabaseError):
    """The file was made by a newer version."""


class ForeignFileError(sqlite3.DatabaseError):
    """The file is another program's database, a text or the like, which is left as it is."""

    def __init__(self) -> None:
        super().__init__("it is no tuning database of Postlude's, and was left as it is")


class EmptyFileError(sqlite3.DatabaseError):
    """There is nothing in the file."""


class NoFileError(sqlite3.DatabaseError):
    """The path names a folder, a device or the like: nothing that could be a database, or that may be moved."""


def is_corrupt(error: BaseException) -> bool:
    """Whether an error says that a database of ours is broken."""
    if isinstance(error, EmptyFileError):
        return True
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _CORRUPT


@dataclass(frozen=True)
class Merged:
    """What became of entries that were put in together."""

    added: int = 0
    replaced: int = 0
    older: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.added + self.replaced + self.older


class Database:
    """The database in one file. Methods raise `sqlite3.Error` and `OSError` as they come."""

    def __init__(self, path: Path, *, patience: float = PATIENCE) -> None:
        self.path = path
        self.patience = patience

    # Reading ---------------------------------------------------------------------------------------------------------

    def get(self, key: Key) -> Entry | None:
        """The entry of this key."""
        return self._first("call = ? AND peer = ? AND environment = ?", key)

    def find(self, call: str, environment: str) -> Entry | None:
        """The newest entry of a call in an environment, whatever it was compared with."""
        return self._first("call = ? AND environment = ? ORDER BY at DESC LIMIT 1", (call, environment))

    def of_region(self, region: str) -> list[Entry]:
        """The entries of a Region, by its text."""
        with self._reading() as connection:
            if connection is None:
                return []
            query = "SELECT call, peer, environment, entry FROM entries WHERE region = ?"
            rows = connection.execute(query, (region,)).fetchall()
        return [found for row in rows if isinstance(found := _parsed(row[3], row[:3]), Entry)]

    def entries(self) -> Iterator[Entry]:
        """All entries that can be read."""
        for _, found in self.rows():
            if isinstance(found, Entry):
                yield found

    def rows(self) -> Iterator[tuple[Key, Entry | EntryError]]:
        """All rows, those that are no entries with what is wrong."""
        with self._reading() as connection:
            if connection is None:
                return
            query = "SELECT call, peer, environment, entry FROM entries ORDER BY device, region, call, peer, environment"
            for *key, text in connection.execute(query):
                yield (key[0], key[1], key[2]), _parsed(text, (key[0], key[1], key[2]))

    def salvaged(self) -> list[Entry]:
        """The entries that can be read of a corrupt file: from both ends up to what is broken."""
        found: dict[Key, Entry] = {}
        with suppress(sqlite3.Error), self._reading() as connection:
            for order in ("ASC", "DESC") if connection is not None else ():
                query = "SELECT call, peer, environment, entry FROM entries ORDER BY call {0}, peer {0}, environment {0}"
                with suppress(sqlite3.Error):
                    for row in connection.execute(query.format(order)):  # type: ignore[union-attr]
                        entry = _parsed(row[3], row[:3])
                        if isinstance(entry, Entry):
                            found[entry.key] = entry
        return list(found.values())

    def decisions(self) -> Iterator[tuple[Any, ...]]:
        """All that compiled graphs depend on: the identity, then each entry's key and whether its Region is left unfused."""
        with self._reading() as connection:
            if connection is not None:
                yield from connection.execute("SELECT text FROM identity")
                query = (
                    "SELECT call, peer, environment, unfused FROM entries INDEXED BY decisions ORDER BY call, peer, environment"
                )
                yield from connection.execute(query)

    def check(self) -> str:
        """SQLite's own check of the whole file: ``"ok"``, or what is wrong."""
        with self._reading() as connection:
            return "ok" if connection is None else str(connection.execute("PRAGMA integrity_check").fetchone()[0])

    def _first(self, condition: str, values: tuple[str, ...]) -> Entry | None:
        with self._reading() as connection:
            if connection is None:
                return None
            query = f"SELECT call, peer, environment, entry FROM entries WHERE {condition}"
            row = connection.execute(query, values).fetchone()
        found = _parsed(row[3], (row[0], row[1], row[2])) if row else None
        return found if isinstance(found, Entry) else None

    # Writing ---------------------------------------------------------------------------------------------------------

    def put(self, entry: Entry) -> None:
        """Write an entry in place of an older one, and end a claim to it."""
        with self._writing() as connection:
            _insert(connection, entry)
            connection.execute("DELETE FROM claims WHERE call = ? AND peer = ? AND environment = ?", entry.key)

    def merge(self, entries: Iterable[Entry]) -> Merged:
        """Put entries in; of two with the same key, the one that was measured later stays. All of them or, on an error, none."""
        counts = {"added": 0, "replaced": 0, "older": 0}
        with self._writing() as connection:
            for entry in entries:
                query = "SELECT at, entry FROM entries WHERE call = ? AND peer = ? AND environment = ?"
                row = connection.execute(query, entry.key).fetchone()
                known = _parsed(row[1], entry.key) if row else None
                if isinstance(known, Entry) and _time(known.at) >= _time(entry.at):
                    counts["older"] += 1
                    continue
                counts["replaced" if row else "added"] += 1
                _insert(connection, entry)
        return Merged(**counts)

    def mark_failed(self, entry: Entry, name: str, error: str) -> None:
        """Note that a candidate could not be built. What others noted meanwhile stays; an entry that is not here is added."""
        with self._writing() as connection:
            query = "SELECT entry FROM entries WHERE call = ? AND peer = ? AND environment = ?"
            row = connection.execute(query, entry.key).fetchone()
            known = _parsed(row[0], entry.key) if row else None
            current = known if isinstance(known, Entry) else entry
            if any(candidate.variant.name == name for candidate in current.candidates):
                _insert(connection, replace(current, failed={**current.failed, name: _short(error)}))

    def remove(self, wanted: Callable[[Entry | EntryError], bool]) -> int:
        """Remove the rows that `wanted` says; returns how many. Graphs that were compiled by them are not found any more."""
        with self._writing() as connection:
            rows = connection.execute("SELECT call, peer, environment, entry FROM entries").fetchall()
            keys = [row[:3] for row in rows if wanted(_parsed(row[3], row[:3]))]
            connection.executemany("DELETE FROM entries WHERE call = ? AND peer = ? AND environment = ?", keys)
            if keys:
                connection.execute("UPDATE identity SET text = ?", (secrets.token_hex(8),))
        return len(keys)

    # Claims ----------------------------------------------------------------------------------------------------------

    def claim(self, key: Key, owner: str, lease: float = LEASE) -> bool:
        """Say that `owner` (see `new_owner`) measures this; False if somebody else does. The owner of a claim may renew it."""
        with self._writing() as connection:
            row = connection.execute(
                "SELECT owner, until FROM claims WHERE call = ? AND peer = ? AND environment = ?", key
            ).fetchone()
            if row and row[0] != owner and row[1] > time.time() and _may_live(row[0]):
                return False
            connection.execute("REPLACE INTO claims VALUES (?, ?, ?, ?, ?)", (*key, owner, time.time() + lease))
        return True

    def release(self, key: Key, owner: str) -> None:
        """End an owner's claim."""
        with self._writing() as connection:
            connection.execute("DELETE FROM claims WHERE call = ? AND peer = ? AND environment = ? AND owner = ?", (*key, owner))

    # Files -----------------------------------------------------------------------------------------------------------

    def create(self) -> None:
        """Make the file where there is none."""
        if not self.path.exists():
            _make(self.path)

    def set_aside(self) -> Path | None:
        """Move a corrupt file out of the way; where it is now, or None if another process did it before.

        Every row that can still be read is put into a new file in its place.
        """
        with _lock(self.path.with_suffix(".lock")):
            try:
                if self.check() == "ok":
                    return None
            except sqlite3.Error as error:
                if not is_corrupt(error):
                    raise
            stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
            aside = self.path.with_name(f"{self.path.stem}.corrupt-{stamp}-{secrets.token_hex(3)}{self.path.suffix}")
            for suffix in ("-wal", "-shm", ""):
                with suppress(FileNotFoundError):
                    os.rename(f"{self.path}{suffix}", f"{aside}{suffix}")
        if readable := Database(aside).salvaged():
            self.merge(readable)
        return aside

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection | None]:
        """A connection that only reads; None where there is no file."""
        if not self.path.exists():
            yield None
            return
        with closing(self._open("ro")) as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A connection within one transaction."""
        self.create()
        with closing(self._open("rw")) as connection:
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.rollback()
                raise
            connection.commit()

    def _open(self, mode: str) -> sqlite3.Connection:
        try:
            return self._connected(f"mode={mode}")
        except sqlite3.OperationalError:
            # In a folder that takes no files WAL can't be read; where nobody writes, nothing is missed without it.
            if mode == "ro" and not os.access(self.path.parent, os.W_OK) and not Path(f"{self.path}-wal").exists():
                return self._connected("mode=ro&immutable=1")
            raise

    def _connected(self, parameters: str) -> sqlite3.Connection:
        if self.path.exists() and not self.path.is_file():  # a device, read as a file, would seem to be an empty one
            raise NoFileError("it is a folder" if self.path.is_dir() else "it is no regular file")
        connection = sqlite3.connect(
            f"file:{quote(str(self.path))}?{parameters}", uri=True, timeout=self.patience, isolation_level=None
        )
        # A text that is damaged is a row that can't be read, not a database.
        connection.text_factory = lambda raw: raw.decode(errors="replace")
        try:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > _SCHEMA_VERSION:
                raise NewerDatabaseError(f"it was made by a newer version of Postlude (tables of version {version})")
            if not self.path.stat().st_size:
                raise EmptyFileError("it is empty")
            tables = connection.execute("SELECT count(*) FROM sqlite_schema WHERE name IN ('entries', 'claims', 'identity')")
            if tables.fetchone()[0] != 3:
                raise ForeignFileError
        except BaseException as error:
            connection.close()
            if is_corrupt(error) and not is_ours(self.path):
                raise ForeignFileError from error
            raise
        return connection


def is_ours(path: Path) -> bool:
    """Whether a file is a tuning database, also a broken one: it shows our tables, or is empty, or lies in our own folder."""
    if path == _own_path():
        return True
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError:
        return False
    return not head or _SIGN in head


def _insert(connection: sqlite3.Connection, entry: Entry) -> None:
    best = entry.best()
    unfused = best is None or best.variant.target == UNFUSED
    values = (*entry.key, entry.call.device, entry.call.region, int(unfused), entry.at, entry.to_json())
    connection.execute("REPLACE INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)


def _parsed(text: Any, key: Key) -> Entry | EntryError:
    """The entry of a row, which must be the one that its key says."""
    try:
        entry = Entry.from_json(text if isinstance(text, str) else "")
        return entry if entry.key == tuple(key) else EntryError("the row stands under another key than its own")
    except EntryError as error:
        return error


def _short(error: str) -> str:
    return (error.strip().splitlines() or [""])[0][:_ERROR]


def _time(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


# Making the file -----------------------------------------------------------------------------------------------------


def _make(path: Path) -> None:
    """Make an empty database, unless another process makes one meanwhile."""
    if not path.parent.is_dir():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f"{path.stem}.new-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with closing(sqlite3.connect(draft, isolation_level=None)) as connection:
            if not on_network(path.parent):
                with suppress(sqlite3.OperationalError):
                    connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
            connection.execute("INSERT INTO identity VALUES (?)", (secrets.token_hex(8),))
        draft.chmod(0o600)
        with _lock(path.with_suffix(".lock")):
            if not path.exists():
                draft.rename(path)
    finally:
        for suffix in ("", "-wal", "-shm", "-journal"):
            with suppress(FileNotFoundError):
                os.unlink(f"{draft}{suffix}")


def on_network(folder: Path, mounts: str = "/proc/self/mounts") -> bool:
    """Whether a folder lies on a file system that several machines may share."""
    try:
        lines = [line.split() for line in Path(mounts).read_text().splitlines()]
    except OSError:
        return False
    folder = folder.resolve()
    points = [
        (Path(fields[1].encode().decode("unicode_escape")), fields[2])
        for fields in lines
        if len(fields) > 2 and folder.is_relative_to(Path(fields[1].encode().decode("unicode_escape")))
    ]
    kind = max(points, key=lambda point: len(point[0].parts), default=(folder, ""))[1]
    return str(kind).partition(".")[0] in _NETWORK


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock between processes, where the file system has locks; the system takes it from a process that dies."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        if fcntl is not None:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        if fcntl is not None:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor too
        os.close(descriptor)


# Owners of claims ----------------------------------------------------------------------------------------------------


def new_owner() -> str:
    """A text that names this process, and one of its tasks, for a claim."""
    return json.dumps([_machine(), os.getpid(), _start_time(os.getpid()), secrets.token_hex(4)])


def _may_live(owner: str) -> bool:
    """Whether an owner's process lives, as far as that can be seen from here."""
    try:
        machine, process, start, _ = json.loads(owner)
    except ValueError:
        return True
    if machine != _machine():
        return True
    if start is not None:
        return bool(_start_time(process) == start)
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True


def _machine() -> str:
    """This run of this machine, and the namespace that process numbers belong to."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{os.uname().nodename}" if hasattr(os, "uname") else ""


def _start_time(process: int) -> str | None:
    """When a process started, in the kernel's own count; None where it is not there, or is a zombie."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[19] if fields[0] not in ("Z", "X") else None


def default_path() -> Path:
    """Where the user's database is: POSTLUDE_TUNING_DB, else `tuning/tuning.db` in the cache folder."""
    return cache.named_path("POSTLUDE_TUNING_DB") or _own_path()


def _own_path() -> Path:
    """Where nobody but us puts a file."""
    return cache.folder() / "tuning" / "tuning.db"
