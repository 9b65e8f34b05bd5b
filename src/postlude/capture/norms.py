"""Deferred RMSNorm: RMSNorm(h) W = rstd * ((h * g) W), so that the norm's kernel between two products disappears.

The Region that computes h gives h * g and the rows' rstd as well; the products that read the norm read h * g, and their epilogues
multiply by rstd. This is a rewrite of the graph before its GEMMs are grown. It is done where nothing but products reads the norm,
and where dry runs of capture show that all of them, and the GEMM before, become Regions with it: else the norm would be rounded
once more than in eager.

h * g is stored in the type of h, as the norm was, with one rounding instead of up to three. It needs the range of bfloat16: in
float16 rows that the norm would have scaled down may have no place. Where squares overflow in float32, rstd is 0 and so is the
norm of finite rows. Then the products must not overflow, or their rows would be NaN: h * g is stored smaller by a power of two.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from postlude.capture.forms import IMPLICIT, LOW, depends_on
from postlude.capture.gemm import RESHAPES, Gemm, NotAGemm, arguments, is_gemm, recognize
from postlude.capture.grow import Growth
from postlude.capture.reach import reach_of
from postlude.capture.sizes import same, same_rows
from postlude.capture.translate import CASTS, ELEMENTWISE

aten = torch.ops.aten
prims = torch.ops.prims

#: Key in the `meta` of a node that is one value per row, by which products that follow are multiplied.
DEFERRED = "postlude_deferred"

#: What h * g is multiplied by. Products of 2^16 terms of the size of h can't overflow; of rows below 1e-33 digits get lost.
_SCALE = 2.0**-16

#: Fewer rows than this are not worth a reduction that is spread over tiles: their kernels compute a norm by themselves.
_LEAST_ROWS = 65

#: Most nodes between a product and the norm's input, and between that and the product before.
_MOST_NODES = 16

#: Grows a GEMM without changing the graph; None where it becomes no Region.
Trial = Callable[[Node], Growth | None]


@dataclass(frozen=True)
class Norm:
    """An RMSNorm between products.

    Attributes:
        node: what the products read, in the shape of `stream`.
        stream: h, of a 16-bit type.
        rstd: one value per row, float32.
        weights: g, and whatever else each column is multiplied by.
        consumers: the products.
    """

    node: Node
    stream: Node
    rstd: Node
    weights: tuple[Node, ...]
    consumers: tuple[Node, ...]


class Kept(Exception):
    """A norm that stays as it is; the message says why."""


def defer(graph: Graph, trial: Trial) -> dict[Node, str]:
    """Rewrite the norms for which that is possible, in place; for products that read another norm, why it stays.

    Args:
        graph: the graph.
        trial: tells what would become of a GEMM of a rewritten copy of the graph.
    """
    norms, kept = find(graph)
    while norms:
        copy, copies = _copied(graph)
        refused = {}
        rewritten = [(norm, _rewrite(_translated(norm, copies))) for norm in norms]
        copy.eliminate_dead_code()
        for norm, new in rewritten:
            if (reason := _refusal(new, trial)) is not None:
                refused[norm] = reason
        kept |= {consumer: reason for norm, reason in refused.items() for consumer in norm.consumers}
        norms = [norm for norm in norms if norm not in refused]
        if not refused:
            break
    for norm in norms:
        _rewrite(norm)
    graph.eliminate_dead_code()
    return kept


def find(graph: Graph) -> tuple[list[Norm], dict[Node, str]]:
    """The norms that may be deferred, and for products that read another norm, why not."""
    found: dict[Node, Norm] = {}
    kept: dict[Node, str] = {}
    for node in graph.nodes:
        try:
            gemm = recognize(node)
        except NotAGemm:
            continue
        if gemm is None or gemm.batched or gemm.attention or gemm.left.transposed:
            continue
        if not reach_of(gemm.left.node.meta["val"].device.type).deferred:
            continue
        top = _behind_views(gemm.left.node)
        try:
            if top not in found and (norm := _norm(top)) is not None:
                found[top] = norm
        except Kept as reason:
            kept[node] = str(reason)
    return list(found.values()), kept


def _norm(node: Node) -> Norm | None:
    """The norm that a node is, or None if it is none.

    Raises:
        Kept: it is one that can't be deferred.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.ndim < 2 or node.op != "call_function":
        return None
    rstd = _column_factor(node)
    stream = _stream_of(rstd) if rstd is not None else None
    if rstd is None or stream is None:
        return None
    weights = _weights(node, stream, rstd)
    if weights is None:
        return None
    if value.dtype != torch.bfloat16 or stream.meta["val"].dtype != value.dtype:
        raise Kept(f"{node.name} is a norm of a type without the range to hold its input times its weight")
    if not all(isinstance(size, int) for size in value.shape):
        raise Kept(f"{node.name} is a norm of rows whose number may be small")
    if prod(value.shape[:-1]) < _LEAST_ROWS:
        raise Kept(f"{node.name} is a norm of few rows")
    consumers = _consumers(node)
    if not consumers:
        raise Kept(f"{node.name} is a norm that more than products read")
    return Norm(node, stream, rstd, weights, consumers)


