"""What is known for certain about sizes, symbolic or not, and how a tensor broadcasts against another."""

from collections.abc import Sequence
from enum import Enum
from math import prod
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

Size = int | torch.SymInt


class Kind(Enum):
    """How a tensor depends on rows and columns."""

    SCALAR = "scalar"
    ROW = "row"
    COLUMN = "column"
    TILE = "tile"


def hint(size: Any) -> int:
    """A plain int for a size: itself, or the value it had in the example."""
    if isinstance(size, int):
        return size
    value = getattr(size.node, "hint", None)
    return int(value) if value is not None else 64


def same(a: Size, b: Size) -> bool:
    """Whether two sizes are equal for every value that their symbols can take."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return statically_known_true(a == b)


def same_shape(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Whether two shapes are equal for certain."""
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def broadcast_kind(shape: Sequence[Size], target: Sequence[Size]) -> Kind | None:
    """How a tensor of `shape` broadcasts to a tile of shape `target` ``[*rows, n]``.

    Returns None where that is not known for certain, or where the tensor would widen the target.
    """
    if len(shape) > len(target):
        return None
    padded = [1] * (len(target) - len(shape)) + list(shape)
    fits = [same(own, wanted) for own, wanted in zip(padded, target, strict=True)]
    ones = [same(own, 1) for own in padded]
    if not all(fit or one for fit, one in zip(fits, ones, strict=True)):
        return None
    by_column = fits[-1] and not ones[-1]
    by_row = any(not one for one in ones[:-1])
    return {
        (False, False): Kind.SCALAR,
        (False, True): Kind.ROW,
        (True, False): Kind.COLUMN,
        (True, True): Kind.TILE,
    }[by_row, by_column]


def is_dense(strides: Sequence[Size], shape: Sequence[Size], order: Sequence[int]) -> bool:
    """Whether the strides are those of a dense tensor with its dimensions in `order`; sizes of 1 may have any stride."""
    step: Any = 1
    exact: Any = 1
    for dim in reversed(order):
        # A size of 0 counts as 1. A symbolic one need not: a tensor without elements is dense whatever its strides.
        if not same(shape[dim], 1) and not same(strides[dim], step) and not same(strides[dim], exact):
            return False
        step = step * torch.sym_max(shape[dim], 1)
        exact = exact * shape[dim]
    return True


def same_rows(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Whether two shapes of the same elements have the same last dimension and so, in row-major order, the same rows."""
    if not a or not b or not same(a[-1], b[-1]):
        return False
    # With no columns, the number of elements says nothing about the rows.
    return statically_known_true(a[-1] != 0) or same(prod(a[:-1]), prod(b[:-1]))
