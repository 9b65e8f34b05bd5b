"""Element types: what a code of a narrow number means, and which code a number gets.

One rule for all types, `encode`:

- The nearest value; of two that are equally near, the one whose code is even. (`e8m0`: the larger one.)
- What is larger than the largest value becomes the largest value. Infinity too, unless the type has one.
- NaN becomes NaN. A type without NaN refuses it: what has no place in it is for the scale to say (see `blocks`).
- The sign of zero is kept where the type has one.

This is OCP's saturating conversion (OCP Microscaling Formats v1.0, section 5.3; OCP 8-bit Floating Point v1.0, section 5.2), and
what `tensor.to(dtype)` of torch 2.13 does on a CPU. `e5m2` is torch's and IEEE's instead: it has an infinity, and what rounds to
more than 57344 becomes it. All arithmetic is exact.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from postlude.errors import QuantizationError


@dataclass(frozen=True)
class Element:
    """One element type.

    Attributes:
        name: as formats name it.
        bits: of a code; 4 or 8.
        largest: the largest finite value.
        dtype: torch's type of a tensor of codes; two 4-bit codes share a byte, the first in the lower half.
        nan: a code of NaN, or None.
        infinite: whether there are infinities.
        exponent_bits, mantissa_bits, bias: of a floating point type; 0 exponent bits for integers.
        lowest: the smallest code of an integer type.
    """

    name: str
    bits: int
    largest: float
    dtype: torch.dtype
    nan: int | None = None
    infinite: bool = False
    exponent_bits: int = 0
    mantissa_bits: int = 0
    bias: int = 0
    lowest: int = 0

    @property
    def packed(self) -> bool:
        """Whether two codes share a byte."""
        return self.bits == 4

    @property
    def storage(self) -> torch.dtype:
        """The type whose bytes are the codes: uint8, or int8."""
        return torch.int8 if self.name == "int8" else torch.uint8

    @property
    def exponent(self) -> int:
        """Exponent of the largest value: `emax` in OCP's specification."""
        return torch.tensor(self.largest).frexp().exponent.item() - 1  # type: ignore[return-value]

    @property
    def has_nonfinite(self) -> bool:
        """Whether NaN and infinity can be said in an element."""
        return self.nan is not None


_TABLE = (
    Element("e4m3", 8, 448.0, torch.float8_e4m3fn, nan=0x7F, exponent_bits=4, mantissa_bits=3, bias=7),
    Element("e5m2", 8, 57344.0, torch.float8_e5m2, nan=0x7F, infinite=True, exponent_bits=5, mantissa_bits=2, bias=15),
    Element("e2m1", 4, 6.0, torch.float4_e2m1fn_x2, exponent_bits=2, mantissa_bits=1, bias=1),
    Element("int8", 8, 127.0, torch.int8, lowest=-128),
    Element("int4", 4, 7.0, torch.uint8, lowest=-8),
    Element("uint4", 4, 15.0, torch.uint8),
)

#: Element types by name.
ELEMENTS: dict[str, Element] = {element.name: element for element in _TABLE}


def encode(values: Tensor, element: Element) -> Tensor:
    """The code of each value, as `element.storage`, one code a byte.

    Args:
        values: any shape, floating point; read as float32.
        element: the element type.

    Raises:
        QuantizationError: a value is NaN and the type has none.
    """
    values = values.to(torch.float32)
    if not element.has_nonfinite and bool(values.isnan().any()):
        raise QuantizationError(
            f"a value to encode as {element.name} is NaN", "numbers", "Let the scale say NaN: see quant.blocks"
        )
    return encode_unchecked(values, element)


def encode_unchecked(values: Tensor, element: Element) -> Tensor:
    """`encode` of float32 without a look at NaN, which becomes 0 where the type has none; for graphs, and for clean values."""
    return _encode_float(values, element) if element.exponent_bits else _encode_integer(values, element)


def _encode_integer(values: Tensor, element: Element) -> Tensor:
    codes = values.nan_to_num(0.0).round().clamp(element.lowest, element.largest).to(torch.int8)
    return codes if element.name == "int8" else codes.bitwise_and(15).to(torch.uint8)


def _encode_float(values: Tensor, element: Element) -> Tensor:
    """With an exponent e >= the smallest one, |v| = r * 2^(e - mantissa bits). r is rounded, and carries into e by itself."""
    m, smallest = element.mantissa_bits, 1 - element.bias
    top = _top_code(element)
    # From there on everything is the same code; and powers of two stay in float32's range.
    size = values.abs().nan_to_num(0.0).clamp(max=4 * element.largest)
    exponent = (size.frexp().exponent - 1).clamp(min=smallest).masked_fill(size == 0, smallest)
    steps = torch.ldexp(size, m - exponent).round().to(torch.int32)
    codes = ((exponent - smallest) << m) + steps
    # The code behind the largest one is infinity's where there is one.
    codes = codes.clamp(max=top + 1 if element.infinite else top)
    if element.nan is not None:
        codes = codes.masked_fill(values.isnan(), element.nan)
    sign = torch.signbit(values).to(torch.int32) << (element.bits - 1)
    return (codes | sign).to(torch.uint8)


