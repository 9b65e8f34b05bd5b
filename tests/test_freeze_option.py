"""`options={"freeze": True}`: weights are packed, and a changed weight is seen at once."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from postlude.targets.cpp import freeze, launcher
from tests.test_backend import Block

pytestmark = pytest.mark.skipif(not launcher.can_freeze(), reason="this torch can't freeze")


def _sgd(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def _no_grad_in_place(model: Block) -> None:
    with torch.no_grad():
        model.up.weight.mul_(2)


CHANGES: dict[str, Callable[[Block], object]] = {
    "in place": _no_grad_in_place,
    "data": lambda model: model.down.weight.data.add_(1),
    "data element": lambda model: model.down.weight.data[0, 0].fill_(9),
    "optimizer": _sgd,
    "load_state_dict": lambda model: model.load_state_dict(Block(24).double().apply(_noise).state_dict()),
    "assign": lambda model: model.load_state_dict(Block(24).apply(_noise).state_dict(), assign=True),
    "set_data": lambda model: setattr(model.up.weight, "data", torch.ones(40, 24)),
    "new parameter": lambda model: setattr(model, "up", nn.Linear(24, 40)),
}


def _noise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight)


@pytest.fixture
def packed() -> tuple[Block, Callable[[Tensor], Tensor], Tensor]:
    torch._dynamo.reset()
    model, x = Block(), torch.randn(40, 24)
    compiled = torch.compile(model, backend="postlude", options={"freeze": True})
    with torch.no_grad():
        for _ in range(4):
            compiled(x)
    assert freeze.packed_bytes() > 0
    return model, compiled, x


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weight_is_never_stale(change: str, packed: tuple[Block, Callable[[Tensor], Tensor], Tensor]) -> None:
    model, compiled, x = packed
    with torch.no_grad():
        before = model(x)
    CHANGES[change](model)
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(model(x), before)


def test_training_graphs_are_not_frozen() -> None:
    torch._dynamo.reset()
    freeze.release()
    model, x = Block(), torch.randn(40, 24)
    compiled = torch.compile(model, backend="postlude", options={"freeze": True})
    for _ in range(4):
        compiled(x).sum().backward()
    assert freeze.packed_bytes() == 0


def test_torchs_own_freezing_packs_its_constants() -> None:
    torch._dynamo.reset()
    freeze.release()
    model, x = Block(), torch.randn(40, 24)
    with torch._inductor.config.patch(freezing=True), torch.no_grad():
        compiled = torch.compile(model, backend="postlude")
        expected = model(x)
        for _ in range(4):
            torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)
    assert freeze.packed_bytes() > 0
