"""A norm in front of a product: computed by the product's kernel, in both forms of it."""

import pytest
import torch
from torch import Tensor

from postlude.errors import KernelBuildError
from postlude.ir import parse
from postlude.targets import cpp, cute
from postlude.targets.triton import unsupported
from postlude.targets.triton.configs import Config, Device, Problem, choose
from tests.targets.triton.norms import HEAD, NORM, PROGRAMS, region
from tests.targets.triton.numerics import check

CONFIGS = {
    "gemv": Config("gemv", 1, 4, 32, 4, 2),
    "gemm": Config("gemm", 16, 16, 16, 4, 2),
    "gemm, transposed": Config("gemm", 16, 16, 16, 4, 2, swap=True),
    "chosen": None,
}


def operands(name: str, m: int, k: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[Tensor]:
    torch.manual_seed(m + k)
    shapes = {"x": (m, k), "g": (k,), "w": (24, k), "u": (24 if name == "swiglu" else 9, k), "v": (7, k), "b": (9,)}
    given = {n: torch.randn(shape) for n, shape in shapes.items()}
    given["x"] *= scale
    return [given[operand.name].to(dtype) for operand in region(name).operands]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, config: str) -> None:
    check(region(name), operands(name, 1, 70), CONFIGS[config])


@pytest.mark.parametrize("config", ["gemv", "gemm", "gemm, transposed"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_narrow_types(config: str, dtype: str) -> None:
    type = {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    check(region("swiglu", dtype), operands("swiglu", 1, 96, type), CONFIGS[config])


@pytest.mark.parametrize("config", ["gemm", "gemm, transposed", "chosen"])
def test_large_numbers_in_float16(config: str) -> None:
    """x * g has no place in float16, the norm of x times g has."""
    check(region("linear", "f16"), operands("linear", 1, 64, torch.float16, scale=15000.0), CONFIGS[config])


@pytest.mark.parametrize("m", [2, 5])
@pytest.mark.parametrize("config", ["gemm", "gemm, transposed", "chosen"])
def test_several_rows(m: int, config: str) -> None:
    check(region("q, k, v"), operands("q, k, v", m, 40), CONFIGS[config])
    check(region("linear"), operands("linear", m, 40), Config("gemv", 8, 4, 32, 4, 2))


def test_k_is_not_split() -> None:
    """A part of a row has no norm."""
    with pytest.raises(KernelBuildError, match="part of a row"):
        check(region("linear"), operands("linear", 1, 64), Config("gemm", 16, 16, 16, 4, 2, split_k=2))
    device, problem = Device("sm_90", 132, 232448), Problem(16, (4096,), 4096)
    assert choose(device, problem).split_k > 1
    assert choose(device, Problem(16, (4096,), 4096, whole_k=True)).split_k == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("%d = sub %x, %mean; %z = mul %d, %r;", "contracts %z"),  # two passes, or a correction of the product
        ("%y = mul %x, %r; %z = tanh %y;", "contracts %z"),
    ],
)
def test_what_can_not_be_taken_apart(text: str, reason: str) -> None:
    norm = NORM.split("%y =")[0]
    head = HEAD.replace("%g = operand [k] {0}; ", "")
    program = f"region(m, n, k); {head} {norm} {text} %acc = contract %z, %w : f32; yield [m, n] f32 %acc"
    assert reason in str(unsupported(parse(program.replace("{0}", "f32"))))


def test_a_scale_that_is_needed_twice() -> None:
    program = PROGRAMS["linear"].replace("yield [m, n] {0} %acc", "%o = mul %acc, %r; yield [m, n] {0} %o")
    assert "is needed by results over the columns" in str(unsupported(parse(program.replace("{0}", "f32"))))


@pytest.mark.parametrize("name", PROGRAMS)
def test_other_targets_say_that_they_can_not(name: str) -> None:
    assert cpp.unsupported(region(name)) is not None
    assert cute.unsupported(region(name, "bf16")) is not None
