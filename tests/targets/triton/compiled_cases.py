"""Kernels compiled for a GPU and launched on a driver that only takes notes: run by test_compiled.py, without the interpreter."""

import ctypes
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import max_shared_mem
from triton.runtime.errors import OutOfResources

from postlude.errors import KernelBuildError
from postlude.ir import parse
from postlude.ir.region import DTYPES
from postlude.targets import triton as target
from postlude.targets.triton import cuda_driver, launcher
from postlude.targets.triton.configs import Config, Device, attention
from postlude.targets.triton.cuda_driver import load_driver
from tests.targets.triton import fake_cuda
from tests.targets.triton.attention import region as attention_region
from tests.targets.triton.norms import region as norm_region

LINEAR = parse(
    "region(m, n, k); %x = operand [m, k] bf16; %w = operand [n, k] bf16; %b = operand [n] bf16; "
    "%acc = contract %x, %w : f32; %0 = add %acc, %b; yield [m, n] bf16 %0"
)
IN_FLOAT32 = parse(
    "region(m, n, k); %x = operand [m, k] f32; %w = operand [n, k] f32; %a = contract %x, %w : f32; yield [m, n] f32 %a"
)
GEMV = Config("gemv", 1, 4, 64, 4, 1)
GEMM = Config("gemm", 16, 16, 64, 4, 2)


class Driver:
    """Triton's driver for one H100 that is not there. Notes what each launch is told."""

    def __init__(self) -> None:
        self.shared = 227 << 10
        self.kernel: int = 2
        self.launches: list[tuple[Any, ...]] = []
        self.sources: list[Any] = []
        self.utils = self

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        self.sources.append(source)
        return lambda *arguments: self.launches.append(arguments)

    def load_binary(self, *arguments: object) -> tuple[int, ...]:
        return (1, self.kernel, 0, 0, 1024)

    def unload_module(self, module: int) -> None:
        """Called for a kernel that nobody needs any more, since Triton 3.8."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self.shared, "multiprocessor_count": 132}

    def get_current_device(self) -> int:
        return -1  # as tensors of the CPU say

    def get_current_stream(self, device: int) -> int:
        return 77

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    triton.runtime.driver.set_active(driver)
    monkeypatch.setattr(cuda_driver, "load_driver", lambda: None)
    monkeypatch.delattr(torch._C, "_cuda_getDevice", raising=False)
    launcher.load_module.cache_clear()  # kernels keep what they were loaded with
    max_shared_mem.cache_clear()
    return driver


def tensors(offset: int = 0, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    flat = torch.zeros(1000, dtype=dtype)
    return [flat[offset : offset + 128].view(1, 128), *(torch.zeros(s, dtype=dtype) for s in ((32, 128), (32,), (1, 32)))]


def told(driver: Driver) -> dict[str, Any]:
    """What the last launch was told, by the kernel's names."""
    return dict(zip(driver.sources[-1].signature, driver.launches[-1][9:], strict=True))


