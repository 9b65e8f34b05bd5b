"""The page's charts as plain data and inline SVG.

Bars and dots are rows of HTML, whose text stays readable at any width; here their positions are computed, in percent. The
roofline is an SVG, drawn once for wide screens and once for narrow ones. Colours and fonts are the style sheet's.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from postlude.checking.machine import Roofs
from postlude.report import words


@dataclass(frozen=True)
class Mark:
    """Something at one place of a row: a bar's end, a dot, a tick.

    Attributes:
        css: its class, which is its colour and form.
        percent: where it is on the axis.
        label: what is written beside it.
        tip: what is shown when it is pointed at.
    """

    css: str
    percent: float
    label: str = ""
    tip: str = ""


@dataclass(frozen=True)
class Tick:
    """A line of the grid."""

    percent: float
    label: str


@dataclass(frozen=True)
class LogAxis:
    """A logarithmic axis over whole decades."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Iterable[float], *, decades: int = 2) -> "LogAxis":
        """The axis that holds all positive finite values, and at least so many decades."""
        exponents = [math.log10(value) for value in values if value > 0 and math.isfinite(value)] or [0.0]
        low, high = math.floor(min(exponents) - 0.05), math.ceil(max(exponents) + 0.05)
        return cls(low, max(high, low + decades))

    def share(self, value: float) -> float:
        """Where a value is, from 0 to 1; what is beyond the axis is at its end."""
        if value <= 0 or math.isnan(value):
            return 0.0
        if math.isinf(value):
            return 1.0
        return min(1.0, max(0.0, (math.log10(value) - self.low) / (self.high - self.low)))

    def percent(self, value: float) -> float:
        """The same in percent."""
        return 100 * self.share(value)

    @classmethod
    def close(cls, values: Iterable[float]) -> "LogAxis":
        """The axis that holds all positive finite values, with little more."""
        exponents = [math.log10(value) for value in values if value > 0 and math.isfinite(value)] or [0.0]
        return cls(min(exponents) - 0.15, max(max(exponents) + 0.15, min(exponents) + 0.85))

    def round_values(self) -> list[float]:
        """Values to write at a short axis: 1, 2, 5, 10, ...; at a long one the powers of ten."""
        steps = (1, 2, 5) if self.high - self.low < 3 else (1,)
        values = [step * 10.0**exponent for exponent in range(math.floor(self.low), math.ceil(self.high) + 1) for step in steps]
        return [value for value in values if self.low <= math.log10(value) <= self.high]

    @property
    def decades(self) -> list[int]:
        """The exponents on the axis, at most about ten of them."""
        step = max(1, round((self.high - self.low) / 8))
        return list(range(int(self.low), int(self.high) + 1, step))

    def ticks(self) -> list[Tick]:
        """A tick at each of them, as powers of ten."""
        return [Tick(self.percent(10.0**exponent), f"10<sup>{exponent}</sup>".replace("-", "−")) for exponent in self.decades]


@dataclass(frozen=True)
class Point:
    """A kernel in a roofline plot: how it was, and how it is.

    Attributes:
        number: by which the table beside the plot names it.
        name: what it is.
        before, after: (operations per byte of memory traffic, operations per second).
        tips: what is shown when the one or the other is pointed at.
    """

    number: int
    name: str
    before: tuple[float, float] | None
    after: tuple[float, float]
    tips: tuple[str, str]


def roofline(roofs: Roofs, points: Sequence[Point], width: int, height: int) -> str:
    """The plot as an SVG element of this size."""
    return _Roofline(roofs, points, width, height).svg()


