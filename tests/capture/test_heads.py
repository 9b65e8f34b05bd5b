"""Attention reads shared keys and values without a copy. Graphs are traced with the ops for GPUs, and not run."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from postlude.capture import heads as heads_module
from postlude.capture.heads import GROUPED, share_heads

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the CPU had them: a torch without CUDA has no fake tensors of a GPU."""
    monkeypatch.setattr(heads_module, "DEVICE", "cpu")


def repeat_for_heads(x: Tensor, count: int) -> Tensor:
    """As models write it."""
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, count, length, width).reshape(batch, heads * count, length, width)


def interleaved(x: Tensor, count: int) -> Tensor:
    """The other order of the heads, which is not what kernels do with groups."""
    batch, heads, length, width = x.shape
    return x[:, None].expand(batch, count, heads, length, width).reshape(batch, heads * count, length, width)


def changed(
    repetition: Callable[[Tensor, int], Tensor],
    heads: tuple[int, int, int],
    strides: tuple[int, int, int] = (1024, 64, 1),
    offset: int = 0,
) -> tuple[int, torch.fx.Graph]:
    """Trace attention after a repetition of keys and values, for heads of queries, keys and values."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        k, v = repetition(key, heads[0] // heads[1]), repetition(value, heads[0] // heads[2])
        return aten._scaled_dot_product_flash_attention(query, k, v)[0]

    with FakeTensorMode():
        query, key, value = (
            torch.empty(1 << 20, dtype=torch.bfloat16).as_strided((2, count, 16, 64), (count * strides[0], *strides), offset)
            for count in heads
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
    ("repetition", "heads"),
    [(interleaved, (8, 2, 2)), (repeat_for_heads, (8, 2, 4))],
    ids=["another order of heads", "other groups of keys than of values"],
)
def test_what_kernels_do_not_take_is_left(repetition: Callable[[Tensor, int], Tensor], heads: tuple[int, int, int]) -> None:
    assert changed(repetition, heads)[0] == 0


@pytest.mark.parametrize(
    ("strides", "offset", "count"),
    [((16 * 192, 192, 1), 64, 1), ((1024, 1, 16), 0, 0), ((1024, 64, 1), 1, 0), ((16 * 65, 65, 1), 0, 0)],
    ids=["a slice of a projection", "columns that do not lie side by side", "misaligned", "rows of an odd length"],
)
def test_kernels_load_vectors(strides: tuple[int, int, int], offset: int, count: int) -> None:
    """The copy was aligned; what it was made of need not be, and FlashAttention does not look."""
    assert changed(repeat_for_heads, (8, 2, 2), strides, offset)[0] == count


@pytest.mark.parametrize(("owner", "name", "value"), [(torch.version, "hip", "7.0"), (heads_module, "DEVICE", "cuda")])
def test_other_vendors_have_other_kernels(owner: object, name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, value)
    assert changed(repeat_for_heads, (8, 2, 2))[0] == 0
