"""A check as one HTML page: nothing is loaded from anywhere, and it reads well printed, in the dark, and on a phone.

Here the numbers become rows and marks; the looks are in `page.html.jinja`, `page.css` and `page.js`.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import CppLexer, PythonLexer

from postlude.capture.names import pattern
from postlude.checking.result import EAGER, INDUCTOR, POSTLUDE, SIDES, Check, RegionFound, Tensors
from postlude.report import words
from postlude.report.charts import LogAxis, Mark, Point, Tick, roofline

#: Rows of the plot of outputs and gradients; the table below it has all of them.
MOST_ROWS = 20

#: Languages of generated code, by target; what is not listed has none to colour.
_LEXERS = {"cpp": CppLexer, "cute": PythonLexer, "triton": PythonLexer}

#: Pygments' styles for light and dark pages.
_STYLES = ("default", "github-dark")


@dataclass(frozen=True)
class Row:
    """A labelled row of bars or dots."""

    label: str
    note: str
    marks: list[Mark]
    link: str = ""


@dataclass(frozen=True)
class Plot:
    """Rows over one axis."""

    rows: list[Row]
    ticks: list[Tick]
    caption: str


@dataclass(frozen=True)
class Figure:
    """A number at the top of the page."""

    title: str
    value: str
    note: str
    state: str = ""


@dataclass(frozen=True)
class Kind:
    """Regions that are the same but for the layer.

    Attributes:
        number: by which plots name it.
        name: of all of them.
        worst: the one with the largest error beside what it may be.
        regions: all of them.
        program, source: as HTML.
        advice: why it is computed as it is.
    """

    number: int
    name: str
    worst: RegionFound
    regions: list[RegionFound]
    program: Markup
    source: Markup
    advice: str

    @property
    def region(self) -> RegionFound:
        """Any of them: what is asked of it is the same for all."""
        return self.regions[0]

    @property
    def anchor(self) -> str:
        """The name of its place on the page."""
        return f"region-{self.number}"


def page(check: Check) -> str:
    """The page."""
    kinds = [_kind(number, same) for number, same in enumerate(check.kinds(), start=1)]
    template = _environment().from_string(_file("page.html.jinja"))
    return template.render(
        check=check,
        words=words,
        sides=SIDES,
        names=words.NAMES,
        style=Markup(_file("page.css") + _highlighting()),
        script=Markup(_file("page.js")),
        figures=_figures(check),
        speed=_speed_plot(check),
        accuracy=_accuracy_plot(check),
        kinds=kinds,
        times=_times_plot(kinds),
        errors=_errors_plot(kinds),
        rooflines=_rooflines(check, kinds),
        left=_left(check),
    )


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"breakable": _breakable, "together": _together}
    return environment


def _breakable(name: str) -> Markup:
    """A path that may be broken behind its dots and underscores, and nowhere else."""
    return Markup(re.sub(r"([._])(?=\w|\*|\{)", r"\1<wbr>", escape(name)))


def _together(text: str) -> str:
    """A text whose numbers keep their units on the same line."""
    return re.sub(r"(\d) (?=(?:s|ms|µs|B|kB|MB|GB)\b)", "\\1\u00a0", text)


def _file(name: str) -> str:
    return (files("postlude.report") / name).read_text(encoding="utf-8")


def _highlighting() -> str:
    """Pygments' colours for both schemes."""
    light, dark = (HtmlFormatter(style=style).get_style_defs(".code") for style in _STYLES)
    keep = [[line for line in css.splitlines() if line.startswith(".code .")] for css in (light, dark)]
    return "\n".join([*keep[0], "@media (prefers-color-scheme: dark) {", *keep[1], "}"])


def _figures(check: Check) -> list[Figure]:
    return [*_speed_figure(check), _accuracy_figure(check), _bits_figure(check), *_compile_figure(check), *_memory_figure(check)]


def _speed_figure(check: Check) -> Iterable[Figure]:
    if check.speedup is not None:
        slow = any("times as long" in failure for failure in check.failures)
        several = len(check.speeds) > 1
        best = {words.NAMES[speed.best_other or EAGER] for speed in check.speeds}
        over = best.pop() if len(best) == 1 else "the faster of eager and Inductor"
        mean = ", geometric mean" if several else ""
        yield Figure(
            "Speed", f"{check.speedup:.2f}×", f"as fast as {over}{mean}", "bad" if slow else "good" if _faster(check) else ""
        )


def _faster(check: Check) -> bool:
    """Whether Postlude is faster for some set of inputs beyond the spread, and slower for none."""
    ratios = [speed.speedups[best] for speed in check.speeds if (best := speed.best_other) in speed.speedups]
    return any(ratio.clear for ratio in ratios) and all(ratio.median > 1 or not ratio.clear for ratio in ratios)


