"""Weights in codes: decoding on every instruction set, and Regions that read them, against the interpreter in float64."""

import ctypes

import pytest
import torch
from torch import Tensor

from postlude.capture.codes import _CODES
from postlude.ir import Region, parse, verify
from postlude.ir.region import DTYPE_NAMES
from postlude.quant import FORMATS, QuantizedTensor, Scheme
from postlude.targets import aten, cpp
from postlude.targets.cpp import build, toolchain
from postlude.targets.cpp.codegen import CODES, SCALES, UnsupportedRegion, generate

_ISAS = [isa for isa in (toolchain.AVX512, toolchain.AVX2, toolchain.PORTABLE) if isa.needs <= toolchain.cpu_features()]

_SOURCE = r"""
#include <postlude/micro_codes.h>
using namespace postlude;
template <Codes C>
void all(const CodedRows &w, int64_t k, float *floats, bfloat16 *halves, const float *x, float *sums) {
  static float scales[4096], arranged[8192];
  decode_row<C>(floats, w, k, scales);
  decode_row<C>(halves, w, k, scales);
  arrange_row<C>(arranged, x, k);
  const CodedCall call{k, arranged, 0, w, sums, 4, scales};
  if (w.block == 0) return coded_rows<C, false, false, 1>(call, 1);
  if (w.shift == nullptr) return coded_rows<C, true, false, 1>(call, 1);
  if constexpr (C == Codes::u4) coded_rows<C, true, true, 1>(call, 1);
}
extern "C" __attribute__((visibility("default"))) void run(
    int codes, const uint8_t *data, int64_t k, int scale_type, const char *scale, const int8_t *shift, int64_t block,
    float *floats, bfloat16 *halves, const float *x, float *sums) {
  CodedRows w;
  w.codes = data, w.scale = scale, w.shift = shift, w.block = block, w.scale_type = static_cast<ScaleType>(scale_type);
  switch (static_cast<Codes>(codes)) {
    case Codes::i8: return all<Codes::i8>(w, k, floats, halves, x, sums);
    case Codes::f8e4m3: return all<Codes::f8e4m3>(w, k, floats, halves, x, sums);
    case Codes::f8e5m2: return all<Codes::f8e5m2>(w, k, floats, halves, x, sums);
    case Codes::f4e2m1: return all<Codes::f4e2m1>(w, k, floats, halves, x, sums);
    case Codes::i4: return all<Codes::i4>(w, k, floats, halves, x, sums);
    case Codes::u4: return all<Codes::u4>(w, k, floats, halves, x, sums);
    case Codes::none: return;
  }
}
"""


@pytest.mark.parametrize("isa", _ISAS, ids=str)
def test_decoding(isa: toolchain.Isa) -> None:
    """Rows of all codes in every format: numbers bit for bit, and their sum with a row."""
    library = build.load_library(build.build(_SOURCE, isa=isa))
    for format in FORMATS.values():
        if format.block[0] > 1:
            continue
        for k in (256, 32 * 9, 130 if not format.element.packed else 160):
            weight = QuantizedTensor.quantize(torch.randn(1, k), Scheme(format.name))
            bytes_ = torch.arange(weight.codes.numel()).to(torch.uint8)
            weight.codes.view(torch.uint8).copy_(bytes_.view_as(weight.codes))
            if format.scale.itemsize == 1:
                every = torch.arange(weight.scale.numel(), dtype=torch.uint8) * 29 % 255
                weight.scale.view(torch.uint8).copy_(every.view_as(weight.scale))
            in_blocks = format.block[1] != 0
            x = torch.randn(k)
            floats, halves = torch.zeros(k + 64), torch.zeros(k + 64, dtype=torch.bfloat16)
            sums = torch.zeros(64)
            shift = weight.zero_point
            library.run(
                list(CODES).index(_CODES[format.element.name]) + 1,
                ctypes.c_void_p(weight.codes.data_ptr()),
                ctypes.c_int64(k),
                list(SCALES).index(format.scale) + 1,
                ctypes.c_void_p(weight.scale.data_ptr()),
                ctypes.c_void_p(None if shift is None else shift.data_ptr()),
                ctypes.c_int64(format.block[1] if in_blocks else 0),
                *(ctypes.c_void_p(t.data_ptr()) for t in (floats, halves, x, sums)),
            )
            if weight.matrix_scale is not None:
                weight.matrix_scale.fill_(1.0)
            if not in_blocks:
                weight.scale.fill_(1.0)
            numbers = weight.dequantize()[0]
            assert torch.equal(floats[:k].nan_to_num(0.5), numbers.nan_to_num(0.5)), (format.name, k)
            assert torch.equal(floats[:k].isnan(), numbers.isnan())
            assert torch.equal(halves[:k].nan_to_num(0.5), numbers.to(torch.bfloat16).nan_to_num(0.5))
            exact = (numbers.double() * x).sum()
            allowed = 1e-6 * (numbers.double() * x).abs().sum()
            assert (sums[0].isnan() and exact.isnan()) or sums[0] == exact.float() or (sums[0] - exact).abs() <= allowed


