"""An entry of the tuning database: what was measured for one call in one environment, as plain data with a JSON form.

The JSON form, one line, is what the database holds, what is exported and what the package ships. It is checked whenever it is
read. A field that is missing, unknown or of another type, another version, a Region that does not parse, a target or
configuration that does not exist, a time that is no positive number: each makes it an `EntryError`, which says what was expected.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any, NoReturn

from postlude.ir import RegionError, RegionSyntaxError
from postlude.op import region_of
from postlude.select.choice import UNFUSED, Candidate, Choice, Origin
from postlude.select.subject import Call, digest
from postlude.select.variants import Variant, variant_from

#: Name and version of the JSON form.
FORMAT = "postlude-tuning"
VERSION = 1

#: Characters of a line; a Region with twenty candidates takes five thousand.
_LONGEST = 1 << 20

#: A difference that other versions of the driver, the compilers or a kernel's source will not have turned around.
CLEAR = 0.05

_ISAS = frozenset({"", "portable", "avx2", "avx512", "avx512_bf16", "amx_bf16"})


class EntryError(ValueError):
    """A line that is no entry of this version."""


@dataclass(frozen=True)
class Measured:
    """A candidate that was measured, or could not be.

    Attributes:
        variant: what it is.
        seconds: median time of a call; None where it could not be measured.
        low, high: the 95 % confidence interval of the median.
        error: why it could not be measured.
    """

    variant: Variant
    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    error: str | None = None

    def candidate(self) -> Candidate:
        """As reports show it."""
        if self.seconds is None or self.low is None or self.high is None:
            return Candidate(self.variant.name, error=self.error)
        return Candidate(self.variant.name, self.seconds, (self.high - self.low) / 2 / self.seconds, self.error)


@dataclass(frozen=True)
class Entry:
    """One measurement.

    Attributes:
        call: what was measured.
        peer: what it was compared with, see `subject.peer`.
        environment: what the times depend on beside the call, see `subject.environment`.
        winner: name of the candidate to take.
        incumbent: name of the candidate that would be taken without a measurement.
        candidates: all of them, `unfused` among them.
        sizes: the axes' own sizes in the measurement.
        rounds: times that each candidate was measured, at most.
        sets: sets of inputs that took turns.
        cold: bytes of all sets; where they are more than the last cache holds, nothing was read from it.
        at: when, ISO 8601 in UTC.
        versions: versions in full, for a person who reads this.
        failed: candidates that could not be built later, by name, and why.
    """

    call: Call
    peer: str
    environment: dict[str, str]
    winner: str
    incumbent: str
    candidates: tuple[Measured, ...]
    sizes: dict[str, int]
    rounds: int
    sets: int
    cold: int
    at: str
    versions: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str]:
        """What is unique in the database: the call's digest, the peer and the environment's digest."""
        return self.call.digest(), self.peer, digest(self.environment)

    def measured(self, name: str) -> Measured:
        """The candidate of this name."""
        return next(one for one in self.candidates if one.variant.name == name)

    def best(self, usable: Callable[[Variant], bool] = lambda variant: True) -> Measured | None:
        """The winner; where it failed since or is not usable, the fastest of the others; None if there is none."""
        left = [c for c in self.candidates if c.seconds is not None and c.variant.name not in self.failed and usable(c.variant)]
        won = [c for c in left if c.variant.name == self.winner]
        return won[0] if won else min(left, key=lambda c: c.seconds or math.inf, default=None)

    @property
    def clear(self) -> bool:
        """Whether the winner beat the incumbent by more than `CLEAR`, even at the unfavourable ends of both intervals."""
        won, ruled = self.measured(self.winner), self.measured(self.incumbent)
        if self.winner in self.failed:
            return False
        return won.high is not None and ruled.low is not None and won.high < ruled.low * (1 - CLEAR)

    def choice(self, origin: Origin, usable: Callable[[Variant], bool] = lambda variant: True) -> Choice | None:
        """What the entry chooses of what is usable; None if nothing is."""
        best = self.best(usable)
        if best is None:
            return None
        shown = tuple(replace(c.candidate(), error=self.failed.get(c.variant.name, c.error)) for c in self.candidates)
        return Choice(best.variant.name, origin, self._reason(best), shown)

    def _reason(self, best: Measured) -> str:
        unfused, seconds = self.measured(UNFUSED).seconds, best.seconds
        assert seconds is not None
        if best.variant.name != self.winner:
            return f"{self.winner} can't be used here; of the others this one is the fastest, {microseconds(seconds)}"
        if best.variant.target == UNFUSED:
            fused = [c for c in self.candidates if c.variant.target != UNFUSED and c.seconds is not None]
            if not fused:
                return "measured: no kernel could be built"
            fastest = min(fused, key=lambda c: c.seconds or math.inf)
            return f"measured: {microseconds(fastest.seconds or 0)} fused, {microseconds(seconds)} in Inductor"
        against = f", {microseconds(unfused)} in Inductor" if unfused else ""
        return f"measured: {microseconds(seconds)}{against}" + (
            "; no candidate is faster beyond the noise" if self.winner == self.incumbent and len(self.candidates) > 2 else ""
        )

    # JSON ------------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """One line."""
        record = {"format": FORMAT, "version": VERSION, **asdict(replace(self, candidates=()))}
        record["call"] |= {"sizes": dict(self.call.sizes), "layout": list(self.call.layout)}
        record["candidates"] = [
            {**c.variant.plain(), **{k: v for k in ("seconds", "low", "high", "error") if (v := getattr(c, k)) is not None}}
            for c in self.candidates
        ]
        return json.dumps(record, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Entry:
        """The entry of a line.

        Raises:
            EntryError: the line is none.
        """
        if len(line) > _LONGEST:
            raise EntryError(f"a line of {len(line)} characters: expected {_LONGEST} at most")
        try:
            record = json.loads(line, parse_constant=_no_constant, object_pairs_hook=_distinct)
        except (ValueError, RecursionError) as error:
            raise EntryError(f"not JSON: {error}") from error
        return cls._from_record(record)

    @classmethod
    def _from_record(cls, record: Any) -> Entry:
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise EntryError(f"not a line of {FORMAT}")
        if record.get("version") != VERSION:
            raise EntryError(f"version {record.get('version')!r}: this Postlude reads version {VERSION}")
        given = _checked("the entry", {k: v for k, v in record.items() if k not in ("format", "version")}, _ENTRY)
        call = _call(given["call"])
        candidates = tuple(_measured(index, one) for index, one in enumerate(given["candidates"]))
        entry = cls(**{**given, "call": call, "candidates": candidates})
        names = [c.variant.name for c in candidates]
        if len(set(names)) < len(names) or UNFUSED not in names:
            raise EntryError("candidates: expected distinct ones, 'unfused' among them")
        for role in ("winner", "incumbent"):
            if getattr(entry, role) not in names:
                raise EntryError(f"{role} is {getattr(entry, role)!r}, which is no candidate")
        if entry.measured(entry.winner).seconds is None:
            raise EntryError(f"the winner {entry.winner!r} was not measured")
        if unknown := set(entry.failed) - set(names):
            raise EntryError(f"failed names {sorted(unknown)[0]!r}, which is no candidate")
        try:
            datetime.fromisoformat(entry.at)
        except ValueError as error:
            raise EntryError(f"at: {error}") from error
        return entry


def microseconds(seconds: float) -> str:
    """A time as reasons show it."""
    return f"{seconds * 1e6:.1f} µs"


# The schema ----------------------------------------------------------------------------------------------------------


def _texts(value: Any) -> bool:
    return isinstance(value, dict) and all(_text(k) and _text(v) for k, v in value.items())


def _counts(value: Any) -> bool:
    return isinstance(value, dict) and all(_text(k) and _count(v) for k, v in value.items())


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _text(value: Any) -> bool:
    """Text that can be stored: JSON may also spell halves of a character, which UTF-8 has not."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def _list_of_text(value: Any) -> bool:
    return isinstance(value, list) and all(map(_text, value))