def _accuracy_figure(check: Check) -> Figure:
    if not check.tensors:
        return Figure("Accuracy", "–", "the model draws random numbers" if check.draws else "not compared")
    missed = sum(not row.kept for row in check.tensors)
    if missed:
        return Figure("Accuracy", f"{missed} of {len(check.tensors)}", "outputs and gradients are off", "bad")
    worst = max((row.errors[POSTLUDE].relative for row in check.tensors if POSTLUDE in row.errors), default=0.0)
    eager = max(row.errors[EAGER].relative for row in check.tensors)
    return Figure("Largest error", f"{worst:.1e}", f"eager has {eager:.1e}", "good")


def _bits_figure(check: Check) -> Figure:
    unstable = check.sides[POSTLUDE].unstable
    if unstable:
        return Figure("Run to run", "differs", f"{words.plural(len(unstable), 'tensor')}", "bad" if check.failures else "")
    return Figure("Run to run", "same bits", "in every run", "good")


def _compile_figure(check: Check) -> Iterable[Figure]:
    compiling, other = check.sides[POSTLUDE].compiling, check.sides[INDUCTOR].compiling
    if compiling is not None and compiling.cold is not None:
        note = f"Inductor {words.seconds(other.cold)}; warm {words.seconds(compiling.warm)}" if other is not None else ""
        yield Figure("First call, cold", words.seconds(compiling.cold), note)


def _memory_figure(check: Check) -> Iterable[Figure]:
    ours, other = check.sides[POSTLUDE].memory, check.sides[INDUCTOR].memory
    if ours and ours[-1] is not None:
        note = f"Inductor {words.size(other[-1])}" if other else ""
        yield Figure("Peak memory", words.size(ours[-1]), note)


def _speed_plot(check: Check) -> Plot | None:
    if not check.speeds:
        return None
    rows = []
    for speed in check.speeds:
        longest = max(latency.p90 for latency in speed.latencies.values())
        typical = max(latency.median for latency in speed.latencies.values())
        end = min(longest, 2 * typical) * 1.02
        marks = []
        for side, latency in speed.latencies.items():
            tip = (
                f"{words.NAMES[side]}: median {words.seconds(latency.median)} {words.spread(latency)}, 90% within"
                f" {words.seconds(latency.p90)}, 99% within {words.seconds(latency.p99)}; {latency.calls} calls"
            )
            marks.append(Mark(side, 100 * latency.median / end, words.seconds(latency.median), tip))
        best = speed.best_other
        note = f"{words.ratio(speed.speedups[best])} as fast as {words.NAMES[best]}" if best in speed.speedups and best else ""
        rows.append(Row(check.input_sets[speed.input_set], note, marks))
    return Plot(rows, [], "Median latency of one call; each set of inputs has a scale of its own.")


def _accuracy_plot(check: Check) -> Plot | None:
    if not check.tensors:
        return None
    rows = sorted(check.tensors, key=_excess, reverse=True)[:MOST_ROWS]
    several = len(check.input_sets) > 1
    axis = LogAxis.over([error.relative for row in rows for error in row.errors.values()] + [row.bar for row in rows])
    return Plot(
        [
            Row(
                row.name,
                f"{row.dtype}[{', '.join(map(str, row.shape))}]" + (f", set {row.input_set}" if several else ""),
                [
                    *(
                        Mark(side, axis.percent(error.relative), tip=f"{words.NAMES[side]}: {words.error(error)}")
                        for side, error in row.errors.items()
                    ),
                    Mark("bar", axis.percent(row.bar), tip=f"allowed: {row.bar:.1e}"),
                ],
            )
            for row in rows
        ],
        axis.ticks(),
        f"Relative error (Frobenius norm) against {check.reference}.",
    )


def _excess(row: Tensors) -> float:
    if POSTLUDE not in row.errors:
        return 0.0
    return math.inf if not row.kept else row.errors[POSTLUDE].relative / row.bar if row.bar else 0.0


def _kind(number: int, regions: list[RegionFound]) -> Kind:
    region = regions[0]
    return Kind(
        number,
        pattern([one.name for one in regions]),
        max(regions, key=lambda one: one.badness),
        regions,
        _program(region.program),
        _source(region.source, region.target),
        _advice(region),
    )


def _program(text: str) -> Markup:
    """A program with its values and keywords marked."""
    marked = escape(text)
    marked = re.sub(r"(%\w+)", r'<span class="value">\1</span>', marked)
    marked = re.sub(r"\b(region|operand|contract|reduce|yield|const|extent|round_to)\b", r'<span class="word">\1</span>', marked)
    return Markup(marked)


