"""Masks are recognised for what they are, however they are written. Graphs are traced with the ops for GPUs, and not run."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from postlude.capture.masks import MASKED, drop_masks, meaning

aten = torch.ops.aten
LEAST = torch.finfo(torch.float16).min


def positions(x: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of queries, as a column, and of keys."""
    at = torch.arange(x.shape[2])
    return at[:, None], at


def ranges(x: Tensor) -> Tensor:
    queries, keys = positions(x)
    return keys <= queries


def triangle(x: Tensor) -> Tensor:
    return torch.ones(x.shape[2], x.shape[2], dtype=torch.bool).tril()


def other_triangle(x: Tensor) -> Tensor:
    """As nn.Transformer.generate_square_subsequent_mask."""
    return torch.triu(torch.full((x.shape[2], x.shape[2]), float("-inf")), diagonal=1)


def filled(x: Tensor) -> Tensor:
    hidden = torch.ones(x.shape[2], x.shape[2]).tril() == 0
    return torch.zeros(x.shape[2], x.shape[2]).masked_fill(hidden, LEAST)


def packed(x: Tensor) -> Tensor:
    """As Transformers: causal, and within sequences that are told apart by jumps of the positions."""
    batch, _, length, _ = x.shape
    at = torch.arange(length).unsqueeze(0).expand(batch, -1)
    first = at[:, :1] - 1
    sequence = (torch.diff(at, prepend=first, dim=-1) != 1).cumsum(-1)
    number = torch.arange(batch)[:, None, None, None]
    queries, keys = torch.arange(length)[None, None, :, None], torch.arange(length)[None, None, None, :]
    causal = torch.ones((), dtype=torch.bool) & (at[number, keys] <= at[number, queries])
    return (causal & (sequence[number, queries] == sequence[number, keys])).expand(batch, -1, length, length)


def padded(x: Tensor) -> Tensor:
    """As for memory-efficient attention, which reads rows of a whole number of vectors."""
    bias = torch.where(ranges(x), 0.0, -65536.0)
    return torch.nn.functional.pad(bias, [0, 8 - x.shape[2] % 8])[:, : x.shape[2]]


def wide_window(x: Tensor) -> Tensor:
    queries, keys = positions(x)
    return (keys <= queries) & (keys > queries - x.shape[2])


def narrow_window(x: Tensor) -> Tensor:
    queries, keys = positions(x)
    return (keys <= queries) & (keys > queries - x.shape[2] + 1)


def strict(x: Tensor) -> Tensor:
    queries, keys = positions(x)
    return keys < queries


def one_ahead(x: Tensor) -> Tensor:
    queries, keys = positions(x)
    return keys <= queries + 1


def prefix(x: Tensor) -> Tensor:
    queries, keys = positions(x)
    return (keys <= queries) | (keys < 3)


def backwards(x: Tensor) -> Tensor:
    queries, keys = positions(x)
    return queries <= keys


def two_sequences(x: Tensor) -> Tensor:
    """The positions start again in the middle."""
    at = torch.cat([torch.arange(4), torch.arange(x.shape[2] - 4)])
    sequence = (torch.diff(at, prepend=at[:1] - 1, dim=-1) != 1).cumsum(-1)
    queries, keys = positions(x)
    return (keys <= queries) & (sequence[:, None] == sequence)


def first_key_apart(x: Tensor) -> Tensor:
    """Nobody but query 0 sees key 0."""
    queries, keys = positions(x)
    one = torch.cat([torch.zeros(1, dtype=torch.int64), torch.ones(x.shape[2] - 1, dtype=torch.int64)])
    return (keys <= queries) & (one[None, :] >= one[:, None])


def from_input(x: Tensor) -> Tensor:
    return x[0, 0, :, :1] <= x[0, 0, :, 0]


def shifted(x: Tensor) -> Tensor:
    """Visible scores are changed, too."""
    queries, keys = positions(x)
    return torch.where(keys <= queries, 1.0, float("-inf"))


def mild(x: Tensor) -> Tensor:
    """What is large enough a penalty for most scores does not hide them."""
    queries, keys = positions(x)
    return torch.where(keys <= queries, 0.0, -10000.0)


