"""float32 kernels of AVX-512 and AVX2 with natural weights: dot products, transposed products and packed panels."""

import pytest
import torch
from torch import Tensor

from postlude.ir import Region, parse
from postlude.targets import cpp
from postlude.targets.aten import evaluate
from postlude.targets.cpp import build, launcher, toolchain
from postlude.targets.cpp.toolchain import AVX2, AVX512, Isa
from tests.targets.cpp.numerics import empty_results

HEAD = "region(m, n, k); %x = operand [m, k] f32; %w = operand [n, k] f32; %b = operand [n] f32; %acc = contract %x, %w : f32; "
LINEAR = HEAD + "%0 = add %acc, %b; yield [m, n] f32 %0"
NORM = (
    HEAD + "%0 = add %acc, %b; %1 = reduce sum n %0; %2 = extent n; %3 = div %1, %2; %4 = sub %0, %3; yield [m, n] f32 %4;"
    " yield [m] f32 %3"
)
GATED = (
    "region(m, n, k); %x = operand [m, k] f32; %w = operand [n, k] f32; %u = operand [n, k] f32;"
    " %0 = contract %x, %w : f32; %1 = contract %x, %u : f32; %2 = sigmoid %0; %3 = mul %0, %2; %4 = mul %1, %3;"
    " yield [m, n] f32 %4"
)


@pytest.fixture(params=[AVX512, AVX2], ids=str)
def isa(request: pytest.FixtureRequest) -> Isa:
    wanted: Isa = request.param
    if missing := wanted.needs - toolchain.cpu_features():
        pytest.skip(f"this machine has no {', '.join(sorted(missing))}")
    return wanted


def load(region: Region, isa: Isa) -> launcher.Kernel:
    path = build.build(cpp.source(region), isa=isa)
    return launcher.load(path, operands=len(region.operands), micro=build.micro_table("f32", isa))


def padded(rows: int, columns: int, scale: float = 1.0) -> Tensor:
    """Rows that lie apart, between numbers that must not be read."""
    memory = torch.full((rows, columns + 3), float("nan"))
    memory[:, :columns] = torch.randn(rows, columns) * scale
    return memory[:, :columns]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("program", [LINEAR, NORM, GATED], ids=["linear", "whole rows", "two weights"])
def test_rows_on_both_sides_of_every_limit(isa: Isa, program: str, threads: int) -> None:
    torch.manual_seed(0)
    region = parse(program)
    kernel = load(region, isa)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for m in (32, 33, 48, 63, 65, 128, 190):
            for n, k in ((1, 40), (17, 161), (63, 96), (64, 384), (65, 320), (200, 257), (400, 384)):
                operands = [padded(m, k), padded(n, k, k**-0.5)]
                operands += [padded(n, k, k**-0.5) if program is GATED else torch.randn(n)]
                results = empty_results(region, operands)
                kernel(*operands, *results)
                for result, exact in zip(results, evaluate(region, operands, arithmetic=torch.float64), strict=True):
                    torch.testing.assert_close(result.double(), exact.double(), rtol=2e-6, atol=2e-6)
    finally:
        torch.set_num_threads(before)


def test_a_panel_of_rows_that_exceeds_the_cache(isa: Isa) -> None:
    torch.manual_seed(0)
    region = parse(LINEAR)
    operands = [torch.randn(64, 4000), torch.randn(256, 4000) / 64, torch.randn(256)]
    results = empty_results(region, operands)
    load(region, isa)(*operands, *results)
    (exact,) = evaluate(region, operands, arithmetic=torch.float64)
    torch.testing.assert_close(results[0].double(), exact.double(), rtol=2e-6, atol=4e-6)
