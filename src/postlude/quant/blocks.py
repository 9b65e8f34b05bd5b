"""Matrices to codes and scales, and back: the reference, in plain torch operations.

What a scale is (a = the largest finite magnitude of the block, M = the largest value of the element type):

    float32, bfloat16   a / M, at least 2^-126, rounded to its type, and such that no product with a code overflows: numbers
                        above 0.996 of float32's largest become that.
                        With zero points: (max(v, 0) - min(v, 0)) / 15, of numbers up to 2^126.
    e8m0                2^(floor(log2 a) - emax), between 2^-127 and 2^127 (OCP Microscaling Formats v1.0, section 6.3)
    e4m3                a / M / g, at least 2^-9, rounded to e4m3, where g is the matrix's scale: its largest magnitude over
                        448 * M, at least 2^-117

Then each number is divided by its scale in float32 and encoded (`elements`). NaN and infinity become NaN, in e5m2 infinity, where
the element type has that; else their block's scale is NaN, and so are all its numbers. Nothing that is not finite becomes finite.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from postlude.errors import QuantizationError
from postlude.quant.elements import (
    DECODE_SCALE,
    E8M0_NAN,
    ELEMENTS,
    decode,
    encode_unchecked,
    power_of_two_below,
)
from postlude.quant.formats import Format
from postlude.quant.layout import pack_pairs, unpack_pairs

_SMALLEST_SCALE = 2.0**-126  # the smallest normal float32
_LARGEST_PRODUCT = 255 * 2.0**120  # of a scale and a code: below float32's largest number by more than a scale's rounding
_LARGEST_SHIFTED = 2.0**126  # with zero points: the difference of two such numbers is finite
_SMALLEST_MATRIX_SCALE = 2.0**-117  # its product with the smallest e4m3 is normal too
_SMALLEST_E4M3, _LARGEST_E4M3 = 2.0**-9, 448.0


@dataclass(frozen=True)
class Quantized:
    """A matrix in a number format.

    Attributes:
        format: the format.
        codes: [..., n, k], or [..., n, k / 2] where two codes share a byte; of the element's own dtype.
        scale: [..., n / block rows, k / block columns], rounded up, of the format's scale type.
        zero_point: int8, shaped like `scale`; None for formats without.
        matrix_scale: float32 [...]; None for formats without.
    """

    format: Format
    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None = None
    matrix_scale: Tensor | None = None


def quantize(values: Tensor, format: Format, *, matrix_scale: Tensor | None = None) -> Quantized:
    """Quantise matrices [..., n, k] of a floating point type; the arithmetic is float32.

    Args:
        values: the matrices.
        format: the number format.
        matrix_scale: float32 [...], for formats that have one; by default that of the largest magnitude.

    Raises:
        QuantizationError: fewer than two dimensions, no floating point type, or an odd k where two codes share a byte.
    """
    if values.ndim < 2 or not values.is_floating_point():
        raise QuantizationError(
            f"a {values.dtype} tensor with {values.ndim} dimensions was to be quantised",
            "floating point matrices with dimensions [..., n, k]",
            "Reshape or convert it",
        )
    n, k = values.shape[-2:]
    codes, scale, zero, matrix_scale = _encoded(values, format, matrix_scale)
    codes = _whole(codes, n, k)
    codes = pack_pairs(codes) if format.element.packed else codes
    zero_point = None if zero is None else zero.to(torch.int8)
    return Quantized(format, codes.view(format.element.dtype), scale.view(format.scale), zero_point, matrix_scale)


def dequantize(quantized: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers that codes and scales stand for, [..., n, k]: computed in float32, rounded once to `dtype`."""
    format, element = quantized.format, quantized.format.element
    codes = unpack_pairs(quantized.codes) if element.packed else quantized.codes
    zero, whole = quantized.zero_point, quantized.matrix_scale
    values = _decoded(_blocked(decode(codes, element), format), quantized.scale, zero, whole, format)
    return _whole(values, *codes.shape[-2:]).to(dtype)


def round_trip(values: Tensor, format: Format) -> Tensor:
    """``dequantize(quantize(values, format), values.dtype)``, without tensors of types that TorchInductor does not compile."""
    codes, scale, zero, matrix_scale = _encoded(values, format, None)
    back = _decoded(decode(codes, format.element), scale, zero, matrix_scale, format)
    return _whole(back, *values.shape[-2:]).to(values.dtype)


