"""Attention without the masks that it does not need: a mask that a graph computes is recognised as causal, or as hiding nothing.

Models that are traced build their causal mask from ranges and give it to scaled dot-product attention, whose kernels then read
it, compute every score, and throw half of them away. With `is_causal` they skip that half. What the mask's elements are is
proved (elements.py), so any way to write it will do, and sizes may be symbolic.

A masked score of NaN makes its whole row NaN where the mask is added, and is never computed where `is_causal` says so. Eager
models say so, since only tracing keeps them from it.
"""

import sympy
import torch
from torch.fx import Graph, Node

from postlude.capture.elements import TRUE, Choice, Element, Elements, Index, Truth, Unknown, negated, size
from postlude.capture.gemm import by_name, set_arguments
from postlude.capture.sizes import same, same_shape

aten = torch.ops.aten

#: Attention ops that take a mask, and where their kernels can leave out scores. (On a CPU attention is a Region.)
MASKED = (
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
)

#: Of backward ops that say so: which gradients are asked for, the mask's as the last.
_NO_GRADIENT = [False] * 4

#: Adding this or less hides a score: for minus infinity models write the least number of a type, and PyTorch gives cuDNN -65536.
_HIDDEN = torch.finfo(torch.float16).min


def drop_masks(graph: Graph) -> int:
    """Let attention do without masks that say what it can be told; returns how many calls were changed, in place."""
    changed = 0
    proved: dict[Node, str | None] = {}
    for target in MASKED:
        for node in graph.find_nodes(op="call_function", target=target):
            given = by_name(node)
            mask = given.get("attn_bias")
            if not isinstance(mask, Node) or given.get("is_causal") or given.get("grad_input_mask", _NO_GRADIENT)[3]:
                continue
            if mask not in proved:
                proved[mask] = meaning(mask)
            lengths = [given[name].meta["val"].shape[2] for name in ("query", "key")]
            square = same(*lengths) and same_shape(mask.meta["val"].shape[-2:], lengths)
            if proved[mask] is None or (proved[mask] == "causal" and not square) or mask.meta["val"].dtype == torch.bool:
                continue
            set_arguments(node, given | {"attn_bias": None, "is_causal": proved[mask] == "causal"})
            changed += 1
    if changed:
        graph.eliminate_dead_code()
    return changed


def meaning(mask: Node) -> str | None:
    """What a mask ``[..., queries, keys]`` means: "causal" (query i sees keys up to i), "all" (every key), or None, not known."""
    shape = tuple(map(size, mask.meta["val"].shape))
    if len(shape) < 2:
        return None

    def seen(elements: Elements, index: Index) -> str | None:
        at = tuple(sympy.Integer(0) if length == 1 else one for one, length in zip(index, shape, strict=True))
        element = elements(mask, at)
        causal = elements.atleast0(index[-2] - index[-1])
        return _meaning(element, causal)

    try:
        found = set(Elements({}).cases(seen, shape))
    except Unknown:
        return None
    # Where a case sees every key, that may be what causality allows there too.
    found.discard("both")
    if not found:
        return "all"
    return found.pop() if len(found) == 1 else None


def _meaning(element: Element, causal: Truth) -> str | None:
    visible = _visible(element)
    if visible == TRUE:
        return "both" if causal == TRUE else "all"
    return "causal" if visible == causal else None


def _visible(element: Element) -> Truth | None:
    """When a score is not hidden, if it is not changed otherwise."""
    if isinstance(element, Truth):
        return element
    if isinstance(element, Choice):
        if not (element.yes.is_number and element.no.is_number):
            return None
        if element.yes == 0 and element.no <= _HIDDEN:
            return element.condition
        return negated(element.condition) if element.no == 0 and element.yes <= _HIDDEN else None
    return TRUE if element == 0 else None
