"""The command `postlude check`: its options, where its reports go, and its exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from postlude.console import clear_errors, messages, models_prints_as_messages, output

#: Exit code where the check ran and a bar was missed; 1 is for what could not be run, 2 for wrong usage.
MISSED = 3


def check(
    target: Annotated[str, typer.Argument(help="package.module:name or path/to/file.py:name, see above.")],
    max_slowdown: Annotated[
        float,
        typer.Option(min=0, help="How many times the latency of the faster of eager and Inductor is allowed."),
    ] = 1.05,
    max_error: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Largest relative error of an output or gradient. [default: as much as eager's own]",
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report to this file, as one page.", dir_okay=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    seconds: Annotated[
        float,
        typer.Option(min=0.01, max=86400, help="How long each side is timed for each set of inputs."),
    ] = 1.0,
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 leaves torch's choice.")] = 0,
    compile_times: Annotated[bool, typer.Option(help="Measure compile times, in processes with empty caches.")] = True,
    freeze: Annotated[bool, typer.Option("--freeze", help="Check with the option freeze: weights packed once.")] = False,
    tune: Annotated[bool, typer.Option("--tune", help="Check with the option tune: every Region measured.")] = False,
    dynamic: Annotated[
        bool | None, typer.Option("--dynamic/--static", help="As torch.compile's dynamic. [default: torch's choice]")
    ] = None,
) -> None:
    """Run a model by eager, Inductor and Postlude: is it right, is it faster, what does it cost?

    The name in TARGET is a function without arguments; in a file it may be left out and is then `target`. It returns a tuple:
    the model or function, and after it the arguments to call it with, or a list of several sets of arguments. A model in
    training mode is checked with its gradients.

    Exit code: 0 if all is well, 3 if a bar was missed, 1 if the model could not be run.
    """
    with clear_errors():
        from postlude.doctor import require_compile

        require_compile()
        import torch

        from postlude.checking.run import check as check_function
        from postlude.loading import load

        if threads:
            torch.set_num_threads(threads)
        if html is not None:
            write(html)  # before the work, not after it
        options: dict[str, Any] = {name: True for name, wanted in (("freeze", freeze), ("tune", tune)) if wanted}
        with messages.status("Loading the model...") as status, models_prints_as_messages():
            example = load(target)
            found = check_function(
                example.function,
                example.inputs,
                options=options or None,
                dynamic=dynamic,
                max_slowdown=max_slowdown,
                max_error=max_error,
                seconds=seconds,
                compile_times=compile_times,
                target=target,
                progress=lambda text: status.update(escape(text)),
            )
        if html is not None:
            write(html, found.to_html())
    if as_json:
        print(found.to_json())
    else:
        output.print(found)
        if html is not None:
            output.print(f"The whole report: {escape(str(html))}", soft_wrap=True)
    if not found.passed:
        raise typer.Exit(MISSED)


def write(path: Path, text: str | None = None) -> None:
    """Write a file; without a text only see that it can be written, and leave what is there.

    Raises:
        ReportNotWritten: the folder is not there, or the disk refuses.
    """
    from postlude.errors import ReportNotWritten

    try:
        if text is None:
            path.open("a").close()
        else:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ReportNotWritten(str(path), error.strerror or str(error)) from error
