"""A check in a terminal: the verdict first, then a table for each question."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from postlude.capture.names import pattern
from postlude.checking.result import EAGER, POSTLUDE, SIDES, Check, RegionFound, Tensors
from postlude.report import words

#: Outputs and gradients that are listed; the page and the JSON have all.
MOST_ROWS = 12


def shown(check: Check) -> Iterator[Any]:
    """What a console prints, part by part."""
    yield _header(check)
    for title, how, table in (
        ("Speed", "latency of one call" + (" with its backward pass" if check.training else ""), _speed(check)),
        ("Accuracy", f"relative error against {check.reference}", _accuracy(check)),
        ("Regions", check.regions_how, _regions(check)),
        ("Compiling", check.compiled_how, _compiling(check)),
        ("Memory", check.memory_how, _memory(check)),
        ("Left to Inductor", "", _left(check)),
    ):
        if table is not None:
            heading = Text(title, style="bold") + Text(f"  {how}" if how else "", style="dim")
            yield Group(Text(), heading, Padding(table, (0, 0, 0, 2)))
    yield Text()
    yield from _remarks(check)


def as_text(check: Check, width: int = 150) -> str:
    """The report as plain text."""
    console = Console(width=width)
    with console.capture() as text:
        console.print(check)
    return text.get()


def _header(check: Check) -> Panel:
    style = "green" if check.passed else "red"
    body = Text(check.verdict, style=f"bold {style}")
    for failure in check.failures:
        if failure not in check.verdict:
            body.append(f"\n{failure[0].upper()}{failure[1:]}.", style=style)
    environment = check.environment
    processor = ", ".join(environment["gpus"]) if check.device.startswith("cuda") else environment["processor"]
    body.append(
        f"\n{check.target}, {'training' if check.training else 'inference'} on {check.device}: {processor},"
        f" {environment['threads']} threads, torch {environment['torch']}; checked in {check.seconds:.0f} s",
        style="dim",
    )
    return Panel(body, title="[bold]postlude check[/]", title_align="left", border_style=style, expand=False)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, column in enumerate(columns):
        first = number == 0
        table.add_column(
            column, justify="left" if first else "right", no_wrap=not first, overflow="fold", min_width=16 if first else None
        )
    return table


def _speed(check: Check) -> Group | None:
    if not check.speeds:
        return None
    parts: list[Any] = []
    for speed in check.speeds:
        table = _table("", "median", "spread", "90%", "99%", "Postlude's speed-up")
        for side, latency in speed.latencies.items():
            table.add_row(
                words.NAMES[side],
                Text(words.seconds(latency.median), style="bold" if side == POSTLUDE else ""),
                words.spread(latency),
                words.seconds(latency.p90),
                words.seconds(latency.p99),
                words.ratio(speed.speedups.get(side)) if side != POSTLUDE else "",
            )
        for column, width in zip(table.columns, (16, 8, 6, 8, 8, 21), strict=True):
            column.min_width = width
        parts += [Text(check.input_sets[speed.input_set], style="italic"), table]
    return Group(*parts)


def _accuracy(check: Check) -> Table | None:
    if not check.tensors:
        return None
    table = _table("tensor", "type", *(words.NAMES[side] for side in SIDES if side in check.tensors[0].errors), "allowed", "")
    several = len(check.input_sets) > 1
    rows = sorted(check.tensors, key=_excess, reverse=True)
    for row in rows[:MOST_ROWS]:
        table.add_row(
            Text(f"{row.name} (set {row.input_set})" if several else row.name),
            f"{row.dtype}[{', '.join(map(str, row.shape))}]",
            *(words.error(error) for error in row.errors.values()),
            f"{row.bar:.1e}",
            "[yellow]as Inductor's[/]" if row.shared else "[green]ok[/]" if row.kept else "[red]too large[/]",
        )
    if len(rows) > MOST_ROWS:
        table.add_row(Text(f"... and {len(rows) - MOST_ROWS} more with smaller errors beside what is allowed", style="dim"))
    return table


def _excess(row: Tensors) -> float:
    if POSTLUDE not in row.errors:
        return 0.0
    if not row.kept:
        return float("inf")
    return row.errors[POSTLUDE].relative / row.bar if row.bar else 0.0


def _regions(check: Check) -> Table | None:
    if not check.regions:
        return None
    table = _table("", "Postlude", "Inductor", "eager", "of peak", "error", "eager's", "")
    for same in check.kinds():
        worst = max(same, key=lambda region: region.badness)
        region = same[0]
        fault = worst.badness > 1
        name = Text(f"{len(same)} x {pattern([one.name for one in same])}" if not fault else worst.name)
        name.append(f"\n{region.description}, {region.target}", style="dim")
        table.add_row(
            name,
            *(words.seconds(region.seconds.get(side)) for side in (POSTLUDE, "inductor", EAGER)),
            _of_peak(check, region),
            words.error(worst.errors[POSTLUDE]),
            words.error(worst.errors[EAGER]),
            f"[red]fault in {worst.blame or 'it'}[/]" if fault else "[green]ok[/]",
        )
    return table


def _of_peak(check: Check, region: RegionFound) -> str:
    if check.roofs is None or POSTLUDE not in region.seconds:
        return "–"
    return f"{region.flops / region.seconds[POSTLUDE] / check.roofs.flops:.0%}"


def _compiling(check: Check) -> Table | None:
    rows = {name: side.compiling for name, side in check.sides.items() if side.compiling is not None}
    if not rows:
        return None
    table = _table("", "cold", "warm", "compiles", "graphs", "graph breaks")
    for name, row in rows.items():
        table.add_row(
            words.NAMES[name],
            words.seconds(row.cold),
            words.seconds(row.warm),
            f"{row.compiles} for {words.plural(len(check.input_sets), 'set')}",
            str(row.graphs),
            str(len(row.breaks)),
        )
    return table


def _memory(check: Check) -> Table | None:
    rows = {name: side.memory for name, side in check.sides.items() if any(peak is not None for peak in side.memory)}
    if not rows:
        return None
    table = _table("inputs", *(words.NAMES[name] for name in rows))
    for index, label in enumerate(check.input_sets):
        table.add_row(Text(label), *(words.size(peaks[index]) for peaks in rows.values()))
    return table


def _left(check: Check) -> Table | None:
    if not check.left:
        return None
    table = Table(box=None, pad_edge=False, show_header=False)
    reasons: dict[str, list[str]] = {}
    for one in check.left:
        reasons.setdefault(one.reason, []).append(one.name)
    for reason, names in reasons.items():
        table.add_row(f"{len(names)} x", Text(pattern(names)), Text(reason, style="dim"))
    return table


def _remarks(check: Check) -> Iterator[Text]:
    for name, side in check.sides.items():
        if side.failed is not None:
            yield Text(f"{words.NAMES[name]} failed: {side.failed}", style="red")
        if side.unstable:
            yield Text(f"{words.NAMES[name]} gives other bits from run to run: {', '.join(side.unstable[:5])}", style="yellow")
        for warning in side.warnings:
            yield Text(f"{words.NAMES[name]}: {warning}", style="yellow")
        for reason in side.compiling.breaks if side.compiling is not None else ():
            yield Text(f"{words.NAMES[name]}: graph break: {reason}", style="yellow")
    if check.draws:
        yield Text(f"Reference: {check.reference}.", style="yellow")
    if not check.regions and check.regions_how:
        yield Text(check.regions_how, style="yellow")
    if check.noisy:
        yield Text(words.NOISY, style="yellow")
