"""The command `postlude`: demo, doctor, explain; those that have a room of their own are added here.

What a command does is in the modules that it calls; here are its options and how its results look. Heavy imports happen
inside the commands, so that `postlude --version` and `postlude doctor` work where torch does not. Tables go to standard
output, progress to standard error; with `--json`, standard output is JSON alone.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from postlude import doctor as examination
from postlude import tuning_commands
from postlude.bench.command import bench
from postlude.checking.command import check
from postlude.console import clear_errors, messages, output
from postlude.errors import PostludeError, TargetNotFound
from postlude.loading import load

if TYPE_CHECKING:
    from postlude.demo.run import Report

app = typer.Typer(
    name="postlude",
    help="Each matrix multiplication of a PyTorch model and what follows it, in one generated kernel.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(check)
app.command()(bench)
tuning_commands.register(app)

MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[red]problem[/]"}


# Above this spread of the rounds, the demo says that the machine is busy. On an idle machine it is 0.01 to 0.03.
BUSY = 0.15


class Dtype(StrEnum):
    """Element types that the demo runs in."""

    float32 = "float32"
    bfloat16 = "bfloat16"


def print_version(wanted: bool) -> None:
    """Print the versions and leave."""
    if wanted:
        torch = examination.version("torch")
        output.print(f"postlude {examination.version('postlude') or '(not installed)'}, torch {torch or '(not installed)'}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the versions.", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    """Options before the command."""


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Show the whole error where compiling fails.")] = False,
    backend: Annotated[str, typer.Option(help="Back-end of torch.compile to try.")] = "postlude",
) -> None:
    """Show what this machine offers and what each target can do here."""
    with clear_errors(), messages.status("Looking around and compiling one small layer..."):
        findings = examination.examine(backend, trace=trace)
    problems = [finding for finding in findings if finding.state == "problem"]
    notes = [finding for finding in findings if finding.state == "note"]
    if as_json:
        record = {"works": not problems, "findings": [vars(finding) for finding in findings]}
        print(json.dumps(record, indent=1))
    else:
        view = Table(show_header=False, box=None, pad_edge=False)
        view.add_column()
        view.add_column(no_wrap=True)
        view.add_column(overflow="fold")
        for finding in findings:
            text = Text(finding.text)
            if finding.remedy:
                text.append(f"\n{finding.remedy}", style="bold")
            view.add_row(MARKS[finding.state], escape(finding.subject), text)
        output.print(view)
        output.print()
        if problems:
            output.print(f"[red]Postlude does not run here:[/] {escape(problems[0].subject)}: {escape(problems[0].text)}")
        elif notes:
            subjects = ", ".join(escape(finding.subject) for finding in notes)
            output.print(f"[yellow]Postlude runs here, with less than it could do[/] ({subjects}).")
        else:
            output.print("[green]Postlude runs here.[/]")
    if problems:
        raise typer.Exit(1)


@app.command()
def demo(
    dtype: Annotated[Dtype, typer.Option(help="Element type of the model.")] = Dtype.float32,
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 leaves torch's choice.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes and shorter measurements.")] = False,
    query: Annotated[list[str] | None, typer.Option(help="A sentence to search for; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    backend: Annotated[str, typer.Option(help="Back-end of torch.compile to show beside Inductor.")] = "postlude",
) -> None:
    """Embed a small corpus with a real sentence encoder; compare eager, Inductor and Postlude."""
    with clear_errors():
        examination.require_compile()
        from postlude.demo.run import run

        with messages.status("Loading the model...") as status:
            report = run(
                dtype=dtype.value,
                threads=threads,
                quick=quick,
                queries=query,
                backend=backend,
                progress=lambda text: status.update(escape(text)),
            )
    if as_json:
        print(json.dumps(report.record(), indent=1))
    else:
        show_demo(report)


def show_demo(report: Report) -> None:
    """Print the demo's report as tables."""
    output.print()
    output.print(
        f"MiniLM sentence encoder, {report.dtype}, {report.environment['threads']} threads, "
        f"torch {report.environment['torch']}, {escape(report.environment['processor'])}"
    )
    output.print()
    view = Table(title="Nearest sentences", title_justify="left", show_edge=False, box=None, show_header=False)
    view.add_column(justify="right")
    view.add_column(overflow="fold")
    for number, search in enumerate(report.searches):
        if number:
            view.add_row("", "")
        view.add_row("", Text(search.query, style="bold"))
        for similarity, sentence in search.nearest:
            view.add_row(f"{similarity:.2f}", Text(sentence))
    output.print(view)
    output.print()
    if report.fusion is not None:
        fused, total = report.fusion.fused, report.fusion.total
        view = Table(title=f"Fusion: {fused} of {total} GEMMs", title_justify="left", show_edge=False)
        view.add_column("regions", justify="right")
        view.add_column("what one kernel computes", overflow="fold")
        for count, text in report.fusion.kinds:
            view.add_row(str(count), Text(text))
        for count, reason in report.fusion.left:
            view.add_row(str(count), Text(f"left to Inductor: {reason}", style="dim"))
        output.print(view)
        output.print()
    view = Table(title="Error of the embeddings against float64", title_justify="left", show_edge=False)
    view.add_column("")
    view.add_column("largest", justify="right")
    view.add_column("root mean square", justify="right")
    for name, error in report.errors.items():
        view.add_row(name, f"{error.largest:.1e}", f"{error.mean_square:.1e}")
    output.print(view)
    output.print()
    view = Table(title="Speed: median ± spread of interleaved rounds", title_justify="left", show_edge=False)
    view.add_column("sentences × tokens", no_wrap=True)
    for name in report.errors:
        view.add_column(name, justify="right", no_wrap=True)
    view.add_column("speed-up", justify="right", no_wrap=True)
    for point in report.points:
        times = point.timings.values()
        view.add_row(
            f"{point.batch} × {point.length}: ms",
            *(f"{timing.median * 1e3:.2f} ±{timing.spread:.0%}" for timing in times),
            f"{point.speedup:.2f}x",
        )
        view.add_row("sentences/s", *(f"{point.batch / timing.median:,.0f}" for timing in times), "", end_section=True)
    view.add_row("geometric mean", *[""] * len(report.errors), f"{report.mean_speedup:.2f}x")
    output.print(view)
    output.print()
    if any(timing.spread > BUSY for point in report.points for timing in point.timings.values()):
        output.print("[yellow]The timings vary a lot: something else is running on this machine, so take them as rough.[/]")
    seconds = ", ".join(f"{name} {value:.1f} s" for name, value in report.compile_seconds.items())
    output.print(f"Speed-up: {report.ours} over the faster of the others at each point.")
    output.print(f"Compiled in this run: {seconds}. A process that finds kernels in the caches starts faster.")