def _region(name: str, dtype: torch.dtype) -> Region:
    """A product with a bias and a ReLU."""
    format, d = FORMATS[name], DTYPE_NAMES[dtype]
    parts = [f"%x = operand [m, k] {d}", f"%w = operand [n, k] {DTYPE_NAMES[_CODES[format.element.name]]}"]
    if format.block[1] == 0:
        parts += [f"%s = operand {'[n]' if format.block[0] == 1 else '[]'} f32", f"%b = operand [n] {d}"]
        parts += ["%acc = contract %x, %w : f32", "%0 = mul %acc, %s"]
    else:
        blocks = ", ".join(f"{axis}/{size}" if size > 1 else axis for axis, size in zip("nk", format.block, strict=True))
        parts += [f"%s = operand [{blocks}] {DTYPE_NAMES[format.scale]}"]
        parts += [f"%z = operand [{blocks}] i8"] * format.zero_points + ["%t = operand [] f32"] * format.matrix_scale
        parts += [f"%b = operand [n] {d}", f"%acc = contract %x, %w{' shifted %z' * format.zero_points} scaled %s : f32"]
        parts += ["%0 = mul %acc, %t" if format.matrix_scale else "%0 = neg %acc"]
    parts += ["%1 = add %0, %b", "%2 = relu %1", "yield [m, n] f32 %2"]
    region = parse("; ".join(["region(m, n, k)", *parts]))
    verify(region)
    return region


def _operands(name: str, m: int, n: int, k: int, dtype: torch.dtype) -> tuple[list[Tensor], QuantizedTensor]:
    generator = torch.Generator().manual_seed(m * 7 + n * 3 + k)
    weight = QuantizedTensor.quantize(torch.randn(n, k, generator=generator), Scheme(name))
    x, bias = (torch.randn(size, generator=generator).to(dtype) for size in ((m, k), (n,)))
    scale = weight.scale.squeeze(1) if FORMATS[name].block[1] == 0 else weight.scale
    more = [part for part in (weight.zero_point, weight.matrix_scale) if part is not None]
    return [x, weight.codes, scale, *more, bias], weight


@pytest.mark.parametrize(("name", "dtype"), [("int8_row", torch.bfloat16), ("nvfp4", torch.float32)], ids=str)
def test_products(name: str, dtype: torch.dtype) -> None:
    region = _region(name, dtype)
    kernel = cpp.load(region)
    for m, n, k in (
        (1, 64, 256), (1, 130, 96), (2, 67, 224), (3, 64, 160), (4, 200, 512), (5, 64, 256), (16, 130, 288), (33, 70, 512),
        (100, 96, 128), (200, 130, 1056), (1, 1, 32), (0, 5, 32), (3, 0, 32), (2, 4, 4096),
    ):  # fmt: skip
        operands, weight = _operands(name, m, n, k, dtype)
        result = torch.full((m, n), float("nan"))
        kernel(*operands, result)
        (exact,) = aten.evaluate(region, operands, arithmetic=torch.float64, rounded=False)
        terms = operands[0].double().abs() @ weight.dequantize().double().abs().T
        assert ((result - exact).abs() <= 4e-7 * terms + 1e-6).all(), (m, n, k)


@pytest.mark.parametrize("name", FORMATS)
def test_the_interpreter_agrees_with_the_reference(name: str) -> None:
    region = _region(name, torch.float32)
    operands, weight = _operands(name, 3, 130, 256, torch.float32)
    if FORMATS[name].block == (0, 0):
        operands[2] = weight.scale.squeeze()
    (result,) = aten.evaluate(region, operands, arithmetic=torch.float64)
    product = operands[0].double() @ weight.dequantize().double().T
    in_blocks_alone = FORMATS[name].block[1] != 0 and not FORMATS[name].matrix_scale
    wanted = ((-product if in_blocks_alone else product) + operands[-1]).relu()
    assert torch.allclose(result, wanted.float(), rtol=1e-5, atol=1e-5)


def test_what_no_kernel_reads_is_refused() -> None:
    with pytest.raises(UnsupportedRegion, match="blocks"):
        generate(_region("fp8_e4m3_128x128", torch.float32))
    text = "region(m, n, k); %x = operand [m, k] f32; %w = operand [k, n] i8; %acc = contract %x, %w : f32; yield [m, n] f32 %acc"
    with pytest.raises(UnsupportedRegion, match="do not lie along"):
        generate(parse(text))
