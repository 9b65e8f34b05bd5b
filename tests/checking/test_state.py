"""A model is left as it was, and what it holds is found."""

import copy
import functools
import random

import torch
from torch import nn

from postlude.checking.exact import widen, widened
from postlude.checking.state import State, same_bits
from tests.checking.models import Restless

GLOBAL = nn.Linear(3, 3)


def test_everything_that_a_call_changes_is_put_back() -> None:
    model = Restless().train()
    model.linear.weight.grad = torch.ones_like(model.linear.weight)
    gradient = model.linear.weight.grad
    before = copy.deepcopy(model.state_dict())
    generator = torch.get_rng_state(), random.getstate()
    state = State(model)
    assert model.linear.weight.grad is None
    model(torch.randn(4, 8)).sum().backward()
    model.eval()
    random.random()
    assert not same_bits(model.state_dict()["linear.bias"], before["linear.bias"])
    state.restore()
    assert all(same_bits(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert model.dropout.training
    assert model.calls == 0
    assert model.linear.weight.grad is gradient
    assert torch.equal(torch.get_rng_state(), generator[0])
    assert random.getstate() == generator[1]


def test_a_function_is_searched_for_what_it_holds() -> None:
    layer, tensor = nn.Linear(2, 2), torch.ones(2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)

    def inner(x: torch.Tensor, scale: torch.Tensor = tensor) -> torch.Tensor:
        return GLOBAL(layer(x)) * scale + int(bool(optimizer.state))

    state = State(functools.partial(inner, torch.zeros(1, 2)))
    found = {id(one) for one in state.modules.values()} | {id(one) for one in state.tensors.values()}
    assert {id(layer), id(GLOBAL), id(tensor), id(layer.weight)} <= found
    assert state.optimizers == [optimizer]
    layer(torch.ones(1, 2)).sum().backward()
    before = layer.weight.detach().clone()
    optimizer.step()
    state.restore()
    assert same_bits(layer.weight, before)
    assert not optimizer.state_dict()["state"]


def test_bits_are_compared_not_values() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.zeros(1)
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, -zero)
    assert not same_bits(zero, zero.double())


class Narrow(nn.Module):
    """Names narrower types, as much of the code out there does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x.float() @ self.weight.to(torch.float32)).softmax(-1, dtype=torch.float32)
        return y.to(x.dtype) + torch.full((64,), 1 / 3)


def test_the_reference_is_float64_through_and_through() -> None:
    torch.manual_seed(0)
    model, x = Narrow(), torch.randn(5, 64)
    storage = model.weight.data_ptr()
    with widened(State(model), torch.float64), torch.no_grad():
        found = model(widen(x, torch.float64))
    exact = (x.double() @ model.weight.detach().double()).softmax(-1) + 1 / 3
    assert found.dtype == torch.float64
    assert float((found - exact).abs().max()) < 1e-15
    assert model.weight.data_ptr() == storage
    assert torch.get_default_dtype() == torch.float32