def _column_factor(node: Node) -> Node | None:
    """The value per row that a product of factors has; the first one on the way."""
    stack, seen = [node], 0
    while stack and seen < _MOST_NODES:
        current, seen = stack.pop(), seen + 1
        value = current.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        if value.ndim >= 2 and same(value.shape[-1], 1):
            return current
        if current.target is aten.mul.Tensor or current.target in CASTS:
            stack.extend(current.all_input_nodes)
    return None


def _stream_of(rstd: Node) -> Node | None:
    """h, where `rstd` is rsqrt(mean(h h) + eps) with a positive eps."""
    if rstd.target is not aten.rsqrt.default or rstd.meta["val"].dtype != torch.float32:
        return None
    total = arguments(rstd)[0]
    if total.target not in (aten.add.Tensor, aten.add.Scalar) or not isinstance(total.args[1], int | float) or total.kwargs:
        return None
    mean = arguments(total)[0]
    if not (isinstance(mean, Node) and mean.target is aten.mean.dim and total.args[1] > 0):
        return None
    squares, dims = arguments(mean)[:2]
    last = squares.meta["val"].ndim - 1
    if [dim % (last + 1) for dim in dims] != [last] or not (len(mean.args) > 2 and mean.args[2]) or mean.kwargs.get("dtype"):
        return None
    by_power = squares.target is aten.pow.Tensor_Scalar and squares.args[1] == 2
    by_product = squares.target is aten.mul.Tensor and squares.args[0] is squares.args[1]
    return _behind_casts(squares.args[0]) if by_power or by_product else None


def _weights(node: Node, stream: Node, rstd: Node) -> tuple[Node, ...] | None:
    """What each column is multiplied by, if `node` is the product of that, the stream and `rstd`, each once; else None."""
    weights: list[Node] = []
    found: list[Node] = []
    inner: dict[Node, None] = {}
    width = stream.meta["val"].shape[-1]
    stack = [node]
    while stack:
        current = stack.pop()
        value = current.meta.get("val")
        if not isinstance(value, torch.Tensor) or len(inner) > _MOST_NODES:
            return None
        if current in (stream, rstd):
            found.append(current)
        elif same(prod(value.shape), width) and same(value.shape[-1], width):
            weights.append(current)
        elif current.target is aten.mul.Tensor and all(isinstance(argument, Node) for argument in current.args):
            inner[current] = None
            stack.extend(arguments(current))
        elif current.target in CASTS and value.dtype in (*LOW, torch.float32):
            inner[current] = None
            stack.append(arguments(current)[0])
        else:
            return None
    if len(found) != 2 or set(found) != {stream, rstd}:
        return None
    normed = [n for n in inner if n is not node and depends_on([n], {rstd})]
    return tuple(weights) if all(user in inner for n in normed for user in n.users) else None


def _consumers(node: Node) -> tuple[Node, ...]:
    """The products that read a node, perhaps in another shape, as their left side; nothing if something else reads it."""
    found: dict[Node, None] = {}
    stack = list(node.users)
    while stack:
        user = stack.pop()
        if user.target in RESHAPES and same_rows(user.meta["val"].shape, node.meta["val"].shape):
            stack.extend(user.users)
            continue
        gemm = _plain(user)
        if gemm is None or _behind_views(gemm.left.node) is not node or _behind_views(gemm.right.node) is node:
            return ()
        found[user] = None
    return tuple(found)


def _plain(node: Node) -> Gemm | None:
    try:
        gemm = recognize(node)
    except NotAGemm:
        return None
    plain = gemm and not gemm.batched and not gemm.attention and not gemm.left.transposed and gemm.alpha == gemm.beta == 1
    return gemm if plain and node.target in (aten.mm.default, aten.addmm.default) else None


