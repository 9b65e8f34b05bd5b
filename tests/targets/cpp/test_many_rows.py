"""Natural weights of so many rows that all threads pack them together before the first product."""

import pytest
import torch
from torch import Tensor

from postlude.ir import parse
from tests.targets.cpp.numerics import check

TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
HEAD = "region(m, n, k); %x = operand [m, k] {t}; %w = operand {w} {t}; %b = operand [n] {t}; %acc = contract %x, %w : {acc}; "
PROGRAMS = {
    "linear": HEAD + "%0 = add %acc, %b; yield [m, n] {t} %0",
    "whole rows": HEAD
    + "%0 = add %acc, %b; %1 = reduce sum n %0; %2 = extent n; %3 = div %1, %2; %4 = sub %0, %3; yield [m, n] {t} %4",
    "two contractions": HEAD + "%u = operand [n, k] {t}; %1 = contract %x, %u : {acc}; %2 = sigmoid %acc; %3 = mul %1, %2;"
    " %4 = add %3, %b; yield [m, n] {t} %4",
}
SIBLINGS = (
    "region(m, n, k, n1); %x = operand [m, k] {t}; %w = operand [n, k] {t}; %v = operand [n1, k] {t};"
    " %0 = contract %x, %w : {acc}; yield [m, n] {t} %0; %1 = contract %x, %v : {acc}; yield [m, n1] {t} %1"
)


def normal(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(dtype)


def text(program: str, kind: str, layout: str = "[n, k]") -> str:
    return program.format(t=kind, w=layout, acc="f64" if kind == "f64" else "f32")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("layout", ["[n, k]", "[k, n]"])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_packed_together(name: str, kind: str, layout: str, threads: int) -> None:
    dtype, (m, n, k) = TYPES[kind], (1037, 141, 83)
    w = normal(n, k, dtype=dtype, scale=k**-0.5)
    operands = [normal(m, k, dtype=dtype), w if layout == "[n, k]" else w.t().contiguous(), normal(n, dtype=dtype)]
    if name == "two contractions":
        operands.append(normal(n, k, dtype=dtype, scale=0.1))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(parse(text(PROGRAMS[name], kind, layout)), operands)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("columns", [(64, 200), (0, 70), (33, 0)])
@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_siblings_have_panels_of_their_own(kind: str, columns: tuple[int, int]) -> None:
    dtype, (m, k) = TYPES[kind], (1025, 96)
    weights = [normal(n, k, dtype=dtype, scale=0.1) for n in columns]
    check(parse(text(SIBLINGS, kind)), [normal(m, k, dtype=dtype), *weights])


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_a_weight_changes_between_calls(kind: str) -> None:
    dtype, region = TYPES[kind], parse(text(PROGRAMS["linear"], kind))
    operands = [normal(1024, 64, dtype=dtype), normal(100, 64, dtype=dtype, scale=0.1), normal(100, dtype=dtype)]
    check(region, operands)
    operands[1].neg_()
    check(region, operands)


def test_weights_that_are_too_large_are_packed_panel_by_panel() -> None:
    m, n, k = 1025, 2100, 2048  # 17 MB
    operands = [normal(m, k, dtype=torch.float32), normal(n, k, dtype=torch.float32, scale=0.02), normal(n, dtype=torch.float32)]
    check(parse(text(PROGRAMS["linear"], "f32")), operands)