def everything(x: Tensor) -> Tensor:
    queries, keys = positions(x)
    return keys < queries + x.shape[2]


def same_part_twice(x: Tensor) -> Tensor:
    """Of three sequences the graph computes the positions of the first and last once."""
    part = torch.arange(x.shape[2] // 4)
    at = torch.cat([part, torch.arange(x.shape[2] - 2 * (x.shape[2] // 4)), part])
    return at <= at[:, None]


def wrapping(x: Tensor) -> Tensor:
    """Positions that an int32 can't hold."""
    at = torch.arange(x.shape[2], dtype=torch.int32) + (2**31 - 3)
    return at <= at[:, None]


def wrapping_bytes(x: Tensor) -> Tensor:
    at = (torch.arange(x.shape[2]) + 250).to(torch.uint8)
    return at <= at[:, None]


def wrapping_sum(x: Tensor) -> Tensor:
    return (torch.full((x.shape[2],), 100).cumsum(0, dtype=torch.int8) > 0).expand(x.shape[2], -1)


def negative_number_of_bytes(x: Tensor) -> Tensor:
    """-1 is 255 beside bytes."""
    return torch.zeros(x.shape[2], x.shape[2], dtype=torch.uint8) > -1


def large_number(x: Tensor) -> Tensor:
    """2**40 is 0 beside an int32."""
    return torch.ones(x.shape[2], x.shape[2], dtype=torch.int32) < 2**40


def rounded_number(x: Tensor) -> Tensor:
    return torch.full((x.shape[2], x.shape[2]), 257.0, dtype=torch.bfloat16) > 256


def rounded_comparison(x: Tensor) -> Tensor:
    """As float32 they are equal."""
    return torch.full((x.shape[2], x.shape[2]), 2**24 + 1) > torch.full((x.shape[2], 1), 2.0**24)


def truth_as_number(x: Tensor) -> Tensor:
    """1 is added where a key is visible."""
    always = torch.ones((), dtype=torch.bool)
    return torch.where(always, ranges(x), torch.zeros(()))


def truth_beside_numbers(x: Tensor) -> Tensor:
    return torch.cat([ranges(x), torch.zeros(x.shape[2], x.shape[2])])[: x.shape[2]]


def no_number(x: Tensor) -> Tensor:
    return torch.where(ranges(x), 0.0, float("nan"))


def no_bias(x: Tensor) -> Tensor:
    return torch.zeros(x.shape[2], x.shape[2])


MASKS: list[tuple[Callable[[Tensor], Tensor], str | None]] = [
    *((mask, "causal") for mask in (ranges, triangle, other_triangle, filled, packed, padded, wide_window)),
    *((mask, None) for mask in (narrow_window, strict, one_ahead, prefix, backwards, two_sequences, first_key_apart)),
    *((mask, None) for mask in (from_input, shifted, mild, no_number)),
    *((mask, None) for mask in (same_part_twice, wrapping, wrapping_bytes, wrapping_sum)),
    *((mask, None) for mask in (negative_number_of_bytes, large_number, rounded_number, rounded_comparison)),
    *((mask, None) for mask in (truth_as_number, truth_beside_numbers)),
    *((mask, "all") for mask in (everything, no_bias)),
]


def traced(mask: Callable[[Tensor], Tensor], shape: tuple[int, ...] = (2, 4, 16, 64), mode: str = "fake") -> Graph:
    """The graph of attention with a mask, as PyTorch turns it into what is added to the scores."""

    def attend(query: Tensor) -> Tensor:
        given = mask(query)
        bias = torch.where(given, 0.0, float("-inf")) if given.dtype == torch.bool else given
        shape = (query.shape[0], query.shape[1], query.shape[2], query.shape[2])
        bias = bias.expand(shape)
        return aten._scaled_dot_product_efficient_attention(query, query, query, bias, False)[0]

    with FakeTensorMode(shape_env=ShapeEnv() if mode == "symbolic" else None):
        query = torch.empty(shape)
        return make_fx(attend, decomposition_table=select_decomp_table(), tracing_mode=mode)(query).graph


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize(("mask", "expected"), MASKS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_meaning(mask: Callable[[Tensor], Tensor], expected: str | None, mode: str) -> None:
    graph = traced(mask, mode=mode)
    (call,) = graph.find_nodes(op="call_function", target=MASKED[1])
    assert meaning(call.args[3]) == expected


@pytest.mark.parametrize(("mask", "expected"), MASKS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_meaning_is_what_the_mask_computes(mask: Callable[[Tensor], Tensor], expected: str | None) -> None:
    """The table above, against the masks themselves."""
    x = torch.randn(2, 4, 16, 64)
    given = mask(x)
    visible = (given if given.dtype == torch.bool else given == 0).expand(2, 4, 16, 16)
    by_value = {"causal": bool((visible == torch.ones(16, 16).tril().bool()).all()), "all": bool(visible.all())}
    hides = given.dtype == torch.bool or bool((given[given != 0] <= LEAST).all())
    assert expected == next((name for name, holds in by_value.items() if holds and hides), None)


def test_attention_is_told() -> None:
    graph = traced(packed)
    assert drop_masks(graph) == 1
    (call,) = graph.find_nodes(op="call_function", target=MASKED[1])
    assert call.args[3] is None
    assert call.args[6] is True
    assert not graph.find_nodes(op="call_function", target=aten.where.self), "nobody computes the mask"


def test_a_mask_that_hides_nothing_goes() -> None:
    graph = traced(everything)
    assert drop_masks(graph) == 1
    (call,) = graph.find_nodes(op="call_function", target=MASKED[1])
    assert (call.args[3], call.args[6]) == (None, False)


@pytest.mark.parametrize("mask", [narrow_window, from_input])
def test_other_masks_stay(mask: Callable[[Tensor], Tensor]) -> None:
    assert drop_masks(traced(mask)) == 0


def test_causal_needs_as_many_keys_as_queries() -> None:
    """With more keys, kernels disagree on where the diagonal begins."""

    def attend(query: Tensor, key: Tensor) -> Tensor:
        visible = torch.arange(key.shape[2]) <= torch.arange(query.shape[2])[:, None]
        bias = torch.where(visible, 0.0, float("-inf")).expand(2, 4, 16, 24)
        return aten._scaled_dot_product_efficient_attention(query, key, key, bias, False)[0]

    with FakeTensorMode():
        inputs = torch.empty(2, 4, 16, 64), torch.empty(2, 4, 24, 64)
        graph = make_fx(attend, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs).graph
    assert drop_masks(graph) == 0


def test_a_mask_of_which_the_gradient_is_asked_for_stays() -> None:
    def attend(query: Tensor) -> Tensor:
        bias = torch.where(ranges(query), 0.0, float("-inf")).expand(2, 4, 16, 16)
        saved = torch.empty(2, 4, 32), torch.empty((), dtype=torch.int64), torch.empty((), dtype=torch.int64)
        wanted = [True, True, True, gradient]
        backward = aten._scaled_dot_product_efficient_attention_backward
        return backward(query, query, query, query, bias, query, *saved, 0.0, wanted)[0]

    for gradient in (False, True):
        with FakeTensorMode():
            query = torch.empty(2, 4, 16, 64)
            graph = make_fx(attend, decomposition_table=select_decomp_table(), tracing_mode="fake")(query).graph
        assert drop_masks(graph) == (not gradient)
        (call,) = graph.find_nodes(op="call_function", target=MASKED[3])
        assert (call.args[4] is None, call.args[11:]) == ((True, (True,)) if not gradient else (False, ()))


def test_a_mask_that_is_the_same_for_all_queries() -> None:
    """It has one row, so its causality says nothing of the others."""

    def attend(query: Tensor) -> Tensor:
        bias = torch.where(torch.arange(16) < 1, 0.0, float("-inf")).view(1, 1, 1, 16)
        return aten._scaled_dot_product_efficient_attention(query, query, query, bias, False)[0]

    with FakeTensorMode():
        graph = make_fx(attend, decomposition_table=select_decomp_table(), tracing_mode="fake")(torch.empty(2, 4, 16, 64)).graph
    assert drop_masks(graph) == 0
