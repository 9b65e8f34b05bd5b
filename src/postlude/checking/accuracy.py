"""How far a tensor is from its reference, and how far it may be: the numerics contract of docs/design.md."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

#: An error may be this many times eager's own on the same values: two roundings of one sum differ by chance that much.
FACTOR = 1.5
#: And so many units in the last place, relative to the whole tensor: eager may hit the exact value by luck.
ULPS = 4
#: Tensors of fewer elements say little about eager's error; the largest of the run stands for theirs.
FEW = 64

_CHUNK = 1 << 24


@dataclass(frozen=True)
class Error:
    """Distance from the reference.

    Attributes:
        relative: in the Frobenius norm, over the elements that are finite on both sides. For integers and truth values: the
            fraction of elements that differ.
        largest: of the absolute differences.
        astray: elements that are NaN or infinite where the reference is not, or is otherwise, and the reverse.
    """

    relative: float
    largest: float
    astray: int = 0

    def within(self, bar: float, yardstick: "Error") -> bool:
        """Whether it keeps to a bar on the relative error, and no more elements are astray than in `yardstick`."""
        return self.relative <= bar and self.astray <= yardstick.astray


def distance(value: Tensor, exact: Tensor) -> Error:
    """The error of a tensor against a reference of the same shape, usually in float64."""
    if value.shape != exact.shape:
        return Error(float("inf"), float("inf"), max(value.numel(), exact.numel()))
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        different = int((value != exact).sum())
        gap = float((value.double() - exact.double()).abs().max()) if different else 0.0
        return Error(different / max(1, value.numel()), gap)
    squares = norm = largest = 0.0
    astray = 0
    for part, right in _chunks(value, exact):
        finite = torch.isfinite(part) & torch.isfinite(right)
        alike = finite | (part == right) | (torch.isnan(part) & torch.isnan(right))
        astray += part.numel() - int(alike.sum())
        difference = torch.where(finite, part - right, 0.0)
        squares += float(difference.square().sum())
        norm += float(torch.where(finite, right, 0.0).square().sum())
        largest = max(largest, float(difference.abs().max()))
    return Error((squares / norm) ** 0.5 if norm else (float("inf") if squares else 0.0), largest, astray)


def bar(eager: Error, dtype: torch.dtype, largest: float | None = None, elements: int = FEW) -> float:
    """The relative error that a result of `dtype` may have where eager's is `eager`.

    Args:
        eager: eager's error of the same tensor.
        dtype: the tensor's type.
        largest: the largest relative error of eager in the run, which counts for tensors of few elements.
        elements: how many elements the tensor has.
    """
    own = max(eager.relative, largest or 0.0) if elements < FEW else eager.relative
    rounding = torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0
    return FACTOR * own + ULPS * rounding


def as_good(own: Error, other: Error, dtype: torch.dtype, largest: float | None = None, elements: int = FEW) -> bool:
    """Whether an error is no larger than another one but for chance; see `bar`."""
    return own.within(bar(other, dtype, largest, elements), other)


def _chunks(value: Tensor, exact: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both in real numbers of the reference's device and widest type, a piece at a time."""
    if value.dtype.is_complex:
        value, exact = torch.view_as_real(value.resolve_conj()), torch.view_as_real(exact.resolve_conj())
    pairs = zip(value.detach().reshape(-1).split(_CHUNK), exact.detach().reshape(-1).split(_CHUNK), strict=True)
    for part, right in pairs:
        if part.numel():
            yield part.to(right.device, torch.float64), right.double()
