"""Tuning: each call is measured once, by one of all processes that want to know, and kept.

- On one device one process measures at a time, or they would time each other. The lock is the operating system's: it ends with
  its process.
- A call that another process measures (on another device, or machine) is waited for, not measured again: claims in the database.
- A session, which `postlude tune` opens, has a time budget and hears what is done. Without one, a compilation with
  ``options={"tune": True}`` measures all that it meets.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from postlude.select.database import LEASE, new_owner
from postlude.select.entry import Entry
from postlude.select.knowledge import Knowledge, knowledge
from postlude.select.measure import Packing, measure
from postlude.select.subject import Call, digest, environment, peer, planned_call, planned_operands, versions
from postlude.targets.aten.interpreter import axis_sizes

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from postlude.capture.rewrite import Plan

#: Seconds between two looks at what another process does.
_POLL = 0.05


class BudgetSpent(BaseException):
    """The session's time is over. Not an Exception: nothing on the way should take it for a fault and go on."""


@dataclass
class Session:
    """What one run of `postlude tune` may spend, and what it did.

    Attributes:
        deadline: by `time.monotonic`; None without a budget.
        again: measure also what is known.
        heard: called with the number of GEMMs that were judged, and that of all in the graphs so far.
        measured: what was measured by this session.
        known: what it met and had been measured before, or was by another process.
    """

    deadline: float | None = None
    again: bool = False
    heard: Callable[[int, int], None] = lambda done, total: None
    measured: dict[tuple[str, str, str], Entry] = field(default_factory=dict)
    known: dict[tuple[str, str, str], Entry] = field(default_factory=dict)
    done: int = 0
    total: int = 0

    def check(self) -> None:
        """Raise where the time is over."""
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise BudgetSpent

    def check_measurement(self) -> None:
        """The same while something is measured. The first is measured whatever it takes: no run is for nothing."""
        if self.measured:
            self.check()

    def note(self, entry: Entry, measured: bool) -> None:
        """Take in what is known or was measured for a call."""
        if entry.key not in self.measured:
            (self.measured if measured else self.known)[entry.key] = entry

    @contextmanager
    def graph(self, gemms: int) -> Iterator[None]:
        """Pass a graph of so many GEMMs."""
        self.total += gemms
        end = self.total
        self.heard(self.done, self.total)
        yield
        self.done = end
        self.heard(self.done, self.total)

    def judged(self, gemms: int) -> None:
        """So many GEMMs more have been judged."""
        self.done = min(self.done + gemms, self.total)
        self.heard(self.done, self.total)


_session: Session | None = None


@contextmanager
def tuning(session: Session) -> Iterator[Session]:
    """Let compilations in this process, in any thread, belong to a session."""
    global _session
    before, _session = _session, session
    try:
        yield session
    finally:
        _session = before


def session() -> Session | None:
    """The session that is open, if any."""
    return _session


def tuned(plan: Plan, names: list[str], incumbent: str, packing: Packing) -> tuple[Entry, bool]:
    """The entry for a plan, measured if there is none; and whether it was measured just now.

    Raises:
        MeasurementFailed: it can't be measured.
        BudgetSpent: the session's time is over.
    """
    session = _session or Session()
    call = planned_call(plan, packed=bool(packing.operands))
    device = plan.sources[0].node.meta["val"].device
    compared, where = peer(), environment(device.type, plan.region)

    def measured(check: Callable[[], None]) -> Entry:
        with unset_fake_temporarily():
            result = measure(plan, names, incumbent, packing, check)
            sizes = axis_sizes(plan.region, [tuple(operand.shape) for operand in planned_operands(plan)])
        return Entry(
            call=call,
            peer=compared,
            environment=where,
            winner=result.winner,
            incumbent=incumbent,
            candidates=result.candidates,
            sizes=sizes,
            rounds=result.rounds,
            sets=result.sets,
            cold=result.cold,
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=versions(device.type),
        )

    entry = once(call, compared, where, device, session, measured)
    session.judged(len(plan.region.contractions))
    return entry, entry.key in session.measured


def once(
    call: Call,
    compared: str,
    where: dict[str, str],
    device: torch.device,
    session: Session,
    measured: Callable[[Callable[[], None]], Entry],
) -> Entry:
    """The entry for a call: one that is known, or will be in a moment, else what `measured` gives.

    Args:
        call: what to measure.
        compared: the peer.
        where: the environment.
        device: what is measured on, by one process at a time.
        session: has the time and hears what was done.
        measured: measures; it is given a function to call now and then.
    """
    known, owner = knowledge(), new_owner()
    key = (call.digest(), compared, digest(where))

    def found() -> Entry | None:
        entry = known.own(call, compared, where)
        if entry is not None and session.again and key not in session.measured:
            return None
        return entry

    if (entry := found()) is None:
        with measuring(device, session.check):
            while (entry := found()) is None:
                session.check_measurement()
                if not known.claim(key, owner):
                    session.check()
                    time.sleep(_POLL)
                    continue
                try:
                    if (entry := found()) is None:  # whoever had the claim may have ended it with an entry since we looked
                        entry = measured(_renewing(known, key, owner, session))
                        known.put(entry)
                        session.note(entry, True)
                finally:
                    known.release(key, owner)
    session.note(entry, False)
    return entry


def _renewing(known: Knowledge, key: tuple[str, str, str], owner: str, session: Session) -> Callable[[], None]:
    """Looks at the session's time, and renews a claim before it ends."""
    last = [time.monotonic()]

    def check() -> None:
        session.check_measurement()
        if time.monotonic() - last[0] > LEASE / 4:
            last[0] = time.monotonic()
            known.claim(key, owner)

    return check


@contextmanager
def measuring(device: torch.device, check: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a device for measurements: other processes of this user on this machine wait.

    Where there are no locks, processes time each other, which costs accuracy and nothing else.
    """
    descriptor = None
    if fcntl is not None:
        with suppress(OSError):
            folder = Path(tempfile.gettempdir()) / f"postlude-{os.getuid()}"
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.stat().st_uid == os.getuid():
                descriptor = os.open(folder / f"measuring-{_identity(device)}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while descriptor is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                check()
                time.sleep(_POLL)
            except OSError:
                break
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor too
            os.close(descriptor)


def _identity(device: torch.device) -> str:
    """A file's name for one device of this machine: all of its cores, or one GPU."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    return str(getattr(properties, "uuid", f"cuda-{device.index}"))
