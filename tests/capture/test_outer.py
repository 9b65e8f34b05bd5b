"""Products over one element become multiplications, with the same bits, special values included; 0 is positive, as on a GPU."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from postlude.capture import outer
from postlude.capture.outer import PRODUCTS, expand_outer_products


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer, "DEVICE", "cpu")


def products(graph: torch.fx.Graph) -> int:
    return sum(node.target in PRODUCTS for node in graph.nodes)


def angles(frequencies: Tensor, positions: Tensor) -> Tensor:
    """As rotary embeddings of Transformers."""
    batch = positions.shape[0]
    wide = frequencies[None, :, None].float().expand(batch, -1, 1) @ positions[:, None, :].float()
    both = torch.cat([wide.transpose(1, 2)] * 2, -1)
    return both.cos() + both.sin()


def outer_product(column: Tensor, row: Tensor) -> Tensor:
    return F.relu(column.T @ row)


SPECIAL = torch.tensor([[0.0, -0.0, 1.5, float("inf"), float("nan"), -3e-39, 1e38]])

CASES = {
    "angles": (angles, (torch.rand(16), torch.arange(24).reshape(2, 12))),
    "outer product": (outer_product, (torch.randn(1, 7), torch.randn(1, 5))),
    "special values": (lambda a, b: a.T @ b, (SPECIAL, SPECIAL)),
    "bfloat16": (outer_product, (torch.randn(1, 7).bfloat16(), torch.randn(1, 5).bfloat16())),
    "strides": (lambda a, b: torch.bmm(a.transpose(0, 2), b).view(-1), (torch.randn(1, 6, 3), torch.randn(3, 1, 4))),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("symbolic", [False, True])
def test_the_same_bits(name: str, symbolic: bool) -> None:
    function, inputs = CASES[name]
    module = make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*inputs)
    assert products(module.graph) == 1
    assert expand_outer_products(module.graph) == 1
    assert products(module.graph) == 0
    module.graph.lint()
    module.recompile()
    found, wanted = module(*inputs), function(*inputs)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert not (found.signbit() & (found == 0)).any(), "CUDA's sums start at 0"


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (torch.mm, (torch.randn(4, 2), torch.randn(2, 4))),
        (torch.mm, (torch.ones(4, 1, dtype=torch.int64), torch.ones(1, 4, dtype=torch.int64))),
        (torch.addmm, (torch.randn(4), torch.randn(4, 1), torch.randn(1, 4))),
    ],
)
def test_others_stay(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
    assert expand_outer_products(make_fx(function)(*inputs).graph) == 0


def test_what_is_on_another_device_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer, "DEVICE", "cuda")
    assert expand_outer_products(make_fx(outer_product, tracing_mode="fake")(torch.randn(1, 7), torch.randn(1, 5)).graph) == 0


def test_compiled() -> None:
    for function, inputs in CASES.values():
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(function, backend="postlude")(*inputs), function(*inputs), equal_nan=True)
