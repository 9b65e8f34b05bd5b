"""Grouped-query attention without copies: attention on a GPU reads keys and values that several heads share as they lie.

Models repeat shared keys and values for every head before they call scaled dot-product attention, because that call takes
equal numbers of heads everywhere. In the graph that is unsqueeze, expand, clone, view: a copy as large as all heads. The
kernels behind the call (FlashAttention, cuDNN) take fewer heads of keys and values than of queries themselves, with head h of the
queries reading head h // (heads of queries / heads of keys), which is what the repetition means.

With one query for each head, as when a model generates, heads that share keys are taken together: they become the queries of
one head, so its keys are read once. That is undone at once for what does not become a Region.
"""

import operator
from collections.abc import Callable

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from postlude.capture.gemm import FEW_QUERIES, RESHAPES, arguments, by_name, set_arguments
from postlude.capture.sizes import is_dense, same, same_shape

aten = torch.ops.aten

#: Attention ops whose kernels take grouped heads.
GROUPED = (aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_cudnn_attention.default)

#: All attention ops of a GPU.
ATTENTION = (*GROUPED, aten._scaled_dot_product_efficient_attention.default)

#: Type of the devices that have these kernels.
DEVICE = "cuda"

#: Bytes to which keys and values must be aligned along every dimension. A copy always is; the kernels don't check.
_ALIGNMENT = 16


def share_heads(graph: Graph) -> int:
    """Let attention read shared keys and values; returns how many calls were changed. The graph is changed in place."""
    changed = 0
    if torch.version.hip is not None:
        return changed  # other kernels are behind the same ops there
    for target in GROUPED:
        for node in graph.find_nodes(op="call_function", target=target):
            query, key, value, *rest = arguments(node)
            if query.meta["val"].device.type != DEVICE:
                continue
            shared_key, shared_value = _before_repetition(key), _before_repetition(value)
            if shared_key is None or shared_value is None:
                continue
            if not same_shape(shared_key.meta["val"].shape[:-1], shared_value.meta["val"].shape[:-1]):
                continue
            node.args = (query, shared_key, shared_value, *rest)
            changed += 1
    if changed:
        graph.eliminate_dead_code()
    return changed


def join_heads(node: Node) -> Callable[[], None] | None:
    """Make queries of one head of those that share keys, if `node` is attention of one query for each; in place.

    Returns:
        A function that undoes it as long as nothing else in the graph was changed, or None where nothing was done.
    """
    if node.target not in ATTENTION or by_name(node)["query"].meta["val"].device.type != DEVICE:
        return None
    return _joined(node)


def _joined(node: Node) -> Callable[[], None] | None:
    """Join the heads of one call, if it can be done; how to undo it."""
    given = by_name(node)
    query, key, value = (given[name] for name in ("query", "key", "value"))
    key, value = (_before_repetition(side, any_place=True) or side for side in (key, value))
    heads, queries, width = query.meta["val"].shape[1:]
    shared = key.meta["val"].shape[1]
    outputs = list(node.users)
    if not same(queries, 1) or not all(isinstance(size, int) for size in (heads, width, shared)):
        return None
    if (
        not 0 < shared < heads <= FEW_QUERIES * shared
        or heads % shared
        or not same_shape(key.meta["val"].shape[:2], value.meta["val"].shape[:2])
    ):
        return None
    if given.get("is_causal") or given.get("dropout_p") or len(outputs) != 1 or outputs[0].target is not operator.getitem:
        return None
    output = outputs[0]
    if output.args[1] != 0 or not is_dense(output.meta["val"].stride(), output.meta["val"].shape, range(4)):
        return None
    mask = given.get("attn_bias")
    if mask is not None and mask.target is aten.expand.default:
        (mask,) = mask.all_input_nodes[:1]
    if mask is not None and not (mask.meta["val"].ndim == 4 and same_shape(mask.meta["val"].shape[1:3], (1, 1))):
        return None
    graph, before = node.graph, (node.args, node.kwargs, node.meta["val"], output.meta["val"])
    fake = query.meta["val"].new_empty(())
    changes = {"key": key, "value": value}
    with graph.inserting_before(node):
        changes["query"] = together = _call(graph, aten.view.default, query, [-1, shared, heads // shared, width])
        if mask is not None:
            changes["attn_bias"] = _call(graph, aten.expand.default, mask, [-1, -1, heads // shared, -1])
    set_arguments(node, given | changes)
    shape = (*together.meta["val"].shape[:3], value.meta["val"].shape[-1])
    output.meta["val"] = fake.new_empty(shape)
    node.meta["val"] = (output.meta["val"], *before[2][1:])
    users = list(output.users)
    with graph.inserting_after(output):
        apart = _call(graph, aten.view.default, output, [-1, heads, 1, shape[-1]])
    for user in users:
        user.replace_input_with(output, apart)

    def undo() -> None:
        node.args, node.kwargs, node.meta["val"], output.meta["val"] = before
        apart.replace_all_uses_with(output)
        for added in (apart, together, *([changes["attn_bias"]] if mask is not None else [])):
            graph.erase_node(added)

    return undo


def _call(graph: Graph, target: torch._ops.OpOverload, source: Node, sizes: list[int]) -> Node:
    node = graph.call_function(target, (source, sizes))
    node.meta["val"] = target(source.meta["val"], sizes)
    return node


def _before_repetition(node: Node, *, any_place: bool = False) -> Node | None:
    """The tensor [batch, heads, length, width] that `node` repeats for each head of a group, if that is all it does.

    `any_place`: whether it may lie anywhere, or where those kernels can read it.
    """
    repeated = tuple(node.meta["val"].shape)
    if node.target not in RESHAPES or len(repeated) != 4:
        return None
    (node,) = node.all_input_nodes[:1]
    while node.target is aten.clone.default:
        (node,) = node.all_input_nodes
    if node.target is not aten.expand.default:
        return None
    expanded = tuple(node.meta["val"].shape)
    (node,) = node.all_input_nodes[:1]
    if node.target is not aten.unsqueeze.default or len(expanded) != 5 or arguments(node)[1] % 5 != 2:
        return None
    (node,) = node.all_input_nodes
    shape = tuple(node.meta["val"].shape)
    if not same_shape((*expanded[:2], *expanded[3:]), shape) or not (any_place or _readable(node.meta["val"])):
        return None
    if not same_shape(repeated, (shape[0], shape[1] * expanded[2], *shape[2:])):
        return None
    return node


def _readable(value: torch.Tensor) -> bool:
    """Whether the kernels, which load vectors, can read a tensor as it lies: certain from its strides and its place in memory."""
    moves = (value.storage_offset(), *value.stride()[:-1])
    aligned = all(statically_known_true(move * value.element_size() % _ALIGNMENT == 0) for move in moves)
    return aligned and statically_known_true(value.stride(-1) == 1)
