"""Attention for few queries as one Triton kernel: softmax(scores) v, with no score in memory.

A program reads a part of the keys and values of one batch, and keeps the largest score, the sum of weights and the weighted
values of what it has read so far (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). With few
batches, several programs share one, each a part of its keys, and the last to arrive joins the parts (Dao et al.,
"Flash-Decoding", 2023). Scores may be changed by any elementwise program, masks among them, before the softmax.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

import torch

from postlude.ir import Apply, Const, Group, Reduce, Region, Statement
from postlude.targets.triton.writer import Writer, indented, load, value


@dataclass(frozen=True)
class Softmax:
    """The two parts of an attention.

    Attributes:
        scores: the group that multiplies queries and keys, with what changes the scores before the softmax, and nothing else.
        output: the group that multiplies the weights and the values.
        score: name of the changed scores.
    """

    scores: Group
    output: Group
    score: str


def softmax_of(region: Region) -> Softmax | None:
    """The attention that a Region is, or None. Capture writes softmax in one way (grow.py), which is looked for here."""
    if len(region.groups) != 2 or len(region.contractions) != 2 or not region.batched:
        return None
    first, second = region.groups
    weights = first.feeds
    if weights is None or first.yields or second.feeds or second.contractions[0].left != weights:
        return None
    if first.contractions[0].left not in region.operand_index or first.contractions[0].accumulate != torch.float32:
        return None
    score = _score(region, weights)
    if score is None:
        return None
    changes = first.behind([score])
    statements = tuple(s for s in first.statements if s.name in changes)
    if any(isinstance(s, Reduce) for s in (*statements, *second.statements)):
        return None
    return Softmax(replace(first, statements=statements, feeds=None), second, score)


def _score(region: Region, weights: str) -> str | None:
    """What the softmax is of: weights = exp(score - peak) / sum, where a row without any score gives 0."""
    by_name: dict[str, Statement] = {s.name: s for s in region.body}

    def inputs(name: str, op: str) -> tuple[str, ...] | None:
        statement = by_name.get(name)
        return statement.inputs if isinstance(statement, Apply) and statement.op == op else None

    def reduced(name: str, kind: str) -> str | None:
        statement = by_name.get(name)
        if not isinstance(statement, Reduce) or (statement.kind, statement.axis) != (kind, region.types[weights].column):
            return None
        return statement.input

    def is_number(name: str, number: float) -> bool:
        statement = by_name.get(name)
        return isinstance(statement, Const) and statement.value == number

    for exponential, inverse in _orders(inputs(weights, "mul")):
        difference, total = inputs(exponential, "exp"), inputs(inverse, "reciprocal")
        parts = inputs(difference[0], "sub") if difference else None
        chosen = inputs(total[0], "where") if total else None
        if parts is None or chosen is None:
            continue
        score, shift = parts[0], inputs(parts[1], "where")
        if shift is None or shift[0] != chosen[0] or not is_number(shift[1], 0.0) or not is_number(chosen[1], 1.0):
            continue
        peak = shift[2]
        compared = inputs(chosen[0], "eq") or ("", "")
        whole = reduced(peak, "max") == score and reduced(chosen[2], "sum") == exponential
        if whole and any(one == peak and is_number(other, -inf) for one, other in _orders(compared)):
            return score
    return None


def _orders(pair: tuple[str, ...] | None) -> tuple[tuple[str, ...], ...]:
    return (pair, pair[::-1]) if pair else ()


def scores_function(writer: Writer, softmax: Softmax) -> str:
    """The function that changes the scores."""
    return writer.function("change", softmax.scores, returns=softmax.score)


def body(writer: Writer, softmax: Softmax) -> Iterator[str]:
    """The kernel: all but its head."""
    region = writer.region
    (first,), (second,) = softmax.scores.contractions, softmax.output.contractions
    n, o = softmax.scores.column, softmax.output.column
    k, _ = region.contraction_axes(first)
    left, right, values = (region.operand_index[name] for name in (first.left, first.right, second.right))
    products, sums = value(first.name), value(second.name)
    yield "part = program % splits"
    yield "blocks = tl.cdiv(m, BLOCK_M)"
    yield "block = program // splits % blocks"
    yield "batch = (program // splits // blocks).to(INDEX)"
    yield "inner, outer = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_O)"
    yield "rows = (block * BLOCK_M + inner).to(INDEX)[:, None]"
    yield "ks = tl.arange(0, BLOCK_K).to(INDEX)"
    yield "os = outer.to(INDEX)[None, :]"
    if writer.chained:
        yield "gdc_wait()"
        yield "gdc_launch_dependents()"
    queries = writer.at(left, {"b": "batch", "m": "rows", k: "ks[None, :]"})
    yield f"x = {load(queries, f'(rows < m) & (ks[None, :] < {k})')}"
    yield 'peak = tl.full([BLOCK_M], float("-inf"), tl.float32)'
    yield "total = tl.zeros([BLOCK_M], tl.float32)"
    yield f"{sums} = tl.zeros([BLOCK_M, BLOCK_O], tl.float32)"
    yield f"length = tl.cdiv(tl.cdiv({n}, BLOCK_N), splits) * BLOCK_N"
    yield "begin = part * length"
    yield f"end = min(begin + length, {n})"
    yield "for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):"
    step = [
        "keys = (start + tl.arange(0, BLOCK_N)).to(INDEX)",
        "cols = keys[None, :]",
        f"w = {load(writer.at(right, {'b': 'batch', n: 'cols', k: 'ks[:, None]'}), f'(cols < {n}) & (ks[:, None] < {k})')}",
        f"{products} = tl.dot(x, w, input_precision=PRECISION, out_dtype=tl.float32)",
        *writer.loads(softmax.scores, "cols"),
        f"score = {writer.call('change', softmax.scores, 'rows', 'cols', [products])}",
        # A row of one query has the shape [BLOCK_M, 1] where nothing that it depends on has columns.
        'score = tl.where(cols < end, score, float("-inf"))',
        "larger = tl.maximum(peak, tl.max(score, axis=1))",
        'shift = tl.where(larger == float("-inf"), 0.0, larger)',
        "weights = libdevice.exp(score - shift[:, None])",
        "decay = libdevice.exp(peak - shift)",
        "total = total * decay + tl.sum(weights, axis=1)",
        f"w = {load(writer.at(values, {'b': 'batch', n: 'keys[:, None]', o: 'os'}), f'(keys[:, None] < {n}) & (os < {o})')}",
        f"{sums} = {sums} * decay[:, None]",
        f"{sums} = tl.dot(weights.to(w.dtype), w, {sums}, input_precision=PRECISION, out_dtype=tl.float32)",
        "peak = larger",
    ]
    yield from indented(step)
    yield "if not SPLIT:"
    yield from indented(_finished(writer, softmax, "rows", "peak", "total", sums))
    yield "else:"
    yield from indented(_joined(sums))
    yield from indented(_finished(writer, softmax, "few", "top", "mass", "joined"), 2)


def _finished(writer: Writer, softmax: Softmax, rows: str, peak: str, total: str, sums: str) -> list[str]:
    """Weights that add up to 1, and the epilogue."""
    output = softmax.output
    return [
        "# A row that sees nothing gives 0.",
        f'whole = {sums} / tl.where({peak} == float("-inf"), 1.0, {total})[:, None]',
        *writer.loads(output, "os"),
        writer.call(f"epilogue_{output.column}", output, rows, "os", ["whole"]),
    ]


def _joined(sums: str) -> Iterator[str]:
    """Leaves a program's part in memory; the last of a batch to arrive goes on with all, for as many rows as there are."""
    yield "# Each program leaves its part; the last one to arrive joins the parts, several at a time, in the same order always."
    yield "mine = tl.program_id(0).to(tl.int64)"
    yield "size = BLOCK_M * (BLOCK_O + 2)"
    yield "at_row = partials + BLOCK_M * BLOCK_O"
    yield f"tl.store(partials + mine * size + inner[:, None] * BLOCK_O + outer[None, :], {sums}, mask=rows < m)"
    yield "tl.store(at_row + mine * size + inner, peak)"
    yield "tl.store(at_row + mine * size + BLOCK_M + inner, total)"
    yield "tl.debug_barrier()"
    yield 'arrived = tl.atomic_add(counters + mine // splits, 1, sem="acq_rel")'
    yield "if arrived == splits - 1:"
    yield "    tl.store(counters + mine // splits, 0)"
    yield "    own = tl.arange(0, ROWS)"
    yield "    few = (block * BLOCK_M + own).to(INDEX)[:, None]"
    yield '    top = tl.full([ROWS], float("-inf"), tl.float32)'
    yield "    mass = tl.zeros([ROWS], tl.float32)"
    yield "    joined = tl.zeros([ROWS, BLOCK_O], tl.float32)"
    yield "    for first in tl.range(0, splits, PARTS):"
    yield "        parts = first + tl.arange(0, PARTS)[:, None]"
    yield "        there = (mine - part + parts) * size"
    yield "        is_part = parts < splits"
    yield "        at_rows = at_row + there + own[None, :]"
    yield '        peaks = tl.load(at_rows, mask=is_part, other=float("-inf"), cache_modifier=".cg")'
    yield '        totals = tl.load(at_rows + BLOCK_M, mask=is_part, other=0.0, cache_modifier=".cg")'
    yield "        at_sums = partials + there[:, :, None] + (own[:, None] * BLOCK_O + outer[None, :])[None, :, :]"
    yield '        theirs = tl.load(at_sums, mask=is_part[:, :, None] & (few < m)[None, :, :], other=0.0, cache_modifier=".cg")'
    yield "        higher = tl.maximum(top, tl.max(peaks, axis=0))"
    yield '        level = tl.where(higher == float("-inf"), 0.0, higher)'
    yield "        fading, decays = libdevice.exp(top - level), libdevice.exp(peaks - level[None, :])"
    yield "        mass = mass * fading + tl.sum(decays * totals, axis=0)"
    yield "        joined = joined * fading[:, None] + tl.sum(decays[:, :, None] * theirs, axis=0)"
    yield "        top = higher"