def _top_code(element: Element) -> int:
    """The code of the largest value, which a type without infinity and with NaN has just below NaN's."""
    last = (1 << (element.bits - 1)) - 1
    if element.infinite:
        return last - (1 << element.mantissa_bits)
    return last - (element.nan is not None)


def decode(codes: Tensor, element: Element) -> Tensor:
    """The value of each code, as float32. Exact.

    Args:
        codes: one code a byte, of any type with 8 bits.
        element: the element type.
    """
    if element.name == "int8":
        return codes.to(torch.float32)
    if codes.dtype == element.dtype and not element.packed:
        return codes.to(torch.float32)
    if element.bits == 8:
        return codes.view(element.dtype).to(torch.float32)
    return _decode_e2m1(codes) if element.exponent_bits else _decode_integer(codes, element)


def _decode_integer(codes: Tensor, element: Element) -> Tensor:
    codes = codes.to(torch.int8)
    return (codes - ((codes & 8) << 1) if element.lowest else codes).to(torch.float32)


def _decode_e2m1(codes: Tensor) -> Tensor:
    """A code's bits are the sign, the lowest exponent bits and the highest mantissa bit of a float16, whose bias is 14 more."""
    codes = codes.to(torch.int32)
    halves = ((codes & 8) << 12) | ((codes & 7) << 9)
    return halves.to(torch.int16).view(torch.float16).to(torch.float32) * 2.0**14


def values_of(element: Element) -> list[float]:
    """The value of every code, in order, from the meaning of its bits."""
    return [_value(code, element) for code in range(1 << element.bits)]


def _value(code: int, element: Element) -> float:
    if not element.exponent_bits:
        half = 1 << (element.bits - 1)
        return float(code - 2 * half if element.lowest and code >= half else code)
    m = element.mantissa_bits
    sign = -1.0 if code >> (element.bits - 1) else 1.0
    rest = code & ((1 << (element.bits - 1)) - 1)
    exponent, mantissa = rest >> m, rest & ((1 << m) - 1)
    if rest > _top_code(element):
        return sign * float("inf") if element.infinite and mantissa == 0 else float("nan")
    fraction = mantissa / (1 << m) + (exponent > 0)
    return sign * fraction * 2.0 ** (max(exponent, 1) - element.bias)


# Scales ----------------------------------------------------------------------------------------------------------------

#: The code of NaN in e8m0.
E8M0_NAN = 0xFF


def power_of_two_below(values: Tensor) -> Tensor:
    """e8m0 codes of 2^floor(log2 v), from 2^-127 (for 0 too) to 2^127; NaN for NaN and Inf."""
    values = values.to(torch.float32)
    exponent = (values.frexp().exponent - 1 + 127).clamp(0, 254)
    exponent = exponent.masked_fill(values == 0, 0)
    return exponent.masked_fill(~values.isfinite(), E8M0_NAN).to(torch.uint8)


def encode_e8m0(values: Tensor) -> Tensor:
    """e8m0 codes of the nearest power of two, the larger of two; as torch's own cast, which ignores the sign, gives them."""
    bits = values.to(torch.float32).view(torch.int32) & 0x7FFFFFFF
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # Below 2^-126 the bits are a multiple of 2^-149, and 2^-127 the smallest code.
    up = torch.where(exponent > 0, mantissa >= 0x400000, mantissa > 0x400000)
    return (exponent + up.to(torch.int32)).clamp(max=E8M0_NAN).masked_fill(exponent == 255, E8M0_NAN).to(torch.uint8)


def decode_e8m0(codes: Tensor) -> Tensor:
    """Powers of two as float32, exact: 2^-127 is a denormal."""
    codes = codes.view(torch.uint8).to(torch.int32)
    bits = torch.where(codes > 0, codes << 23, 0x00400000)
    return bits.masked_fill(codes == E8M0_NAN, 0x7FC00000).view(torch.float32)


#: How scales of a type, or the bytes of those of 8 bits, become float32.
DECODE_SCALE: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float8_e8m0fnu: decode_e8m0,
    torch.float8_e4m3fn: lambda codes: codes.view(torch.float8_e4m3fn).to(torch.float32),
    torch.float32: lambda scale: scale,
    torch.bfloat16: lambda scale: scale.to(torch.float32),
}
