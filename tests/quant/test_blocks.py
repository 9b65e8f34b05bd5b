"""Whole matrices: scales by their definition, bounds of the error, what is not finite, layouts."""

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_strategies
from torch import Tensor

from postlude.errors import QuantizationError
from postlude.quant import FORMATS, Format, dequantize, format_named, pack_pairs, quantize, swizzle, unpack_pairs, unswizzle
from postlude.quant.elements import DECODE_SCALE, values_of

_sizes = st.tuples(st.integers(1, 140), st.integers(1, 70).map(lambda half: 2 * half))
_numbers = st.floats(width=32, min_value=-(2.0**125), max_value=2.0**125) | st.floats(-8, 8, width=32)


@st.composite
def _matrices(draw: st.DrawFn) -> Tensor:
    shape = draw(_sizes)
    fill = draw(st.sampled_from((0.0, 1.0, -3.0)))
    return torch.from_numpy(draw(numpy_strategies.arrays("float32", shape, elements=_numbers, fill=st.just(fill))))


def _codes(quantized: object) -> Tensor:
    codes = quantized.codes  # type: ignore[attr-defined]
    return unpack_pairs(codes) if quantized.format.element.packed else codes.view(quantized.format.element.storage)  # type: ignore[attr-defined]


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@settings(max_examples=8, deadline=None)
@given(values=_matrices())
def test_scales_and_codes_by_their_definition(format: Format, values: Tensor) -> None:
    quantized = quantize(values, format)
    n, k = values.shape
    rows, columns = format.block_of(n, k)
    element = format.element
    scale = DECODE_SCALE[format.scale](quantized.scale).double()
    assert quantized.scale.shape == (-(-n // rows), -(-k // columns))
    assert quantized.scale.dtype == format.scale
    assert quantized.codes.dtype == element.dtype
    whole = 1.0 if quantized.matrix_scale is None else quantized.matrix_scale.item()
    own = _per_number(scale * whole, format, n, k)
    zero = 0.0 if quantized.zero_point is None else _per_number(quantized.zero_point.double(), format, n, k)
    table = torch.tensor(values_of(element), dtype=torch.float64)
    back, exact = dequantize(quantized).double(), values.double()
    stored = (table[_codes(quantized).view(torch.uint8).long()] - zero) * own
    assert ((back - stored).abs() <= stored.abs() * 2.0**-22).all()
    # Each number has the nearest value that the type has, as far as float32's division tells.
    wanted = exact / own + zero
    possible = table[table.isfinite()].unique()
    above = torch.searchsorted(possible, wanted).clamp(max=len(possible) - 1)
    neighbours = torch.stack((possible[(above - 1).clamp(min=0)], possible[above]))
    nearest = (neighbours - wanted).abs().amin(0) * own
    assert ((back - exact).abs() <= nearest + exact.abs() * 2.0**-21 + own * 2.0**-20).all()
    if format.scale == torch.float8_e8m0fnu:
        for i, j in itertools.product(range(min(n, 4)), range(scale.shape[1])):
            top = float(values[i, j * columns : (j + 1) * columns].abs().max())
            assert Fraction(float(scale[i, j])) == _ocp_scale(top, element.exponent)


def _per_number(scale: Tensor, format: Format, n: int, k: int) -> Tensor:
    rows, columns = format.block_of(n, k)
    return scale.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]


def _ocp_scale(top: float, emax: int) -> Fraction:
    """2^(floor(log2 top) - emax) within e8m0's range, without logarithms."""
    if top == 0:
        return Fraction(2) ** -127
    exponent = -150
    while Fraction(2) ** (exponent + 1) <= Fraction(top):
        exponent += 1
    return Fraction(2) ** min(max(max(exponent, -127) - emax, -127), 127)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_nothing_that_is_not_finite_becomes_finite(format: Format) -> None:
    values = torch.randn(130, 256, generator=torch.Generator().manual_seed(1))
    bad = torch.zeros_like(values, dtype=torch.bool)
    for (i, j), special in zip(((0, 0), (3, 40), (129, 255)), (float("inf"), float("-inf"), float("nan")), strict=True):
        values[i, j], bad[i, j] = special, True
    back = dequantize(quantize(values, format))
    assert not back[bad].isfinite().any()
    if format.element.has_nonfinite:
        assert back[~bad].isfinite().all()
    if format.element.infinite:
        assert torch.equal(back[bad].isnan(), values[bad].isnan())
    rows, columns = format.block_of(*values.shape)
    if not format.element.has_nonfinite:  # the whole block says so, and no other
        blocks = bad.unflatten(-1, (-1, columns)).any(-1, keepdim=True).expand(-1, -1, columns).flatten(-2)
        assert rows == 1
        assert torch.equal(~back.isfinite(), blocks)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (0, 0), (2, 3, 64), (1, 2)], ids=str)
