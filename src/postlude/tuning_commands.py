"""The commands around the tuning database: `postlude tune`, `postlude db list | export | import | merge | prune`."""

from __future__ import annotations

import json
import re
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from postlude.errors import DatabaseUnusable, FileUnusable, PostludeError, TargetNotFound

if TYPE_CHECKING:
    from postlude.select.database import Database
    from postlude.select.entry import Entry
    from postlude.select.exchange import Imported, Rejected

T = TypeVar("T")

db = typer.Typer(no_args_is_help=True, help="The tuning database: what was measured on this machine, or imported.")

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}

#: Seconds of a hundred years.
_LONGEST = 36525 * 86400

#: Rejected lines that are shown one by one.
_SHOWN = 20


def register(app: typer.Typer) -> None:
    """Put the commands into the application."""
    app.command()(tune)
    app.add_typer(db, name="db")


def duration(text: str) -> float:
    """Seconds of ``60s``, ``5m``, ``1.5h``, ``90d`` or ``60``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0 < seconds <= _LONGEST:
        raise typer.BadParameter(f"{text!r}: expected a time such as 60s, 5m, 1h or 90d, of a hundred years at most")
    return seconds


# tune ----------------------------------------------------------------------------------------------------------------


def tune(
    target: Annotated[str, typer.Argument(help="package.module:name or path/to/file.py:name, see above.")],
    budget: Annotated[str | None, typer.Option(help="Measure no longer than this: 60s, 5m, 1h.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure also what is known.")] = False,
    freeze: Annotated[bool, typer.Option("--freeze", help="As with the option freeze: weights are packed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was measured as JSON.")] = False,
) -> None:
    """Measure the kernels of a model on this machine, and keep in the tuning database what is fastest.

    The name in TARGET is a function without arguments; in a file it may be left out and is then `target`. It returns a tuple:
    the model or function, and after it the arguments to call it with, or a list of several sets of arguments. Compilations
    find what was measured by themselves.
    """
    from postlude import doctor
    from postlude.console import clear_errors, messages, models_prints_as_messages, output

    seconds = duration(budget) if budget is not None else None
    with clear_errors():
        doctor.require_compile()
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        from postlude.loading import load
        from postlude.tuning import tune as tune_example

        with models_prints_as_messages():
            example = load(target)
        columns = (TextColumn("Tuning"), BarColumn(), MofNCompleteColumn(), TextColumn("GEMMs"), TimeElapsedColumn())
        left = (TextColumn("left"), TimeRemainingColumn())
        with Progress(*columns, *left, console=messages, transient=True) as progress, models_prints_as_messages():
            task = progress.add_task("", total=None)
            try:
                tuned = tune_example(
                    example,
                    budget=seconds,
                    again=again,
                    options={"freeze": True} if freeze else None,
                    heard=lambda done, total: progress.update(task, completed=done, total=total),
                )
            except PostludeError:
                raise
            except Exception as error:
                reason = f"the model raised {type(error).__name__}: {doctor.first_line(error)}"
                raise TargetNotFound(target, reason) from error
        from postlude.select.knowledge import knowledge

        known = knowledge()
        session = tuned.session
        if as_json:
            entries = [*session.measured.values(), *session.known.values()]
            print(
                json.dumps(
                    {
                        "ended": tuned.ended,
                        "database": str(known.database.path),
                        "measured": len(session.measured),
                        "known": len(session.known),
                        "entries": [json.loads(entry.to_json()) for entry in entries],
                    },
                    indent=1,
                )
            )
        else:
            entries = [*session.measured.values(), *session.known.values()]
            if entries:
                output.print(_table(entries))
            for text, count in Counter(f"{c.variant.name}: {c.error}" for e in entries for c in e.candidates if c.error).items():
                output.print(f"[yellow]Not measured in {count} of {len(entries)} Regions:[/] {escape(text)}", soft_wrap=True)
            output.print(
                f"{len(session.measured)} measured now, {len(session.known)} were known."
                f" Database: {escape(str(known.database.path))}",
                soft_wrap=True,
            )
            if not session.measured and not session.known and tuned.ended == "done":
                output.print(
                    "No Region of this model has a kernel here that could be measured; postlude explain says what became of its"
                    " matrix multiplications."
                )
        if not known.writes and session.measured:
            raise DatabaseUnusable(known.database.path, "what was measured could not be written")
        if tuned.ended == "budget":
            if session.measured:
                messages.print(f"The budget of {budget} is spent; what was measured is kept. Run the same again to go on.")
            else:
                messages.print(
                    f"The budget of {budget} was spent while another process was measuring on this device. Run the same again.",
                    soft_wrap=True,
                )
        if tuned.ended == "interrupted":
            messages.print("Interrupted; what was measured is kept. Run the same again to go on.")
            raise typer.Exit(130)


def _table(entries: list[Entry], states: dict[tuple[str, str, str], str] | None = None) -> Table:
    view = Table(show_edge=False)
    for column in ("Region", "sizes", "winner"):
        view.add_column(column, overflow="fold", min_width=7)
    for column in ("µs", "±", "Inductor", "speed-up"):
        view.add_column(column, justify="right", no_wrap=True)
    if states is not None:
        view.add_column("measured", no_wrap=True)
        view.add_column("state", overflow="fold")
    for entry in entries:
        best, unfused = entry.best(), entry.measured("unfused").seconds
        candidate = best.candidate() if best is not None else None
        seconds = candidate.seconds if candidate is not None else None
        cells = [
            _what(entry),
            " ".join(f"{axis} {size}" for axis, size in entry.call.sizes),
            candidate.name if candidate is not None else "none is left",
            f"{seconds * 1e6:.1f}" if seconds else "",
            f"{candidate.spread:.0%}" if candidate is not None and candidate.spread is not None else "",
            f"{unfused * 1e6:.1f}" if unfused else "",
            f"{unfused / seconds:.2f}x" if unfused and seconds else "",
        ]
        if states is not None:
            cells += [entry.at[:10], states[entry.key]]
        view.add_row(*map(Text, cells))
    return view


def _what(entry: Entry) -> str:
    """A Region in a few words: types and ops."""
    from postlude.ir import Apply, Reduce
    from postlude.ir.region import DTYPE_NAMES
    from postlude.op import region_of

    region = region_of(entry.call.region)
    left = region.contractions[0]
    dtype = DTYPE_NAMES[region.operands[region.operand_index[left.right]].dtype]
    ops = [s.op if isinstance(s, Apply) else f"{s.kind} of rows" for s in region.body if isinstance(s, Apply | Reduce)]
    packed = " (packed)" if entry.call.packed else ""
    products = f"{len(region.contractions)} x " if len(region.contractions) > 1 else ""
    return f"{products}{dtype} GEMM{packed}" + (f", {', '.join(dict.fromkeys(ops))}" if ops else "")


# db ------------------------------------------------------------------------------------------------------------------


@db.command("list")
def list_entries(as_json: Annotated[bool, typer.Option("--json", help="Print the entries as JSON.")] = False) -> None:
    """Show what the database holds, and what of it this machine uses."""
    from postlude.console import clear_errors, output

    with clear_errors():
        from postlude.select.entry import Entry
        from postlude.select.exchange import devices_here

        database, rows = _used(lambda database: list(database.rows()))
        entries = [found for _, found in rows if isinstance(found, Entry)]
        here = devices_here() if entries else []
        states = {entry.key: _state(entry, here) for entry in entries}
        broken = len(rows) - len(entries)
        if as_json:
            record = [{**json.loads(entry.to_json()), "state": states[entry.key]} for entry in entries]
            print(json.dumps({"database": str(database.path), "unreadable": broken, "entries": record}, indent=1))
            return
        for device in dict.fromkeys(_device(entry) for entry in entries):
            output.print(Text(device, style="bold"))
            output.print(_table([entry for entry in entries if _device(entry) == device], states))
            output.print()
        output.print(f"{len(entries)} entries in {escape(str(database.path))}", soft_wrap=True)
        if broken:
            output.print(f"[yellow]{broken} rows can't be read by this version[/]; postlude db prune --stale removes them.")


def _device(entry: Entry) -> str:
    """Where an entry was measured."""
    threads = entry.call.threads
    return f"{entry.call.device}, {entry.call.isa}, {threads} thread{'s' * (threads != 1)}" if threads else entry.call.device


def _state(entry: Entry, here: list[str]) -> str:
    from postlude.select.exchange import is_stale
    from postlude.select.subject import applies

    if entry.call.device not in here:
        return "other device"
    if is_stale(entry, here):
        return "stale"
    if entry.failed:
        return f"{len(entry.failed)} failed"
    return "in use" if applies(entry.call, entry.environment) else "other threads"


@db.command("export")
def export_entries(
    file: Annotated[Path, typer.Argument(help="The file to write, JSON lines; - is standard output.")],
    device: Annotated[str | None, typer.Option(help="Only entries of devices whose name contains this.")] = None,
) -> None:
    """Write entries to a file that other machines can import."""
    from postlude.console import clear_errors, messages

    with clear_errors():
        from postlude.select.exchange import write_lines

        def wanted(database: Database) -> list[Entry]:
            return [e for e in database.entries() if device is None or device.lower() in e.call.device.lower()]

        database, entries = _used(wanted)
        if str(file) == "-":
            for entry in entries:
                print(entry.to_json())
        else:
            try:
                write_lines(entries, file)
            except OSError as error:
                raise FileUnusable(file, error.strerror or error, "a file in a folder that exists and is writable") from error
        where = "standard output" if str(file) == "-" else str(file)
        messages.print(
            f"{len(entries)} entries of {escape(str(database.path))} written to {escape(where)}",
            soft_wrap=True,
        )
        if not entries:
            of = "no entries" if device is None else f"no entries of a device whose name contains {device!r}"
            messages.print(f"[yellow]The database has {escape(of)}; postlude db list shows what it has.[/]", soft_wrap=True)


@db.command("import")
def import_entries(
    files: Annotated[list[Path], typer.Argument(help="Files that postlude db export wrote; - is standard input.")],
) -> None:
    """Put the entries of files into the database; of two for the same, the one that was measured later stays.

    A line that is not understood is reported and left out; the others are taken. The exit code is then 1.
    """
    from postlude.select.exchange import read_lines

    def found() -> Iterator[Entry | Rejected]:
        for file in files:
            if str(file) == "-":
                yield from read_lines(sys.stdin.buffer, "standard input")
                continue
            try:
                with file.open("rb") as opened:
                    yield from read_lines(opened, str(file))
            except OSError as error:
                raise FileUnusable(file, error.strerror or error, "files that postlude db export wrote") from error

    _put_in(found)


@db.command("merge")
def merge_databases(
    files: Annotated[list[Path], typer.Argument(help="Other tuning databases, also one that was moved aside as corrupt.")],
) -> None:
    """Put the entries of other database files into the database; of two for the same, the one measured later stays."""
    from postlude.select.exchange import read_database

    def found() -> Iterator[Entry | Rejected]:
        for file in files:
            if not file.is_file():
                raise FileUnusable(file, "there is no such file", "other tuning databases")
            yield from read_database(file)

    _put_in(found)


@db.command()
def prune(
    stale: Annotated[
        bool, typer.Option("--stale", help="Of this machine's devices with other versions; unreadable rows.")
    ] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Whose choice could not be built later.")] = False,
    older_than: Annotated[str | None, typer.Option(help="Measured longer ago than this: 90d.")] = None,
    device: Annotated[str | None, typer.Option(help="Of devices whose name contains this.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All entries.")] = False,
) -> None:
    """Remove entries: those that any of the options names."""
    from postlude.console import clear_errors, output

    age = timedelta(seconds=duration(older_than)) if older_than is not None else None
    if not (stale or failed or age or device or everything):
        raise typer.BadParameter("say what to remove: --stale, --failed, --older-than 90d, --device NAME or --all")
    with clear_errors():
        from postlude.select.entry import EntryError
        from postlude.select.exchange import devices_here, is_stale

        here = devices_here()
        now = datetime.now(UTC)

        def wanted(found: Entry | EntryError) -> bool:
            if isinstance(found, EntryError):
                return stale or everything
            measured = datetime.fromisoformat(found.at)
            measured = measured if measured.tzinfo else measured.replace(tzinfo=UTC)
            return (
                everything
                or (stale and is_stale(found, here))
                or (failed and bool(found.failed))
                or (age is not None and now - measured > age)
                or (device is not None and device.lower() in found.call.device.lower())
            )

        database, removed = _used(lambda database: database.remove(wanted) if database.path.exists() else 0)
        output.print(f"{removed} entries removed from {escape(str(database.path))}", soft_wrap=True)


def _put_in(found: Callable[[], Iterator[Any]]) -> None:
    from postlude.console import clear_errors, messages, output

    with clear_errors():
        from postlude.select.exchange import put_in

        database, imported = _used(lambda database: put_in(database, found()))
        merged = imported.merged
        output.print(
            f"{merged.added} added, {merged.replaced} replaced, {merged.older} not newer than what was there,"
            f" {len(imported.rejected)} rejected. {imported.usable} of {merged.total} are for this machine as it is now."
            f" Database: {escape(str(database.path))}",
            soft_wrap=True,
        )
        _show_rejected(imported)
        if imported.rejected:
            messages.print("[yellow]Rejected lines were left out; the others are in the database.[/]")
            raise typer.Exit(1)


def _show_rejected(imported: Imported) -> None:
    from postlude.console import messages

    for one in imported.rejected[:_SHOWN]:
        messages.print(f"{escape(one.where)}: {escape(one.reason)}", soft_wrap=True)
    if len(imported.rejected) > _SHOWN:
        messages.print(f"... and {len(imported.rejected) - _SHOWN} more")


def _used(use: Callable[[Database], T]) -> tuple[Database, T]:
    """The user's database, and what `use` makes of it; a corrupt one is moved aside first."""
    from postlude.console import messages
    from postlude.select.database import Database, default_path, is_corrupt

    database = Database(default_path())
    try:
        try:
            return database, use(database)
        except sqlite3.Error as error:
            if not is_corrupt(error):
                raise
            aside = database.set_aside()
            messages.print(f"[yellow]The database was corrupt ({escape(str(error))}) and was moved to {escape(str(aside))}.[/]")
            return database, use(database)
    except (sqlite3.Error, OSError) as error:
        raise DatabaseUnusable(database.path, error) from error
