"""Decode on one GPU: a few rows times weights that lie in no cache, with the whole epilogue, as in a CUDA graph.

Linear + bias + GELU, the gated pair of a SwiGLU, and both with an RMSNorm before them. Each graph walks through copies of the
weights, 512 MB or more, so that every weight comes from memory. Modes are interleaved in one process; a number is the median over
rounds. How near a mode comes to memory speed is told by a plain kernel that reads the same buffers in the same rounds.

    python benchmarks/gpu_decode.py --out decode.json                 this target and its peers
    python benchmarks/gpu_decode.py --out sweep.json --sweep          many configurations too
    python benchmarks/gpu_decode.py --chosen sweep.json               the tables' choice against that record; no GPU

Needs torch and Triton only.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch._inductor.select_algorithm
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from postlude.ir import Region, parse
from postlude.targets import triton as target
from postlude.targets.triton.configs import Config, Device, Problem, choose

SIZES = ((4096, 4096), (14336, 4096), (4096, 14336), (6144, 4096))
ROWS = (1, 2, 4, 8, 16, 32, 64)
PEERS = ("cublas", "inductor", "inductor-auto")
COLD_BYTES = 512 << 20

LINEAR_GELU = """region(m, n, k); %x = operand [m, k] bf16; %w = operand [n, k] bf16; %row = operand [n] bf16;
%acc = contract %x, %w : f32; %0 = add %acc, %row; %1 = const 0.5; %2 = mul %0, %1; %3 = const 0.7071067811865476;
%4 = mul %0, %3; %5 = erf %4; %6 = const 1.0; %7 = add %5, %6; %8 = mul %2, %7; yield [m, n] bf16 %8"""

SWIGLU = """region(m, n, k); %x = operand [m, k] bf16; %w = operand [n, k] bf16; %w1 = operand [n, k] bf16;
%acc = contract %x, %w : f32; %0 = sigmoid %acc; %1 = mul %acc, %0; %acc1 = contract %x, %w1 : f32; %2 = mul %1, %acc1;
yield [m, n] bf16 %2"""

NORM = """%0 = mul %x, %x; %1 = reduce sum k %0; %2 = extent k; %3 = div %1, %2; %4 = const 1e-05; %5 = add %3, %4;
%6 = rsqrt %5; %7 = mul %x, %6; %8 = mul %7, %g;"""

NORM_LINEAR = f"""region(m, n, k); %x = operand [m, k] bf16; %g = operand [k] bf16; %w = operand [n, k] bf16; {NORM}
%acc = contract %8, %w : f32; yield [m, n] bf16 %acc"""

NORM_SWIGLU = f"""region(m, n, k); %x = operand [m, k] bf16; %g = operand [k] bf16; %w = operand [n, k] bf16;
%w1 = operand [n, k] bf16; {NORM} %acc = contract %8, %w : f32; %9 = sigmoid %acc; %10 = mul %acc, %9;
%acc1 = contract %8, %w1 : f32; %11 = mul %10, %acc1; yield [m, n] bf16 %11"""


@dataclass(frozen=True)
class Kind:
    """What is computed: the Region, the same for eager and Inductor, plain products, and how many weights it reads.

    `norm` and `bias`: whether it takes a vector along k before the weights, and one along n after them.
    """

    name: str
    program: str
    fused: Callable[..., Tensor]
    plain: Callable[..., Any]
    weights: int
    norm: bool = False
    bias: bool = False

    @property
    def region(self) -> Region:
        """The Region."""
        return parse(self.program)


def linear_gelu(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """Linear + bias + erf-GELU."""
    return F.gelu(F.linear(x, w, bias))


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """The gated pair."""
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def norm_linear(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    """RMSNorm, then a linear, as a model's projections."""
    return F.linear(F.rms_norm(x, (x.shape[-1],), g, 1e-5), w)