@app.command()
def explain(
    target: Annotated[str, typer.Argument(help="package.module:name or path/to/file.py:name, see above.")],
    source: Annotated[bool, typer.Option("--source", help="Also print the generated code.")] = False,
) -> None:
    """Show every GEMM of a model or function, what was fused with it, and what stopped further fusion.

    The name in TARGET is a function without arguments; in a file it may be left out and is then `target`. It returns a tuple:
    the model or function to explain, and after it the arguments to call it with. Of several sets of arguments the first is taken.
    """
    with clear_errors():
        examination.require_compile()
        example = load(target)
        import torch

        from postlude.explanation import explain as explain_function

        # A module in eval mode is there for inference: its graph without gradients is what will run.
        with messages.status("Tracing..."), torch.set_grad_enabled(example.wants_grad):
            try:
                first = example.inputs[0]
                explanation: Any = explain_function(example.function, *first.args, **first.kwargs)
            except PostludeError:
                raise
            except Exception as error:
                reason = f"the model raised {type(error).__name__}: {examination.first_line(error)}"
                raise TargetNotFound(target, reason) from error
    output.print(explanation)
    if source:
        for region in explanation.regions:
            output.rule(escape(region.name))
            output.print(escape(str(region.source)), soft_wrap=True)


def main() -> None:
    """The entry point of the console script."""
    app(prog_name="postlude")


if __name__ == "__main__":
    main()
