"""Faults and odd calls: no process to compile in, a GPU of another vendor, empty results, operands in another order."""

import pytest
import torch

from postlude.ir import parse
from postlude.targets.cute import ahead, build, launcher, toolchain
from postlude.targets.cute.build import Specialization, Target
from postlude.targets.cute.configurations import Configuration

PRODUCTS = parse(
    "region(m, n, n1, k); %x = operand [m, k] bf16; %w = operand [n, k] bf16; %w1 = operand [n1, k] bf16;"
    " %acc = contract %x, %w : f32; %acc1 = contract %x, %w1 : f32; yield [m, n] bf16 %acc; yield [m, n1] bf16 %acc1"
)
KERNEL = Specialization("program", 0, False, (1, 1, 1), Configuration(128, 128), Target(9, 0, (132, 66, 33)))


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> ahead._Workers:
    made = ahead._Workers()
    monkeypatch.setattr(ahead, "_workers", made)
    monkeypatch.setattr(ahead, "IDLE", 0.05)
    monkeypatch.setattr(build.Specialization, "key", lambda self: self.program)
    return made


def test_a_process_that_can_not_be_started_keeps_nobody_waiting(workers: ahead._Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(ahead, "_start", start)
    (future,) = ahead.submit([KERNEL], most=1)
    assert "Cannot allocate memory" in future.result(timeout=5)
    ahead.wait(KERNEL)
    assert not workers.pending


def test_there_are_no_kernels_for_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch calls AMD's GPUs `cuda` too, and gives gfx942 the capability (9, 4)."""
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 4))
    assert "AMD" in str(toolchain.unavailable.__wrapped__())


@pytest.mark.parametrize(("m", "n"), [(0, 8), (8, 0)])
def test_an_empty_result_does_not_stand_for_all(m: int, n: int) -> None:
    """A call may do nothing only if all its results are empty."""
    tensors = [torch.empty(shape, dtype=torch.bfloat16) for shape in ((m, 16), (n, 16), (8, 16), (m, n), (m, 8))]
    launch = launcher.Kernel(PRODUCTS, trusted=True).plan(tensors)
    assert (launch is None) == (m > 0)


def test_a_pair_is_ordered_as_its_contractions_are() -> None:
    """The kernel is told which weight lies lower by contraction; in a Region's text operands may stand in another order."""
    region = parse(
        "region(m, n, k); %x = operand [m, k] bf16; %b = operand [n, k] bf16; %a = operand [n, k] bf16;"
        " %acc = contract %x, %a : f32; %acc1 = contract %x, %b : f32; %0 = mul %acc, %acc1; yield [m, n] bf16 %0"
    )
    (form,) = launcher.forms(region)
    assert launcher._pair(region, form) == (2, 1)
