"""Numbers of the kernels on a GPU against float64: every Region of the catalogue, every op, odd sizes and strides.

`python -m tests.targets.cute.gpu_cases --processes 12` runs them all without pytest and prints a line for each.
"""

import argparse
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from postlude.ir import OPS, Region, parse
from postlude.op import allocate_results
from postlude.targets import cute
from postlude.targets.aten import evaluate
from postlude.targets.cute import Configuration, toolchain
from tests import precise
from tests.targets.cute.catalogue import CATALOGUE

SIZES = ((328, 400, 264), (8, 4096, 72), (136, 16, 8), (1000, 272, 1032))

#: The error may be this many times that of float32 arithmetic on the same operands, which cuBLAS sums in another order.
_SLACK = 1.25

#: What tensor cores may lose besides while they add, which shows in float32 results: 1.7e-6 was seen with k = 1032.
_OF_TENSOR_CORES = 3e-6

CONFIGURATIONS = (
    Configuration(128, 256, 1, 2),
    Configuration(256, 128, 2, 1, swapped=True),
    Configuration(128, 160, 2, 1, pingpong=True),
    Configuration(192, 128, 1, 2, pingpong=True, swapped=True),
    Configuration(64, 256, 1, 1, pingpong=True, raster="n", swizzle=4),
    Configuration(128, 64, 1, 2, pingpong=True),
    Configuration(64, 64, 2, 1, pingpong=True),
)


def operands_of(region: Region, m: int, n: int, k: int, seed: int = 0) -> list[Tensor]:
    """Random dense operands; the batch is two dimensions."""
    sizes = {"b": (2, 3), "m": (m,), "n": (n,), "n1": (n + 8,), "k": (k,)}
    generator = torch.Generator("cuda").manual_seed(seed)
    operands = []
    for operand in region.operands:
        shape = [size for axis in operand.axes for size in sizes[axis]]
        value = torch.randn(shape, device="cuda", generator=generator)
        operands.append(value > 0.5 if operand.dtype == torch.bool else value.to(operand.dtype))
    operands[region.operand_index[region.contractions[0].left]] /= k**0.5
    return operands


def check(region: Region, operands: list[Tensor], configuration: Configuration | None = None) -> str:
    """Run the kernel and compare; returns the errors, raises AssertionError."""
    assert cute.fits(region, operands) is None, cute.fits(region, operands)
    results = allocate_results(region, operands)
    kernel = cute.load(region, configuration)
    before: list[Tensor] = []
    for call in (kernel, kernel.fast, kernel.fast):  # launched by Python, planned again, launched from C
        for result in results:
            result.fill_(True if result.dtype == torch.bool else torch.nan)
        assert call(*operands, *results)
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(results, before, strict=False)), "a second call gives other bits"
        before = [result.clone() for result in results]
    exact = evaluate(region, operands, arithmetic=torch.float64, rounded=False)
    single = evaluate(region, operands)
    said = []
    for result, reference, rounded in zip(results, exact, single, strict=True):
        if result.dtype == torch.bool:
            wrong = (result != reference).sum().item()
            said.append(f"{wrong} of {result.numel()} differ")
            assert wrong <= result.numel() // 10_000, said[-1]
            continue
        size = reference.abs().max()
        error, allowed = (((value.double() - reference).abs().max() / size).item() for value in (result, rounded))
        said.append(f"{error:.2e}/{allowed:.2e}")
        assert error <= _SLACK * allowed + _OF_TENSOR_CORES, f"error {error:.3e}, in float32 {allowed:.3e}"
    return " ".join(said)


