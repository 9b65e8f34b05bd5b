"""Recognises the matrix multiplications of an ATen graph and what their operands really are.

A GEMM node is described by where its left and right operands live, looking through transposes, and through the reshapes,
expands and copies that stand between attention's 4-D tensors and `bmm`. So a Region reads a Parameter itself, never a
transposed view of it, and heads where they lie.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from postlude.capture.sizes import Size, is_dense, same_rows, same_shape

aten = torch.ops.aten

#: Types of the arithmetic by storage type of a contraction's operands.
ACCUMULATE = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float64: torch.float64,
}


#: Most queries of a head, or of heads that share keys, that attention on a GPU is a Region for.
FEW_QUERIES = 16


@dataclass(frozen=True)
class Side:
    """One side of a contraction: the node to read and the order of its last two dimensions.

    `transposed` means [k, m] for a left side and [n, k] for a right side.
    """

    node: Node
    transposed: bool

    @property
    def shape(self) -> tuple[Size, ...]:
        """Shape of the node's tensor."""
        return tuple(self.node.meta["val"].shape)


@dataclass(frozen=True)
class Gemm:
    """A matrix multiplication ``alpha * left @ right + beta * bias`` (or attention's pair of them).

    Attributes:
        node: the graph's node.
        left, right: the sides.
        batched: whether leading dimensions are a batch.
        bias: what is added, or None.
        alpha, beta: factors; `bias` is None where beta is 0.
        attention: for scaled dot-product attention, what else it takes.
    """

    node: Node
    left: Side
    right: Side
    batched: bool
    bias: Node | None = None
    alpha: float = 1.0
    beta: float = 1.0
    attention: "Attention | None" = None


@dataclass(frozen=True)
class Attention:
    """The rest of softmax(scale * q k^T + mask) v."""

    value: Side
    mask: Node | None
    scale: float


class NotAGemm(Exception):
    """A matrix multiplication that Postlude leaves alone; the message says why."""


def recognize(node: Node) -> Gemm | None:
    """Describe `node` if it is a matrix multiplication.

    Raises:
        NotAGemm: it is one, but not one that a Region can hold.
    """
    rule = _RULES.get(node.target) if node.op == "call_function" else None
    if rule is None:
        return None
    tensors = [a for a in node.all_input_nodes if isinstance(a.meta.get("val"), torch.Tensor)]
    for source in tensors:
        _check(source)
    gemm = rule(node)
    if gemm is None:
        return None
    if gemm.left.node.meta["val"].dtype != gemm.right.node.meta["val"].dtype:
        raise NotAGemm("its operands have different types")
    if gemm.left.node.meta["val"].dtype not in ACCUMULATE:
        raise NotAGemm(f"no kernel multiplies {gemm.left.node.meta['val'].dtype}")
    if _result_dtype(node) not in (gemm.left.node.meta["val"].dtype, ACCUMULATE[gemm.left.node.meta["val"].dtype]):
        raise NotAGemm("its result has another type than its operands")
    return gemm


def is_gemm(node: Node) -> bool:
    """Whether `node` is a matrix multiplication of any kind that is looked at, or a Region already."""
    return node.op == "call_function" and (node.target in _RULES or getattr(node.target, "namespace", "") == "postlude")


def _result_dtype(node: Node) -> torch.dtype:
    value = node.meta["val"]
    dtype: torch.dtype = (value[0] if isinstance(value, tuple | list) else value).dtype
    return dtype


def _check(source: Node) -> None:
    value = source.meta["val"]
    if value.layout != torch.strided or value.is_quantized:
        raise NotAGemm(f"{source.name} is not a plain strided tensor")
    if value.is_complex():
        raise NotAGemm(f"{source.name} is complex")


def side_2d(node: Node) -> Side:
    """A 2-D side, through a transpose."""
    source = _through_copies(node)
    if source.target is aten.permute.default and list(arguments(source)[1]) == [1, 0]:
        return Side(_argument(source, 0), True)
    if source.target is aten.t.default:
        return Side(_argument(source, 0), True)
    if source.target is aten.transpose.int and {dim % 2 for dim in arguments(source)[1:]} == {0, 1}:
        return Side(_argument(source, 0), True)
    return Side(source, False)


def left_2d(node: Node) -> Side:
    """A 2-D left side, through a reshape that only flattens rows of a dense tensor."""
    side = side_2d(node)
    source = side.node
    if not side.transposed and source.target in RESHAPES:
        inner = _argument(source, 0)
        value = inner.meta["val"]
        dense = is_dense(value.stride(), value.shape, range(value.ndim))
        if value.ndim >= 2 and same_rows(value.shape, side.shape) and dense:
            return Side(inner, False)
    return side


def side_batched(node: Node) -> Side:
    """A side of bmm, as the tensor with its own batch dimensions where reshapes and copies hide one."""
    source = _through_copies(node)
    if source.target in RESHAPES:
        inner = _through_copies(_argument(source, 0))
        shape, flat = inner.meta["val"].shape, source.meta["val"].shape
        if len(shape) > 3 and same_shape(shape[-2:], flat[-2:]) and same_rows(shape, flat):
            source = inner
    ndim = source.meta["val"].ndim
    swap = [*range(ndim - 2), ndim - 1, ndim - 2]
    if source.target is aten.permute.default and [dim % ndim for dim in arguments(source)[1]] == swap:
        return Side(_argument(source, 0), True)
    if source.target is aten.transpose.int and {dim % ndim for dim in arguments(source)[1:]} == {ndim - 1, ndim - 2}:
        return Side(_argument(source, 0), True)
    return Side(source, False)