def _source(text: str, target: str) -> Markup:
    lexer = _LEXERS.get(target)
    return Markup(highlight(text, lexer(), HtmlFormatter(nowrap=True)) if lexer else escape(text))


def _advice(region: RegionFound) -> str:
    """Why the winner won: what selection says, and what was measured here."""
    said = f"{region.choice.winner} was chosen ({region.choice.origin}): {region.choice.reason}." if region.choice else ""
    ours, theirs = region.seconds.get(POSTLUDE), region.seconds.get(INDUCTOR)
    if ours is None or theirs is None:
        return said
    ratio = theirs / ours
    spread = max(region.spreads.get(POSTLUDE, 0.0), region.spreads.get(INDUCTOR, 0.0))
    compared = (
        "no difference beyond the spread"
        if abs(ratio - 1) <= spread
        else f"{ratio:.2f} times as fast as Inductor's code for the same nodes"
        if ratio > 1
        else f"slower than Inductor's code for the same nodes ({ratio:.2f} times its speed): try the option tune"
    )
    saved = f" It leaves out {words.size(region.saved)} of memory traffic per call." if region.saved else ""
    return f"{said} Measured here: {words.seconds(ours)} against {words.seconds(theirs)}, {compared}.{saved}".strip()


def _times_plot(kinds: Sequence[Kind]) -> Plot | None:
    timed = [kind for kind in kinds if kind.region.seconds]
    if not timed:
        return None
    end = max(len(kind.regions) * max(kind.region.seconds.values()) for kind in timed) * 1.02
    rows = []
    for kind in timed:
        count = len(kind.regions)
        marks = [
            Mark(
                side,
                100 * count * seconds / end,
                words.seconds(count * seconds),
                f"{words.NAMES[side]}: {count} × {words.seconds(seconds)} ±{kind.region.spreads.get(side, 0):.0%}",
            )
            for side in SIDES
            if (seconds := kind.region.seconds.get(side)) is not None
        ]
        rows.append(Row(f"{kind.number} · {kind.name}", f"{count} × {kind.region.description}", marks, f"#{kind.anchor}"))
    return Plot(rows, [], "Time in one call of the model, all layers together: the same nodes by each side.")


def _errors_plot(kinds: Sequence[Kind]) -> Plot | None:
    if not kinds:
        return None
    axis = LogAxis.over(
        [error.relative for kind in kinds for error in kind.worst.errors.values()] + [kind.worst.bar for kind in kinds]
    )
    rows = [
        Row(
            f"{kind.number} · {kind.worst.name}",
            f"fault in {kind.worst.blame or 'it'}" if kind.worst.badness > 1 else kind.region.description,
            [
                *(
                    Mark(side, axis.percent(error.relative), tip=f"{words.NAMES[side]}: {words.error(error)}")
                    for side, error in kind.worst.errors.items()
                ),
                Mark("bar", axis.percent(kind.worst.bar), tip=f"allowed: {kind.worst.bar:.1e}"),
            ],
            f"#{kind.anchor}",
        )
        for kind in kinds
    ]
    return Plot(
        rows, axis.ticks(), "Relative error on the values that the Region gets in the model; the worst layer of each kind."
    )


def _rooflines(check: Check, kinds: Sequence[Kind]) -> list[Markup]:
    """The plot for wide and for narrow screens."""
    timed = [kind for kind in kinds if POSTLUDE in kind.region.seconds]
    if check.roofs is None or not timed:
        return []
    points = [_point(kind) for kind in timed]
    return [Markup(roofline(check.roofs, points, *size)) for size in ((1040, 460), (420, 400))]


def _point(kind: Kind) -> Point:
    region = kind.region
    after = region.flops / region.traffic, region.flops / region.seconds[POSTLUDE]
    tips = ["", f"{kind.name}, Postlude: {words.rate(after[1], 'FLOP/s')}, {after[0]:.1f} FLOP/byte"]
    before = None
    if INDUCTOR in region.seconds:
        before = region.flops / (region.traffic + region.saved), region.flops / region.seconds[INDUCTOR]
        tips[0] = f"{kind.name}, Inductor: {words.rate(before[1], 'FLOP/s')}, {before[0]:.1f} FLOP/byte"
    return Point(kind.number, kind.name, before, after, (tips[0], tips[1]))


def _left(check: Check) -> list[tuple[str, str]]:
    """(names, reason) of what was left to Inductor."""
    reasons: dict[str, list[str]] = {}
    for one in check.left:
        reasons.setdefault(one.reason, []).append(one.name)
    return [(f"{len(names)} × {pattern(names)}", reason) for reason, names in reasons.items()]