@dataclass(frozen=True)
class _Rewritten:
    """What a deferred norm consists of: nodes of the GEMM before, and of the products behind."""

    weighted: Node
    rstd: Node
    products: tuple[tuple[Node, Node], ...]


def _rewrite(norm: Norm) -> _Rewritten:
    """Put the deferred form into the graph; the norm's own nodes are dead then."""
    graph, stream, rstd = norm.node.graph, norm.stream, norm.rstd
    dtype, rows = stream.meta["val"].dtype, list(stream.meta["val"].shape)
    with graph.inserting_before(norm.node):
        weighted = _call(graph, prims.convert_element_type.default, stream, torch.float32)
        for weight in (_SCALE, *norm.weights):
            weighted = _call(graph, aten.mul.Tensor, weighted, weight)
        weighted = _call(graph, prims.convert_element_type.default, weighted, dtype)
        factor = _call(graph, aten.mul.Tensor, rstd, 1 / _SCALE)
        factor.meta[DEFERRED] = True
        flat = _call(graph, aten.reshape.default, weighted, [prod(rows[:-1]), rows[-1]])
        column = _call(graph, aten.reshape.default, factor, [prod(rows[:-1]), 1])
    products = []
    for old in norm.consumers:
        gemm = recognize(old)
        assert gemm is not None
        with graph.inserting_before(old):
            product = _call(graph, aten.mm.default, flat, arguments(old)[-1])
            product.meta = {**old.meta, "val": product.meta["val"]}
            scaled = _call(graph, prims.convert_element_type.default, product, torch.float32)
            scaled = _call(graph, aten.mul.Tensor, scaled, column)
            if gemm.bias is not None:
                scaled = _call(graph, aten.add.Tensor, scaled, gemm.bias)
            scaled = _call(graph, prims.convert_element_type.default, scaled, old.meta["val"].dtype)
            scaled.meta[IMPLICIT] = True
        old.replace_all_uses_with(scaled)
        graph.erase_node(old)
        products.append((product, scaled))
    return _Rewritten(weighted, factor, tuple(products))


def _refusal(new: _Rewritten, trial: Trial) -> str | None:
    """Why a deferred norm does not become part of Regions on both sides, or None."""
    before = [node for node in _gemms_behind(new.weighted) if (growth := trial(node)) and _has(growth, new.weighted, new.rstd)]
    if not before:
        return "a norm whose sums no kernel of the product before computes for less"
    done: set[Node] = set()
    for product, scaled in new.products:
        if scaled in done:
            continue
        growth = trial(product)
        if growth is None or scaled not in growth.values:
            return "a norm that one of the products behind it could not be multiplied by"
        done |= set(growth.values)
    return None


def _has(growth: Growth, *nodes: Node) -> bool:
    return all(node in growth.values for node in nodes)


def _gemms_behind(node: Node) -> list[Node]:
    """The products that a node is computed from elementwise."""
    found: list[Node] = []
    stack: list[Node] = [node]
    seen: set[Node] = set()
    while stack and len(seen) < 2 * _MOST_NODES:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        if is_gemm(current):
            found.append(current)
        elif current.target in (*CASTS, *RESHAPES) or current.target in ELEMENTWISE:
            stack.extend(current.all_input_nodes)
    return sorted(found)


def _behind_views(node: Node) -> Node:
    while node.target in RESHAPES and same_rows(node.meta["val"].shape, arguments(node)[0].meta["val"].shape):
        node = arguments(node)[0]
    return node


def _behind_casts(node: Any) -> Node | None:
    while isinstance(node, Node) and node.target in CASTS:
        node = arguments(node)[0]
    return node if isinstance(node, Node) else None


def _copied(graph: Graph) -> tuple[Graph, dict[Node, Node]]:
    copy, copies = Graph(), dict[Node, Node]()
    copy.output(copy.graph_copy(graph, copies))
    return copy, copies


def _translated(norm: Norm, copies: dict[Node, Node]) -> Norm:
    def of(nodes: Sequence[Node]) -> tuple[Node, ...]:
        return tuple(copies[node] for node in nodes)

    return replace(
        norm,
        node=copies[norm.node],
        stream=copies[norm.stream],
        rstd=copies[norm.rstd],
        weights=of(norm.weights),
        consumers=of(norm.consumers),
    )


def _call(graph: Graph, target: Any, *given: Any) -> Node:
    node = graph.call_function(target, given)
    node.meta["val"] = target(*torch.fx.node.map_arg(given, lambda n: n.meta["val"]))
    return node
