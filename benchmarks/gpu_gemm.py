"""GEMM + epilogue on a GPU: the `cute` target against cuBLAS's plain GEMM and against Inductor, in one process.

Each side of a case is captured in a CUDA graph that walks over several sets of inputs, together larger than the L2 cache, so that
no input is hot and no time is the host's. Graphs are replayed in turn and timed with CUDA events; a time is the median over the
rounds, its spread the interquartile range over it. Data is random. Errors are against float64, relative to the largest result.
What a call costs on the host is timed with a small problem.

    python benchmarks/gpu_gemm.py                                     what is chosen, against cuBLAS and Inductor
    python benchmarks/gpu_gemm.py --sweep 20 --variants               and the best of 20 configurations, and variants of these
    python benchmarks/gpu_gemm.py --peers cublas,inductor,autotune --autotune-seconds 240 --out table.json
"""

import functools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import asdict, dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_common import Time, graph_of, interleave, parser, save
from postlude.ir import Region, parse, to_text
from postlude.targets import aten, cute, triton
from postlude.targets.cute import Configuration, ahead
from postlude.targets.cute.build import Specialization
from postlude.targets.cute.launcher import target_of

M = (512, 2048, 8192)
NK = ((4096, 4096), (14336, 4096), (4096, 14336))

PEERS = ("cublas", "inductor", "autotune")
MODES = {"inductor": None, "autotune": "max-autotune-no-cudagraphs"}

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
    times: dict[str, Time] = field(default_factory=dict)
    swept: dict[str, Time] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    chosen: str = ""

    @property
    def region(self) -> Region:
        return parse(EPILOGUES[self.epilogue].region)

    @property
    def title(self) -> str:
        return f"{self.epilogue} M{self.m} N{self.n} K{self.k}"

    def of(self, name: str) -> float:
        """Microseconds."""
        return self.times[name].microseconds if name in self.times else math.nan

    def best(self) -> str:
        """This target's fastest kernel among those that were measured beside the peers."""
        return min((name for name in self.times if name not in (*PEERS, "triton")), key=self.of, default="")


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


def measure(case: Case, sides: Mapping[str, Callable[[int], object]], count: int, rounds: int, seconds: float) -> dict[str, Time]:
    """Time sides, which are called with the number of a set, in rounds of about `seconds` each."""
    graphs, calls = {}, 0
    for name, run in sides.items():
        try:
            if not calls:
                calls = count * max(1, min(200, math.ceil(seconds / estimate(run, count) / count)))
            graphs[name] = graph_of(functools.partial(all_sets, run, count, calls), warm_up=1)
        except Exception as error:  # a configuration that does not compile or launch is a row, not the end
            case.failures[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error) else ''}"
    times = interleave(graphs, rounds, repeats=1)
    return {name: Time(t.microseconds / calls, t.spread) for name, t in times.items()}


def all_sets(run: Callable[[int], object], count: int, calls: int) -> None:
    for index in range(calls):
        run(index % count)


def estimate(run: Callable[[int], object], count: int) -> float:
    """Seconds of one call, roughly."""
    all_sets(run, count, count)
    torch.cuda.synchronize()
    start = time.perf_counter()
    all_sets(run, count, count)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def plain_gemm(sets: Sequence[Sequence[Tensor]], weights: int) -> Callable[[int], object]:
    """cuBLAS's GEMM of the same sizes; a pair of weights stands beside each other for it."""
    pairs = [(operands[0], torch.cat(operands[1 : 1 + weights]) if weights > 1 else operands[1]) for operands in sets]
    return lambda index: F.linear(*pairs[index])


def compiled(function: Callable[..., Tensor], mode: str | None) -> Callable[..., Tensor]:
    result: Callable[..., Tensor] = torch.compile(function, mode=mode, dynamic=False)
    return result


def error_of(result: Tensor, expected: Tensor) -> float:
    return ((result.double() - expected).abs().max() / expected.abs().max()).item()


