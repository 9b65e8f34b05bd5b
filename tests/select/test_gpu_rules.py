"""What pays on a GPU without measuring, by the rules. Graphs are of CPU tensors; sizes from which rules hold are set small."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.capture import Settings, reach
from postlude.capture.grow import Growth
from postlude.capture.rewrite import Plan
from postlude.select import judge as rules
from postlude.select.rows import by_rows
from tests.capture.graphs import captured

N, K = 48, 32


@pytest.fixture(autouse=True)
def a_measured_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "REACH", {})  # kernels own tiles
    monkeypatch.setattr(rules, "_was_measured", lambda device: True)
    monkeypatch.setattr(rules, "serving", lambda device, region: ["cute", "triton", "blas"])
    monkeypatch.setattr(rules, "VERY_MANY_ROWS", 256)
    monkeypatch.setattr(rules, "_LARGE_WEIGHT", N * K)


def said(function: Callable[..., Tensor], *inputs: Tensor) -> list[str | None]:
    """What the rules say of each Region of a function."""
    found: list[str | None] = []

    def judge(plan: Plan, growth: Growth) -> None:
        found.append(rules._pays_on_a_gpu(plan, growth))

    captured(function, *inputs, settings=Settings(strict=True), judge=judge)
    return found


def tensor(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


@pytest.mark.parametrize(("rows", "n", "kept"), [(256, N, True), (255, N, False), (256, N - 1, False), (16, N, True)])
def test_a_plain_product(rows: int, n: int, kept: bool) -> None:
    """Of few rows, and of very many with a large weight."""
    for bias in ((), (tensor(n),)):
        (reason,) = said(F.linear, tensor(rows, K), tensor(n, K), *bias)
        assert (reason is None) == kept, reason


def test_the_gradient_of_a_weight_is_left_to_cublas() -> None:
    (reason,) = said(lambda x, y: x.t() @ y, tensor(512, 256), tensor(512, N))
    assert reason is not None
    assert "cuBLAS" in reason


def test_an_epilogue_of_many_rows_pays() -> None:
    assert said(lambda x, w: F.relu(F.linear(x, w)), tensor(100, K), tensor(N, K)) == [None]


def test_a_norm_is_deferred_from_a_size_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor, w: Tensor, g: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        h = F.linear(x, w) + x
        wide = h.float()
        y = g * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
        return h, F.linear(y, v)

    inputs = tensor(100, K), tensor(K, K), tensor(K), tensor(N, K)
    for least, deferred in ((100 * K, True), (100 * K + 1, False)):
        monkeypatch.setattr(rules, "_LEAST_FOR_NORMS", least)
        reasons = said(function, *inputs)
        assert any(reason is not None and "norm of so few" in reason for reason in reasons) != deferred


@pytest.mark.parametrize(("rows", "first"), [(8, "triton"), (4096, "blas"), (16384, "cute")])
def test_who_is_asked_first(rows: int, first: str) -> None:
    from postlude.ir import parse

    plain = parse(
        "region(m, n, k); %x = operand [m, k] bf16; %w = operand [n, k] bf16; %acc = contract %x, %w : f32;"
        " yield [m, n] bf16 %acc"
    )
    assert by_rows(plain, rows, ["cute", "triton", "blas"])[0] == first
