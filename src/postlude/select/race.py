"""Which of several candidates is fastest, and whether that is certain.

Every round times all candidates, in an order that rotates, so that what drifts (clocks, neighbours, temperature) meets all of
them alike. A challenger is compared with the incumbent by the ratio of their times in each round; the median of the ratios has a
confidence interval by order statistics, whatever the distribution. A candidate that is certainly slower than the fastest by more
than `HOPELESS` is timed no more.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb

#: Rounds: at least, and at most.
LEAST, MOST = 9, 60

#: A race ends after so many seconds for each candidate, once it has its least rounds.
PATIENCE = 0.5

#: Where calls take seconds, a race ends after this many with fewer rounds than `LEAST`, but 3.
LIMIT = 10.0

#: How much faster, for certain, than the incumbent a challenger must be. Two processes that time the same two kernels agree no
#: better: memory lies elsewhere, and so do conflicts in caches.
MARGIN = 0.02

HOPELESS = 1.05


@dataclass(frozen=True)
class Interval:
    """A median and its 95 % confidence interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Result:
    """Times of one candidate in seconds per call, and its ratio to the incumbent."""

    time: Interval
    ratio: Interval
    rounds: int


def race(
    cycles: Mapping[str, Callable[[], float]], incumbent: str, check: Callable[[], None] = lambda: None
) -> dict[str, Result]:
    """Time candidates against each other.

    Args:
        cycles: for each candidate a function that returns the seconds of a call, see `clock.cycle`.
        incumbent: the one that the others are compared with.
        check: called before each round; what it raises ends the race.
    """
    times: dict[str, list[float]] = {name: [] for name in cycles}
    running = list(cycles)
    for timed in cycles.values():
        timed()  # not counted: first touches of memory, cold branches
    begin = time.perf_counter()
    for index in range(MOST):
        check()
        for name in running[index % len(running) :] + running[: index % len(running)]:
            times[name].append(cycles[name]())
        spent = time.perf_counter() - begin
        if index + 1 < LEAST and not (index >= 2 and spent > LIMIT):
            continue
        ratios = {name: median_interval(_ratios(times[name], times[incumbent])) for name in running}
        best = min(ratios.values(), key=lambda ratio: ratio.high).high
        running = [name for name in running if name == incumbent or ratios[name].low <= best * HOPELESS]
        if spent > PATIENCE * len(cycles) or (running == [incumbent] and spent > PATIENCE / 2):
            break
    return {
        name: Result(median_interval(own), median_interval(_ratios(own, times[incumbent])), len(own))
        for name, own in times.items()
    }


def winner(results: Mapping[str, Result], incumbent: str) -> str:
    """The fastest of those that are certainly faster than the incumbent; the incumbent if there is none."""
    faster = [name for name, result in results.items() if name != incumbent and result.ratio.high < 1 - MARGIN]
    return min(faster, key=lambda name: results[name].ratio.median, default=incumbent)


def _ratios(own: Sequence[float], incumbent: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(own, incumbent, strict=False)]


def median_interval(values: Sequence[float]) -> Interval:
    """The median and its 95 % confidence interval by order statistics; of fewer than 6 values, their whole range."""
    ordered = sorted(values)
    rank = _rank(len(ordered))
    return Interval(statistics.median(ordered), ordered[rank], ordered[-1 - rank])


@lru_cache
def _rank(count: int) -> int:
    """How many values lie outside on each side: as many as a fair coin shows heads, or fewer, in 2.5 % of `count` throws."""
    rank, below = -1, 1 / 2**count
    while below <= 0.025:
        rank += 1
        below += comb(count, rank + 1) / 2**count
    return max(rank, 0)
