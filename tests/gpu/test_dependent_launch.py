"""Inductor's kernels beside Regions start before the kernel ahead has ended, and wait for it before they touch memory."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from tests.models.zoo import build, first_output

ACCESS = re.compile(r"\btl\.(load|store|atomic_\w+)\(")
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"triton.enable_pdl": True})


def kernels(codes: list[str]) -> list[str]:
    """The Triton kernels in generated wrappers."""
    return [body for code in codes for body in re.findall(r"^def triton_\w*\(.*?(?=^'''|\Z)", code, re.DOTALL | re.MULTILINE)]


def check_waits(codes: list[str]) -> None:
    found = kernels(codes)
    assert found, "Inductor generated no kernel"
    for body in found:
        access = ACCESS.search(body)
        wait = body.find("gdc_wait()")
        assert access is None or 0 <= wait < access.start(), body


def layer(x: Tensor, w: Tensor, u: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Products with several results, and kernels of Inductor's that read, rewrite and mix them."""
    q, k, v = F.linear(x, w), F.linear(x, u), F.linear(x, w + u)
    turned = torch.cat([-q[:, q.shape[1] // 2 :], q[:, : q.shape[1] // 2]], -1) * g + q
    norm = F.rms_norm(k + x, (x.shape[-1],), g)
    return (
        turned,
        norm,
        F.gelu(F.linear(norm, w)) + v.roll(1, 1),
        torch.cumsum(v.to(torch.promote_types(v.dtype, torch.float32)), 1),
    )


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("rows", [1, 16, 300])
def test_kernels_wait_before_they_touch_memory(options: dict[str, Any], rows: int) -> None:
    x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
    w, u = (torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16) / 32 for _ in range(2))
    g = torch.rand(1024, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(layer, backend="postlude", options={"fuse_all": True, **options})
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        results, codes = run_and_get_code(compiled, x, w, u, g)
        assert not torch._inductor.config.triton.enable_pdl, "the setting is Inductor's own again"
        check_waits(codes)
        exact = layer(*(tensor.double() for tensor in (x, w, u, g)))
        for result, eager, wanted in zip(results, layer(x, w, u, g), exact, strict=True):
            error, allowed = (float((one.double() - wanted).norm() / wanted.norm()) for one in (result, eager))
            assert error <= 1.05 * allowed + 1e-4


def test_what_the_user_forbids() -> None:
    x, w = (torch.randn(64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    compiled = torch.compile(lambda x, w: F.relu(x @ w).cumsum(1), backend="postlude", options={"triton.enable_pdl": False})
    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(compiled, x, w)
    assert kernels(codes)
    assert not any("gdc_wait" in body for body in kernels(codes))


def replayed(run: Callable[[], tuple[Tensor, ...]], change: Callable[[], object], times: int) -> list[list[Tensor]]:
    """What a CUDA graph gives for inputs that change before each replay."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    found = []
    for _ in range(times):
        change()
        graph.replay()
        found.append([result.clone() for result in results])
    return found


@pytest.mark.parametrize("rows", [1, 16])
def test_replays_give_the_same_bits_without(rows: int) -> None:
    """Many layers in a row, where a kernel that reads or writes too early would meet another's data."""
    w, u = (torch.randn(4, 512, 512, device="cuda", dtype=torch.bfloat16) / 23 for _ in range(2))
    g = torch.rand(512, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)

    def model() -> tuple[Tensor, ...]:
        y = x
        for i in range(4):
            turned, norm, mixed, sums = layer(y, w[i], u[i], g)
            y = torch.tanh(turned + norm + mixed + sums.to(x.dtype))
        return y, sums

    found = []
    for allowed in (True, False):
        torch._dynamo.reset()
        options = {"fuse_all": True, "triton.enable_pdl": allowed}
        generator = torch.Generator("cuda").manual_seed(1)
        compiled = torch.compile(model, backend="postlude", options=options)
        with torch.no_grad():
            found.append(replayed(compiled, lambda generator=generator: x.normal_(generator=generator), 30))
    for chained, plain in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(chained, plain, strict=True))


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "mixtral"])
def test_whole_models(name: str) -> None:
    pytest.importorskip("transformers")
    model, inputs = build(name, dtype=torch.bfloat16)
    model, inputs = model.cuda(), {key: value.cuda() for key, value in inputs.items()}
    compiled = torch.compile(model, backend="postlude", options={"fuse_all": True})
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        result, codes = run_and_get_code(compiled, **inputs)
        check_waits([code for code in codes if "region_0" in code])
        distance = (first_output(result).float() - first_output(model(**inputs)).float()).norm()
    assert float(distance / first_output(result).float().norm()) < 0.05
