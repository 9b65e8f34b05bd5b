"""Codes of every element type against an oracle of fractions, against torch's own casts, and on ten million floats."""

import numpy as np
import pytest
import torch

from postlude.errors import QuantizationError
from postlude.quant import ELEMENTS, decode, encode
from postlude.quant.elements import decode_e8m0, encode_e8m0, power_of_two_below, values_of
from tests.quant import oracle

_FLOATS = sorted(oracle.FLOATS)

#: Before torch 2.13 a cast to float8_e4m3fn does not saturate.
_SATURATES = not torch.tensor(1000.0).to(torch.float8_e4m3fn).float().isnan().item()


@pytest.mark.parametrize("name", _FLOATS)
def test_every_code_has_the_value_of_its_bits(name: str) -> None:
    element = ELEMENTS[name]
    codes = torch.arange(1 << element.bits, dtype=torch.uint8)
    exact = [float(v) for v in oracle.magnitudes(name)]
    values = decode(codes, element)
    half = len(codes) // 2
    assert values[: len(exact)].tolist() == exact
    assert values[half : half + len(exact)].tolist() == [-v for v in exact]
    assert torch.signbit(values[half]).item()
    special = values[len(exact) : half]
    assert special[:1].isinf().all() if element.infinite else special.isnan().all()
    assert special[element.infinite :].isnan().all()
    if not element.packed:
        assert torch.equal(codes.view(element.dtype).float().nan_to_num(-1.0), values.nan_to_num(-1.0))
    assert torch.equal(torch.tensor(values_of(element)).nan_to_num(-1.0), values.nan_to_num(-1.0))


@pytest.mark.parametrize("name", sorted(ELEMENTS))
def test_every_code_survives(name: str) -> None:
    element = ELEMENTS[name]
    codes = torch.arange(1 << element.bits, dtype=torch.uint8)
    values = decode(codes.view(element.storage), element)
    numbers = ~values.isnan()
    assert torch.equal(encode(values[numbers], element).view(torch.uint8), codes[numbers])
    if element.has_nonfinite:
        again = decode(encode(values[~numbers], element), element)
        assert again.isnan().all()


@pytest.mark.parametrize("name", _FLOATS)
def test_ten_million_floats(name: str) -> None:
    element = ELEMENTS[name]
    values = oracle.floats(10_000_000, seed=len(name))
    if not element.has_nonfinite:
        values = values[~np.isnan(values)]
    codes = encode(torch.from_numpy(values), element)
    assert torch.equal(codes, torch.from_numpy(oracle.encode(values, name)))


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_casts_of_torch(name: str) -> None:
    element = ELEMENTS[name]
    values = torch.from_numpy(oracle.floats(1_000_000, seed=7))
    if not _SATURATES:
        values = values.clamp(-element.largest, element.largest)
    assert torch.equal(encode(values, element), values.to(element.dtype).view(torch.uint8))
    halves = values.to(torch.bfloat16)  # are exact in float32
    if not _SATURATES:
        halves = halves.clamp(-element.largest, element.largest)
    assert torch.equal(encode(halves, element), halves.to(element.dtype).view(torch.uint8))


def test_e8m0() -> None:
    values = torch.from_numpy(oracle.floats(1_000_000, seed=8))
    assert torch.equal(encode_e8m0(values), values.to(torch.float8_e8m0fnu).view(torch.uint8))
    codes = torch.arange(256, dtype=torch.uint8)
    decoded = decode_e8m0(codes)
    assert decoded[:255].tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert decoded[255].isnan().item()
    assert torch.equal(codes.view(torch.float8_e8m0fnu).float()[:255], decoded[:255])
    assert torch.equal(power_of_two_below(decoded), codes)
    positive = values.abs().to(torch.float64)
    floor = power_of_two_below(values.abs())
    finite = values.isfinite() & (values != 0)
    below = 2.0 ** (floor.to(torch.float64) - 127)
    assert ((below <= positive) | (floor == 0))[finite].all()
    assert (positive < 2 * below)[finite].all()
    assert (floor[~values.isfinite()] == 255).all()


def test_integers() -> None:
    values = torch.tensor([-1e9, -128.5, -128.0, -8.5, -7.5, -2.5, -1.5, -0.5, -0.0, 0.5, 1.5, 2.5, 7.5, 15.5, 127.5, 1e9])
    for name, low, high in (("int8", -128, 127), ("int4", -8, 7), ("uint4", 0, 15)):
        wanted = np.clip(np.rint(values.numpy()), low, high)  # halves to even
        assert decode(encode(values, ELEMENTS[name]), ELEMENTS[name]).tolist() == wanted.tolist()


@pytest.mark.parametrize("name", ["e2m1", "int8", "int4", "uint4"])
def test_nan_is_refused_where_there_is_none(name: str) -> None:
    with pytest.raises(QuantizationError, match="NaN"):
        encode(torch.tensor([1.0, float("nan")]), ELEMENTS[name])
