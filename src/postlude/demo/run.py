"""The demo's work: search, error and speed of one model under eager, Inductor and Postlude, as plain data.

Every compiled mode is compiled once for all shapes (`dynamic=True`; a batch of one is a second graph), as a program that
embeds sentences of any number and length would do it.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from postlude.demo import minilm
from postlude.demo.timing import Timing, geometric_mean, interleave
from postlude.doctor import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

QUERIES = (
    "Why is my program slow?",
    "the weather was worse than expected",
    "learning a foreign language",
    "birds that recognise human faces",
)
POINTS = ((1, 16), (1, 128), (32, 32), (8, 128))
# What a program's statements look like where it holds a well-known computation; operands are named in normal form.
PATTERNS = (
    ("bias", (r"= add %acc\d*, %row",)),
    ("scale", (r"= mul %acc\d*, %\d",)),
    ("mask", (r"= add .*%tile", r"= exp ")),
    ("residual", (r"= add .*%tile", r"(?s)\A(?!.*= exp )")),
    ("GELU", (r"= erf ",)),
    ("softmax", (r"= reduce max n", r"= exp ", r"= reduce sum n")),
    ("LayerNorm", (r"= reduce sum n", r"= sub ", r"= rsqrt ")),
)
QUICK_POINTS = ((1, 16), (8, 128))
NEAREST = 3


@dataclass(frozen=True)
class Search:
    """A query and the sentences nearest to it, with their cosine similarity."""

    query: str
    nearest: list[tuple[float, str]]


@dataclass(frozen=True)
class Fusion:
    """What became of the model's GEMMs: how many are fused, into what kinds of kernel, and why the rest is left to Inductor."""

    fused: int
    total: int
    kinds: list[tuple[int, str]]
    left: list[tuple[int, str]]


@dataclass(frozen=True)
class Error:
    """Distance from the float64 result of the same weights."""

    largest: float
    mean_square: float


@dataclass(frozen=True)
class Point:
    """Timings of all modes for one batch size and length."""

    batch: int
    length: int
    timings: dict[str, Timing]
    speedup: float


@dataclass(frozen=True)
class Report:
    """All that the demo found."""

    dtype: str
    environment: dict[str, Any]
    ours: str
    searches: list[Search]
    fusion: Fusion | None
    errors: dict[str, Error]
    points: list[Point]
    compile_seconds: dict[str, float]

    @property
    def mean_speedup(self) -> float:
        """Geometric mean over the points of the speed-up over the best other mode."""
        return geometric_mean(point.speedup for point in self.points)

    def record(self) -> dict[str, Any]:
        """Plain data for JSON."""
        points = [
            {
                "batch": point.batch,
                "length": point.length,
                "speedup_over_best_other": point.speedup,
                "timings": {name: timing.record() for name, timing in point.timings.items()},
                "sentences_per_second": {name: point.batch / timing.median for name, timing in point.timings.items()},
            }
            for point in self.points
        ]
        return {**asdict(self), "points": points, "mean_speedup": self.mean_speedup}


def run(
    *,
    dtype: str,
    threads: int,
    quick: bool,
    queries: Sequence[str] | None,
    backend: str,
    progress: Callable[[str], object],
) -> Report:
    """Run the whole demo. `progress` is told in a few words what is going on."""
    if threads:
        torch.set_num_threads(threads)
    model = minilm.load(getattr(torch, dtype))
    tokenizer, corpus = minilm.Tokenizer(), minilm.corpus()
    ours = backend.capitalize()
    modes: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"Eager": model}
    for name, chosen in (("Inductor", "inductor"), (ours, backend)):
        modes[name] = torch.compile(minilm.separate_copy(model), backend=chosen, dynamic=True)

    whole = tokenizer(corpus)
    inputs = [tokenizer.filled(corpus, *point) for point in (QUICK_POINTS if quick else POINTS)]
    compile_seconds = {name: 0.0 for name in modes if name != "Eager"}
    with torch.no_grad():
        for name in compile_seconds:
            progress(f"Compiling with {name} (takes some seconds the first time)...")
            start = time.perf_counter()
            for tokens in (whole, *inputs):
                modes[name](*tokens.arguments)
            compile_seconds[name] = time.perf_counter() - start

        progress("Computing the float64 reference...")
        exact = minilm.load(getattr(torch, dtype)).double()(*whole.arguments)
        embeddings = {name: call(*whole.arguments).double() for name, call in modes.items()}
        points = []
        for tokens in inputs:
            batch, length = tokens.input_ids.shape
            progress(f"Measuring {batch} × {length}...")
            points.append(_measure(modes, tokens, quick, ours))
        asked = tokenizer(queries or QUERIES)
        searches = _search(modes[ours](*asked.arguments).double(), embeddings[ours], queries or QUERIES, corpus)

        progress("Asking what was fused...")
        fusion = _fusion(model, whole) if backend == "postlude" else None

    return Report(
        dtype=dtype,
        environment=environment(),
        ours=ours,
        searches=searches,
        fusion=fusion,
        errors={name: _error(embedding, exact) for name, embedding in embeddings.items()},
        points=points,
        compile_seconds=compile_seconds,
    )


def _measure(modes: dict[str, Callable[[Tensor, Tensor], Tensor]], tokens: minilm.Tokens, quick: bool, ours: str) -> Point:
    calls = {name: (lambda call=call: call(*tokens.arguments)) for name, call in modes.items()}
    timings = interleave(calls, rounds=5 if quick else 9, seconds=0.05)
    best = min((timing for name, timing in timings.items() if name != ours), key=lambda timing: timing.median)
    batch, length = tokens.input_ids.shape
    return Point(batch, length, timings, timings[ours].speedup_over(best))


def _search(asked: Tensor, embeddings: Tensor, queries: Sequence[str], corpus: list[str]) -> list[Search]:
    found = (asked @ embeddings.T).topk(min(NEAREST, len(corpus)))
    return [
        Search(query, [(similarity, corpus[index]) for similarity, index in zip(row, places, strict=True)])
        for query, row, places in zip(queries, found.values.tolist(), found.indices.tolist(), strict=True)
    ]


def _error(embedding: Tensor, exact: Tensor) -> Error:
    difference = embedding - exact
    return Error(float(difference.abs().max()), float(difference.square().mean().sqrt()))


def _fusion(model: minilm.SentenceEncoder, tokens: minilm.Tokens) -> Fusion:
    from postlude.explanation import explain

    # Dynamo's state is reset on the way, so this comes after everything that uses compiled models.
    explanation = explain(minilm.separate_copy(model), *tokens.arguments)
    kinds = Counter(describe(region.program) for region in explanation.regions if region.fused)
    left = Counter(reason for region in explanation.regions if not region.fused for reason in region.stopped_by)
    return Fusion(
        explanation.fused_gemms,
        explanation.gemms,
        [(count, text) for text, count in kinds.most_common()],
        [(count, text) for text, count in left.most_common()],
    )


def describe(program: str) -> str:
    """A Region in a few words, such as "GEMM + bias, GELU": the known patterns in its program."""
    gemms = program.count("= contract ")
    found = [name for name, statements in PATTERNS if all(re.search(statement, program) for statement in statements)]
    subject = "GEMM" if gemms == 1 else f"{gemms} GEMMs"
    return f"{subject} + {', '.join(found)}" if found else subject
