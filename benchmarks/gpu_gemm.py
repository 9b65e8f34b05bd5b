"""GEMM + epilogue on a GPU: the `cute` target against cuBLAS's plain GEMM and against Inductor, in one process.

Each candidate of a case is captured in a CUDA graph that walks over several sets of inputs, together larger than the L2
cache, so that no input is hot and no time is the host's. Graphs are replayed in interleaved rounds and timed with CUDA
events; a time is the median over the rounds, its spread the interquartile range. Data is random. Errors are against
float64, relative to the largest result. What a call costs on the host is timed with a small problem.

    python benchmarks/gpu_gemm.py                         # the configuration that is chosen without measuring
    python benchmarks/gpu_gemm.py --sweep 24              # and the best of 24
    python benchmarks/gpu_gemm.py --peers cublas,inductor,autotune --out table.json
"""

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.ir import Region, parse
from postlude.targets import aten, cute
from postlude.targets.cute import Configuration

M = (512, 2048, 8192)
NK = ((4096, 4096), (14336, 4096), (4096, 14336))

_HEAD = "region(m, n, k); %x = operand [m, k] bf16; %w = operand [n, k] bf16;"
_BIAS = f"{_HEAD} %row = operand [n] bf16; %acc = contract %x, %w : f32; %0 = add %acc, %row;"


@dataclass(frozen=True)
class Epilogue:
    """One epilogue: as the Region that capture makes of it, and as a function of PyTorch."""

    region: str
    function: Callable[..., Tensor]
    weights: int = 1


EPILOGUES = {
    "plain": Epilogue(f"{_HEAD} %acc = contract %x, %w : f32; yield [m, n] bf16 %acc", F.linear),
    "bias+gelu_tanh": Epilogue(
        f"{_BIAS} %1 = const 0.5; %2 = mul %1, %0; %3 = mul %0, %0; %4 = mul %3, %0; %5 = const 0.044715; %6 = mul %4, %5;"
        " %7 = add %6, %0; %8 = const 0.7978845608028654; %9 = mul %7, %8; %10 = tanh %9; %11 = const 1.0; %12 = add %11, %10;"
        " %13 = mul %2, %12; yield [m, n] bf16 %13",
        lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"),
    ),
    "bias+gelu_erf": Epilogue(
        f"{_BIAS} %1 = const 0.5; %2 = mul %1, %0; %3 = const 0.7071067811865476; %4 = mul %3, %0; %5 = erf %4; %6 = const 1.0;"
        " %7 = add %5, %6; %8 = mul %2, %7; yield [m, n] bf16 %8",
        lambda x, w, b: F.gelu(F.linear(x, w, b)),
    ),
    "bias+relu^2": Epilogue(
        f"{_BIAS} %1 = relu %0; %2 = mul %1, %1; yield [m, n] bf16 %2", lambda x, w, b: F.relu(F.linear(x, w, b)) ** 2
    ),
    "bias+residual": Epilogue(
        f"{_HEAD} %row = operand [n] bf16; %tile = operand [m, n] bf16;"
        " %acc = contract %x, %w : f32; %0 = add %acc, %row; %1 = add %0, %tile; yield [m, n] bf16 %1",
        lambda x, w, b, r: F.linear(x, w, b) + r,
    ),
    "swiglu": Epilogue(
        f"{_HEAD} %w1 = operand [n, k] bf16; %acc = contract %x, %w : f32; %acc1 = contract %x, %w1 : f32; %0 = const 1.0;"
        " %1 = neg %acc; %2 = exp %1; %3 = add %0, %2; %4 = div %acc, %3; %5 = round_to bf16 %4; %6 = mul %acc1, %5;"
        " yield [m, n] bf16 %6",
        lambda x, w, w1: F.silu(F.linear(x, w)) * F.linear(x, w1),
        weights=2,
    ),
}