def run_case(case: Case, peers: Sequence[str], swept: Sequence[Configuration], rounds: int) -> None:
    torch._dynamo.reset()
    epilogue, region = EPILOGUES[case.epilogue], case.region
    sets, results = make_sets(case)

    def ours(kernel: Callable[..., object]) -> Callable[[int], object]:
        return lambda index: kernel(*sets[index], results[index])

    def theirs(function: Callable[..., Tensor]) -> Callable[[int], object]:
        return lambda index: function(*sets[index])

    kernels = {str(configuration): ours(cute.load(region, configuration)) for configuration in swept}
    case.swept = measure(case, kernels, len(sets), 5, 2e-3)
    best = sorted(case.swept, key=lambda name: case.swept[name].microseconds)[:3]
    sides = {"chosen": ours(cute.load(region))} | {name: kernels[name] for name in best if name != case.chosen}
    if case.m <= 256:
        sides["triton"] = ours(triton.load(region))
    own = list(sides)
    if "cublas" in peers:
        sides["cublas"] = plain_gemm(sets, epilogue.weights)
    for name in ("inductor", "autotune"):
        if name in peers:
            function = compiled(epilogue.function, MODES[name])
            function(*sets[0])
            sides[name] = theirs(function)
    case.times = measure(case, sides, len(sets), rounds, 4e-3)
    expected = aten.evaluate(region, sets[0], arithmetic=torch.float64, rounded=False)[0]
    case.errors["eager"] = error_of(epilogue.function(*sets[0]), expected)
    for name in case.times:
        results[0].fill_(torch.nan)
        answer = sides[name](0)
        if name != "cublas":
            case.errors[name] = error_of(results[0] if name in own else answer, expected)  # type: ignore[arg-type]


def processors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def compile_all(kernels: Sequence[tuple[Region, Configuration]], jobs: int) -> None:
    """Put kernels for dense operands into the cache; for a pair, that for each order of its weights in memory."""
    target = target_of(torch.device("cuda", torch.cuda.current_device()))
    special = []
    for region, configuration in kernels:
        layout = (*(len(o.axes) - 1 for o in region.operands), 1)
        one = Specialization(to_text(region), 0, False, layout, configuration, target)
        special += [one, replace(one, reverse=True)] if len(region.contractions) > 1 else [one]
    start = time.perf_counter()
    futures = ahead.submit(special, most=jobs)
    wait(futures)
    print(f"compiled {len(futures)} kernels in {time.perf_counter() - start:.0f} s; target {target}", flush=True)
    for fault in sorted({future.result() for future in futures} - {""})[:20]:
        print("  did not compile:", fault, flush=True)


def host_overhead() -> dict[str, float]:
    """Microseconds of host time per call, the GPU's queue never full: bias + GELU at 128 x 256 x 256."""
    case = Case("bias+gelu_tanh", 128, 256, 256)
    operands = make_operands(case, torch.Generator("cuda").manual_seed(0))
    result = torch.empty(case.m, case.n, device="cuda", dtype=torch.bfloat16)
    leading = [operands[0].view(2, 64, -1), *operands[1:]], result.view(2, 64, -1)
    kernel = cute.load(case.region)
    function = EPILOGUES[case.epilogue].function
    inductor = compiled(function, None)
    kernel(*operands, result)
    alone = next(iter(kernel._plans.values())).steps[0].compiled(False).function  # type: ignore[union-attr]
    sides: dict[str, Callable[[], object]] = {
        "ours": lambda: kernel.fast(*operands, result),
        "ours, rows in two dimensions": lambda: kernel.fast(*leading[0], leading[1]),
        "ours without the C extension": lambda: kernel(*operands, result),
        "ours, compiled function alone": lambda: alone(*operands, result),
        "eager": lambda: function(*operands),
        "inductor": lambda: inductor(*operands),
    }
    found = {}
    for name, run in sides.items():
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


def ratios(case: Case) -> dict[str, float]:
    """The ratios that the bars are about, and those of the best that was measured."""
    peer = min((case.of(name) for name in ("inductor", "autotune") if name in case.times), default=math.nan)
    cublas, chosen, best = case.of("cublas"), case.of("chosen"), case.of(case.best())
    return {
        "chosen / cublas": chosen / cublas,
        "peer / chosen": peer / chosen,
        "best / cublas": best / cublas,
        "peer / best": peer / best,
    }


