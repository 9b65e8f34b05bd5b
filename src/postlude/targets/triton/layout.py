"""How tensors lie in memory, as kernels see it: one stride along each axis, or two where one is not enough.

An axis of rows or of the batch can stand for several dimensions of a tensor. Mostly they lie so that one stride describes
them. Attention's heads, permuted, do not: their batch is (inner size, outer stride, step).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

Dimensions = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Extension:
    """One axis of a tensor. Position i lies at ``i // inner * outer + i % inner * step``, or ``i * step`` where inner is 0."""

    step: int
    inner: int = 0
    outer: int = 0


def extensions(
    axes: Sequence[str], shape: Sequence[int], strides: Sequence[int], rows: Sequence[str], m: int
) -> dict[str, Extension] | None:
    """The extension of each axis of a tensor, or None if the kernels can't read it as it lies.

    Args:
        axes: names of the trailing dimensions; an axis of rows in front stands for all leading dimensions.
        shape: the tensor's.
        strides: the tensor's, in elements.
        rows: the Region's axes of rows, ``("m",)`` or ``("b", "m")``.
        m: size of `m`.
    """
    dimensions = tuple(zip(shape, strides, strict=True))
    if not axes:
        return {}
    if tuple(axes[: len(rows)]) == tuple(rows):
        leading, named = dimensions[: len(shape) - len(axes) + len(rows)], axes[len(rows) :]
        parts = {"m": leading} if len(rows) == 1 else _cut(leading, m)
    elif axes[0] in rows:
        leading, named = dimensions[: len(shape) - len(axes) + 1], axes[1:]
        parts = {axes[0]: leading}
    else:
        leading, named, parts = (), axes, {}
    if parts is None:
        return None
    found = {axis: _extension(part) for axis, part in parts.items()}
    for axis, (size, stride) in zip(named, dimensions[len(leading) :], strict=True):
        found[axis] = Extension(stride if size > 1 else 1)
    return None if None in found.values() else found  # type: ignore[return-value]


def reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements of memory a tensor spans."""
    return 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _cut(dimensions: Dimensions, m: int) -> dict[str, Dimensions] | None:
    """Leading dimensions as those of the batch and those of the rows, of which there are m; None where the cut is no grid."""
    inner: list[tuple[int, int]] = []
    outer = list(dimensions)
    missing = m
    while missing > 1 and outer:
        size, stride = outer.pop()
        if size > missing and size % missing == 0:
            outer.append((size // missing, stride * missing))
            size = missing
        if size == 0 or missing % size:
            return None
        inner.insert(0, (size, stride))
        missing //= size
    return {"b": tuple(outer), "m": tuple(inner)} if missing == 1 or prod(size for size, _ in dimensions) == 0 else None


def _extension(dimensions: Dimensions) -> Extension | None:
    """Several dimensions, outermost first, as one axis; None if it takes more than two strides."""
    merged: list[tuple[int, int]] = []
    for size, stride in dimensions:
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    if len(merged) > 2:
        return None
    if len(merged) == 2:
        return Extension(merged[1][1], merged[1][0], merged[0][1])
    return Extension(merged[0][1] if merged else 0)
