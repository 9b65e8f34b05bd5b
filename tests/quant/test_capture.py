"""Products whose kernel reads codes: what capture makes of a quantised layer, and the text of its Region."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import postlude
from postlude import quantize_
from postlude.ir import RegionError, RegionSyntaxError, parse, to_text, verify
from postlude.quant import Scheme


class Gated(nn.Module):
    """A SwiGLU with a bias behind it: two products of one Region, then one of another."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 96, bias=False)
        self.up = nn.Linear(64, 96, bias=False)
        self.down = nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def test_codes_are_read_by_the_products_kernel() -> None:
    torch.manual_seed(0)
    model, x = Gated().to(torch.bfloat16), torch.randn(3, 64).to(torch.bfloat16)
    with torch.no_grad():
        quantize_(model, "int8-weight")
        exact = Gated().to(torch.float64)
        for name in ("gate", "up", "down"):
            layer = getattr(exact, name)
            layer.weight.copy_(getattr(model, name).weight.dequantize().double())
        exact.down.bias.copy_(model.down.bias)
        explanation = postlude.explain(model, x)
        first, second = (region.program for region in explanation.regions)
        assert first.count("operand [n, k] i8") == 2
        assert first.count("contract") == 2
        assert second.count("operand [n, k] i8") == 1
        assert {region.target for region in explanation.regions} == {"cpp"}
        compiled, wanted = torch.compile(model, backend="postlude")(x), exact(x.double())
        eager = model(x)
    assert (compiled.double() - wanted).abs().max() <= (eager.double() - wanted).abs().max()


@pytest.mark.parametrize("name", ["fp8_e4m3_128x128", "nvfp4"])
def test_what_no_kernel_reads_is_dequantised_before(name: str) -> None:
    """Blocks of rows have no kernel, and roundings as in eager leave no room for one."""
    torch.manual_seed(0)
    model, x = nn.Linear(128, 64), torch.randn(3, 128)
    quantize_(model, Scheme(name))
    options = {"rounding": "eager"} if name == "nvfp4" else {}
    with torch.no_grad():
        (region,) = postlude.explain(model, x, options=options).regions
        assert "operand [n, k] f32" in region.program
        compiled = torch.compile(model, backend="postlude", options=options)(x)
        assert torch.allclose(compiled, model(x), rtol=1e-5, atol=1e-6)


_TEXT = (
    "region(m, n, k); %x = operand [m, k] bf16; %w = operand [n, k] u4; %scale = operand [n, k/32] bf16;"
    " %shift = operand [n, k/32] i8; %acc = contract %x, %w shifted %shift scaled %scale : f32; yield [m, n] bf16 %acc"
)


def test_text_reads_back() -> None:
    region = parse(_TEXT)
    verify(region)
    assert to_text(region) == _TEXT
    assert region.coded
    assert region.operands[2].blocks == (1, 32)


@pytest.mark.parametrize(
    ("change", "to", "error"),
    [
        ("[n, k/32] bf16", "[n, k] bf16", "in blocks"),
        ("[n, k/32] i8", "[k/32, n] i8", "in blocks"),
        ("[n, k] u4", "[n, k] bf16", "are numbers already"),
        ("%w = operand [n, k] u4", "%w = operand [n, k/2] u4", "in blocks"),
        ("%x = operand [m, k] bf16", "%x = operand [m, k] i8", "right of contractions"),
    ],
)
def test_what_means_nothing_is_refused(change: str, to: str, error: str) -> None:
    with pytest.raises(RegionError, match=error):
        verify(parse(_TEXT.replace(change, to)))


def test_blocks_are_numbers() -> None:
    with pytest.raises(RegionSyntaxError, match="is no axis"):
        parse(_TEXT.replace("k/32", "k/0"))