@dataclass
class Case:
    """One epilogue at one size: what is measured and what came out."""

    epilogue: str
    m: int
    n: int
    k: int
    times: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    heuristic: str = ""

    @property
    def region(self) -> Region:
        return parse(EPILOGUES[self.epilogue].region)

    @property
    def title(self) -> str:
        return f"{self.epilogue} M{self.m} N{self.n} K{self.k}"

    def median(self, name: str) -> float:
        return statistics.median(self.times[name]) if self.times.get(name) else math.nan

    def spread(self, name: str) -> float:
        times = sorted(self.times.get(name, ()))
        return times[len(times) * 3 // 4] - times[len(times) // 4] if len(times) > 3 else math.nan


def make_operands(case: Case, generator: torch.Generator) -> list[Tensor]:
    sizes = {"m": case.m, "n": case.n, "k": case.k}
    operands = []
    for operand in case.region.operands:
        shape = [sizes[axis] for axis in operand.axes]
        data = torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16)
        operands.append(data / math.sqrt(case.k) if operand.name in ("w", "w1") else data)
    return operands


def make_sets(case: Case) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Sets of operands, together at least three times the L2 cache, and a result for each."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    generator = torch.Generator("cuda").manual_seed(case.m + case.n + case.k)
    first = make_operands(case, generator)
    size = sum(t.numel() * t.element_size() for t in first) + case.m * case.n * 2
    count = max(2, math.ceil(3 * l2 / size))
    sets = [first, *(make_operands(case, generator) for _ in range(count - 1))]
    return sets, [torch.empty(case.m, case.n, device="cuda", dtype=torch.bfloat16) for _ in range(count)]


def graph_of(run: Callable[[int], object], count: int, seconds: float) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of calls run(0) to run(count - 1), again and again, that takes about `seconds`, and its number of calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(count):
            run(index)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for index in range(count):
            run(index)
        end.record()
        end.synchronize()
    each = start.elapsed_time(end) * 1e-3 / count
    calls = count * max(1, min(200, math.ceil(seconds / each / count)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for index in range(calls):
            run(index % count)
    torch.cuda.synchronize()
    return graph, calls


def measure(case: Case, candidates: dict[str, Callable[[int], object]], count: int, rounds: int, seconds: float) -> None:
    """Time candidates in interleaved rounds; adds to case.times in microseconds."""
    graphs = {}
    for name, run in candidates.items():
        try:
            graphs[name] = graph_of(run, count, seconds)
        except Exception as error:  # a configuration that does not compile or launch is a row, not the end
            case.failures[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error) else ''}"
    for graph, _ in graphs.values():
        graph.replay()
    torch.cuda.synchronize()
    for round_index in range(rounds):
        order = list(graphs)
        for name in order[round_index % len(order) :] + order[: round_index % len(order)] if order else []:
            graph, calls = graphs[name]
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            case.times.setdefault(name, []).append(start.elapsed_time(end) * 1e3 / calls)


def plain_gemm(sets: Sequence[Sequence[Tensor]], weights: int) -> Callable[[int], object]:
    """cuBLAS's GEMM of the same sizes; a pair of weights stands beside each other for it."""
    pairs = [(operands[0], torch.cat(operands[1 : 1 + weights]) if weights > 1 else operands[1]) for operands in sets]
    return lambda index: F.linear(*pairs[index])


def compiled(function: Callable[..., Tensor], mode: str | None) -> Callable[..., Tensor]:
    result: Callable[..., Tensor] = torch.compile(function, mode=mode, dynamic=False)
    return result


def error_of(case: Case, result: Tensor, expected: Tensor) -> float:
    return ((result.double() - expected).abs().max() / expected.abs().max()).item()


def run_case(case: Case, arguments: argparse.Namespace, swept: Sequence[Configuration]) -> None:
    torch._dynamo.reset()
    epilogue, region = EPILOGUES[case.epilogue], case.region
    sets, results = make_sets(case)
    kernels = {str(configuration): cute.load(region, configuration) for configuration in swept}
    chosen = cute.candidates(region, case.m, case.n, case.k, torch.cuda.get_device_capability(), processors())[0]
    case.heuristic = str(chosen)

    def ours(kernel: Callable[..., object]) -> Callable[[int], object]:
        return lambda index: kernel(*sets[index], results[index])

    if kernels:
        sweep = Case(case.epilogue, case.m, case.n, case.k)
        measure(sweep, {name: ours(kernel) for name, kernel in kernels.items()}, len(sets), 5, 2e-3)
        case.failures |= sweep.failures
        case.times |= {f"sweep {name}": times for name, times in sweep.times.items()}
        best = sorted(sweep.times, key=sweep.median)[:3]
        kernels = {name: kernels[name] for name in best}
    candidates: dict[str, Callable[[int], object]] = {"chosen": ours(cute.load(region, chosen))}
    candidates |= {name: ours(kernel) for name, kernel in kernels.items()}
    peers: dict[str, Callable[..., Tensor]] = {}
    if "cublas" in arguments.peers:
        candidates["cublas"] = plain_gemm(sets, epilogue.weights)
    if "inductor" in arguments.peers:
        peers["inductor"] = compiled(epilogue.function, None)
    if "autotune" in arguments.peers:
        peers["autotune"] = compiled(epilogue.function, "max-autotune-no-cudagraphs")

    def theirs(function: Callable[..., Tensor]) -> Callable[[int], object]:
        return lambda index: function(*sets[index])

    for name, function in peers.items():
        function(*sets[0])
        candidates[name] = theirs(function)
    measure(case, candidates, len(sets), arguments.rounds, 4e-3)
    expected = aten.evaluate(region, sets[0], arithmetic=torch.float64, rounded=False)[0]
    for name in ("chosen", *kernels):
        if name in case.times:
            results[0].fill_(torch.nan)
            candidates[name](0)
            case.errors[name] = error_of(case, results[0], expected)
    case.errors["eager"] = error_of(case, epilogue.function(*sets[0]), expected)
    for name, function in peers.items():
        case.errors[name] = error_of(case, function(*sets[0]), expected)


def best_of_sweep(case: Case) -> str:
    """Name of our fastest kernel among those that were measured beside the peers."""
    own = [name for name in case.times if name not in ("cublas", "inductor", "autotune") and not name.startswith("sweep ")]
    return min(own, key=case.median, default="")


def processors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def compile_one(task: tuple[str, Configuration, tuple[int, ...], object]) -> str:
    """In a process of its own: put one kernel into the cache; what went wrong, or nothing."""
    from postlude.targets.cute import build

    text, configuration, layout, target = task
    try:
        build.object_path(parse(text), 0, False, layout, configuration, target)  # type: ignore[arg-type]
        if len(layout) > 1 and "%w1" in text:
            build.object_path(parse(text), 0, True, layout, configuration, target)  # type: ignore[arg-type]
    except Exception as error:
        return f"{configuration}: {type(error).__name__}: {str(error).strip()[:300]}"
    return ""


def hide_gpu() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def precompile(tasks: Sequence[tuple[str, Configuration]], jobs: int) -> None:
    from postlude.targets.cute.launcher import target_of

    target = target_of(torch.device("cuda", torch.cuda.current_device()))
    full = []
    for text, configuration in tasks:
        region = parse(text)
        layout = (*(len(o.axes) - 1 for o in region.operands), 1)
        full.append((text, configuration, layout, target))
    start = time.perf_counter()
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), hide_gpu) as pool:
        faults = [fault for fault in pool.map(compile_one, full) if fault]
    print(f"compiled {len(full) - len(faults)} kernels in {time.perf_counter() - start:.0f} s; target {target}", flush=True)
    for fault in faults[:20]:
        print("  did not compile:", fault, flush=True)


