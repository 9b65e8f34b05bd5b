"""Backward graphs on a CPU: derivatives in the product's epilogue, a norm's backward, sums over rows, and sums of products."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from postlude.ir import to_text
from tests.capture.graphs import captured
from tests.capture.test_capture import ONLY_THE_OP, check

aten = torch.ops.aten

DERIVATIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu_erf": lambda gradient, x: aten.gelu_backward(gradient, x),
    "gelu_tanh": lambda gradient, x: aten.gelu_backward(gradient, x, approximate="tanh"),
    "silu": lambda gradient, x: aten.silu_backward(gradient, x),
    "relu": lambda gradient, x: aten.threshold_backward(gradient, x, 0),
    "relu_squared": lambda gradient, x: aten.threshold_backward(2 * x.relu() * gradient, x, 0),
}


def numbers(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def programs(function: Callable[..., Any], inputs: list[Tensor]) -> list[str]:
    """The Regions' texts."""
    return [to_text(one.region) for one in captured(function, *inputs)[1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivative_is_computed_from_the_saved_activation(name: str, dtype: torch.dtype) -> None:
    derivative = DERIVATIVES[name]
    inputs = numbers((5, 7), (7, 6), (5, 6), dtype=dtype)
    assert check(lambda dy, w, x: derivative(dy @ w, x), inputs) == ONLY_THE_OP


def test_derivative_through_reshapes() -> None:
    inputs = numbers((2, 5, 7), (7, 6), (10, 6))
    left = check(lambda dy, w, x: aten.gelu_backward(dy @ w, x.view(2, 5, 6)), inputs)
    assert [name for name in left if "view" not in name and "reshape" not in name] == ONLY_THE_OP


def test_both_gradients_of_a_gated_pair() -> None:
    def backward(dy: Tensor, w: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        hidden = dy @ w
        return aten.silu_backward(hidden * up, gate), hidden * torch.nn.functional.silu(gate)

    left = check(backward, numbers((5, 7), (7, 6), (5, 6), (5, 6)))
    assert [name for name in left if "getitem" not in name] == ["postlude.region.results2"]


def test_what_is_stored_anyway_is_read() -> None:
    def function(x: Tensor, w: Tensor, y: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        tanh = y.tanh()
        return (x @ w) * tanh, tanh @ v

    assert "aten.tanh.default" in check(function, numbers((5, 7), (7, 6), (5, 6), (6, 3)))


def test_a_mask_is_read_as_truth_values() -> None:
    def function(dy: Tensor, w: Tensor, mask: Tensor) -> Tensor:
        return (dy @ w) * (mask.to(torch.float32) * 1.25)

    inputs = [*numbers((5, 7), (7, 6)), torch.rand(5, 6) > 0.5]
    assert check(function, inputs) == ONLY_THE_OP


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layer_norm_backward_is_one_region(dtype: torch.dtype) -> None:
    def function(dy: Tensor, w: Tensor, residual: Tensor, x: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        _, mean, rstd = aten.native_layer_norm(x, [6], gamma, beta, 1e-5)
        gradient = dy @ w + residual
        dx, dgamma, dbeta = aten.native_layer_norm_backward(gradient, x, [6], mean, rstd, gamma, beta, [True] * 3)
        return dx, dgamma, dbeta, dx.sum(0)

    inputs = numbers((5, 7), (7, 6), (5, 6), (5, 6), (6,), (6,), dtype=dtype)
    left = check(function, inputs)
    assert sum("postlude" in name for name in left) == 1
    assert "aten.sum.dim_IntList" not in left
    (program,) = programs(function, inputs)
    assert program.count("reduce sum m") == 3
    assert program.count("yield [m, n]") == 1


def test_products_of_different_inputs_are_added_up_in_one_region() -> None:
    def function(*tensors: Tensor) -> Tensor:
        q, k, v, a, b, c, residual = tensors
        return residual + q @ a + k @ b + v @ c

    inputs = numbers(*[(5, 7)] * 3, *[(7, 6)] * 3, (5, 6))
    assert check(function, inputs) == ONLY_THE_OP
    (program,) = programs(function, inputs)
    assert program.count("contract") == 3


def test_products_of_different_depth_stay_apart() -> None:
    def function(q: Tensor, k: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return q @ a + k @ b

    assert len([name for name in check(function, numbers((5, 7), (5, 4), (7, 6), (4, 6))) if "postlude" in name]) == 2


@pytest.mark.parametrize("shape", [(5,), (2, 3)], ids=str)
def test_gradient_of_a_bias_is_a_sum_over_rows(shape: tuple[int, ...]) -> None:
    def function(dy: Tensor, w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        gradient = aten.gelu_backward(dy @ w, x)
        rows = list(range(gradient.ndim - 1))
        return gradient, gradient.sum(rows), gradient.mean(rows), gradient.sum(rows, True).view(-1)

    left = check(function, numbers((*shape, 7), (7, 6), (*shape, 6)))
    assert not any("sum" in name or "mean" in name for name in left)


def test_sums_over_the_rows_of_a_batch_are_left_to_inductor() -> None:
    left = check(lambda x, w: torch.bmm(x, w).sum(1), numbers((3, 5, 7), (3, 7, 6)))
    assert "aten.sum.dim_IntList" in left
