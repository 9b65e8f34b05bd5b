"""Quantised weights wherever a weight goes: state dicts, files, copies, devices and dtypes, exports, shards."""

import copy
import io
import pickle
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional as F

from postlude import quantize_
from postlude.errors import QuantizationError
from postlude.quant import FORMATS, SCHEMES, QuantizedTensor, Scheme, dequantize, flatten, quantize, unflatten
from tests.quant.models import Block, block


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _quantized(scheme: str | Scheme, dtype: torch.dtype = torch.float32) -> Block:
    model = block(dtype)
    quantize_(model, scheme)
    return model


def _input(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_eager_is_the_product_of_dequantised_sides(scheme: str, dtype: torch.dtype) -> None:
    model, plain, x = _quantized(scheme, dtype), block(dtype), _input(dtype)
    wanted = SCHEMES[scheme]

    def layer(x: torch.Tensor, linear: nn.Linear, own: nn.Linear) -> torch.Tensor:
        if not isinstance(own.weight, QuantizedTensor):
            return F.linear(x, linear.weight, linear.bias)
        if wanted.activation:
            x = dequantize(quantize(x.flatten(0, 1), FORMATS[wanted.activation]), dtype).view_as(x)
        return F.linear(x, dequantize(quantize(linear.weight, FORMATS[wanted.weight]), dtype), linear.bias)

    hidden = F.gelu(layer(x, plain.up, model.up))
    expected = layer(layer(hidden, plain.down, model.down), plain.head, model.head)
    assert torch.equal(model(x), expected)


def test_gradients_pass_through(scheme: str) -> None:
    model, x = _quantized(scheme), _input().requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert x.grad.abs().sum() > 0
    assert model.up.bias.grad is not None
    assert not model.up.weight.requires_grad


def test_copies_and_files(scheme: str, tmp_path: Path) -> None:
    model, x = _quantized(scheme, torch.bfloat16), _input(torch.bfloat16)
    expected = model(x)
    copied = copy.deepcopy(model)
    assert isinstance(copied.up.weight, nn.Parameter)
    assert copied.up.weight.codes.data_ptr() != model.up.weight.codes.data_ptr()  # type: ignore[operator]
    assert torch.equal(copied(x), expected)
    pickled = pickle.loads(pickle.dumps(model))
    assert isinstance(pickled.up.weight, nn.Parameter)
    assert torch.equal(pickled(x), expected)
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    other = _quantized(scheme, torch.bfloat16)
    with torch.no_grad():
        other.up.weight.codes.view(torch.uint8).zero_()  # type: ignore[operator]
    other.load_state_dict(torch.load(saved, weights_only=True))
    assert torch.equal(other(x), expected)
    tensors, metadata = flatten(model.state_dict())
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata)
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        state = unflatten({name: file.get_tensor(name) for name in file.keys()}, file.metadata())  # noqa: SIM118
    with torch.device("meta"):
        empty = Block().to(torch.bfloat16)
    quantize_(empty, scheme)
    assert empty.up.weight.is_meta
    empty.load_state_dict(state, assign=True)
    assert torch.equal(empty(x), expected)


def test_a_plain_checkpoint_is_quantised_as_it_is_loaded() -> None:
    model = _quantized("nvfp4-weight")
    other = block()
    with torch.no_grad():
        other.up.weight.mul_(3.0)
    model.load_state_dict(other.state_dict())
    assert torch.equal(model.up.weight.dequantize(), dequantize(quantize(other.up.weight, FORMATS["nvfp4"])))  # type: ignore[operator]


def test_dtypes_and_devices(scheme: str) -> None:
    model = _quantized(scheme).to(torch.bfloat16)
    assert isinstance(model.up.weight, QuantizedTensor)
    assert model.up.weight.dtype == torch.bfloat16
    assert model.up.weight.scale.dtype in (torch.float32, FORMATS[SCHEMES[scheme].weight].scale, torch.uint8)
    assert model(_input(torch.bfloat16)).dtype == torch.bfloat16
    away = model.to("meta")
    assert away.up.weight.is_meta
    assert isinstance(away.up.weight, QuantizedTensor)


def test_a_weight_is_not_changed_in_place() -> None:
    weight = _quantized("int8-weight").up.weight
    with pytest.raises(QuantizationError, match="in place"), torch.no_grad():
        weight.mul_(2.0)
    with pytest.raises(QuantizationError, match="was to be copied"), torch.no_grad():
        weight.copy_(torch.zeros(3, 64))
    assert torch.equal(weight * 2.0, weight.dequantize() * 2.0)  # type: ignore[operator]


@pytest.mark.parametrize("name", FORMATS)
def test_rows(name: str) -> None:
    matrix = torch.randn(256, 128)
    weight = QuantizedTensor.quantize(matrix, Scheme(name))
    whole = weight.dequantize()
    first, second = weight.split(128)
    assert isinstance(first, QuantizedTensor)
    assert torch.equal(torch.cat((first.dequantize(), second.dequantize())), whole)
    assert torch.equal(weight[128:].dequantize(), whole[128:])
    filled = weight.new_zeros(256, 128)
    filled.narrow(0, 0, 128).copy_(first)
    assert torch.equal(filled.dequantize()[:128], whole[:128])
    if FORMATS[name].block[0] == 128:
        with pytest.raises(QuantizationError, match="rows"):
            weight.split(100)


def test_plain_state_dicts_say_what_is_wrong() -> None:
    tensors, metadata = flatten(_quantized("int4-weight").state_dict())
    assert all(type(tensor) is torch.Tensor for tensor in tensors.values())
    del tensors["up.weight.codes"]
    with pytest.raises(QuantizationError, match="do not fit together"):
        unflatten(tensors, metadata)
    assert unflatten({"a": torch.ones(1)}, None)["a"].item() == 1.0
    with pytest.raises(QuantizationError, match=r"up\.weight\.codes"):
        flatten({**_quantized("int8-weight").state_dict(), "up.weight.codes": torch.ones(1)})


def test_export(scheme: str) -> None:
    model, x = _quantized(scheme), _input()
    exported = torch.export.export(model, (x,))
    assert torch.equal(exported.module()(x), model(x))
