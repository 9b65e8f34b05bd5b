"""Real model code, forward and gradients, against eager and a float64 reference: the numerics contract of docs/design.md."""

import copy

import pytest
import torch

from tests.models.zoo import MODELS, build, first_output

pytest.importorskip("transformers")

#: An output's error may be eager's own on the same inputs, and this many units in the last place of the largest element.
ULPS = 4


def error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative error in the Frobenius norm."""
    return float((value.double() - exact).norm() / exact.norm().clamp_min(1e-30))


def allowed(eager: float, dtype: torch.dtype) -> float:
    """Eager's error, with a little room for where both round differently."""
    return eager * 1.1 + ULPS * torch.finfo(dtype).eps


def reference(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    exact = copy.deepcopy(model).double()
    if hasattr(exact.config, "num_local_experts"):
        exact.set_experts_implementation("eager")  # the grouped GEMM of experts has no float64 kernel
    return exact, wide


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_inference_is_as_accurate_as_eager(name: str, dtype: torch.dtype) -> None:
    model, inputs = build(name, dtype=dtype)
    wide_model, wide_inputs = reference(model, inputs)
    compiled = torch.compile(model, backend="postlude", options={"fuse_all": True})
    with torch.no_grad():
        exact = first_output(wide_model(**wide_inputs))
        eager = error(first_output(model(**inputs)), exact)
        ours = error(first_output(compiled(**inputs)), exact)
    assert ours <= allowed(eager, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_as_accurate_as_eager(name: str, dtype: torch.dtype) -> None:
    model, inputs = build(name, dtype=dtype, training=True)
    wide_model, wide_inputs = reference(model, inputs)
    eager_model = copy.deepcopy(model)

    def gradients(run: torch.nn.Module, owner: torch.nn.Module, arguments: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        output = first_output(run(**arguments))
        # A random direction: the mean square of a normalised output has hardly any gradient.
        direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        (output.double() * direction).sum().backward()
        return {n: p.grad for n, p in owner.named_parameters() if p.grad is not None}

    exact = gradients(wide_model, wide_model, wide_inputs)
    eager = gradients(eager_model, eager_model, inputs)
    ours = gradients(torch.compile(model, backend="postlude", options={"fuse_all": True}), model, inputs)
    assert exact.keys() == eager.keys()
    assert eager.keys() <= ours.keys()

    def errors(found: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([(found[key].double() - gradient).norm() for key, gradient in exact.items()])

    sizes = torch.stack([gradient.norm() for gradient in exact.values()])
    room = ULPS * torch.finfo(dtype).eps
    own, theirs = errors(ours), errors(eager)
    assert float(own.norm()) <= 1.05 * float(theirs.norm()) + room * float(sizes.norm())
    # One parameter's error is a small sample of roundings: it may be twice eager's where the whole is not larger.
    bounds = 2 * theirs + room * sizes.clamp_min(1e-3 * float(sizes.max()))
    worst = int((own / bounds).argmax())
    assert own[worst] <= bounds[worst], f"{list(exact)[worst]}: {own[worst]:.2e}, eager {theirs[worst]:.2e}"
