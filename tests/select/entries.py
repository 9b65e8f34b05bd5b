"""Entries for tests of the database, made without measuring anything."""

from dataclasses import replace
from typing import Any

from postlude.select.choice import UNFUSED
from postlude.select.entry import Entry, Measured
from postlude.select.subject import Call
from postlude.select.variants import Variant

PROGRAM = (
    "region(m, n, k); %x = operand [m, k] f32; %w = operand [n, k] f32; %acc = contract %x, %w : f32; %0 = tanh %acc;"
    " yield [m, n] f32 %0"
)
ENVIRONMENT = {"torch": "2.13.0", "generation": "cpp 1", "generator": "0" * 32}


def call(index: int = 0, **changes: Any) -> Call:
    """A call; distinct for distinct numbers."""
    made = Call(
        PROGRAM, (("k", 8), ("m", 4), ("n", index + 1)), ("2 1 @16", "2 1 @16"), "a processor", "avx2", 2, False, "highest"
    )
    return replace(made, **changes)


def entry(
    index: int = 0, *, fused: float = 1e-6, unfused: float = 2e-6, at: str = "2026-01-02T03:04:05+00:00", **changes: Any
) -> Entry:
    """A measurement of that call."""
    candidates = (
        Measured(Variant("cpp"), fused, fused * 0.9, fused * 1.1),
        Measured(Variant(UNFUSED), unfused, unfused * 0.9, unfused * 1.1),
    )
    made = Entry(
        call=call(index),
        peer="inductor",
        environment=ENVIRONMENT,
        winner="cpp" if fused < unfused else UNFUSED,
        incumbent="cpp",
        candidates=candidates,
        sizes={"m": 3, "n": index + 1, "k": 8},
        rounds=9,
        sets=3,
        cold=1 << 20,
        at=at,
    )
    return replace(made, **changes)
