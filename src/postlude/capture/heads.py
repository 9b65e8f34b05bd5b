"""Grouped-query attention without copies: attention on a GPU reads keys and values that several heads share as they lie.

Models repeat shared keys and values for every head before they call scaled dot-product attention, because that call takes
equal numbers of heads everywhere. In the graph that is unsqueeze, expand, clone, view: a copy as large as all heads. The
kernels behind the call (FlashAttention, cuDNN) take fewer heads of keys and values than of queries themselves, with head h of the
queries reading head h // (heads of queries / heads of keys), which is what the repetition means.
"""

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from postlude.capture.gemm import RESHAPES, arguments
from postlude.capture.sizes import same_shape

aten = torch.ops.aten

#: Attention ops whose kernels take grouped heads.
GROUPED = (aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_cudnn_attention.default)

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


def _before_repetition(node: Node) -> Node | None:
    """The tensor [batch, heads, length, width] that `node` repeats for each head of a group, if that is all it does."""
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
    if not same_shape((*expanded[:2], *expanded[3:]), shape) or not _readable(node.meta["val"]):
        return None
    if not same_shape(repeated, (shape[0], shape[1] * expanded[2], *shape[2:])):
        return None
    return node


def _readable(value: torch.Tensor) -> bool:
    """Whether the kernels, which load vectors, can read a tensor as it lies: certain from its strides and its place in memory."""
    moves = (value.storage_offset(), *value.stride()[:-1])
    aligned = all(statically_known_true(move * value.element_size() % _ALIGNMENT == 0) for move in moves)
    return aligned and statically_known_true(value.stride(-1) == 1)
