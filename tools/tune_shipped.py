"""Measures what ships with the package (src/postlude/select/shipped.jsonl): kernels for common layers on the GPU of this machine.

    python tools/tune_shipped.py OUT.jsonl --seconds 220

The models have the layer sizes of published ones and random weights. Cases come in the order of their worth; what there is no
time for is left for the next run, which goes on from the entries in OUT.jsonl and in the package. Of each entry only what a
choice or a person needs is kept: the winner, what the rules choose, Inductor's code, and each target's fastest. Other GPUs'
entries in OUT.jsonl stay, and entries of this GPU in the same place are replaced.

Run it with the package's sources as they will ship, and the versions of torch, the driver and the compilers that most users have:
there all of an entry holds. Elsewhere, clear differences alone do (src/postlude/select/knowledge.py).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from postlude.select.entry import Entry, Measured

#: Most bytes of the file: it is part of every installation.
MOST_BYTES = 300_000
#: Tokens in the cache of a decoding step.
CACHED = 2048


@dataclass(frozen=True)
class Case:
    """A model, sequences, tokens of each, and whether they are one step of decoding."""

    model: str
    batch: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.model} {self.batch} x {self.tokens}"


CASES = (
    Case("llama-8b", 1, 1),
    Case("llama-8b", 1, 2048),
    Case("bert-base", 32, 128),
    Case("llama-8b", 16, 1),
    Case("bert-base", 1, 128),
    Case("llama-8b", 1, 512),
    Case("bert-large", 32, 128),
    Case("llama-8b", 4, 2048),
    Case("llama-8b", 4, 1),
    Case("bert-base", 8, 128),
    Case("llama-8b", 64, 1),
    Case("bert-large", 8, 128),
    Case("bert-large", 1, 128),
)


def llama(case: Case) -> Callable[[], Any]:
    """A call of two layers of Llama 3's 8B model and its head."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )
    with torch.device("cuda"):
        model: Any = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)
    tokens = torch.randint(0, 32000, (case.batch, case.tokens), device="cuda")
    if case.tokens > 1:
        return lambda: model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits
    cache = transformers.StaticCache(config=config, max_cache_len=CACHED)
    prompt = torch.randint(0, 32000, (case.batch, 8), device="cuda")
    with torch.no_grad():
        model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    positions = torch.full((case.batch, 1), 8, device="cuda")
    settings = {"past_key_values": cache, "position_ids": positions, "use_cache": True, "logits_to_keep": 1}
    return lambda: model(input_ids=tokens, **settings).logits


def bert(case: Case) -> Callable[[], Any]:
    """A call of two layers of BERT."""
    import torch
    import transformers

    sizes = {"bert-base": (768, 12, 3072), "bert-large": (1024, 16, 4096)}[case.model]
    config = transformers.BertConfig(
        hidden_size=sizes[0], num_attention_heads=sizes[1], intermediate_size=sizes[2], num_hidden_layers=2
    )
    with torch.device("cuda"):
        model = transformers.BertModel(config, add_pooling_layer=False).to(torch.bfloat16).eval().requires_grad_(False)
    tokens = torch.randint(0, 30000, (case.batch, case.tokens), device="cuda")
    return lambda: model(input_ids=tokens).last_hidden_state


def slim(entry: Entry) -> Entry:
    """The entry with the candidates that a choice or a person needs, and times as exact as they were measured."""
    fastest: dict[str, Measured] = {}
    for candidate in entry.candidates:
        if candidate.seconds is not None:
            best = fastest.get(candidate.variant.target)
            if best is None or (best.seconds or 0) > candidate.seconds:
                fastest[candidate.variant.target] = candidate
    wanted = {c.variant.name for c in fastest.values()} | {entry.winner, entry.incumbent, "unfused"}
    kept = tuple(
        replace(c, **{name: _rounded(getattr(c, name)) for name in ("seconds", "low", "high")})
        for c in entry.candidates
        if c.variant.name in wanted
    )
    return replace(entry, candidates=kept)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds:.4g}")


def shippable(entry: Entry) -> bool:
    """Whether an entry may leave this machine's database: nothing of it failed later."""
    return not entry.failed


def merged(old: Sequence[Entry], new: Sequence[Entry]) -> list[Entry]:
    """The entries of a file: one for each call, the newer one; in an order that changes little."""
    found = {entry.call.digest(): entry for entry in (*old, *new)}
    return sorted(found.values(), key=lambda e: (e.call.device, e.call.region, e.call.sizes, e.call.layout, e.call.digest()))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the file of entries; those that it has are kept")
    parser.add_argument("--seconds", type=float, default=220.0, help="when to stop, everything included")
    parser.add_argument("--cases", nargs="*", help="only cases whose name contains one of these")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    with tempfile.TemporaryDirectory() as folder:
        os.environ["POSTLUDE_TUNING_DB"] = str(Path(folder) / "tuning.db")
        return measure(arguments, deadline)


def measure(arguments: argparse.Namespace, deadline: float) -> int:
    """Measure case by case; the file is written after each."""
    import torch

    from postlude.loading import Example, Inputs
    from postlude.select.exchange import read_lines, write_lines
    from postlude.select.knowledge import SHIPPED, knowledge
    from postlude.tuning import tune

    warnings.filterwarnings("ignore")
    old: list[Entry] = []
    for path in (SHIPPED, arguments.out):
        if path.exists():
            with path.open("rb") as file:
                old += [found for found in read_lines(file, str(path)) if not hasattr(found, "reason")]  # type: ignore[misc]
    known = knowledge()
    known.database.merge(old)  # what holds here is not measured again
    entries: list[Entry] = []
    for case in CASES:
        if arguments.cases is not None and not any(part in str(case) for part in arguments.cases):
            continue
        left = deadline - time.monotonic()
        if left < 10:
            print(f"{case}: left for the next run")
            continue
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        begin = time.monotonic()
        make = llama if case.model.startswith("llama") else bert
        done = tune(Example(str(case), make(case), (Inputs(),)), budget=left)
        session = done.session
        entries += [slim(entry) for entry in (*session.measured.values(), *session.known.values()) if shippable(entry)]
        count = write_lines(merged(old, entries), arguments.out)
        print(
            f"{case}: {len(session.measured)} measured, {len(session.known)} known, {done.ended},"
            f" {time.monotonic() - begin:.0f} s; {count} entries in {arguments.out.stat().st_size} bytes",
            flush=True,
        )
    show(entries)
    if arguments.out.stat().st_size > MOST_BYTES:
        print(f"{arguments.out} is larger than {MOST_BYTES} bytes")
        return 1
    return 0


def show(entries: Sequence[Entry]) -> None:
    """What was gained over the rules, in short."""
    print("\nsizes: rule -> winner, time of the rule / time of the winner; of Inductor's / of the winner")
    for entry in entries:
        won, ruled, unfused = (entry.measured(name) for name in (entry.winner, entry.incumbent, "unfused"))
        sizes = " ".join(f"{axis} {size}" for axis, size in sorted(entry.sizes.items()))
        ratios = [f"{one.seconds / won.seconds:.3f}" if one.seconds and won.seconds else "-" for one in (ruled, unfused)]
        print(f"{sizes}: {entry.incumbent} -> {entry.winner}, {ratios[0]}; {ratios[1]}{'  clear' if entry.clear else ''}")


if __name__ == "__main__":
    sys.exit(main())