def host_overhead() -> dict[str, float]:
    """Microseconds of host time per call, the GPU's queue never full: bias + GELU at 128 x 256 x 256."""
    case = Case("bias+gelu_tanh", 128, 256, 256)
    operands = make_operands(case, torch.Generator("cuda").manual_seed(0))
    result = torch.empty(case.m, case.n, device="cuda", dtype=torch.bfloat16)
    kernel = cute.load(case.region)
    function = EPILOGUES[case.epilogue].function
    candidates: dict[str, Callable[[], object]] = {
        "ours": lambda: kernel(*operands, result),
        "eager": lambda: function(*operands),
        "inductor": (lambda f: lambda: f(*operands))(compiled(function, None)),
    }
    kernel(*operands, result)
    (call,) = next(iter(kernel._plans.values()))
    candidates["ours, compiled function alone"] = lambda: call.function(*operands, result)
    found = {}
    for name, run in candidates.items():
        times = []
        for _ in range(30):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(50):
                run()
            times.append((time.perf_counter() - start) / 50 * 1e6)
        torch.cuda.synchronize()
        found[name] = statistics.median(times[5:])
    return found


def report(cases: Sequence[Case], host: dict[str, float]) -> None:
    """The table, and the means that the bars are about."""
    columns = ("cublas", "inductor", "autotune", "chosen", "best")
    print("\nmicroseconds; errors relative to the largest result")
    print(f"{'case':36s}" + "".join(f"{c:>9s}" for c in columns) + " best/cublas peer/best    error    eager  best configuration")
    means: dict[str, list[float]] = {"best / cublas": [], "chosen / cublas": [], "best peer / best": [], "best peer / chosen": []}
    for case in cases:
        best = best_of_sweep(case)
        times = {c: case.median(best if c == "best" else c) for c in columns}
        peer = min((times[n] for n in ("inductor", "autotune") if n in case.times), default=math.nan)
        ratios = (
            times["best"] / times["cublas"],
            times["chosen"] / times["cublas"],
            peer / times["best"],
            peer / times["chosen"],
        )
        if case.epilogue != "plain":
            for values, ratio in zip(means.values(), ratios, strict=True):
                values.append(ratio)
        errors = f"{case.errors.get(best, math.nan):9.5f}{case.errors['eager']:9.5f}"
        row = "".join(f"{times[c]:9.1f}" for c in columns)
        print(f"{case.title:36s}{row}{ratios[0]:12.3f}{ratios[2]:10.3f}{errors}  {best if best != 'chosen' else case.heuristic}")
    for label, values in means.items():
        if known := [value for value in values if not math.isnan(value)]:
            print(f"geometric mean of {label}: {statistics.geometric_mean(known):.3f} over {len(known)} cases")
    spreads = [case.spread(n) / case.median(n) for case in cases for n in case.times if not n.startswith("sweep ")]
    print(f"spread of a time (interquartile range / median): median {statistics.median(spreads):.3f}, largest {max(spreads):.3f}")
    print("host time per call, microseconds:", ", ".join(f"{name} {value:.1f}" for name, value in host.items()))
    for failure in sorted({f"{name}: {text}" for case in cases for name, text in case.failures.items()})[:12]:
        print("failed:", failure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--epilogues", default=",".join(EPILOGUES), help="comma-separated: " + ", ".join(EPILOGUES))
    parser.add_argument("--m", default=",".join(map(str, M)))
    parser.add_argument("--nk", default=",".join(f"{n}x{k}" for n, k in NK))
    parser.add_argument("--peers", default="cublas,inductor", help="of cublas, inductor, autotune (slow to compile)")
    parser.add_argument(
        "--sweep", type=int, default=0, metavar="N", help="measure the N configurations that are expected to be best"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", help="write everything that was measured here, as JSON")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no case after this many seconds")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    if reason := cute.unavailable():
        sys.exit(f"the cute target can't be used here: {reason}")
    arguments.peers = arguments.peers.split(",")
    cases = [
        Case(epilogue, m, *map(int, nk.split("x")))
        for nk in arguments.nk.split(",")
        for m in map(int, arguments.m.split(","))
        for epilogue in arguments.epilogues.split(",")
    ]
    capability = torch.cuda.get_device_capability()
    swept = {
        case.title: cute.candidates(case.region, case.m, case.n, case.k, capability, processors())[: arguments.sweep]
        for case in cases
    }
    chosen = {case.title: cute.candidates(case.region, case.m, case.n, case.k, capability, processors())[0] for case in cases}
    tasks = {(EPILOGUES[c.epilogue].region, conf) for c in cases for conf in (*swept[c.title], chosen[c.title])}
    precompile(sorted(tasks, key=str), arguments.jobs)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {processors()} SMs", flush=True)
    host = host_overhead()
    done = []
    for case in cases:
        if time.perf_counter() - begin > arguments.seconds:
            print(f"out of time before {case.title}", flush=True)
            break
        run_case(case, arguments, swept[case.title])
        done.append(case)
        best = best_of_sweep(case)
        shown = ", ".join(f"{name} {case.median(name):.1f}" for name in ("cublas", "inductor", "autotune", "chosen", best))
        print(f"[{time.perf_counter() - begin:4.0f} s] {case.title}: {shown}; chosen is {case.heuristic}", flush=True)
        if arguments.out:
            with open(arguments.out, "w") as file:
                json.dump({"host": host, "cases": [vars(c) for c in done]}, file)
        torch.cuda.empty_cache()
    report(done, host)


if __name__ == "__main__":
    main()
