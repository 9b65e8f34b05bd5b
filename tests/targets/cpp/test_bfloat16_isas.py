"""bfloat16 kernels of both instruction sets that multiply pairs: AMX's tiles and AVX-512's vectors."""

import ctypes
import mmap
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from postlude.ir import Region, parse
from postlude.targets import cpp
from postlude.targets.aten import evaluate
from postlude.targets.cpp import build, launcher, toolchain
from postlude.targets.cpp.toolchain import AMX_BF16, AVX512_BF16, Isa
from tests.targets.cpp.numerics import empty_results

HEAD = "region(m, n, k); %x = operand [m, k] bf16; %w = operand {w} bf16; %b = operand [n] bf16; %acc = contract %x, %w : f32; "
LINEAR = HEAD + "%0 = add %acc, %b; yield [m, n] bf16 %0"
NORM = (
    HEAD + "%0 = add %acc, %b; %1 = reduce sum n %0; %2 = extent n; %3 = div %1, %2; %4 = sub %0, %3; yield [m, n] bf16 %4;"
    " yield [m] f32 %3"
)
GATED = (
    "region(m, n, k); %x = operand [m, k] bf16; %g = operand [n, k] bf16; %u = operand [n, k] bf16;"
    " %0 = contract %x, %g : f32; %1 = contract %x, %u : f32; %2 = sigmoid %0; %3 = mul %0, %2; %4 = mul %1, %3;"
    " yield [m, n] bf16 %4"
)
ATTENTION = (
    "region(b, m, n, k, n1); %q = operand [b, m, k] bf16; %k = operand [b, n, k] bf16; %v = operand [b, n, n1] bf16;"
    " %0 = contract %q, %k : f32; %1 = reduce max n %0; %2 = sub %0, %1; %3 = exp %2; %4 = reduce sum n %3; %5 = div %3, %4;"
    " %6 = contract %5, %v : f32; yield [b, m, n1] bf16 %6"
)


@pytest.fixture(params=[AMX_BF16, AVX512_BF16], ids=str)
def isa(request: pytest.FixtureRequest) -> Isa:
    wanted: Isa = request.param
    missing = wanted.needs - toolchain.cpu_features()
    if missing:
        pytest.skip(f"this machine has no {', '.join(sorted(missing))}, or does not let this process use it")
    if toolchain.usable(wanted, toolchain.compiler()) is not wanted:
        pytest.skip(f"this compiler does not know {wanted}")
    return wanted


def load(region: Region, isa: Isa) -> launcher.Kernel:
    path = build.build(cpp.source(region), isa=isa)
    return launcher.load(path, operands=len(region.operands), micro=build.micro_table("bf16", isa))


def compare(region: Region, results: list[Tensor], operands: list[Tensor], bound: float = 2**-7) -> None:
    for result, exact in zip(results, evaluate(region, operands, arithmetic=torch.float64), strict=True):
        torch.testing.assert_close(result.double(), exact.double(), rtol=bound, atol=bound)


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).bfloat16()


@pytest.mark.parametrize("layout", ["[n, k]", "[k, n]"])
@pytest.mark.parametrize("program", [LINEAR, NORM], ids=["linear", "whole rows"])
def test_every_edge(isa: Isa, layout: str, program: str) -> None:
    torch.manual_seed(0)
    region = parse(program.format(w=layout))
    kernel = load(region, isa)
    for m in (1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 48, 65, 130):
        for n, k in ((1, 1), (15, 31), (16, 32), (17, 33), (33, 64), (63, 65), (64, 96), (80, 127), (200, 257)):
            w = normal(n, k, scale=k**-0.5)
            operands = [normal(m, k), w if layout == "[n, k]" else w.t().contiguous(), normal(n)]
            results = empty_results(region, operands)
            kernel(*operands, *results)
            compare(region, results, operands)