#: Field -> (test, what is expected, whether it may be missing).
_Schema = Mapping[str, tuple[Callable[[Any], bool], str, bool]]

_ENTRY: _Schema = {
    "call": (lambda v: isinstance(v, dict), "an object", False),
    "peer": (_text, "text", False),
    "environment": (_texts, "an object of texts", False),
    "winner": (_text, "text", False),
    "incumbent": (_text, "text", False),
    "candidates": (lambda v: isinstance(v, list) and 0 < len(v) <= 1000, "a list of candidates", False),
    "sizes": (_counts, "an object of numbers", False),
    "rounds": (_count, "a number", False),
    "sets": (_count, "a number", False),
    "cold": (_count, "a number of bytes", False),
    "at": (_text, "a time", False),
    "versions": (_texts, "an object of texts", True),
    "failed": (_texts, "an object of texts", True),
}

_CALL: _Schema = {
    "region": (_text, "text", False),
    "sizes": (_counts, "an object of numbers", False),
    "layout": (_list_of_text, "a list of texts", False),
    "device": (lambda v: _text(v) and 0 < len(v) <= 200, "a device's name", False),
    "isa": (lambda v: _text(v) and v in _ISAS, "the name of an instruction set", False),
    "threads": (_count, "a number", False),
    "packed": (lambda v: isinstance(v, bool), "true or false", False),
    "float32": (lambda v: v in ("", "highest", "high", "medium"), "'highest', 'high', 'medium' or nothing", False),
}