def test_empty_and_further_dimensions(format: Format, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape)
    back = dequantize(quantize(values, format), torch.bfloat16)
    assert back.shape == values.shape
    assert back.dtype == torch.bfloat16
    if values.ndim == 3:
        for one, matrix in zip(back, values, strict=True):
            assert torch.equal(one, dequantize(quantize(matrix, format), torch.bfloat16))


def test_tiny_and_huge_numbers_are_not_lost() -> None:
    for format in FORMATS.values():
        for size in (2.0**-120, 1e-30, 1e30, 3e38, torch.finfo(torch.float32).max):
            values = torch.full((4, 64), size)
            values[1] = -size
            back = dequantize(quantize(values, format))
            # With zero points numbers end at 2^126.
            smaller = values.clamp(-(2.0**126), 2.0**126) if format.zero_points else values
            assert torch.allclose(back, smaller, rtol=0.13, atol=0.0), (format.name, size)


def test_matrix_scale_may_be_given() -> None:
    values = torch.randn(8, 64)
    own = quantize(values, FORMATS["nvfp4"])
    given = quantize(values[:4], FORMATS["nvfp4"], matrix_scale=own.matrix_scale)
    assert torch.equal(dequantize(given), dequantize(own)[:4])


def test_refusals() -> None:
    with pytest.raises(QuantizationError, match="even number"):
        quantize(torch.randn(2, 3), FORMATS["nvfp4"])
    with pytest.raises(QuantizationError, match="dimensions"):
        quantize(torch.randn(3), FORMATS["int8_row"])
    with pytest.raises(QuantizationError, match="floating point"):
        quantize(torch.ones(3, 3, dtype=torch.int32), FORMATS["int8_row"])
    with pytest.raises(QuantizationError, match="'fp3'"):
        format_named("fp3")


def test_pairs() -> None:
    codes = torch.randint(0, 16, (5, 6), dtype=torch.uint8)
    packed = pack_pairs(codes)
    assert torch.equal(packed, codes[:, ::2] + 16 * codes[:, 1::2])
    assert torch.equal(unpack_pairs(packed), codes)


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (129, 5), (300, 9), (0, 4)], ids=str)
def test_swizzled_scales_are_where_cublas_looks_for_them(shape: tuple[int, int]) -> None:
    rows, columns = shape
    scale = torch.randint(1, 256, shape, dtype=torch.uint8)
    swizzled = swizzle(scale.view(torch.float8_e4m3fn))
    assert swizzled.dtype == torch.float8_e4m3fn
    tiles = -(-columns // 4)
    wanted = torch.zeros(-(-rows // 128) * tiles * 512, dtype=torch.uint8)
    for r in range(rows):
        for c in range(columns):
            wanted[((r // 128) * tiles + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = scale[r, c]
    assert torch.equal(swizzled.view(torch.uint8), wanted)
    assert torch.equal(unswizzle(swizzled, rows, columns).view(torch.uint8), scale)
    with pytest.raises(QuantizationError, match="swizzled"):
        unswizzle(swizzled.new_zeros(512 * 99), rows, columns)
