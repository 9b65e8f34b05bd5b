"""Attention reads shared keys and values without a copy. Graphs are traced with the ops for GPUs, and not run."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from postlude.capture.heads import GROUPED, share_heads

aten = torch.ops.aten


def repeat_for_heads(x: Tensor, count: int) -> Tensor:
    """As models write it."""
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, count, length, width).reshape(batch, heads * count, length, width)


def interleaved(x: Tensor, count: int) -> Tensor:
    """The other order of the heads, which is not what kernels do with groups."""
    batch, heads, length, width = x.shape
    return x[:, None].expand(batch, count, heads, length, width).reshape(batch, heads * count, length, width)


def changed(
    repetition: Callable[[Tensor, int], Tensor], heads: tuple[int, int, int], *, dense: bool = True
) -> tuple[int, torch.fx.Graph]:
    """Trace attention after a repetition of keys and values, for heads of queries, keys and values."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        k, v = repetition(key, heads[0] // heads[1]), repetition(value, heads[0] // heads[2])
        return aten._scaled_dot_product_flash_attention(query, k, v)[0]

    with FakeTensorMode():
        strides = (1024, 64, 1) if dense else (1024, 1, 16)
        query, key, value = (
            torch.empty_strided((2, count, 16, 64), (count * 1024, *strides), dtype=torch.bfloat16) for count in heads
        )
        graph = make_fx(attend, decomposition_table=select_decomp_table(), tracing_mode="fake")(query, key, value).graph
        return share_heads(graph), graph


def test_keys_and_values_are_read_as_they_lie() -> None:
    count, graph = changed(repeat_for_heads, (8, 2, 2))
    assert count == 1
    (call,) = graph.find_nodes(op="call_function", target=GROUPED[0])
    assert [tuple(a.meta["val"].shape) for a in call.args[:3]] == [(2, 8, 16, 64), (2, 2, 16, 64), (2, 2, 16, 64)]
    assert not graph.find_nodes(op="call_function", target=aten.expand.default)


@pytest.mark.parametrize(
    ("repetition", "heads", "dense"),
    [(interleaved, (8, 2, 2), True), (repeat_for_heads, (8, 2, 4), True), (repeat_for_heads, (8, 2, 2), False)],
    ids=["another order of heads", "other groups of keys than of values", "columns that do not lie side by side"],
)
def test_what_kernels_do_not_take_is_left(
    repetition: Callable[[Tensor, int], Tensor], heads: tuple[int, int, int], dense: bool
) -> None:
    assert changed(repetition, heads, dense=dense)[0] == 0