@pytest.mark.parametrize("config", [GEMV, replace(GEMV, chained=True, prefetch=64, release=2), GEMM, replace(GEMM, swap=True)])
def test_a_launch_is_told_pointers_sizes_and_strides(driver: Driver, config: Config) -> None:
    operands = tensors()
    assert target.load(LINEAR, config)(*operands)
    assert driver.launches[-1][:5] == (32 // config.block_n, 1, 1, 77, driver.kernel)
    found = told(driver)
    names = ("p_x", "p_w", "p_b", "r0")
    assert {name: found[name] for name in names} == dict(zip(names, (t.data_ptr() for t in operands), strict=True))
    assert [found[name] for name in ("m", "n", "k", "s_w_n", "s_w_k", "r0_m")] == [1, 32, 128, 128, 1, 0]
    assert found.get("prefetch", 0) == config.prefetch
    assert found.get("release", 0) == config.release
    if config.form == "gemm":
        assert (found["splits"], found["partials"], found["counters"]) == (1, None, None)


def test_k_split_takes_memory(driver: Driver) -> None:
    target.load(LINEAR, replace(GEMM, split_k=2))(*tensors())
    assert driver.launches[-1][0] == 4
    found = told(driver)
    assert found["splits"] == 2
    assert min(found["partials"], found["counters"]) > 0
    assert (driver.sources[-1].signature["partials"], driver.sources[-1].signature["counters"]) == ("*fp32", "*i32")


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("mask", ["none", "truth values"])
def test_attention(driver: Driver, dtype: str, mask: str) -> None:
    like = DTYPES[dtype]
    query, key, out = (torch.zeros(2, 8, length, 128, dtype=like) for length in (4, 256, 4))
    visible = [torch.ones(256, dtype=torch.bool).expand(2, 8, 4, 256)] if mask == "truth values" else []
    hopper = Device("sm_90", 132, 227 << 10)
    config = attention(hopper, rows=4, keys=256, width=128, width_out=128, batch=16, element=like.itemsize)
    target.load(attention_region(dtype, mask), config)(query, key, key, *visible, out)
    found = told(driver)
    assert (found["m"], found["n"], found["n1"], found["k"], found["b"]) == (4, 256, 128, 128, 16)
    assert driver.launches[-1][0] == 16 * found["splits"]
    assert found["splits"] == 256 // found["BLOCK_N"] > 1


@pytest.mark.parametrize("config", [GEMV, replace(GEMV, chained=True, prefetch=64), GEMM, replace(GEMM, swap=True)])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_norm_before_products(driver: Driver, config: Config, dtype: str) -> None:
    region = norm_region("q, k, v", dtype)
    axes = {"m": 1, "n": 24, "n1": 9, "n2": 7, "k": 128}
    given = [torch.zeros([axes[axis] for axis in one.axes], dtype=one.dtype) for one in (*region.operands, *region.yields)]
    target.load(region, config)(*given)
    assert driver.launches[-1][0] == sum(-(-axes[n] // config.block_n) for n in ("n", "n1", "n2"))


@pytest.mark.parametrize("config", [replace(GEMV, chained=True, prefetch=64), replace(GEMM, split_k=2)])
def test_cuda_and_triton_launch_alike(driver: Driver, config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    operands = tensors()
    kernel = target.load(LINEAR, config)
    kernel(*operands)
    found = told(driver)
    kinds = {name: kind for name, kind in driver.sources[-1].signature.items() if kind != "constexpr"}
    library = load_driver.__wrapped__(fake_cuda.build(tmp_path))
    known = fake_cuda.kernel([8 if kind[0] == "*" else 4 for kind in kinds.values()] + [8, 8])
    driver.kernel = ctypes.addressof(known)
    monkeypatch.setattr(cuda_driver, "load_driver", lambda: library)
    launcher.load_module.cache_clear()
    calls = target.load(LINEAR, config)
    calls(*operands)
    calls(*operands)
    record = fake_cuda.record(library)
    assert (len(driver.launches), record.launches) == (1, 2)
    assert (list(record.grid), record.stream) == (list(driver.launches[0][:3]), 77)
    assert record.attributes == config.chained
    passed = dict(zip(kinds, record.arguments, strict=False))
    for name in set(kinds) - {"partials", "counters"}:
        assert passed[name] == found[name]
    record.answer = 201  # no context in this thread: Triton's launcher makes one
    calls(*operands)
    assert (len(driver.launches), record.launches) == (2, 2)


def test_a_misaligned_pointer_is_compiled_for(driver: Driver) -> None:
    kernel = target.load(LINEAR, GEMV)
    for offset in (0, 1, 0, 8):
        kernel(*tensors(offset))
    assert len(driver.sources) == 2
    aligned, other = ([bool(source.attrs.get((p,))) for p in range(4)] for source in driver.sources)
    assert (aligned, other) == ([True] * 4, [False, True, True, True])


def test_tf32_as_torch_is_set(driver: Driver) -> None:
    matmul = torch.backends.cuda.matmul
    kernel = target.load(IN_FLOAT32, GEMM)
    x, w, _, out = tensors(dtype=torch.float32)
    before = matmul.fp32_precision
    try:
        for setting in ("ieee", "tf32"):
            matmul.fp32_precision = setting
            kernel(x, w, out)
            assert told(driver)["PRECISION"] == setting
    finally:
        matmul.fp32_precision = before


def test_what_does_not_fit_is_made_smaller(driver: Driver) -> None:
    driver.shared = 9 << 10
    target.load(LINEAR, Config("gemm", 16, 16, 64, 4, 4))(*tensors())
    assert told(driver)["STAGES"] < 4


def test_nothing_fits(driver: Driver) -> None:
    driver.shared = 100
    with pytest.raises(KernelBuildError, match="shared memory") as raised:
        target.load(LINEAR, Config("gemm", 16, 16, 64, 4, 4))(*tensors())
    assert isinstance(raised.value.__cause__, OutOfResources)


def test_what_triton_refuses_is_told_with_its_reason(driver: Driver) -> None:
    with pytest.raises(KernelBuildError, match="power of 2") as raised:
        target.load(LINEAR, replace(GEMV, block_n=24))(*tensors())
    assert "gemv 1x24x64" in str(raised.value)