class _Roofline:
    """Log-log: what memory, cache and arithmetic allow, and where each kernel is below."""

    LEFT, RIGHT, TOP, BOTTOM = 64, 18, 16, 46

    def __init__(self, roofs: Roofs, points: Sequence[Point], width: int, height: int) -> None:
        self.roofs = roofs
        self.points = points
        self.width, self.height = width, height
        places = [place for point in points for place in (point.before, point.after) if place is not None]
        ridges = [roofs.flops / roofs.memory, roofs.flops / roofs.cache]
        self.across = LogAxis.close([x for x, _ in places] + ridges)
        self.up = LogAxis.close([y for _, y in places] + [roofs.flops])

    def x(self, value: float) -> float:
        return self.LEFT + self.across.share(value) * (self.width - self.LEFT - self.RIGHT)

    def y(self, value: float) -> float:
        return self.height - self.BOTTOM - self.up.share(value) * (self.height - self.TOP - self.BOTTOM)

    def svg(self) -> str:
        """All parts, from the back to the front."""
        parts = [*self._grid(), *self._roofs(), *self._arrows(), *self._points()]
        label = "Roofline plot: operations per second over operations per byte, for each Region before and after"
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}" role="img"'
            f' aria-label="{label}">{"".join(parts)}</svg>'
        )

    def _grid(self) -> Iterable[str]:
        left, right = self.LEFT, self.width - self.RIGHT
        top, bottom = self.TOP, self.height - self.BOTTOM
        for value in self.across.round_values():
            x = self.x(value)
            yield f'<line class="grid" x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}"/>'
            yield _text(x, bottom + 17, f"{value:g}", "middle")
        for value in self.up.round_values():
            y = self.y(value)
            yield f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}"/>'
            yield _text(left - 8, y + 4, words.rate(value, "").strip().replace(".00", "").replace(".0", ""), "end")
        yield _text((left + right) / 2, self.height - 8, "operations per byte of memory traffic", "middle", "axis")
        middle = (top + bottom) / 2
        yield (
            f'<text class="axis" text-anchor="middle" transform="translate(14 {middle:.1f}) rotate(-90)">'
            "operations per second</text>"
        )

    def _roofs(self) -> Iterable[str]:
        low, high = 10.0**self.across.low, 10.0**self.across.high  # of the axis across
        floor = 10.0**self.up.low
        flops = self.roofs.flops
        for css, rate, name in (("memory", self.roofs.memory, "memory"), ("cache", self.roofs.cache, "cache")):
            ridge = flops / rate
            begin = max(low, floor / rate)
            end = min(ridge, high)
            if begin >= end:
                continue
            yield (
                f'<line class="roof {css}" x1="{self.x(begin):.1f}" y1="{self.y(begin * rate):.1f}" x2="{self.x(end):.1f}"'
                f' y2="{self.y(min(flops, end * rate)):.1f}"/>'
            )
            x1, y1, x2, y2 = self.x(begin), self.y(begin * rate), self.x(end), self.y(min(flops, end * rate))
            angle = math.degrees(math.atan2(y2 - y1, x2 - x1))
            share = 0.42 if css == "memory" else 0.3
            x, y = x1 + share * (x2 - x1), y1 + share * (y2 - y1)
            yield (
                f'<text class="roofname" text-anchor="middle" transform="translate({x:.1f} {y:.1f}) rotate({angle:.1f})'
                f' translate(0 -6)">{name} {escape(words.size(rate))}/s</text>'
            )
        y = self.y(flops)
        start, end = self.x(max(low, flops / max(self.roofs.cache, self.roofs.memory))), self.x(high)
        yield f'<line class="roof peak" x1="{start:.1f}" y1="{y:.1f}" x2="{end:.1f}" y2="{y:.1f}"/>'
        yield _text(self.width - self.RIGHT - 4, y - 7, f"peak {words.rate(flops, 'FLOP/s')}", "end", "roofname")

    def _arrows(self) -> Iterable[str]:
        for point in self.points:
            if point.before is not None:
                (x1, y1), (x2, y2) = self._at(point.before), self._at(point.after)
                yield f'<line class="move" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'

    def _points(self) -> Iterable[str]:
        for point in self.points:
            if point.before is not None:
                x, y = self._at(point.before)
                tip = escape(point.tips[0])
                yield f'<circle class="before tip" tabindex="0" cx="{x:.1f}" cy="{y:.1f}" r="6" data-tip="{tip}"/>'
        for point, (x, y) in zip(self.points, self._apart(), strict=True):
            at_x, at_y = self._at(point.after)
            line = f'<line class="leader" x1="{at_x:.1f}" y1="{at_y:.1f}" x2="{x:.1f}" y2="{y:.1f}"/>'
            yield (
                f'<g class="after tip" tabindex="0" data-tip="{escape(point.tips[1])}">'
                f'{line}<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="3.5"/><circle cx="{x:.1f}" cy="{y:.1f}" r="9"/>'
                f'<text x="{x:.1f}" y="{y + 3.6:.1f}" text-anchor="middle">{point.number}</text></g>'
            )

    def _apart(self) -> list[tuple[float, float]]:
        """Where the numbers go: at their points, or beside them where another number is in the way."""
        taken: list[tuple[float, float]] = []
        for point in self.points:
            x, y = self._at(point.after)
            while any(math.hypot(x - other_x, y - other_y) < 19 for other_x, other_y in taken):
                x += 5
            taken.append((x, y))
        return taken

    def _at(self, place: tuple[float, float]) -> tuple[float, float]:
        return self.x(place[0]), self.y(place[1])


def _text(x: float, y: float, text: str, anchor: str, css: str = "tick") -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