def catalogue_cases() -> Iterator[tuple[str, Callable[[], str]]]:
    for name, (m, n, k) in product(CATALOGUE, SIZES):
        yield (
            f"{name} {m}x{n}x{k}",
            lambda name=name, m=m, n=n, k=k: check(CATALOGUE[name], operands_of(CATALOGUE[name], m, n, k)),
        )
    for name, configuration in product(("everything", "swiglu", "truths", "totals", "paired", "heads"), CONFIGURATIONS):
        pair = name in ("swiglu", "paired")
        if not (configuration.swapped and name not in ("everything", "truths")) and not (pair and configuration.tile_n % 32):
            region = CATALOGUE[name]
            yield f"{name} {configuration}", lambda r=region, c=configuration: check(r, operands_of(r, 712, 784, 264), c)


def stride_cases() -> Iterator[tuple[str, Callable[[], str]]]:
    gelu, everything, swiglu, batched_ = (CATALOGUE[name] for name in ("gelu_erf", "everything", "swiglu", "batched"))

    def replaced(region: Region, change: Callable[[list[Tensor]], None]) -> str:
        operands = operands_of(region, 240, 400, 264)
        change(operands)
        return check(region, operands)

    def leading(o: list[Tensor]) -> None:
        o[0] = o[0].view(5, 48, 264)
        o[3] = o[3].view(5, 48, 400)

    def transposed(o: list[Tensor]) -> None:
        o[0] = o[0].t().contiguous().t()
        o[1] = o[1].t().contiguous().t()

    def sliced(o: list[Tensor]) -> None:
        o[0] = torch.cat([o[0], o[0]], 1)[:, 264:]
        o[1] = torch.cat([o[1], o[1]], 1)[:, :264]
        o[2] = torch.cat([o[2], o[2]])[400:]

    def second_weight_first(o: list[Tensor]) -> None:
        both = torch.stack([o[2], o[1]])
        o[1], o[2] = both[1], both[0]

    def weights_far_apart(o: list[Tensor]) -> None:
        between = torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
        o[2] = o[2].clone()
        del between

    def shared_batch(o: list[Tensor]) -> None:
        o[1] = o[1][:1, :1].expand(2, 3, -1, -1)

    def heads(o: list[Tensor]) -> None:
        """Heads beside each other, as projections leave them: [batch, m, heads, k], permuted."""
        for i, tensor in enumerate(o):
            o[i] = tensor.transpose(1, 2).contiguous().transpose(1, 2)

    yield "leading dimensions", lambda: replaced(everything, leading)
    yield "transposed operands", lambda: replaced(gelu, transposed)
    yield "sliced operands", lambda: replaced(gelu, sliced)
    yield "second weight lies first", lambda: replaced(swiglu, second_weight_first)
    yield "weights far apart", lambda: replaced(swiglu, weights_far_apart)
    yield "one weight for all batches", lambda: replaced(batched_, shared_batch)
    yield "heads beside each other", lambda: replaced(CATALOGUE["heads"], heads)
    yield "second weight lies first, with all that a pair can have", lambda: replaced(CATALOGUE["paired"], second_weight_first)


