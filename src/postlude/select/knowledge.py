"""What is known of a call: the user's database, under it the entries that ship with the package.

Whatever is wrong with the database (corrupt, locked, read-only, disk full, made by a newer version), compiling goes on with what
is left, and one warning says what happened and what to do. What was measured is then remembered for as long as the process lives.
"""

from __future__ import annotations

import hashlib
import sqlite3
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from postlude.ir import Region
from postlude.select.choice import UNFUSED, Choice, Origin
from postlude.select.database import Database, default_path, is_corrupt
from postlude.select.entry import Entry, EntryError
from postlude.select.subject import Bounds, Call, digest, environment, same_graph
from postlude.select.variants import Variant

T = TypeVar("T")

#: Entries that ship with the package, one a line: measured on the GPUs that they name.
SHIPPED = Path(__file__).with_name("shipped.jsonl")


class TuningDatabaseWarning(UserWarning):
    """The tuning database can't be used as it should be."""


class Knowledge:
    """The layers of knowledge over one database file."""

    def __init__(self, path: Path) -> None:
        self.database = Database(path)
        #: What could not be written.
        self.remembered: dict[tuple[str, str, str], Entry] = {}
        self.reads = self.writes = True
        self._warned = False

    @property
    def empty(self) -> bool:
        """Whether there is nothing to ask."""
        return not (self.remembered or shipped() or self.database.path.exists())

    def prepare(self) -> None:
        """Make the database where there is none."""
        self._write(self.database.create)

    # Asking ----------------------------------------------------------------------------------------------------------

    def own(self, call: Call, peer: str, environment: dict[str, str]) -> Entry | None:
        """The user's entry for exactly this."""
        key = (call.digest(), peer, digest(environment))
        return self.remembered.get(key) or self._read(lambda: self.database.get(key), None)

    def choice(self, call: Call, peer: str, environment: dict[str, str], names: Sequence[str]) -> Choice | None:
        """What is known to be best, by the user's entry, else by a shipped one; None where nothing is.

        Args:
            call: what is to be computed.
            peer: what it was to be compared with.
            environment: of this process.
            names: targets that serve the Region here.
        """
        if (entry := self.own(call, peer, environment)) is not None:
            return _choice(entry, "user database", names)
        entry = self._shipped(call, environment)
        return _choice(entry, "shipped database", names) if entry is not None and entry.peer == peer else None

    def of_graph(self, call: Call, bounds: Bounds, peer: str, environment: dict[str, str]) -> list[Entry]:
        """What is known of all calls that a graph serves which is compiled for `call`, where sizes vary within `bounds`."""
        none: list[Entry] = []
        stored = self._read(lambda: self.database.of_region(call.region), none)
        told = [self._shipped(e.call, environment) for e in shipped().values() if e.call.region == call.region]
        found = {e.call: e for e in told if e is not None and e.peer == peer}
        own = [e for e in (*stored, *self.remembered.values()) if e.peer == peer and e.environment == environment]
        found |= {e.call: e for e in own}
        return [entry for other, entry in found.items() if same_graph(call, other, bounds)]

    def kernel(self, call: Call, around: dict[str, str], names: Sequence[str]) -> tuple[Variant, Entry] | None:
        """The fastest kernel of a call in this environment, whatever it was compared with; None where nothing is known."""
        key = call.digest()
        entries = [e for (c, _, where), e in self.remembered.items() if c == key and where == digest(around)]
        entry = entries[-1] if entries else self._read(lambda: self.database.find(key, digest(around)), None)
        entry = entry or self._shipped(call, around)
        if entry is None:
            return None
        best = entry.best(lambda variant: variant.target in names)
        return (best.variant, entry) if best is not None else None

    def _shipped(self, call: Call, here: dict[str, str]) -> Entry | None:
        """The shipped entry of a call, with what failed of it here, if it says something about this environment."""
        entry = shipped().get(call.digest())
        if entry is None:
            return None
        key = entry.key
        entry = self.remembered.get(key) or self._read(lambda: self.database.get(key), None) or entry
        return entry if _holds(entry, here) else None

    def digest(self) -> str:
        """Changes when graphs that were compiled by this knowledge may have to be compiled anew."""
        found = hashlib.sha256()
        none: list[tuple[Any, ...]] = []
        rows = self._read(lambda: list(self.database.decisions()), none)
        if not rows and not self.remembered and not shipped():
            return ""  # neither do threads decide anything then
        for row in rows:
            found.update(repr(row).encode())
        for key in sorted(self.remembered):
            best = self.remembered[key].best()
            found.update(repr((key, best and best.variant.name)).encode())
        return f"{found.hexdigest()} {torch.get_num_threads()}"

    # Telling ---------------------------------------------------------------------------------------------------------

    def put(self, entry: Entry) -> None:
        """Keep a measurement."""
        if not self._write(lambda: self.database.put(entry)):
            self.remembered[entry.key] = entry

    def claim(self, key: tuple[str, str, str], owner: str) -> bool:
        """Claim a measurement; where the database can't be written, nobody else is known to do it."""
        granted = [True]
        self._write(lambda: granted.append(self.database.claim(key, owner)))
        return granted[-1]

    def release(self, key: tuple[str, str, str], owner: str) -> None:
        """End a claim."""
        self._write(lambda: self.database.release(key, owner))

    def mark_failed(self, entry: Entry, name: str, error: str) -> None:
        """Note that a candidate which was chosen could not be built: it is not chosen again."""
        self._write(lambda: self.database.mark_failed(entry, name, error))

    def mark_region_failed(self, region: Region, program: str, device_type: str, name: str, error: str) -> None:
        """The same for all entries of a Region in this environment."""
        where = environment(device_type, region)
        none: list[Entry] = []
        for entry in self._read(lambda: self.database.of_region(program), none):
            if entry.environment == where and any(c.variant.name == name for c in entry.candidates):
                self.mark_failed(entry, name, error)

    # Faults ----------------------------------------------------------------------------------------------------------

    def _read(self, read: Callable[[], T], nothing: T) -> T:
        if not self.reads:
            return nothing
        try:
            return read()
        except (sqlite3.Error, OSError) as error:
            if self._set_aside(error):
                return self._read(read, nothing)
            self.reads = self.writes = False
            self._warn(f"can't be used: {error}. Regions are chosen by the rules.")
            return nothing

    def _write(self, write: Callable[[], object]) -> bool:
        if not self.writes:
            return False
        try:
            write()
        except (sqlite3.Error, OSError) as error:
            if self._set_aside(error):
                return self._write(write)
            self.writes = False
            self._warn(f"can't be written: {error}. What is measured is remembered until this process ends.")
            return False
        return True

    def _set_aside(self, error: Exception) -> bool:
        """Put a corrupt file out of the way; whether there is a good one, or none, in its place now."""
        if not is_corrupt(error):
            return False
        try:
            aside = self.database.set_aside()
        except (sqlite3.Error, OSError):
            return False
        if aside is not None:
            self._warn(
                f"is corrupt ({error}) and was moved to {aside}. What could be read of it is in a new one. Nothing needs to be"
                " done; `postlude tune` measures again what is missing."
            )
        return True

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"The tuning database {self.database.path} {what} Set POSTLUDE_TUNING_DB to use another file.",
                TuningDatabaseWarning,
                stacklevel=2,
            )


