"""Interleaved timing of several callables in one process.

Clock frequency, neighbours on the machine and cache state drift while a measurement runs. Every round therefore times all
callables, in an order that rotates, and two callables are compared by the median of their per-round ratios, in which the
drift cancels. What a number means: the median over rounds of the median call of a round (or, where the caller says so, of
its fastest call).
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


@dataclass(frozen=True)
class Timing:
    """Seconds per call of one callable: one entry of `rounds` stands for that round, by default its median call."""

    name: str
    rounds: tuple[float, ...]
    fastest: float
    calls: int = field(default=0)

    @property
    def median(self) -> float:
        """Median over rounds, in seconds."""
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, relative to the median: 0.02 means plus or minus 2%."""
        if len(self.rounds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.rounds, n=4, method="inclusive")
        return (high - low) / 2 / self.median

    def speedup_over(self, other: Timing) -> float:
        """How many times faster this one is than `other`: the median of the per-round ratios."""
        return statistics.median(theirs / ours for ours, theirs in zip(self.rounds, other.rounds, strict=True))

    def record(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "median_ms": self.median * 1e3,
            "fastest_ms": self.fastest * 1e3,
            "spread": self.spread,
            "rounds_ms": [seconds * 1e3 for seconds in self.rounds],
            "calls": self.calls,
        }


def interleave(
    callables: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 11,
    seconds: float = 0.06,
    at_least: int = 3,
    warm: int = 2,
    of_round: Callable[[list[float]], float] = statistics.median,
    on_round: Callable[[int], object] | None = None,
) -> dict[str, Timing]:
    """Time each callable for about `seconds` in each of `rounds` rounds.

    Args:
        callables: name to a function of no arguments. Each should have been called before (compiled).
        rounds: number of rounds; the order of the callables rotates from one to the next.
        seconds: time for one callable in one round.
        at_least: timed calls of one callable in one round, however slow it is.
        warm: untimed calls before, which bring the callable's weights back into the caches.
        of_round: what stands for a round, from the seconds of its calls: `min` where other processes disturb.
        on_round: called after each round with its number, for progress.
    """
    names = list(callables)
    of_rounds: dict[str, list[float]] = {name: [] for name in names}
    fastest = dict.fromkeys(names, math.inf)
    calls = dict.fromkeys(names, 0)
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            samples = _sample(callables[name], seconds, at_least, warm)
            of_rounds[name].append(of_round(samples))
            fastest[name] = min(fastest[name], *samples)
            calls[name] += len(samples)
        if on_round is not None:
            on_round(number)
    return {name: Timing(name, tuple(of_rounds[name]), fastest[name], calls[name]) for name in names}


def _sample(call: Callable[[], object], seconds: float, at_least: int, warm: int) -> list[float]:
    clock = time.perf_counter
    for _ in range(warm):
        call()
    samples = []
    end = clock() + seconds
    while True:
        start = clock()
        call()
        stop = clock()
        samples.append(stop - start)
        if stop >= end and len(samples) >= at_least:
            return samples


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean of positive numbers."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))