def _encoded(values: Tensor, format: Format, matrix_scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Codes in blocks, scales (of 8 bits as bytes), zero points as float32, the matrix's scale."""
    element, values = format.element, values.to(torch.float32)
    blocked = _blocked(values, format)
    finite = blocked.isfinite()
    clean = blocked.where(finite, 0.0)
    if format.matrix_scale and matrix_scale is None:
        top = clean.abs().amax((-4, -3, -2, -1)) if values.numel() else values.new_zeros(values.shape[:-2])
        matrix_scale = (top / (_LARGEST_E4M3 * element.largest)).clamp(min=_SMALLEST_MATRIX_SCALE)
    scale, zero = _scales(clean, format, matrix_scale)
    if not element.has_nonfinite:
        scale = scale.masked_fill(~finite.all(-1).all(-2), _NAN[format.scale])
        blocked = clean
    factor = DECODE_SCALE[format.scale](scale)
    quotient = blocked / _spread(factor if matrix_scale is None else factor * matrix_scale[..., None, None])
    if zero is not None:
        codes = (quotient.round() + _spread(zero)).clamp(0, element.largest).nan_to_num(0.0).to(torch.uint8)
        return codes, scale, zero, matrix_scale
    saturated = quotient.clamp(-element.largest, element.largest)  # only what was infinite may become so
    if element.has_nonfinite:
        saturated = saturated.where(finite, quotient if element.infinite else torch.nan)
    return encode_unchecked(saturated, element), scale, None, matrix_scale


def _decoded(blocked: Tensor, scale: Tensor, zero_point: Tensor | None, matrix_scale: Tensor | None, format: Format) -> Tensor:
    """Values of codes in blocks, shifted and scaled."""
    if zero_point is not None:
        blocked = blocked - _spread(zero_point)
    values = blocked * _spread(DECODE_SCALE[format.scale](scale))
    return values if matrix_scale is None else values * matrix_scale[..., None, None, None, None]


# Blocks ----------------------------------------------------------------------------------------------------------------


def _blocked(values: Tensor, format: Format) -> Tensor:
    """[..., n, k] as [..., blocks, rows of a block, blocks, columns of a block], filled up with zeros."""
    n, k = values.shape[-2:]
    rows, columns = format.block_of(n, k)
    below, right = -n % rows, -k % columns
    if below or right:
        values = torch.nn.functional.pad(values, (0, right, 0, below))
    blocked: Tensor = values.unflatten(-1, ((k + right) // columns, columns)).unflatten(-3, ((n + below) // rows, rows))
    return blocked


def _whole(blocked: Tensor, n: int, k: int) -> Tensor:
    """The inverse of `_blocked`."""
    return blocked.flatten(-2).flatten(-3, -2)[..., :n, :k]


def _spread(scale: Tensor) -> Tensor:
    """Scales [..., blocks, blocks] beside blocked values."""
    return scale.unsqueeze(-2).unsqueeze(-1)


# Scales ----------------------------------------------------------------------------------------------------------------


def _scales(clean: Tensor, format: Format, matrix_scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scales, in their type, and zero points of blocked values that are all finite."""
    element = format.element
    if format.zero_points:
        low, high = clean.amin((-3, -1)).clamp(-_LARGEST_SHIFTED, 0.0), clean.amax((-3, -1)).clamp(0.0, _LARGEST_SHIFTED)
        scale = (high / element.largest - low / element.largest).clamp(min=_SMALLEST_SCALE).to(format.scale)
        zero = (-low / scale.to(torch.float32)).round().clamp(0, element.largest)
        return scale, zero
    top = clean.abs().amax((-3, -1))
    if format.scale == torch.float8_e8m0fnu:
        exponent = power_of_two_below(top).to(torch.int32) - element.exponent
        return exponent.clamp(0, 254).to(torch.uint8), None
    scale = top / element.largest
    if matrix_scale is not None:
        scale = (scale / matrix_scale[..., None, None]).clamp(_SMALLEST_E4M3, _LARGEST_E4M3)
        return encode_unchecked(scale, ELEMENTS["e4m3"]), None
    return scale.clamp(_SMALLEST_SCALE, _LARGEST_PRODUCT / element.largest).to(format.scale), None


#: What a scale of NaN is.
_NAN: dict[torch.dtype, float | int] = {
    torch.float32: torch.nan,
    torch.bfloat16: torch.nan,
    torch.float8_e8m0fnu: E8M0_NAN,
    torch.float8_e4m3fn: 0x7F,
}