def batch_of(side: Side) -> tuple[Size, ...]:
    """Sizes of the batch dimensions."""
    return side.shape[:-2]


def rows_and_contracted(left: Side) -> tuple[tuple[Size, ...], Size]:
    """Sizes of the rows of a left side that is no batch, and of the axis that is contracted."""
    return (left.shape[-1:], left.shape[0]) if left.transposed else (left.shape[:-1], left.shape[-1])


RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


def arguments(node: Node) -> tuple[Any, ...]:
    """The positional arguments, which FX types too widely to be of use."""
    return node.args


def by_name(node: Node) -> dict[str, Any]:
    """The arguments that are given, by their names in the op's schema."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def set_arguments(node: Node, given: dict[str, Any]) -> None:
    """Give a node other arguments: by position as far as they go, with the schema's defaults in the gaps."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    last = max(index for index, one in enumerate(arguments) if one.name in given and not one.kwarg_only)
    node.args = tuple(given.get(one.name, one.default_value) for one in arguments[: last + 1])
    node.kwargs = {one.name: given[one.name] for one in arguments if one.kwarg_only and one.name in given}


def _argument(node: Node, index: int) -> Node:
    argument = node.args[index]
    assert isinstance(argument, Node)
    return argument


def _through_copies(node: Node) -> Node:
    """Kernels read any strides, so a copy that only makes a tensor dense is not needed."""
    while node.target is aten.clone.default:
        node = _argument(node, 0)
    return node


def _mm(node: Node) -> Gemm:
    return Gemm(node, left_2d(_argument(node, 0)), side_2d(_argument(node, 1)), False)


def _addmm(node: Node) -> Gemm:
    return _scaled(node, left_2d(_argument(node, 1)), side_2d(_argument(node, 2)), False)


def _bmm(node: Node) -> Gemm:
    left, right = _batched_sides(_argument(node, 0), _argument(node, 1))
    return Gemm(node, left, right, True)


def _baddbmm(node: Node) -> Gemm:
    left, right = _batched_sides(_argument(node, 1), _argument(node, 2))
    return _scaled(node, left, right, True)


def _linear(node: Node) -> Gemm:
    x, weight = _argument(node, 0), _argument(node, 1)
    if x.meta["val"].ndim < 2 or weight.meta["val"].ndim != 2:
        raise NotAGemm("linear of a vector")
    bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    return Gemm(node, Side(x, False), Side(weight, True), False, bias if isinstance(bias, Node) else None)


def _batched_sides(left: Node, right: Node) -> tuple[Side, Side]:
    sides = side_batched(left), side_batched(right)
    if not same_shape(batch_of(sides[0]), batch_of(sides[1])):
        sides = Side(left, False), Side(right, False)
    return sides


def _scaled(node: Node, left: Side, right: Side, batched: bool) -> Gemm:
    alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
    if not isinstance(alpha, int | float) or not isinstance(beta, int | float):
        raise NotAGemm("alpha or beta is symbolic")
    if alpha == 0:
        raise NotAGemm("alpha is 0: the product is not computed, so its NaNs don't count")
    # beta = 0 means that the bias is not read: a NaN in it does not count.
    bias = _argument(node, 0) if beta != 0 else None
    return Gemm(node, left, right, batched, bias, float(alpha), float(beta))


def _attention(node: Node) -> Gemm:
    given = by_name(node)
    query, key, value = (_through_copies(given[name]) for name in ("query", "key", "value"))
    mask, scale = given.get("attn_mask", given.get("attn_bias")), given.get("scale")
    if given.get("dropout_p", 0.0) != 0.0:
        raise NotAGemm("attention with dropout")
    if given.get("is_causal", False):
        raise NotAGemm("causal attention without a mask: half of its scores are never needed")
    width = query.meta["val"].shape[-1]
    if scale is None and isinstance(width, int):
        scale = width**-0.5
    if not isinstance(scale, int | float):
        raise NotAGemm("attention's scale is symbolic")
    left, right, values = Side(query, False), Side(key, True), Side(value, False)
    if not (same_shape(batch_of(left), batch_of(right)) and same_shape(batch_of(left), batch_of(values))):
        raise NotAGemm("attention whose queries and keys have different batches")
    if values.node.meta["val"].dtype != query.meta["val"].dtype:
        raise NotAGemm("its operands have different types")
    return Gemm(
        node,
        left,
        right,
        True,
        attention=Attention(values, mask if isinstance(mask, Node) else None, float(scale)),
    )


def _attention_of_few(node: Node) -> Gemm | None:
    """On a GPU: one new token, against a cache. Of many queries PyTorch's own kernels take care."""
    queries = by_name(node)["query"].meta["val"].shape[2]
    only_output = all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)
    return _attention(node) if isinstance(queries, int) and queries <= FEW_QUERIES and only_output else None


_RULES: dict[object, Callable[[Node], Gemm | None]] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten.baddbmm.default: _baddbmm,
    aten.linear.default: _linear,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention.default: _attention_of_few,
    aten._scaled_dot_product_cudnn_attention.default: _attention_of_few,
    aten._scaled_dot_product_efficient_attention.default: _attention_of_few,
}