def report(cases: Sequence[Case], host: Mapping[str, float]) -> None:
    """The table, and the means that the bars are about: over all epilogues but `plain`, which has none."""
    columns = ("cublas", "inductor", "autotune", "triton", "chosen", "best")
    print("\nmicroseconds; errors relative to the largest result; the peer is the faster of Inductor's two")
    print(f"{'case':34s}" + "".join(f"{c:>9s}" for c in columns) + " chosen/cublas peer/chosen   error   eager  chosen, best")
    for case in cases:
        best = case.best()
        row = "".join(f"{case.of(best if c == 'best' else c):9.1f}" for c in columns)
        ratio = ratios(case)
        told = case.chosen + (f", {best}" if best != "chosen" else "")
        print(
            f"{case.title:34s}{row}{ratio['chosen / cublas']:14.3f}{ratio['peer / chosen']:12.3f}"
            f"{case.errors.get('chosen', math.nan):8.5f}{case.errors['eager']:8.5f}  {told}"
        )
    counted = [case for case in cases if case.epilogue != "plain"]
    for label in ratios(cases[0]) if counted else ():
        if known := [ratio for case in counted if not math.isnan(ratio := ratios(case)[label])]:
            extremes = f"{min(known):.3f} to {max(known):.3f}"
            print(f"geometric mean of {label}: {statistics.geometric_mean(known):.3f}, {extremes}, {len(known)} cases")
    spreads = [t.spread for case in cases for t in case.times.values()]
    print(f"spread of a time (interquartile range / median): median {statistics.median(spreads):.3f}, largest {max(spreads):.3f}")
    print("host time per call, microseconds:", ", ".join(f"{name} {value:.1f}" for name, value in host.items()))
    for failure in sorted({f"{name}: {text}" for case in cases for name, text in case.failures.items()})[:12]:
        print("failed:", failure)


#: What a sweep may try beside tiles, clusters and orientation.
VARIANTS = (
    *({"swizzle": swizzle} for swizzle in (1, 4, 16)),
    *({"raster": raster} for raster in ("m", "n")),
    *({"tile_k": tile_k} for tile_k in (32, 128)),
    *({"cluster_m": m, "cluster_n": n} for m, n in ((2, 2), (4, 1), (1, 4))),
)


def candidates(case: Case, sweep: int, variants: bool) -> list[Configuration]:
    """The configuration that is chosen, those expected to be fastest after it, and variants of the chosen one."""
    capability = torch.cuda.get_device_capability()
    every = cute.candidates(case.region, case.m, case.n, case.k, capability, processors())
    found = every[: max(sweep, 1)]
    if variants:
        found += [replace(every[0], **variant) for variant in VARIANTS]  # type: ignore[arg-type]
    return list(dict.fromkeys(found))


def main() -> None:
    options = parser(__doc__.splitlines()[0])  # type: ignore[union-attr]
    options.add_argument("--epilogues", default=",".join(EPILOGUES), help="comma-separated: " + ", ".join(EPILOGUES))
    options.add_argument("--m", default=",".join(map(str, M)))
    options.add_argument("--nk", default=",".join(f"{n}x{k}" for n, k in NK))
    options.add_argument("--peers", default="cublas,inductor", help="of " + ", ".join(PEERS))
    options.add_argument("--sweep", type=int, default=0, metavar="N", help="measure the N configurations expected to be fastest")
    options.add_argument(
        "--variants", action="store_true", help="and variants of the chosen one: swizzle, raster, depth, clusters"
    )
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile")
    options.add_argument("--seconds", type=float, default=math.inf, help="start no case after this many seconds")
    options.add_argument("--autotune-seconds", type=float, default=math.inf, help="autotune nothing after this many seconds")
    arguments = options.parse_args()
    begin = time.perf_counter()
    if reason := cute.unavailable():
        sys.exit(f"the cute target can't be used here: {reason}")
    cases = [
        Case(epilogue, m, *map(int, nk.split("x")))
        for nk in arguments.nk.split(",")
        for m in map(int, arguments.m.split(","))
        for epilogue in arguments.epilogues.split(",")
    ]
    swept = {case.title: candidates(case, arguments.sweep, arguments.variants) for case in cases}
    compile_all([(case.region, configuration) for case in cases for configuration in swept[case.title]], arguments.jobs)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {processors()} SMs", flush=True)
    host = host_overhead()
    print(host, flush=True)
    done: list[Case] = []
    for case in cases:
        now = time.perf_counter() - begin
        if now > arguments.seconds:
            print(f"out of time before {case.title}", flush=True)
            break
        peers = [p for p in arguments.peers.split(",") if p != "autotune" or now < arguments.autotune_seconds]
        case.chosen = str(swept[case.title][0])
        run_case(case, peers, swept[case.title] if arguments.sweep or arguments.variants else (), arguments.rounds)
        done.append(case)
        shown = ", ".join(f"{name} {t.microseconds:.1f}" for name, t in case.times.items())
        print(f"[{time.perf_counter() - begin:4.0f} s] {case.title}: {shown}; chosen is {case.chosen}", flush=True)
        save(arguments.out, {"host": host, "cases": [asdict(c) for c in done]})
        torch.cuda.empty_cache()
    report(done, host)


if __name__ == "__main__":
    main()
