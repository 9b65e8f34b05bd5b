"""Real model code on a GPU in bfloat16: forward and gradients, as accurate as eager."""

import copy

import pytest
import torch

from tests.models.zoo import MODELS, build, first_output

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", MODELS)
def test_inference(name: str) -> None:
    model, inputs = build(name, dtype=torch.bfloat16)
    model, inputs = model.cuda(), {key: value.cuda() for key, value in inputs.items()}
    compiled = torch.compile(model, backend="postlude", options={"fuse_all": True})
    with torch.no_grad():
        wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
        exact_model = copy.deepcopy(model).double()
        if hasattr(exact_model.config, "num_local_experts"):
            exact_model.set_experts_implementation("eager")
        exact = first_output(exact_model(**wide)).double()
        errors = [float((first_output(run(**inputs)).double() - exact).norm() / exact.norm()) for run in (model, compiled)]
    assert errors[1] <= 1.1 * errors[0] + 4 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_training(name: str) -> None:
    model, inputs = build(name, dtype=torch.bfloat16, training=True)
    model, inputs = model.cuda(), {key: value.cuda() for key, value in inputs.items()}
    gradients = []
    for run in (model, torch.compile(model, backend="postlude", options={"fuse_all": True})):
        model.zero_grad()
        output = first_output(run(**inputs)).float()
        # A random direction: the mean square of a normalised output has hardly any gradient.
        direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).cuda()
        (output * direction).sum().backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    eager, ours = gradients
    assert eager.keys() <= ours.keys()  # compiled code gives zeros where eager gives no gradient
    scale = max(float(gradient.float().norm()) for gradient in eager.values())
    for key, wanted in eager.items():
        distance = float((ours[key] - wanted).float().norm())
        assert distance <= 0.05 * float(wanted.float().norm()) + 1e-3 * scale, key
