"""Derives the polynomial coefficients of include/postlude/math.h and prints them as C++ initialisers.

Each entry of APPROXIMATIONS is a minimax problem: a function, an interval, the monomials that may be used and the weight
of the error (1 / f for a relative one). The Remez exchange (E. Remez, 1934) runs in 60 digits; then the coefficients are
rounded to float one by one, most important first, and the others are fitted again, so that rounding is part of the fit.

    python tools/derive_coefficients.py [name ...]
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import mpmath
import numpy
from mpmath import mpf

mpmath.mp.dps = 60

Function = Callable[[mpf], mpf]


@dataclass
class Approximation:
    """One minimax problem: `function` by sum of c_i * x**powers[i] on `interval`, error weighted by `weight`."""

    function: Function
    interval: tuple[float, float]
    powers: Sequence[int]
    weight: Function
    fixed: dict[int, float] = field(default_factory=dict)  # powers whose coefficient is given, such as {0: 1}
    double: bool = False  # coefficients are rounded to double, not to float


def remez(problem: Approximation, known: dict[int, mpf]) -> tuple[dict[int, mpf], mpf]:
    """The minimax coefficients of the powers that are not `known`, and the weighted error."""
    powers = [power for power in problem.powers if power not in known]
    low, high = (mpf(bound) for bound in problem.interval)

    def target(x: mpf) -> mpf:
        return problem.function(x) - sum((c * x**power for power, c in known.items()), mpf(0))

    if not powers:
        grid = mpmath.linspace(low, high, 401)
        return {}, max(abs(target(x) * problem.weight(x)) for x in grid)
    count = len(powers) + 1
    nodes = [(low + high) / 2 - (high - low) / 2 * mpmath.cos(mpmath.pi * (i + mpf(1) / 2) / count) for i in range(count)]
    grid = [(low + high) / 2 - (high - low) / 2 * mpmath.cos(mpmath.pi * i / 600) for i in range(601)]
    targets, weights = [target(x) for x in grid], [problem.weight(x) for x in grid]
    solution: list[mpf] = []
    for _ in range(40):
        matrix = mpmath.matrix(count, count)
        right = mpmath.matrix(count, 1)
        for row, x in enumerate(nodes):
            weight = problem.weight(x)
            for column, power in enumerate(powers):
                matrix[row, column] = x**power * weight
            matrix[row, count - 1] = (-1) ** row
            right[row] = target(x) * weight
        solution = list(mpmath.lu_solve(matrix, right))
        errors = [
            weight * (value - sum((c * x**power for c, power in zip(solution, powers, strict=False)), mpf(0)))
            for x, value, weight in zip(grid, targets, weights, strict=True)
        ]
        # The largest error of each run of one sign is a new node; keep the `count` neighbours that hold the largest.
        extrema: list[int] = []
        for i, error in enumerate(errors):
            if extrema and (errors[extrema[-1]] > 0) == (error > 0):
                if abs(error) > abs(errors[extrema[-1]]):
                    extrema[-1] = i
            else:
                extrema.append(i)
        while len(extrema) > count:
            extrema.pop(0 if abs(errors[extrema[0]]) < abs(errors[extrema[-1]]) else -1)
        if len(extrema) < count:
            break
        nodes = [grid[i] for i in extrema]
        sizes = [abs(errors[i]) for i in extrema]
        if max(sizes) - min(sizes) < max(sizes) * mpf("1e-3"):
            break
    worst = max(abs(error) for error in errors)
    return dict(zip(powers, solution[:-1], strict=True)), worst


def fit(problem: Approximation, digits: Callable[[mpf], float]) -> tuple[list[float], float]:
    """Coefficients rounded by `digits`, in the order of `powers`, and the weighted error that remains.

    Two ways, of which the better one is taken: round all at once, or one by one with a new fit of the others. (The second
    fails where the rounding of one coefficient alone is larger than the error of the fit: the others then chase it.)
    """
    fixed = {power: mpf(value) for power, value in problem.fixed.items()}
    at_once = fixed | {power: mpf(digits(value)) for power, value in remez(problem, fixed)[0].items()}
    one_by_one = dict(fixed)
    for power in problem.powers:
        if power not in one_by_one:
            one_by_one[power] = mpf(digits(remez(problem, one_by_one)[0][power]))
    error, best = min((remez(problem, known)[1], i) for i, known in enumerate((at_once, one_by_one)))
    known = (at_once, one_by_one)[best]
    return [float(known[power]) for power in problem.powers], float(error)


def to_float(value: mpf) -> float:
    return float(numpy.float32(mpmath.nstr(value, 25)))


def one(_: mpf) -> mpf:
    return mpf(1)


def divided(function: Function, remove: Function, power: int, limit: mpf) -> Function:
    """(function - remove) / x**power, with its limit at 0."""
    return lambda x: limit if abs(x) < mpf("1e-18") else (function(x) - remove(x)) / x**power


LN2 = mpmath.log(2)
HALF_LN2 = float(LN2 / 2) * 1.0001
PI_4 = float(mpmath.pi / 4) * 1.0002
ERF_BRANCH = 0.921875
SQRT_HALF, SQRT_2 = 0.7071, 1.41422

APPROXIMATIONS: dict[str, Approximation] = {
    "exp": Approximation(mpmath.exp, (-HALF_LN2, HALF_LN2), range(7), lambda x: mpmath.exp(-x), {0: 1, 1: 1}),
    "exp2": Approximation(lambda x: mpf(2) ** x, (-0.50001, 0.50001), range(7), lambda x: mpf(2) ** -x, {0: 1}),
    "expm1": Approximation(
        divided(mpmath.expm1, lambda x: x, 2, mpf(1) / 2),
        (-HALF_LN2, HALF_LN2),
        range(6),
        lambda x: mpf(0) if abs(x) < 1e-18 else abs(x**2 / mpmath.expm1(x)),
    ),
    # log(1 + f) = f - f^2 / 2 + f^3 P(f)
    "log": Approximation(
        divided(mpmath.log1p, lambda f: f - f**2 / 2, 3, mpf(1) / 3),
        (SQRT_HALF - 1, SQRT_2 - 1),
        range(8),
        lambda f: mpf(0) if abs(f) < 1e-18 else f**3 / mpmath.log1p(f),
    ),
    # sin(x) = x + x^3 P(x^2), cos(x) = 1 - x^2 / 2 + x^4 P(x^2)
    "sin": Approximation(
        lambda x: mpf(-1) / 6 if abs(x) < 1e-18 else (mpmath.sin(mpmath.sqrt(x)) / mpmath.sqrt(x) - 1) / x,
        (0, PI_4**2),
        range(4),
        lambda x: mpf(1) if abs(x) < 1e-18 else x ** mpf(1.5) / mpmath.sin(mpmath.sqrt(x)),
    ),
    "cos": Approximation(
        lambda x: mpf(1) / 24 if abs(x) < 1e-18 else (mpmath.cos(mpmath.sqrt(x)) - 1 + x / 2) / x**2,
        (0, PI_4**2),
        range(3),
        lambda x: x**2 / mpmath.cos(mpmath.sqrt(x)),
    ),
    # For pow, in double: log2((1 + s) / (1 - s)) = s P(s^2), and exp2.
    "pow_log2": Approximation(
        lambda x: 2 / LN2 if abs(x) < 1e-18 else mpmath.log((1 + mpmath.sqrt(x)) / (1 - mpmath.sqrt(x)), 2) / mpmath.sqrt(x),
        (0, 0.1716**2),
        range(6),
        lambda x: LN2 / 2,
        double=True,
    ),
    "pow_exp2": Approximation(lambda x: mpf(2) ** x, (-0.50001, 0.50001), range(8), lambda x: mpf(2) ** -x, {0: 1}, double=True),
    # erf(x) = x + x P(x^2) for |x| < ERF_BRANCH, else 1 - exp(-Q(|x|))
    "erf_small": Approximation(
        lambda x: 2 / mpmath.sqrt(mpmath.pi) - 1 if abs(x) < 1e-18 else mpmath.erf(mpmath.sqrt(x)) / mpmath.sqrt(x) - 1,
        (0, (ERF_BRANCH * 1.001) ** 2),
        range(7),
        lambda x: mpf(1),
    ),
    "erf_large": Approximation(
        lambda x: -mpmath.log(mpmath.erfc(x)),
        (ERF_BRANCH * 0.999, 3.95),
        range(7),
        lambda x: mpmath.erfc(x) / mpmath.erf(x),
    ),
    # tanh(x) = x + x^3 P(x^2) for |x| < 0.65
    "tanh_small": Approximation(
        lambda x: mpf(-1) / 3 if abs(x) < 1e-18 else (mpmath.tanh(mpmath.sqrt(x)) / mpmath.sqrt(x) - 1) / x,
        (0, 0.6251**2),
        range(5),
        lambda x: x,
    ),
}


Interval = tuple[float, float, float]  # low, high, centre


def table(function: Function, intervals: Sequence[Interval], degree: int) -> list[list[float]]:
    """Piecewise polynomials of an odd function; column d holds the coefficients of degree d, for a vector permutation.

    The first interval starts at 0, and its polynomial is that of function(x) - x without a constant term: added to x, it has
    a small relative error.
    """
    rows = []
    for i, (low, high, centre) in enumerate(intervals):
        near_zero = i == 0
        problem = Approximation(
            (lambda r: function(r) - r) if near_zero else (lambda r, centre=centre: function(centre + r)),
            (low - centre, high - centre),
            range(1, degree + 1) if near_zero else range(degree + 1),
            lambda r, centre=centre: 1 / function(centre + r) if centre + r > 1e-18 else mpf(0),
        )
        coefficients, error = fit(problem, to_float)
        rows.append([0.0, *coefficients] if near_zero else coefficients)
        print(f"// [{low}, {high}]: relative error 2^{float(mpmath.log(error, 2)):.1f}", file=sys.stderr)
    return [list(column) for column in zip(*rows, strict=True)]


def equal_steps(step: float, count: int) -> list[Interval]:
    """Intervals around the multiples of `step`; the first is half as wide."""
    return [(max(0.0, (i - 0.5) * step), (i + 0.5) * step, i * step) for i in range(count)]


def half_octaves(first: float, count: int) -> list[Interval]:
    """[0, first], then two intervals from each power of two to the next: the bits of a float number them."""
    bounds = [first * 2.0 ** (i // 2) * (1.5 if i % 2 else 1.0) for i in range(count)]
    return [(0.0, first, 0.0)] + [(low, high, (low + high) / 2) for low, high in itertools.pairwise(bounds)]


def literal(value: float) -> str:
    return f"{value:.9g}f" if any(c in f"{value:.9g}" for c in ".e") else f"{value:.9g}.0f"


TABLES: dict[str, tuple[Function, list[Interval], int]] = {
    "erf_table": (mpmath.erf, equal_steps(65 / 256, 16), 5),
    "tanh_table": (mpmath.tanh, half_octaves(0.125, 14), 6),
}


def main(names: list[str]) -> None:
    for name, problem in APPROXIMATIONS.items():
        if not names or name in names:
            coefficients, error = fit(problem, float if problem.double else to_float)
            written = ", ".join(map(repr if problem.double else literal, coefficients))
            print(f"{name}: {{{written}}}  // weighted error 2^{float(mpmath.log(error, 2)):.1f}")
    for name, arguments in TABLES.items():
        if not names or name in names:
            for degree, column in enumerate(table(*arguments)):
                print(f"{name} degree {degree}: {{{', '.join(map(literal, column))}}}")


if __name__ == "__main__":
    main(sys.argv[1:])
