"""Calls: what is planned once, and tensors that lie in unusual ways."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from postlude.ir import parse
from postlude.targets import triton
from postlude.targets.triton.configs import Config
from postlude.targets.triton.launcher import Kernel
from tests.targets.triton.numerics import DEVICE, check

LINEAR = parse(
    "region(m, n, k); %x = operand [m, k] f32; %w = operand [n, k] f32; %b = operand [n] f32; "
    "%acc = contract %x, %w : f32; %0 = add %acc, %b; yield [m, n] f32 %0"
)
GEMM = Config("gemm", 16, 16, 16, 4, 1)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.nn.functional.linear(x.double(), w.double(), b.double()).float()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each plan that is made."""
    found: list[int] = []
    plan = Kernel.plan
    monkeypatch.setattr(Kernel, "plan", lambda self, tensors: (found.append(tensors[0].shape[0]), plan(self, tensors))[1])
    return found


@pytest.fixture
def precision() -> Iterator[Callable[[str], None]]:
    """Sets how torch multiplies float32 on GPUs."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    yield lambda value: setattr(matmul, "fp32_precision", value)
    matmul.fp32_precision = before


@pytest.mark.parametrize("fast", [False, True])
def test_equal_calls_are_planned_once_and_misaligned_ones_anew(planned: list[int], fast: bool) -> None:
    kernel = triton.load(LINEAR, GEMM)
    call: Callable[..., bool] = kernel.fast if fast else kernel
    w, b = random(20, 32), random(20)
    flat = random(3 * 32 + 16)
    for offset, plans in ((0, 1), (4, 1), (1, 2), (0, 2), (8, 2), (5, 2), (2, 3), (1, 3)):
        x, out = flat[offset : offset + 96].view(3, 32), torch.full((3, 20), 9.0, device=DEVICE)
        assert call(x, w, b, out)
        torch.testing.assert_close(out, linear(x, w, b), rtol=1e-5, atol=1e-5)
        assert len(planned) == plans


def test_other_shapes_and_strides_are_planned_anew(planned: list[int]) -> None:
    kernel = triton.load(LINEAR, GEMM)
    w, b = random(20, 32), random(20)
    for x in (random(3, 32), random(4, 32), random(32, 3).T, random(3, 32)):
        out = torch.empty(len(x), 20, device=DEVICE)
        kernel(x, w, b, out)
        torch.testing.assert_close(out, linear(x, w, b), rtol=1e-5, atol=1e-5)
    assert planned == [3, 4, 3]


def test_the_setting_of_tf32_is_part_of_a_plan(planned: list[int], precision: Callable[[str], None]) -> None:
    kernel = triton.load(LINEAR, GEMM)
    operands = (random(3, 32), random(20, 32), random(20), torch.empty(3, 20, device=DEVICE))
    for setting, plans in (("ieee", 1), ("tf32", 2), ("ieee", 2)):
        precision(setting)
        kernel(*operands)
        assert len(planned) == plans


def test_it_is_no_part_of_a_plan_without_float32(planned: list[int], precision: Callable[[str], None]) -> None:
    region = parse(
        "region(m, n, k); %x = operand [m, k] bf16; %w = operand [n, k] bf16; %a = contract %x, %w : f32; yield [m, n] f32 %a"
    )
    operands = (random(3, 32).bfloat16(), random(20, 32).bfloat16(), torch.empty(3, 20, device=DEVICE))
    kernel = triton.load(region, GEMM)
    for setting in ("ieee", "tf32"):
        precision(setting)
        kernel(*operands)
    assert len(planned) == 1


def test_operands_that_no_two_strides_describe_are_copied() -> None:
    x = torch.randn(4, 3, 2, 32).permute(2, 1, 0, 3)
    check(LINEAR, [x, torch.randn(20, 32), torch.randn(20)])


def test_results_that_no_two_strides_describe_are_copied_back() -> None:
    x, w, b = random(2, 3, 4, 32), random(20, 32), random(20)
    memory = torch.full((4, 3, 2, 20), 9.0, device=DEVICE)
    triton.load(LINEAR)(x, w, b, memory.permute(2, 1, 0, 3))
    torch.testing.assert_close(memory.permute(2, 1, 0, 3), linear(x, w, b), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [Config("gemv", 1, 4, 16, 4, 1), GEMM], ids=lambda config: config.form)
def test_offsets_beyond_two_to_the_31(config: Config) -> None:
    """Rows of a weight 2^30 elements apart: each stride has 31 bits, the third row's offset has 32."""
    w = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=DEVICE).as_strided((3, 32), (2**30, 1))
    w.copy_(random(3, 32))
    x, b, out = random(1, 32), random(3), torch.empty(1, 3, device=DEVICE)
    region = parse(
        "region(m, n, k); %x = operand [m, k] f32; %w = operand [n, k] bf16; %b = operand [n] f32; "
        "%acc = contract %x, %w : f32; %0 = add %acc, %b; yield [m, n] f32 %0"
    )
    triton.load(region, config)(x, w, b, out)
    torch.testing.assert_close(out, linear(x, w, b), rtol=1e-5, atol=1e-5)