def norm_swiglu(x: Tensor, g: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """RMSNorm, then the gated pair."""
    return swiglu(F.rms_norm(x, (x.shape[-1],), g, 1e-5), gate, up)


KINDS = {
    "gelu": Kind("gelu", LINEAR_GELU, linear_gelu, lambda x, w, bias: F.linear(x, w, bias), 1, bias=True),
    "swiglu": Kind("swiglu", SWIGLU, swiglu, lambda x, gate, up: (F.linear(x, gate), F.linear(x, up)), 2),
    "norm": Kind("norm", NORM_LINEAR, norm_linear, lambda x, g, w: F.linear(x, w), 1, norm=True),
    "normed": Kind("normed", NORM_SWIGLU, norm_swiglu, lambda x, g, a, b: (F.linear(x, a), F.linear(x, b)), 2, norm=True),
}


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    kind: str
    m: int
    n: int
    k: int

    @property
    def bytes(self) -> int:
        """Bytes of weights that one call reads."""
        return 2 * self.n * self.k * KINDS[self.kind].weights

    @property
    def title(self) -> str:
        """How the table names it."""
        return f"{self.kind:6} {self.m:3} {self.n:6} {self.k:6}"


class Data:
    """Operands of one cell: as many copies of the weights as are needed to miss every cache."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        kind = KINDS[cell.kind]
        self.copies = max(2, -(-COLD_BYTES // cell.bytes))
        generator = torch.Generator("cuda").manual_seed(0)
        self.memory = torch.empty(self.copies, kind.weights, cell.n, cell.k, dtype=torch.bfloat16, device="cuda")
        self.memory.normal_(generator=generator).mul_(cell.k**-0.5)
        self.x = torch.randn(cell.m, cell.k, generator=generator, device="cuda").bfloat16()
        bias = torch.randn(self.copies, cell.n, generator=generator, device="cuda").bfloat16()
        self.out = torch.empty(cell.m, cell.n, dtype=torch.bfloat16, device="cuda")
        scale = [torch.rand(cell.k, generator=generator, device="cuda").bfloat16() + 0.5] if kind.norm else []
        self.operands = [(self.x, *scale, *self.memory[i], *([bias[i]] if kind.bias else [])) for i in range(self.copies)]

    @cached_property
    def exact(self) -> Tensor:
        """The result for the first copy, in float64."""
        return KINDS[self.cell.kind].fused(*(operand.double() for operand in self.operands[0]))

    def error(self, result: Tensor) -> float:
        """Relative error of a result for the first copy, in the Frobenius norm, against float64."""
        return float((result.double() - self.exact).norm() / self.exact.norm())


@triton.jit
def read_kernel(source, maxima, BLOCK: tl.constexpr):  # noqa: N803
    """Read a block and leave its maximum, so that no load can be dropped."""
    program = tl.program_id(0).to(tl.int64)
    values = tl.load(source + program * BLOCK + tl.arange(0, BLOCK))
    tl.store(maxima + program, tl.max(values, axis=0))


def reader(memory: Tensor, block: int = 8192) -> Callable[[], None]:
    """A call that reads the whole of a dense buffer once."""
    words = memory.view(torch.int32).flatten()
    assert words.numel() % block == 0
    maxima = torch.empty(words.numel() // block, dtype=torch.int32, device=memory.device)
    return lambda: read_kernel[(words.numel() // block,)](words, maxima, BLOCK=block, num_warps=8)


class Graph:
    """Calls recorded in a CUDA graph."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls[:2]:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.calls = len(calls)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for call in calls:
                call()

    def time(self, seconds: float) -> float:
        """Seconds of one call, from as many replays as take about `seconds`."""
        first = self._replay(1)
        repeats = max(1, int(seconds / max(first, 1e-6)))
        return self._replay(repeats) / repeats / self.calls

    def _replay(self, repeats: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def interleaved(graphs: dict[str, Graph], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Seconds per call of each graph in each round; the order rotates."""
    names = list(graphs)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for index in range(len(names)):
            name = names[(index + number) % len(names)]
            times[name].append(graphs[name].time(seconds))
    return times


def own(data: Data, config: Config | None = None) -> list[Callable[[], object]]:
    """Calls of this target's kernel, one for each copy of the weights."""
    kernel = target.load(KINDS[data.cell.kind].region, config)
    return [partial(kernel, *operands, data.out) for operands in data.operands]


def peers(data: Data, names: Sequence[str]) -> dict[str, list[Callable[[], object]]]:
    """Calls of the peers, ready to be recorded."""
    kind = KINDS[data.cell.kind]
    functions: dict[str, Callable[..., Any]] = {}
    torch._dynamo.reset()
    for name in names:
        if name == "cublas":
            functions[name] = kind.plain
        elif name == "inductor":
            functions[name] = torch.compile(kind.fused, dynamic=False)
        else:
            functions[name] = torch.compile(kind.fused, dynamic=False, mode="max-autotune-no-cudagraphs")
        functions[name](*data.operands[0])
    return {name: [partial(function, *operands) for operands in data.operands] for name, function in functions.items()}


# The sweep ---------------------------------------------------------------------------------------------------------------------


#: Forms worth trying with each number of weights: (block_n, block_k, warps, stages).
GEMV = {
    1: ((8, 512, 4, 3), (4, 512, 4, 3), (16, 512, 4, 3), (4, 1024, 4, 5), (8, 512, 4, 1), (8, 1024, 8, 5), (2, 1024, 4, 1)),
    2: ((1, 1024, 4, 1), (2, 1024, 4, 3), (2, 2048, 4, 3), (4, 1024, 4, 5), (8, 512, 4, 3), (2, 512, 4, 5), (4, 512, 4, 1)),
}

#: The same where a norm comes first, of which wider tiles compute less.
NORMED = {
    1: (
        (4, 1024, 4, 5),
        (8, 512, 4, 3),
        (8, 1024, 8, 3),
        (8, 1024, 4, 3),
        (16, 512, 4, 3),
        (16, 512, 8, 3),
        (4, 2048, 8, 3),
        (8, 256, 4, 5),
    ),
    2: (
        (2, 1024, 4, 3),
        (4, 512, 4, 3),
        (4, 1024, 8, 3),
        (4, 1024, 4, 3),
        (8, 512, 8, 3),
        (8, 512, 4, 3),
        (8, 256, 4, 4),
        (4, 512, 4, 2),
    ),
}

#: (block_n, block_k, warps, stages, swap), each with k split into 1, 2, 4 where that makes sense.
GEMM = (
    (64, 128, 4, 5, True),
    (64, 128, 4, 3, True),
    (64, 64, 4, 5, True),
    (64, 64, 4, 8, True),
    (64, 256, 4, 3, True),
    (128, 128, 4, 3, True),
    (128, 64, 4, 5, True),
    (32, 256, 4, 3, False),
    (32, 128, 4, 5, False),
    (32, 128, 4, 3, False),
)

#: Of chained kernels: bytes of each column that are brought to L2 early, and when the next kernel may start.
PREFETCHES = (0, 1024, 2048, 4096)
RELEASES = (-1, 0, 2, 4)


def candidates(cell: Cell, multiprocessors: int) -> Iterator[Config]:
    """Configurations that could be good for a cell, unchained."""
    pair = KINDS[cell.kind].weights
    rows = 1 << (cell.m - 1).bit_length()
    if rows <= 2:
        for block_n, block_k, warps, stages in (NORMED if KINDS[cell.kind].norm else GEMV)[pair]:
            yield Config("gemv", rows, block_n, block_k, warps, stages)
    block_m = max(16, rows)
    for block_n, block_k, warps, stages, swap in GEMM if rows > 1 else ():
        for split in (1,) if KINDS[cell.kind].norm else (1, 2, 4):
            programs = cell.n // block_n * split
            memory = (block_m + pair * block_n) * block_k * 2 * stages
            enough = programs >= 0.7 * multiprocessors and (split == 1 or programs <= 4 * multiprocessors)
            if enough and memory <= 227 << 10 and cell.k >= 4 * split * block_k:
                yield Config("gemm", block_m, block_n, block_k, warps, stages, split, swap=swap)


def compile_one(program: str, m: int, config: Config) -> str:
    """Compile a candidate, in a process of its own, into Triton's cache on disk."""
    kind = next(kind for kind in KINDS.values() if kind.program == program)
    cell = Cell(kind.name, m, 512, 8192)
    data = [torch.zeros(cell.m, cell.k), *([torch.zeros(cell.k)] if kind.norm else [])]
    data += [torch.zeros(cell.n, cell.k) for _ in range(kind.weights)]
    data += [torch.zeros(cell.n)] if kind.bias else []
    operands = [tensor.to(device="cuda", dtype=torch.bfloat16) for tensor in data]
    try:
        target.load(parse(program), config)(*operands, torch.empty(cell.m, cell.n, dtype=torch.bfloat16, device="cuda"))
        torch.cuda.synchronize()
    except Exception as error:  # what can't be compiled is no candidate; the sweep says so when it meets it
        return f"{type(error).__name__}: {error}"
    return ""


def jobs_of(configs: Mapping[Cell, Iterable[Config]]) -> dict[tuple[str, Config], int]:
    """What is to be compiled, (program, configuration) -> rows. The rest of a configuration is told to a kernel at run time."""
    return {
        (KINDS[cell.kind].program, replace(config, split_k=min(config.split_k, 2), prefetch=0, release=0)): cell.m
        for cell, of_cell in configs.items()
        for config in of_cell
    }


def compile_all(jobs: dict[tuple[str, Config], int], processes: int) -> None:
    """Compile candidates, (program, configuration) -> rows, in parallel."""
    started = time.perf_counter()
    arguments = [(program, m, config) for (program, config), m in jobs.items()]
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        errors = [error for error in pool.map(compile_one, *zip(*arguments, strict=True), chunksize=4) if error]
    print(f"compiled {len(jobs)} candidates in {time.perf_counter() - started:.0f} s, {len(errors)} failed", flush=True)
    for error in sorted({error.splitlines()[0][:200] for error in errors})[:5]:
        print("  ", error)


def attempt(data: Data, config: Config, rounds: int, seconds: float) -> dict[str, Any]:
    """Measure one candidate."""
    entry: dict[str, Any] = {"config": asdict(config)}
    try:
        calls = own(data, config)
        calls[0]()
        entry["error"] = data.error(data.out)
        graph = Graph(calls)
        return entry | {"us": statistics.median(graph.time(seconds) for _ in range(rounds)) * 1e6}
    except Exception as error:
        return entry | {"us": float("inf"), "failure": f"{type(error).__name__}: {error}"[:300]}


def sweep(
    cells: Sequence[Cell], options: argparse.Namespace, found: dict[Cell, list[dict[str, Any]]], save: Callable[[], None]
) -> None:
    """Measure the candidates of each cell, chained too; of the best few all ways to chain them. The fastest come first."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    chains = torch.cuda.get_device_capability()[0] >= 9
    first = {cell: list(candidates(cell, multiprocessors)) for cell in cells}
    if chains:
        for of_cell in first.values():
            of_cell += [replace(config, chained=True, prefetch=2048, release=2) for config in of_cell]
    compile_all(jobs_of(first), options.processes)
    started = time.perf_counter()
    for cell, of_cell in first.items():
        data = Data(cell)
        entries = sorted((attempt(data, config, 3, 0.0015) for config in of_cell), key=lambda entry: entry["us"])
        plain = list(dict.fromkeys(replace(Config(**e["config"]), chained=False, prefetch=0, release=0) for e in entries))
        for config in plain[: options.best] if chains else []:
            for prefetch in PREFETCHES:
                for release in RELEASES:
                    chained = replace(config, chained=True, prefetch=prefetch, release=release)
                    if chained not in of_cell:
                        entries.append(attempt(data, chained, 3, 0.0015))
        found[cell] = sorted(entries, key=lambda entry: entry["us"])
        again = [attempt(data, Config(**entry["config"]), 7, 0.004) for entry in found[cell][:3]]
        found[cell] = sorted(again, key=lambda entry: entry["us"]) + found[cell]
        seconds = time.perf_counter() - started
        print(f"{cell.title}  {found[cell][0]['us']:7.2f} us, the best of {len(entries)}, after {seconds:.0f} s", flush=True)
        save()
        del data


def show_chosen(path: Path) -> None:
    """What the tables choose against the best of a recorded sweep, cell by cell, from what that sweep measured of both."""
    record = json.loads(path.read_text())
    device = Device("sm_90", 132, 227 << 10)
    print(f"{path}: {record['device']}; microseconds")
    for entry in record["sweep"]:
        cell = Cell(**entry["cell"])
        times: dict[Config, float] = {}
        for candidate in entry["candidates"]:  # the first of several measurements of the best is the longest
            times.setdefault(Config(**candidate["config"]), candidate["us"])
        best = min(times.values())
        kind = KINDS[cell.kind]
        chosen = choose(device, Problem(cell.m, (cell.n,), cell.k, contractions=kind.weights, whole_k=kind.norm))
        of_chosen = f"{times[chosen]:7.2f} {times[chosen] / best:6.3f}" if chosen in times else f"{'not measured':>14}"
        print(f"{cell.title}  best {best:7.2f}  chosen {of_chosen}  {chosen}")


# The table ---------------------------------------------------------------------------------------------------------------------


def measure(cell: Cell, options: argparse.Namespace, best: Config | None) -> dict[str, Any]:
    """One row: this target as its tables say, with the best configuration of a sweep, peers, and plain reading."""
    data = Data(cell)
    calls: dict[str, list[Callable[[], object]]] = {"postlude": own(data)}
    if best is not None:
        calls["best"] = own(data, best)
    errors = {}
    for name, of_copies in calls.items():
        of_copies[0]()
        errors[name] = data.error(data.out)
    for name, of_copies in peers(data, options.peers).items():
        calls[name] = of_copies
        if name != "cublas":
            errors[name] = data.error(of_copies[0]())  # type: ignore[arg-type]
    errors["eager"] = data.error(KINDS[cell.kind].fused(*data.operands[0]))
    calls["read"] = [reader(copy) for copy in data.memory]
    calls["read all"] = [reader(data.memory)]
    graphs = {name: Graph(of_copies) for name, of_copies in calls.items()}
    times = interleaved(graphs, options.rounds, options.seconds)
    times["read all"] = [seconds / data.copies for seconds in times["read all"]]
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "cell": asdict(cell),
        "us": {name: value * 1e6 for name, value in medians.items()},
        "rounds_us": {name: [value * 1e6 for value in values] for name, values in times.items()},
        "of_read": {name: medians["read all"] / value for name, value in medians.items()},
        "speedup": {
            name: statistics.median(theirs / ours for theirs, ours in zip(times[name], times["postlude"], strict=True))
            for name in times
        },
        "error": errors,
        "best": best and asdict(best),
        "terabytes_per_second": cell.bytes / medians["read all"] / 1e12,
    }


def host_costs() -> dict[str, float]:
    """Microseconds that a call takes on the host: small operands, so that the GPU is never waited for.

    As graphs call it, also with k split; and looked up in Python, where there is no compiler for what does it in C.
    """
    x, w = (torch.randn(rows, 2048, device="cuda").bfloat16() for rows in (1, 64))
    bias, out = torch.zeros(64, device="cuda").bfloat16(), torch.empty(1, 64, device="cuda", dtype=torch.bfloat16)
    region = parse(LINEAR_GELU)
    split = Config("gemm", 16, 64, 128, 4, 3, 2, swap=True)
    calls = {
        "call": target.load(region).fast,
        "call, split": target.load(region, split).fast,
        "from Python": target.load(region),
    }
    costs = {}
    for name, call in calls.items():
        times = []
        for _ in range(20):
            call(x, w, bias, out)
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(200):
                call(x, w, bias, out)
            times.append((time.perf_counter() - started) / 200)
            torch.cuda.synchronize()
        costs[name] = statistics.median(times) * 1e6
    return costs


def show(records: Sequence[dict[str, Any]]) -> None:
    """Print the table, plainly."""
    names = [name for name in ("postlude", "best", *PEERS, "read", "read all") if any(name in r["us"] for r in records)]
    peers = [name for name in names if name in PEERS]
    print("\nMicroseconds; 'of read': share of the speed of reading all copies at once; 'over': times faster than that peer")
    columns = [*(f"{name:>13}" for name in names), "of read", *(f"over {name:>13}" for name in peers), "error / eager's"]
    print(f"{'kind':6} {'M':>3} {'N':>6} {'K':>6} " + "  ".join(columns))
    for record in records:
        cell = Cell(**record["cell"])
        row = [f"{record['us'][name]:13.2f}" if name in record["us"] else f"{'-':>13}" for name in names]
        row += [f"{record['of_read']['postlude']:7.1%}", *(f"{record['speedup'][name]:18.2f}" for name in peers)]
        row += [f"{record['error']['postlude'] / record['error']['eager']:15.2f}"]
        print(f"{cell.title} " + "  ".join(row))


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file for everything that was measured")
    parser.add_argument("--sweep", action="store_true", help="measure many configurations too")
    parser.add_argument("--chosen", type=Path, help="only compare what the tables choose with the best in this record of a sweep")
    parser.add_argument("--best", type=int, default=3, help="of a sweep: how many to measure chained in all ways")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--sizes", nargs="+", default=[f"{n}x{k}" for n, k in SIZES], help="NxK")
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="default: all, or cublas alone in a sweep")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.01, help="for one mode in one round")
    parser.add_argument("--processes", type=int, default=16, help="compile so many candidates at once")
    options = parser.parse_args()
    if options.chosen:
        show_chosen(options.chosen)
        return
    if options.peers is None:
        options.peers = ["cublas"] if options.sweep else list(PEERS)
    cells = [Cell(kind, m, *map(int, size.split("x"))) for kind in options.kinds for size in options.sizes for m in options.rows]
    payload: dict[str, Any] = {
        "command": ["python", "benchmarks/gpu_decode.py", *sys.argv[1:]],
        "device": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
    }
    torch._inductor.select_algorithm.PRINT_AUTOTUNE = False
    with torch.no_grad():
        payload["host_us"] = host_costs()
        costs = ", ".join(f"{cost:.2f} us ({name})" for name, cost in payload["host_us"].items())
        print(f"host cost of a call: {costs}", flush=True)
        swept: dict[Cell, list[dict[str, Any]]] = {}
        records: list[dict[str, Any]] = []

        def save() -> None:
            payload["sweep"] = [{"cell": asdict(cell), "candidates": entries} for cell, entries in swept.items()]
            payload["cells"] = records
            if options.out:
                options.out.write_text(json.dumps(payload, indent=1) + "\n")

        if options.sweep:
            sweep(cells, options, swept, save)
        for cell in cells:
            best = Config(**swept[cell][0]["config"]) if cell in swept else None
            records.append(measure(cell, options, best))
            save()
    if swept:
        print("\nThe best of each sweep")
        for cell, entries in swept.items():
            config = ", ".join(f"{name}={value}" for name, value in entries[0]["config"].items())
            print(f"{cell.title}  {entries[0]['us']:7.2f} us  {config}")
    show(records)


if __name__ == "__main__":
    main()
