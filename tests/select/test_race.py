"""Who wins a race, with clocks that are made up."""

import random
import statistics
from collections.abc import Callable
from math import comb

import pytest

from postlude.select import race as race_module
from postlude.select.race import LEAST, MARGIN, Result, median_interval, race, winner


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time passes by these clocks: all rounds are run."""
    monkeypatch.setattr(race_module, "PATIENCE", 1e9)


def clock(seconds: float, noise: float, seed: int) -> Callable[[], float]:
    chance = random.Random(seed)
    return lambda: seconds * (1 + noise * chance.random())


def result(ratio: tuple[float, float, float], seconds: float = 1.0) -> Result:
    low, median, high = ratio
    return Result(race_module.Interval(seconds, seconds, seconds), race_module.Interval(median, low, high), 9)


@pytest.mark.parametrize("count", [6, 7, 9, 10, 25, 60, 200])
def test_the_interval_covers_95_percent_and_little_more(count: int) -> None:
    ordered = list(range(count))
    found = median_interval(ordered)
    outside = int(found.low)
    assert found.high == count - 1 - outside
    covered = [1 - 2 * sum(comb(count, i) for i in range(rank + 1)) / 2**count for rank in (outside, outside + 1)]
    assert covered[0] >= 0.95 > covered[1]
    assert found.median == statistics.median(ordered)


def test_of_few_values_all_are_in_the_interval() -> None:
    for count in (1, 2, 5):
        found = median_interval(list(range(count)))
        assert (found.low, found.high) == (0, count - 1)


def test_what_is_certainly_faster_wins() -> None:
    cycles = {"old": clock(1.0, 0.1, 1), "new": clock(0.8, 0.1, 2), "newer": clock(0.7, 0.1, 3), "slow": clock(2.0, 0.1, 4)}
    results = race(cycles, "old")
    assert winner(results, "old") == "newer"
    assert 0.65 < results["newer"].ratio.median < 0.8
    assert results["slow"].rounds == LEAST  # hopeless: timed no more
    assert results["old"].rounds > LEAST


@pytest.mark.parametrize("seed", range(20))
def test_a_difference_within_noise_keeps_the_incumbent(seed: int) -> None:
    cycles = {name: clock(1.0, 0.3, 100 * seed + index) for index, name in enumerate(("old", "same", "same too"))}
    cycles["hardly"] = clock(1 - MARGIN / 2, 0.3, 100 * seed + 99)
    assert winner(race(cycles, "old"), "old") == "old"


def test_drift_meets_all_alike() -> None:
    """The machine grows slower by a factor of ten while the race runs."""
    now = [0.0]

    def drifting(seconds: float) -> Callable[[], float]:
        def timed() -> float:
            now[0] += 1
            return seconds * (1 + now[0] / 20)

        return timed

    assert winner(race({"old": drifting(1.0), "new": drifting(0.8)}, "old"), "old") == "new"
    assert winner(race({"old": drifting(1.0), "new": drifting(1.0)}, "old"), "old") == "old"


def test_an_interval_that_touches_the_margin_is_not_certain() -> None:
    assert winner({"old": result((1, 1, 1)), "new": result((0.5, 0.6, 1 - MARGIN))}, "old") == "old"
    assert winner({"old": result((1, 1, 1)), "new": result((0.5, 0.6, 0.97))}, "old") == "new"


def test_calls_of_seconds_end_with_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race_module, "LIMIT", 0.0)
    monkeypatch.setattr(race_module, "PATIENCE", 0.0)
    assert race({"old": clock(1.0, 0.1, 1), "new": clock(1.1, 0.1, 2)}, "old")["old"].rounds == 3


def test_a_check_ends_it() -> None:
    def check() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        race({"old": clock(1.0, 0.1, 1)}, "old", check)
