"""Numbers of the kernels on a GPU against float64: every Region of the catalogue, every op, odd sizes and strides.

`python -m tests.targets.cute.gpu_cases` runs them all without pytest and prints a line for each.
"""

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor

from postlude.ir import OPS, Region, parse
from postlude.op import allocate_results
from postlude.targets import cute
from postlude.targets.aten import evaluate
from postlude.targets.cute import Configuration, toolchain
from tests.targets.cute.catalogue import CATALOGUE

SIZES = ((328, 392, 264), (8, 4096, 72), (136, 8, 8), (1000, 264, 1032))

#: The error may be this many times that of float32 arithmetic on the same operands, which cuBLAS sums in another order.
_SLACK = 1.25

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
        operands.append(torch.randn(shape, device="cuda", generator=generator).to(operand.dtype))
    return operands


def check(region: Region, operands: list[Tensor], configuration: Configuration | None = None) -> str:
    """Run the kernel and compare; returns the errors, raises AssertionError."""
    assert cute.fits(region, operands) is None, cute.fits(region, operands)
    results = allocate_results(region, operands)
    kernel = cute.load(region, configuration)
    for _ in range(2):  # planned and launched by Python, then from C
        for result in results:
            result.fill_(torch.nan)
        assert kernel.fast(*operands, *results)
        torch.cuda.synchronize()
    exact = evaluate(region, operands, arithmetic=torch.float64, rounded=False)
    single = evaluate(region, operands)
    said = []
    for result, reference, rounded in zip(results, exact, single, strict=True):
        size = reference.abs().max()
        error, allowed = (((value.double() - reference).abs().max() / size).item() for value in (result, rounded))
        said.append(f"{error:.2e}/{allowed:.2e}")
        assert error <= _SLACK * allowed + 1e-6, f"error {error:.3e}, in float32 {allowed:.3e}"
    return " ".join(said)


def catalogue_cases() -> Iterator[tuple[str, Callable[[], str]]]:
    for name, (m, n, k) in product(CATALOGUE, SIZES):
        yield (
            f"{name} {m}x{n}x{k}",
            lambda name=name, m=m, n=n, k=k: check(CATALOGUE[name], operands_of(CATALOGUE[name], m, n, k)),
        )
    for name, configuration in product(("everything", "swiglu"), CONFIGURATIONS):
        if not (name == "swiglu" and (configuration.swapped or configuration.tile_n % 32)):
            region = CATALOGUE[name]
            yield f"{name} {configuration}", lambda r=region, c=configuration: check(r, operands_of(r, 712, 776, 264), c)


def stride_cases() -> Iterator[tuple[str, Callable[[], str]]]:
    gelu, everything, swiglu, batched_ = (CATALOGUE[name] for name in ("gelu_erf", "everything", "swiglu", "batched"))

    def replaced(region: Region, change: Callable[[list[Tensor]], None]) -> str:
        operands = operands_of(region, 240, 392, 264)
        change(operands)
        return check(region, operands)

    def leading(o: list[Tensor]) -> None:
        o[0] = o[0].view(5, 48, 264)
        o[3] = o[3].view(5, 48, 392)

    def transposed(o: list[Tensor]) -> None:
        o[0] = o[0].t().contiguous().t()
        o[1] = o[1].t().contiguous().t()

    def sliced(o: list[Tensor]) -> None:
        o[0] = torch.cat([o[0], o[0]], 1)[:, 264:]
        o[1] = torch.cat([o[1], o[1]], 1)[:, :264]
        o[2] = torch.cat([o[2], o[2]])[392:]

    def second_weight_first(o: list[Tensor]) -> None:
        both = torch.stack([o[2], o[1]])
        o[1], o[2] = both[1], both[0]

    def weights_far_apart(o: list[Tensor]) -> None:
        between = torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
        o[2] = o[2].clone()
        del between

    def shared_batch(o: list[Tensor]) -> None:
        o[1] = o[1][:1, :1].expand(2, 3, -1, -1)

    yield "leading dimensions", lambda: replaced(everything, leading)
    yield "transposed operands", lambda: replaced(gelu, transposed)
    yield "sliced operands", lambda: replaced(gelu, sliced)
    yield "second weight lies first", lambda: replaced(swiglu, second_weight_first)
    yield "weights far apart", lambda: replaced(swiglu, weights_far_apart)
    yield "one weight for all batches", lambda: replaced(batched_, shared_batch)


def misfit_cases() -> Iterator[tuple[str, Callable[[], str]]]:
    region = CATALOGUE["gelu_erf"]

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
    yield from misfit_cases()
    yield from op_cases()


def main() -> None:
    """Run all cases; with arguments, those whose name contains one of them."""
    failures = 0
    for name, case in all_cases():
        if sys.argv[1:] and not any(word in name for word in sys.argv[1:]):
            continue
        start = time.perf_counter()
        try:
            said = case()
        except AssertionError as error:
            failures, said = failures + 1, f"FAILED {error}"
        except Exception:
            failures, said = failures + 1, f"FAILED {traceback.format_exc(limit=-2)[-600:]}"
        print(f"{name}: {said} [{time.perf_counter() - start:.1f} s]", flush=True)
    print(f"{failures} failed")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
