"""Entries as files: JSON lines out of a database and into one. What is read is data, checked line by line; no code is run."""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from postlude.select.database import Database, Merged
from postlude.select.entry import Entry, EntryError
from postlude.select.subject import applies, device_name, environment


@dataclass(frozen=True)
class Rejected:
    """A line or row that is no entry: where it is, and what was expected."""

    where: str
    reason: str


@dataclass(frozen=True)
class Imported:
    """What became of entries from elsewhere; `usable` of them are for a device and environment of this process."""

    merged: Merged
    rejected: tuple[Rejected, ...]
    usable: int


def write_lines(entries: Iterable[Entry], path: Path) -> int:
    """Write a file of entries, whole or not at all; returns how many."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    count = 0
    try:
        with draft.open("w", encoding="utf-8") as file:
            for entry in entries:
                file.write(entry.to_json() + "\n")
                count += 1
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return count


def read_lines(file: IO[bytes], name: str) -> Iterator[Entry | Rejected]:
    """The entries of a file of lines; for a line that is none, why. Empty lines are passed over."""
    for number, line in enumerate(file, 1):
        where = f"{name}:{number}"
        try:
            text = line.decode().strip()
        except UnicodeDecodeError as error:
            yield Rejected(where, f"not UTF-8: {error.reason}")
            continue
        if not text:
            continue
        try:
            yield Entry.from_json(text)
        except EntryError as error:
            yield Rejected(where, str(error))


def read_database(path: Path) -> Iterator[Entry | Rejected]:
    """The entries of another database file, which is not changed; of a corrupt one those that can be read."""
    try:
        for key, found in Database(path).rows():
            yield found if isinstance(found, Entry) else Rejected(f"{path}: row {key[0][:8]}", str(found))
    except sqlite3.Error as error:
        yield Rejected(str(path), f"not all of it can be read: {error}")
        yield from Database(path).salvaged()


def put_in(database: Database, found: Iterable[Entry | Rejected]) -> Imported:
    """Merge what was read into a database, in one transaction, and say what became of it."""
    entries: list[Entry] = []
    rejected: list[Rejected] = []
    for one in found:
        if isinstance(one, Entry):
            entries.append(one)
        else:
            rejected.append(one)
    merged = database.merge(entries)
    return Imported(merged, tuple(rejected), sum(applies(entry.call, entry.environment) for entry in entries))


def is_stale(entry: Entry, devices: Sequence[str]) -> bool:
    """Whether an entry is of a device that is here, and of an environment that is not here any more."""
    from postlude.op import region_of

    if entry.call.device not in devices:
        return False
    return entry.environment != environment("cpu" if entry.call.threads else "cuda", region_of(entry.call.region))


def devices_here() -> list[str]:
    """Names of this machine's processor and GPUs."""
    import torch

    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [device_name(device) for device in (torch.device("cpu"), *gpus)]
