"""`quantize_`: which layers it takes, what it reports; and the same numbers from every backend."""

import pytest
import torch
from torch import nn

import postlude
from postlude import quantize_
from postlude.errors import QuantizationError
from postlude.quant import SCHEMES, QuantizedTensor, Scheme
from tests.quant.models import block


def test_report() -> None:
    model = block()
    report = quantize_(model, "nvfp4-weight")
    assert [layer.name for layer in report.quantized] == ["up", "down"]
    (left,) = report.left_alone
    assert left.name == "head"
    assert left.reason == "nvfp4 needs a multiple of 16 columns"
    assert type(model.head.weight) is nn.Parameter
    up = report.quantized[0]
    assert up.bytes_before == 128 * 64 * 4
    assert up.bytes_after == 128 * 64 // 2 + 128 * 4 + 4
    assert 0.05 < up.error < 0.15
    text = str(report)
    assert "2 of 3 linear layers in nvfp4" in text
    assert "left alone: nvfp4 needs a multiple of 16 columns" in text
    again = quantize_(model, "int8-weight")
    assert [layer.name for layer in again.quantized] == ["head"]
    assert "is in nvfp4 already" in str(again)


def test_filter() -> None:
    model = block()
    report = quantize_(model, "int8-weight", filter=lambda module, name: name != "down")
    assert [layer.name for layer in report.layers] == ["up", "head"]
    assert type(model.down.weight) is nn.Parameter


def test_layers_that_must_be_left_alone() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(32, 64)
            self.head = nn.Linear(64, 32, bias=False)
            self.head.weight = self.embedding.weight
            self.attention = nn.MultiheadAttention(64, 2)
            self.first = nn.Linear(64, 64)
            self.same = nn.Linear(64, 64)
            self.same.weight = self.first.weight
            self.double = nn.Linear(64, 64, dtype=torch.float64)
            self.empty = nn.Linear(64, 0)

    model = Tied()
    report = quantize_(model, "int8-weight")
    assert {layer.name: layer.reason for layer in report.left_alone} == {
        "head": "embedding has the same weight",
        "attention.out_proj": "attention reads its weight itself",
        "double": "its weight is torch.float64",
        "empty": "is empty",
    }
    assert model.first.weight is model.same.weight
    assert isinstance(model.first.weight, QuantizedTensor)
    assert model.head.weight is model.embedding.weight


def test_schemes() -> None:
    with pytest.raises(QuantizationError, match="'fp7'"):
        quantize_(block(), "fp7")
    with pytest.raises(QuantizationError, match="'nothing'"):
        Scheme("nothing")
    report = postlude.quantize_(block(), Scheme("uint4_32"))
    assert "in uint4_32" in str(report)


@pytest.mark.parametrize(("backend", "scheme"), [("aot_eager", "mxfp8"), ("inductor", "nvfp4-weight"), ("postlude", "fp8")])
def test_backends(backend: str, scheme: str) -> None:
    model, x = block(), torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        exact = block().double()(x.double())
    quantize_(model, scheme)
    torch._dynamo.reset()
    with torch.no_grad():
        eager = model(x)
        compiled = torch.compile(model, backend=backend, fullgraph=True)(x)
    # Where activations are quantised, a number between two codes may fall to either: an error of the format's own size.
    allowed = 1e-6 if SCHEMES[scheme].activation is None else float((eager - exact).norm() / exact.norm())
    assert float((compiled - eager).norm() / eager.norm()) < allowed
