"""Attention reads shared keys and values without a copy. Graphs are traced with the ops for GPUs, and not run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F

from postlude.capture import Settings, capture
from postlude.capture import heads as heads_module
from postlude.capture.heads import ATTENTION, GROUPED, join_heads, share_heads
from postlude.select.choice import UNFUSED, Choice

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


def one_token(mask: str = "none", causal: bool = False, heads: int = 2) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A step of generation, with heads that share keys, and tensors for it."""

    def attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
        k, v = (repeat_for_heads(x, query.shape[1] // x.shape[1]) for x in (key, value))
        bias = {
            "none": None,
            "for all heads": torch.where(visible, 0.0, float("-inf")),
            "expanded": torch.where(visible, 0.0, float("-inf")).expand(-1, query.shape[1], -1, -1),
            "for each head": torch.where(visible.expand(-1, query.shape[1], -1, -1), 0.0, float("-inf")).clone(),
        }[mask]
        out = aten._scaled_dot_product_cudnn_attention(query, k, v, bias, False, 0.0, causal)[0]
        return out.transpose(1, 2).reshape(query.shape[0], 1, -1) * 2.0

    torch.manual_seed(0)
    tensors = [torch.randn(2, 8, 1, 16), torch.randn(2, heads, 40, 16), torch.randn(2, 50, heads, 24)[:, :40].transpose(1, 2)]
    return attend, [*tensors, torch.rand(2, 1, 1, 40) > 0.3]


def traced(attend: Callable[..., Tensor], tensors: list[Tensor], mode: str = "fake") -> torch.fx.GraphModule:
    with FakeTensorMode(shape_env=ShapeEnv() if mode == "symbolic" else None) as fake:
        like = [fake.from_tensor(tensor, static_shapes=True) for tensor in tensors]
        module = make_fx(attend, decomposition_table=select_decomp_table(), tracing_mode=mode)(*like)
    module.graph.eliminate_dead_code()  # as it is in a graph that Inductor gives
    return module


@pytest.mark.parametrize("mask", ["none", "for all heads", "expanded"])
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_heads_of_one_token_are_queries_of_one_head(mask: str, mode: str) -> None:
    attend, tensors = one_token(mask)
    module = traced(attend, tensors, mode)
    (call,) = module.graph.find_nodes(op="call_function", target=GROUPED[1])
    undo = join_heads(call)
    assert undo is not None
    assert tuple(call.args[0].meta["val"].shape)[1:] == (2, 4, 16)
    assert tuple(call.args[1].meta["val"].shape)[1:] == (2, 40, 16)
    undo()
    (region,) = capture(module.graph, Settings(strict=True))
    assert region.region is not None, region.reason
    assert region.region.batched
    module.recompile()
    query, key, value, visible = tensors
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=None if mask == "none" else visible, enable_gqa=True)
    torch.testing.assert_close(module(*tensors), expected.transpose(1, 2).reshape(2, 1, -1) * 2.0)


@pytest.mark.parametrize("mask", ["none", "for all heads", "expanded"])
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_what_becomes_no_region_is_as_it_was(mask: str, mode: str) -> None:
    module = traced(*one_token(mask), mode)
    before = module.graph.python_code("self").src
    (region,) = capture(module.graph, Settings(strict=True), lambda plan, growth: Choice(UNFUSED, "rule", "not now"))
    assert region.reason == "not now"
    module.graph.lint()
    assert module.graph.python_code("self").src == before


def test_what_its_queries_come_from_may_be_a_region() -> None:
    """Of which the result takes the place of the queries before attention is looked at, and left alone."""

    def attend(x: Tensor, weight: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query = torch.relu(x @ weight).view(2, 1, 8, 16).transpose(1, 2)
        k, v = (repeat_for_heads(each, 4) for each in (key, value))
        return aten._scaled_dot_product_efficient_attention(query, k, v, None, False)[0] * 2.0

    x, weight, key, value = torch.randn(2, 48), torch.randn(48, 128), torch.randn(2, 2, 40, 16), torch.randn(2, 2, 40, 24)
    module = traced(attend, [x, weight, key, value])
    judged = capture(
        module.graph,
        Settings(strict=True),
        lambda plan, growth: Choice(UNFUSED, "rule", "not now") if growth.first.attention else None,
    )
    assert [one.region is not None for one in judged] == [True, False]
    module.graph.lint()
    (call,) = module.graph.find_nodes(op="call_function", target=ATTENTION[2])
    assert [tuple(argument.meta["val"].shape) for argument in call.args[:3]] == [(2, 8, 1, 16), (2, 8, 40, 16), (2, 8, 40, 24)]


@pytest.mark.parametrize(
    ("mask", "shape"),
    [("for all heads", (1, 1, 1, 40)), *(("expanded", (batch, 1, 1, keys)) for batch in (1, 2) for keys in (1, 40))],
)
def test_a_mask_that_is_broadcast(mask: str, shape: tuple[int, ...]) -> None:
    attend, (query, key, value, _) = one_token(mask)
    visible = torch.rand(shape) > 0.1
    module = traced(attend, [query, key, value, visible])
    (region,) = capture(module.graph, Settings(strict=True))
    assert region.region is not None, region.reason
    module.recompile()
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=visible.expand(2, 8, 1, 40), enable_gqa=True)
    torch.testing.assert_close(module(query, key, value, visible), expected.transpose(1, 2).reshape(2, 1, -1) * 2.0)


@pytest.mark.parametrize(
    "case", [{"mask": "for each head"}, {"causal": True}, {"heads": 8}], ids=["a mask of its own", "causal", "no sharing"]
)
def test_other_heads_stay_apart(case: dict[str, Any]) -> None:
    module = traced(*one_token(**case))
    before = [str(node.args) for target in ATTENTION for node in module.graph.find_nodes(op="call_function", target=target)]
    assert not any(join_heads(node) for node in module.graph.nodes)
    assert before == [
        str(node.args) for target in ATTENTION for node in module.graph.find_nodes(op="call_function", target=target)
    ]