def _choice(entry: Entry, origin: Origin, names: Sequence[str]) -> Choice | None:
    usable = {*names, UNFUSED}
    return entry.choice(origin, lambda variant: variant.target in usable)


def _holds(entry: Entry, here: dict[str, str]) -> bool:
    """Whether a shipped entry says something about this environment.

    In its own, all that was measured. With other versions, of which there are many, or kernels whose sources have changed since:
    that a candidate is clearly faster than what the rules choose, if the kernels are of the same generation.
    """
    return entry.environment == here or (entry.environment.get("generation") == here.get("generation") and entry.clear)


@lru_cache(maxsize=1)
def shipped() -> dict[str, Entry]:
    """The shipped entries, by their calls' digests."""
    found = {}
    for line in SHIPPED.read_text().splitlines() if SHIPPED.exists() else ():
        try:
            entry = Entry.from_json(line)
        except EntryError:  # a test says that there are none; an edited file must not stop a model
            continue
        found[entry.call.digest()] = entry
    return found


_known: dict[Path, Knowledge] = {}


def knowledge() -> Knowledge:
    """That of this process, over the database where it is now."""
    path = default_path()
    if path not in _known:
        _known[path] = Knowledge(path)
    return _known[path]


def forget() -> None:
    """Look at the database with new eyes: what was wrong with it may be right now."""
    _known.clear()
    shipped.cache_clear()
