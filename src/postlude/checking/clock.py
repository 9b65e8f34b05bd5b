"""Latency of several callables, call by call in turn, with every sample kept: percentiles, and ratios in which drift cancels."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: Rounds of a measurement; the order of the callables rotates from one to the next.
ROUNDS = 15
#: Above this spread of the rounds, something else is running on the machine.
BUSY = 0.15
#: So many rounds are made, however slow a call is.
AT_LEAST = 5


@dataclass(frozen=True)
class Latency:
    """Seconds of single calls.

    Attributes:
        median: median of the rounds' medians: what tables show, and what ratios are ratios of.
        p90, p99: percentiles over all calls.
        rounds: median call of each round.
        calls: how many calls were timed.
    """

    median: float
    p90: float
    p99: float
    rounds: tuple[float, ...]
    calls: int

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles of the rounds, relative to the median."""
        low, median, high = statistics.quantiles(self.rounds, n=4, method="inclusive")
        return (high - low) / 2 / median

    @property
    def noisy(self) -> bool:
        """Whether the rounds differ among themselves."""
        return self.spread > BUSY


@dataclass(frozen=True)
class Ratio:
    """How many times faster one side is than another: the ratio of their medians, and the quartiles of the rounds' ratios.

    Where the ratio of the medians is not between the quartiles, it is an end of the range itself.
    """

    median: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the difference is larger than the spread of the rounds, and than 2%."""
        return self.low > 1.02 or self.high < 0.98


def speedup(ours: Latency, theirs: Latency) -> Ratio:
    """How many times faster `ours` is."""
    ratios = [other / own for own, other in zip(ours.rounds, theirs.rounds, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    median = theirs.median / ours.median
    return Ratio(median, min(low, median), max(high, median))


def race(
    calls: Mapping[str, Callable[[], object]],
    seconds: float,
    device: torch.device,
    on_round: Callable[[int], object] | None = None,
    before: Callable[[], object] | None = None,
) -> dict[str, Latency]:
    """Time the callables for about `seconds` each. A call on a GPU counts until the GPU has finished it.

    `before` is called before each call, and does not count.
    """
    samples: dict[str, list[list[float]]] = {name: [] for name in calls}
    timed = {name: (lambda call=call: _timed(call, device, before)) for name, call in calls.items()}
    names = list(calls)
    begin = time.perf_counter()
    for number in range(ROUNDS):
        if number >= AT_LEAST and time.perf_counter() - begin > 1.5 * seconds * len(names):
            break
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            samples[name].append(_round(timed[name], seconds / ROUNDS))
        if on_round is not None:
            on_round(number)
    return {name: _latency(rounds) for name, rounds in samples.items()}


def _timed(call: Callable[[], object], device: torch.device, before: Callable[[], object] | None) -> float:
    if before is not None:
        before()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    begin = time.perf_counter()
    kept = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    end = time.perf_counter()
    del kept  # what it takes to free the results is not the model's
    return end - begin


def _round(timed: Callable[[], float], seconds: float) -> list[float]:
    end = time.perf_counter() + seconds
    first = timed()  # brings the weights back into the caches; it counts where a call takes the whole round
    samples = [first] if time.perf_counter() > end else []
    while time.perf_counter() < end:
        samples.append(timed())
    return samples or [first]


def _latency(rounds: Sequence[Sequence[float]]) -> Latency:
    samples = sorted(sample for samples in rounds for sample in samples)
    percentile: Any = statistics.quantiles(samples, n=100, method="inclusive")
    medians = tuple(statistics.median(samples) for samples in rounds)
    return Latency(statistics.median(medians), percentile[89], percentile[98], medians, len(samples))