def total_cases() -> Iterator[tuple[str, Callable[[], str]]]:
    """Reductions: special values, rows and columns beyond the edges, calls that overlap, workspace in graphs."""
    totals = CATALOGUE["totals"]

    def special_values() -> str:
        region = parse(
            "region(m, n, k); %x = operand [m, k] bf16; %w = operand [n, k] bf16; %tile = operand [m, n] f32;"
            " %acc = contract %x, %w : f32; %0 = add %acc, %tile; %1 = reduce max n %0; %2 = reduce min n %0;"
            " %3 = reduce sum n %0; %4 = reduce sum m %0; yield [m] f32 %1; yield [m] f32 %2; yield [m] f32 %3; yield [n] f32 %4"
        )
        m, n = 200, 392
        x, w = torch.zeros(m, 8, device="cuda", dtype=torch.bfloat16), torch.zeros(n, 8, device="cuda", dtype=torch.bfloat16)
        tile = -1 - torch.rand(m, n, device="cuda")  # a maximum that 0 would hide, and a minimum
        tile[100:] *= -1
        for row, column, value in ((0, 5, torch.nan), (1, 391, torch.inf), (2, 0, -torch.inf), (199, 391, torch.nan)):
            tile[row, column] = value
        results = allocate_results(region, [x, w, tile])
        assert cute.load(region)(x, w, tile, *results)
        torch.cuda.synchronize()
        for result, wanted in zip(results, (tile.amax(1), tile.amin(1), tile.sum(1), tile.sum(0)), strict=True):
            torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-4, equal_nan=True)  # of hundreds of terms that cancel
        return "as eager"

    def beyond_the_edges() -> str:
        """exp(0) = 1 beyond the edge would count."""
        region = CATALOGUE["row_totals"]
        operands = [torch.zeros(size, 8, device="cuda", dtype=torch.bfloat16) for size in (129, 136)]
        (result,) = allocate_results(region, operands)
        assert cute.load(region)(*operands, result)
        assert (result == 136).all(), result.unique().tolist()
        return "136"

    def on_two_streams() -> str:
        """Calls that overlap have workspace of their own."""
        kernel, all_operands = cute.load(totals), [operands_of(totals, 2048, 1024, 512, seed) for seed in (1, 2)]
        all_results = [allocate_results(totals, operands) for operands in all_operands]
        expected = []
        for operands, results in zip(all_operands, all_results, strict=True):
            kernel.fast(*operands, *results)
            torch.cuda.synchronize()
            expected.append([result.clone() for result in results])
        streams = [torch.cuda.Stream() for _ in range(2)]
        for _ in range(50):
            for stream, operands, results in zip(streams, all_operands, all_results, strict=True):
                with torch.cuda.stream(stream):
                    kernel.fast(*operands, *results)
        torch.cuda.synchronize()
        for results, wanted in zip(all_results, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))
        return "the same bits"

    def in_a_graph() -> str:
        kernel, operands = cute.load(totals), operands_of(totals, 640, 1024, 512)
        results = allocate_results(totals, operands)
        kernel.fast(*operands, *results)
        torch.cuda.synchronize()
        expected = [result.clone() for result in results]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernel.fast(*operands, *results)
        torch.empty(1 << 28, dtype=torch.uint8, device="cuda").fill_(255)  # what else the allocator gives away
        for result in results:
            result.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
        return "replayed"

    yield "totals of special values", special_values
    yield "totals beyond the edges", beyond_the_edges
    yield "totals on two streams", on_two_streams
    yield "totals in a CUDA graph", in_a_graph
    few, many = ((1, 16, 8), (64, 64, 64), (127, 144, 64), (129, 1008, 72)), ((4096, 48, 128), (7, 8192, 256), (8192, 4096, 512))
    for name, sizes in product(("totals", "column_totals", "paired"), (*few, *many)):
        region = CATALOGUE[name]
        yield f"{name} {'x'.join(map(str, sizes))}", lambda r=region, s=sizes: check(r, operands_of(r, *s))


def precise_cases() -> Iterator[tuple[str, Callable[[], str]]]:
    """Chains of ops whose terms cancel, as accurate as eager's float32."""

    def run(region: Region, operands: Sequence[Tensor]) -> list[Tensor]:
        there = [operand.cuda() for operand in operands]
        results = allocate_results(region, there)
        assert cute.load(region)(*there, *results)
        return [result.cpu() for result in results]

    def case(name: str) -> str:
        for short in ("bf16", "f16", "f32"):
            precise.check(name, short, run, "cuda")
        return "as accurate as eager"

    for name in precise.PROGRAMS:
        yield f"precise: {name}", lambda name=name: case(name)