_CANDIDATE: _Schema = {
    "target": (_text, "text", False),
    "configuration": (lambda v: isinstance(v, dict), "an object", True),
    "seconds": (_time, "a positive number", True),
    "low": (_time, "a positive number", True),
    "high": (_time, "a positive number", True),
    "error": (_text, "text", True),
}


def _checked(what: str, given: Any, schema: _Schema) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise EntryError(f"{what} is {type(given).__name__}: expected an object")
    if unknown := sorted(set(given) - set(schema)):
        raise EntryError(f"{what} has an unknown field {unknown[0]!r}")
    for name, (test, expected, optional) in schema.items():
        if name not in given:
            if not optional:
                raise EntryError(f"{what} has no field {name!r}")
        elif not test(given[name]):
            raise EntryError(f"{name} of {what} is {str(given[name])[:60]!r}: expected {expected}")
    return given


def _call(given: Any) -> Call:
    fields = _checked("the call", given, _CALL)
    try:
        region = region_of(fields["region"])
    except (RegionSyntaxError, RegionError) as error:
        raise EntryError(f"the region: {error}") from error
    if len(fields["layout"]) != len(region.operands):
        raise EntryError(f"{len(fields['layout'])} layouts for {len(region.operands)} operands")
    return Call(**{**fields, "sizes": tuple(sorted(fields["sizes"].items())), "layout": tuple(fields["layout"])})


def _measured(index: int, given: Any) -> Measured:
    what = f"candidate {index}"
    fields = _checked(what, given, _CANDIDATE)
    try:
        variant = variant_from({k: fields[k] for k in ("target", "configuration") if k in fields})
    except ValueError as error:
        raise EntryError(f"{what}: {error}") from error
    measured = Measured(variant, **{k: fields.get(k) for k in ("seconds", "low", "high", "error")})
    times = (measured.low, measured.seconds, measured.high)
    if None in times:
        if any(time is not None for time in times) or measured.error is None:
            raise EntryError(f"{what}: expected seconds, low and high, or an error")
    elif list(times) != sorted(times):  # type: ignore[type-var]
        raise EntryError(f"{what}: {times[1]} s is not in its interval {times[0]} to {times[2]} s")
    return measured


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in one object")
    return found