@pytest.mark.parametrize("rows", [1, 5, 20, 70, 300])
def test_packed_weights_give_the_same_bits(isa: Isa, rows: int) -> None:
    if launcher.extension() is None:
        pytest.skip("the launcher can't be compiled here")
    region = parse(LINEAR.format(w="[n, k]"))
    kernel = load(region, isa)
    operands = [normal(rows, 200), normal(150, 200), normal(150)]
    frozen = kernel.frozen(lambda kernel, index, tensor: None, (1,))
    frozen.use_packed(1, kernel.pack(1, operands[1], operands[1]))
    natural, packed = empty_results(region, operands), empty_results(region, operands)
    kernel(*operands, *natural)
    frozen(*operands, *packed)
    compare(region, packed, operands, 2**-5)
    torch.testing.assert_close(natural, packed, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("rows", [3, 40, 200])
def test_two_contractions(isa: Isa, rows: int) -> None:
    region = parse(GATED)
    operands = [normal(rows, 100), normal(90, 100, scale=0.1), normal(90, 100, scale=0.1)]
    results = empty_results(region, operands)
    load(region, isa)(*operands, *results)
    compare(region, results, operands)


@pytest.mark.parametrize(("m", "n", "depth"), [(5, 7, 8), (16, 16, 32), (33, 65, 64), (128, 128, 32), (70, 129, 33)])
def test_attention(isa: Isa, m: int, n: int, depth: int) -> None:
    region = parse(ATTENTION)
    operands = [normal(6, m, depth, scale=depth**-0.5), normal(6, n, depth), normal(6, n, depth)]
    results = empty_results(region, operands)
    load(region, isa)(*operands, *results)
    compare(region, results, operands)


@pytest.mark.parametrize("rows", [2, 33, 160])
def test_special_values(isa: Isa, rows: int) -> None:
    """NaN and infinity stay in their row and column; zeros that fill up tiles meet none of them."""
    region = parse(LINEAR.format(w="[n, k]"))
    operands = [normal(rows, 45), normal(50, 45), normal(50)]
    operands[0][0, 44] = torch.nan
    operands[0][1, 3] = torch.inf
    operands[1][49, 44] = -torch.inf
    results = empty_results(region, operands)
    load(region, isa)(*operands, *results)
    exact = functional.linear(*(operand.double() for operand in operands))
    assert torch.equal(results[0].isnan(), exact.isnan())
    assert torch.equal(results[0].isinf(), exact.isinf())
    finite = exact.isfinite()
    torch.testing.assert_close(results[0].double()[finite], exact[finite], rtol=2**-6, atol=2**-6)


def at_the_end_of_memory(values: Tensor) -> tuple[Tensor, mmap.mmap]:
    """A copy of a tensor whose last byte is the last one before a page that must not be touched."""
    size = values.numel() * values.element_size()
    page = mmap.PAGESIZE
    room = (size + page - 1) // page * page
    memory = mmap.mmap(-1, room + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + room), ctypes.c_size_t(page), 0) == 0
    copy = torch.frombuffer(memory, dtype=values.dtype, count=values.numel(), offset=room - size).view(values.shape)
    return copy.copy_(values), memory


@pytest.mark.parametrize("layout", ["[n, k]", "[k, n]"])
@pytest.mark.parametrize("rows", [1, 7, 16, 29, 48, 200])
def test_nothing_past_the_end_is_read_or_written(isa: Isa, layout: str, rows: int) -> None:
    region = parse(LINEAR.format(w=layout))
    kernel = load(region, isa)
    for n, k in ((17, 33), (70, 64), (65, 65)):
        w = normal(n, k, scale=k**-0.5)
        operands = [normal(rows, k), w if layout == "[n, k]" else w.t().contiguous(), normal(n)]
        guarded = [at_the_end_of_memory(tensor) for tensor in [*operands, *empty_results(region, operands)]]
        kernel(*(tensor for tensor, _ in guarded))
        compare(region, [guarded[-1][0]], operands)


def test_torch_and_many_threads_beside_it(isa: Isa) -> None:
    """Tile registers have a shape for each thread, and torch's own kernels set theirs."""
    region = parse(LINEAR.format(w="[n, k]"))
    kernel = load(region, isa)
    jobs = []
    for m in (5, 40, 100, 64):
        operands = [normal(m, 160), normal(200, 160, scale=0.1), normal(200)]
        results = empty_results(region, operands)
        kernel(*operands, *results)
        jobs.append((operands, results[0].clone(), functional.linear(*operands)))

    def repeat(job: tuple[list[Tensor], Tensor, Tensor]) -> bool:
        operands, ours, theirs = job
        for _ in range(50):
            results = empty_results(region, operands)
            kernel(*operands, *results)
            if not torch.equal(results[0], ours) or not torch.equal(functional.linear(*operands), theirs):
                return False
        return True

    with ThreadPoolExecutor(len(jobs)) as pool:
        assert all(pool.map(repeat, jobs))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_computes_the_same(isa: Isa) -> None:
    region = parse(LINEAR.format(w="[n, k]"))
    kernel = load(region, isa)
    operands = [normal(100, 160), normal(300, 160, scale=0.1), normal(300)]
    before, after = empty_results(region, operands), empty_results(region, operands)
    kernel(*operands, *before)
    child = os.fork()
    if child == 0:
        kernel(*operands, *after)
        os._exit(0 if bytes(before[0].untyped_storage()) == bytes(after[0].untyped_storage()) else 1)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert status == 0
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")