def misfit_cases() -> Iterator[tuple[str, Callable[[], str]]]:
    region = CATALOGUE["gelu_erf"]

    def misfit(region: Region, m: int, n: int, k: int) -> str:
        reason = cute.fits(region, operands_of(region, m, n, k))
        assert reason is not None
        return reason

    def refused(m: int, n: int, k: int, change: Callable[[list[Tensor]], None] | None = None) -> str:
        operands = operands_of(region, m, n, k)
        if change:
            change(operands)
        reason = cute.fits(region, operands)
        assert reason is not None
        return reason

    def misaligned(o: list[Tensor]) -> None:
        o[0] = torch.empty(64 * 64 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(64, 64)

    yield "k not a multiple of 8", lambda: refused(64, 64, 60)
    yield "a mask whose rows are no multiple of 16 bytes", lambda: misfit(CATALOGUE["truths"], 64, 72, 64)
    yield "k is 0", lambda: refused(64, 64, 0)
    yield "misaligned", lambda: refused(64, 64, 64, misaligned)


def op_cases() -> Iterator[tuple[str, Callable[[], str]]]:
    """Each op on a tile of ordinary and special numbers, with a float32 result and with a bfloat16 one."""
    every = list(OPS)
    for names in (tuple(every[i : i + 3]) for i in range(0, len(every), 3)):
        for short in ("f32", "bf16"):
            yield f"{' '.join(names)} -> {short}", lambda names=names, short=short: check_ops(names, short)


def check_ops(names: tuple[str, ...], short: str) -> str:
    """Compare elementwise: within a few units in the last place, and the same NaN and infinities."""
    region = parse(_op_program(names, short))
    m, n = 128, 64
    generator = torch.Generator("cuda").manual_seed(1)
    x, w = torch.zeros(m, 8, device="cuda", dtype=torch.bfloat16), torch.zeros(n, 8, device="cuda", dtype=torch.bfloat16)
    first, second = (torch.randn(m, n, device="cuda", generator=generator) * 3 for _ in range(2))
    special = torch.tensor(
        [0.0, 1.0, -1.0, 0.5, 2.5, torch.inf, -torch.inf, torch.nan, 1e30, -1e30, 1e-30, 88.0, -88.0, 20.0, -20.0]
    )
    near = torch.cat([torch.logspace(-20, 1.94, 32), 1 + torch.logspace(-7, -0.3, 16), 1 - torch.logspace(-7, -0.3, 16)])
    first[2], first[3] = near.cuda(), -near.cuda()
    first[0, : len(special)] = special.cuda()
    first[1, : len(special)] = special.cuda()
    second[1, : len(special)] = special.roll(3).cuda()
    operands = [{"x": x, "w": w, "tile": first, "tile1": second}[o.name] for o in region.operands]
    results = allocate_results(region, operands)
    assert cute.load(region)(*operands, *results)
    torch.cuda.synchronize()
    single = evaluate(region, operands)
    exact = evaluate(region, operands, arithmetic=torch.float64, rounded=False)
    unit = torch.finfo(results[0].dtype).eps
    said = []
    for name, result, reference, rounded in zip(names, results, exact, single, strict=True):
        eager = rounded.double()
        finite = torch.isfinite(eager)
        same = torch.equal(eager[~finite].nan_to_num(7.0), result.double()[~finite].nan_to_num(7.0))
        # In units of the last place of the larger of the result and what rounding the inputs costs.
        error = ((result.double() - reference).abs() / (reference.abs() * unit + 1e-37))[finite]
        allowed = ((eager - reference).abs() / (reference.abs() * unit + 1e-37))[finite]
        excess = (error - allowed).max().item()
        said.append(f"{name} {error.max().item():.1f}/{allowed.max().item():.1f}")
        assert same, f"{name}: NaN or infinities differ at {first[~finite][:20].tolist()}: {result[~finite][:20].tolist()}"
        assert excess <= 4, f"{name}: {excess:.1f} units in the last place beyond PyTorch's own error"
    return ", ".join(said)


def _op_program(names: tuple[str, ...], short: str) -> str:
    lines, results = [], []
    for index, name in enumerate(names):
        op = OPS[name]
        inputs = []
        for position, kind in enumerate(op.inputs):
            value = ("%0", "%1", "%0")[position]
            if kind == "bool":
                lines.append(f"%c{index}_{position} = gt {value}, %zero")
                value = f"%c{index}_{position}"
            inputs.append(value)
        if name == "where":
            inputs = [inputs[0], "%1", "%0"]
        lines.append(f"%r{index} = {name} {', '.join(inputs)}")
        if op.result == "bool":
            lines.append(f"%s{index} = where %r{index}, %1, %zero")
        results.append(f"yield [m, n] {short} %{'s' if op.result == 'bool' else 'r'}{index}")
    body = "; ".join(lines)
    second = "%tile1 = operand [m, n] f32; " if "%1" in body else ""
    return (
        "region(m, n, k); %x = operand [m, k] bf16; %w = operand [n, k] bf16; %tile = operand [m, n] f32; "
        f"{second}%acc = contract %x, %w : f32; %zero = const 0.0; %0 = add %acc, %tile; "
        f"{'%1 = add %acc, %tile1; ' if second else ''}{body}; {'; '.join(results)}"
    )


def native_cases() -> Iterator[tuple[str, Callable[[], str]]]:
    """Calls that are launched from C: they must run, on the current stream, and not fall back to Python."""

    def not_by_python() -> str:
        region = CATALOGUE["swiglu"]
        operands = operands_of(region, 128, 256, 256)
        results = allocate_results(region, operands)
        kernel = cute.load(region)
        kernel.fast(*operands, *results)
        torch.cuda.synchronize()
        expected = [result.clone() for result in results]
        kernel._planned = None  # type: ignore[method-assign,assignment]
        for result in results:
            result.zero_()
        assert kernel.fast(*operands, *results)
        torch.cuda.synchronize()
        assert all(torch.equal(result, wanted) for result, wanted in zip(results, expected, strict=True))
        return "launched"

    def on_another_stream() -> str:
        region = CATALOGUE["gelu_tanh"]
        operands = operands_of(region, 4096, 4096, 4096)
        results = allocate_results(region, operands)
        kernel = cute.load(region)
        kernel.fast(*operands, *results)
        torch.cuda.synchronize()
        expected = results[0].clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # a launch on any other stream would break the capture
            kernel.fast(*operands, *results)
        results[0].zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(results[0], expected)
        return "captured"

    yield "from C, not by Python", not_by_python
    yield "from C on the stream of a capture", on_another_stream


def self_test() -> str:
    """The check at first use, which raises where a version of the packages compiles wrong kernels."""
    toolchain.check(torch.device("cuda", torch.cuda.current_device()))
    return "passed"


def all_cases() -> Iterator[tuple[str, Callable[[], str]]]:
    yield "self-test", self_test
    yield from native_cases()
    yield from catalogue_cases()
    yield from stride_cases()
    yield from total_cases()
    yield from precise_cases()
    yield from misfit_cases()
    yield from op_cases()


def main() -> None:
    """Run all cases, or those whose name contains one of the arguments; several processes share them: compiles take long."""
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--alone", action="store_true", help="this is one of several processes")
    given = parser.parse_args()
    if given.processes > 1 and not given.alone:
        parts = [[sys.executable, *sys.orig_argv[1:], "--alone", "--part", str(part)] for part in range(given.processes)]
        running = [subprocess.Popen(part) for part in parts]
        sys.exit(sum(process.wait() for process in running) > 0)
    failures = 0
    wanted = [(n, case) for n, case in all_cases() if not given.words or any(word in n for word in given.words)]
    for name, case in wanted[given.part :: given.processes]:
        start = time.perf_counter()
        try:
            said = case()
        except AssertionError as error:
            failures, said = failures + 1, f"FAILED {error}"
        except Exception:
            failures, said = failures + 1, f"FAILED {traceback.format_exc(limit=-2)[-600:]}"
        print(f"{name}: {said} [{time.perf_counter() - start:.1f} s]", flush=True)
    print(f"{failures} of {len(wanted[given.part :: given.processes])} failed")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
