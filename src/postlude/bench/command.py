"""The command `postlude bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from postlude.console import clear_errors, messages, output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from postlude.bench.run import Measured


def bench(
    sizes: Annotated[list[str] | None, typer.Argument(help="MxNxK: x [M, K] times a weight [N, K]. Several are allowed.")] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Take the cases from this CSV: a header m,n,k[,epilogue][,dtype], one case a line.")
    ] = None,
    epilogue: Annotated[
        list[str] | None,
        typer.Option(help="none, bias, relu, gelu, gelu_tanh, silu, residual or swiglu; may be repeated. [default: gelu]"),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="float32, bfloat16, float16 or float64; may be repeated. [default: float32]")
    ] = None,
    peer: Annotated[list[str] | None, typer.Option(help="Only this peer; may be repeated. [default: all installed]")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seconds: Annotated[float, typer.Option(min=0.01, max=86400, help="How long each peer is timed for each case.")] = 1.0,
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 leaves torch's choice.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the results to this file as JSON.", dir_okay=False)] = None,
) -> None:
    """Measure matrix multiplications with what follows them against the peers that are installed.

    All peers run in turn in one process. Times are medians of single calls; errors are relative, against float64.
    """
    with clear_errors():
        from postlude.doctor import require_compile

        require_compile()
        import torch

        from postlude.bench.cases import from_csv, parsed
        from postlude.bench.peers import PEERS
        from postlude.bench.run import measure, record
        from postlude.checking.command import write
        from postlude.errors import CaseError

        if threads:
            torch.set_num_threads(threads)
        if device == "cuda" and not torch.cuda.is_available():
            raise CaseError("There is no GPU that torch can use: `postlude doctor` tells more. Use --device cpu.")
        if device not in ("cpu", "cuda"):
            raise CaseError(f"{device!r} is no device: cpu and cuda are.")
        names = [one.name for one in PEERS]
        if unknown := [name for name in peer or () if name not in names]:
            raise CaseError(f"{unknown[0]!r} is no peer: {', '.join(names)} are.")
        epilogues, dtypes = epilogue or ["gelu"], dtype or ["float32"]
        cases = parsed(sizes or (), epilogues, dtypes)
        if csv is not None:
            cases += from_csv(csv, epilogues, dtypes)
        if not cases:
            raise CaseError("Nothing to measure: name sizes such as 128x1536x384, or a CSV with --csv.")
        if out is not None:
            write(out)  # before the work, not after it
        chosen = [one for one in PEERS if not peer or one.name in peer]
        with messages.status("Measuring...") as status:
            found = measure(cases, chosen, device, seconds, lambda text: status.update(escape(text)))
        text = json.dumps(record(found, device), indent=1)
        if out is not None:
            write(out, text + "\n")
    if as_json:
        print(text)
    else:
        show(found)


def show(found: Sequence[Measured]) -> None:
    """Print the table: a line for each case and peer, the fastest other peer as what Postlude is compared with."""
    from postlude.bench.run import mean_speedup
    from postlude.report import words

    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, column in enumerate(("", "median", "spread", "rate", "error", "speed-up")):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=number > 0)
    for one in found:
        table.add_row(f"[bold]{escape(str(one.case))}[/]")
        for name, latency in one.latencies.items():
            table.add_row(
                f"  {name}",
                words.seconds(latency.median),
                words.spread(latency),
                words.rate(one.rate(name), "FLOP/s"),
                f"{one.errors[name]:.1e}",
                words.ratio(one.speedups[name]) if name in one.speedups else "best other" if name == one.best_other else "",
            )
    output.print(table)
    missing = {(name, reason): None for one in found for name, reason in one.missing.items()}
    for name, reason in missing:
        output.print(f"[dim]{escape(name)} was left out: {escape(reason)}[/]", soft_wrap=True)
    for name, mean in mean_speedup(found).items() if len(found) > 1 else ():
        output.print(f"{name}: {mean:.2f}x the fastest other peer, geometric mean over {len(found)} cases")
