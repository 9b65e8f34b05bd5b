"""What an error is, and what is allowed."""

import math

import pytest
import torch

from postlude.checking.accuracy import ULPS, Error, bar, distance

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("value", "exact", "relative", "largest", "astray"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0, 0.0, 0),
        ([3.0, 4.5], [3.0, 4.0], 0.1, 0.5, 0),
        ([NAN, INF, -INF, 1.0], [NAN, INF, -INF, 1.0], 0.0, 0.0, 0),
        ([NAN, INF, 1.0, 2.0], [0.0, -INF, NAN, 2.0], 0.0, 0.0, 3),
        ([0.0, 0.0], [0.0, 0.0], 0.0, 0.0, 0),
        ([1.0, 0.0], [0.0, 0.0], INF, 1.0, 0),
    ],
)
def test_distance(value: list[float], exact: list[float], relative: float, largest: float, astray: int) -> None:
    found = distance(torch.tensor(value), torch.tensor(exact, dtype=torch.float64))
    assert found == Error(pytest.approx(relative), pytest.approx(largest), astray)  # type: ignore[arg-type]


def test_integers_count_by_how_many_differ() -> None:
    assert distance(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 6])) == Error(0.25, 2.0)
    assert distance(torch.tensor([True, False]), torch.tensor([True, True])).relative == 0.5


def test_another_shape_is_an_error_without_measure() -> None:
    assert distance(torch.zeros(3), torch.zeros(2)).relative == INF


def test_the_bar_is_eagers_error_with_room_for_chance() -> None:
    eager = Error(1e-6, 0.0)
    assert bar(eager, torch.float32) == pytest.approx(1.5e-6 + ULPS * torch.finfo(torch.float32).eps)
    assert bar(Error(0.0, 0.0), torch.int64) == 0
    # A scalar that eager happens to hit says nothing about what eager's error is.
    assert bar(Error(0.0, 0.0), torch.float32, largest=1e-5, elements=1) > 1.5e-5
    assert not Error(0.0, 0.0, astray=1).within(1.0, Error(0.0, 0.0))
