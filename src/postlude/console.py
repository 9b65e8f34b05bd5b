"""What all commands share: where they write, and how an error that a user can meet ends one."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape

from postlude.errors import PostludeError

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Columns of what goes to a file or another program: tables then are as wide as what stands in them.
_WIDE = 200


def _console(*, stderr: bool = False) -> Console:
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDE
    return console


output = _console()
messages = _console(stderr=True)


def known_cause(error: BaseException | None) -> PostludeError | None:
    """The Postlude error that `error` is or wraps: Dynamo and Inductor wrap what a back-end raises."""
    while error is not None and not isinstance(error, PostludeError):
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return error


@contextmanager
def models_prints_as_messages() -> Iterator[None]:
    """Send what the user's model prints to standard error: standard output is the command's own, which may be JSON."""
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turn an error that a user can meet into its message and exit code 1."""
    try:
        yield
    except typer.Exit:
        raise
    except Exception as error:
        known = known_cause(error)
        if known is None:
            raise
        messages.print(f"[red]postlude:[/] {escape(str(known))}", soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        messages.print("postlude: interrupted")
        raise typer.Exit(130) from None
