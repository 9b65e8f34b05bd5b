"""Training on a GPU: forward and backward of layers and of Hugging Face's Llama, and the chain residual + RMSNorm + linear.

Each mode is `torch.compile` of the same unchanged module; a step (forward, and the gradients of all parameters and of the input)
is captured as a CUDA graph, and graphs are replayed in turn. Peak memory is what one step outside graphs allocates beyond what is
there before it. Errors are relative (norm of the difference over norm) against the same module in float64, the largest over all
results and gradients; `worst ratio` is the largest over them of our error to Inductor's.

    python benchmarks/gpu_training.py --out results/gpu_training.json                   eager's and Inductor's errors, all cases
    python benchmarks/gpu_training.py --modes inductor autotune postlude --case llama
    python benchmarks/gpu_training.py --explain                    Regions of each graph, what ended them, kernels by time
    python benchmarks/gpu_training.py --kernels dswiglu swiglu     single kernels of a step, in several configurations
"""

from __future__ import annotations

import argparse
import collections
import copy
import gc
import itertools
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch._inductor.select_algorithm
import torch.nn.functional as F
from torch import Tensor, nn

import gpu_common as common

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MODES: dict[str, dict[str, Any]] = {
    "inductor": {"backend": "inductor"},
    "autotune": {"backend": "inductor", "mode": "max-autotune-no-cudagraphs"},
    "postlude": {"backend": "postlude"},
}
PEERS = ("inductor", "autotune")
HIDDEN, INNER = 4096, 14336


class Gelu(nn.Module):
    """Linear, GELU, linear, all with biases."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Swiglu(nn.Module):
    """Llama's MLP."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaNorm(nn.Module):
    """RMSNorm as Llama's code has it, with roundings to the input's type."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(hidden) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Chain(nn.Module):
    """Projection, residual, RMSNorm, projection; gives the residual stream as well."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.norm = LlamaNorm(hidden)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        stream = residual + self.first(x)
        return stream, self.second(self.norm(stream))


@dataclass(frozen=True)
class Case:
    """What is measured: a module, its inputs, and whether gradients are computed."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    gradients: bool = True
    #: Least factor over the best of the peers that was asked for, and which peers count.
    bar: float = 1.08
    peers: tuple[str, ...] = PEERS


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def llama() -> nn.Module:
    """Hugging Face's code with the layer shapes of the 8B model, 4 layers."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


class WithLoss(nn.Module):
    """The language model with its loss as the only result."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss


CASES = {
    "llama": Case(
        lambda: WithLoss(llama()),
        lambda: (torch.randint(0, 32000, (2, 2048), device="cuda"),),
        bar=1.12,
        peers=("inductor",),
    ),
    **{
        f"{name} {m}": Case(lambda make=make: make(HIDDEN, INNER), lambda m=m: (normal(m, HIDDEN),))  # type: ignore[misc]
        for name, make in (("gelu", Gelu), ("swiglu", Swiglu))
        for m in (4096, 16384)
    },
    **{
        f"chain {m}": Case(lambda: Chain(HIDDEN), lambda m=m: (normal(m, HIDDEN), normal(m, HIDDEN)), False, 1.10)  # type: ignore[misc]
        for m in (4096, 16384)
    },
}


def make(case: Case) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The module in bfloat16 on the GPU, and inputs."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = case.make().to(torch.bfloat16).train(case.gradients)
    return module, case.inputs()


def step_of(case: Case, module: nn.Module, run: Callable[..., Any], inputs: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """One step without arguments: results, then gradients of float inputs and of all parameters."""
    if not case.gradients:

        def forward() -> list[Tensor]:
            with torch.no_grad():
                result = run(*inputs)
            return list(result) if isinstance(result, tuple) else [result]

        return forward
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    wanted = [*(x for x in leaves if x.requires_grad), *module.parameters()]
    generator = torch.Generator("cuda").manual_seed(7)
    upstream: list[Tensor] = []

    def training() -> list[Tensor]:
        result = run(*leaves)
        if result.ndim and not upstream:
            upstream.append(torch.randn(result.shape, device="cuda", generator=generator).to(torch.bfloat16).to(result.dtype))
        gradients = torch.autograd.grad(result, wanted, upstream[0] if upstream else None)
        return [result.detach(), *gradients]

    return training


def exact_of(case: Case, module: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The step in float64; the results are kept in the CPU's memory, the GPU's is needed for what is timed."""
    wide = copy.deepcopy(module).double()
    double = [x.double() if x.is_floating_point() else x for x in inputs]
    return [t.cpu() for t in step_of(case, wide, wide, double)()]


def errors_of(results: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    return [common.relative_error(got, wanted.to(got.device)) for got, wanted in zip(results, exact, strict=True)]


def peak_memory(step: Callable[[], Any]) -> int:
    """Bytes that one step needs beyond what is allocated before it."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def compiled(module: nn.Module, mode: str) -> Callable[..., Any]:
    return torch.compile(module, dynamic=False, **MODES[mode])


def run_case(name: str, options: argparse.Namespace) -> dict[str, Any]:
    case = CASES[name]
    torch._dynamo.reset()
    module, inputs = make(case)
    exact = exact_of(case, module, inputs)
    torch.cuda.empty_cache()
    errors = {"eager": errors_of(step_of(case, module, module, inputs)(), exact)}
    steps, sides, peaks = {}, {}, {}
    for mode in options.modes:
        begin = time.perf_counter()
        step = step_of(case, module, compiled(module, mode), inputs)
        errors[mode] = errors_of(step(), exact)
        step()
        peaks[mode] = peak_memory(step)
        steps[mode] = step
        print(f"{name}: {mode} compiled, {time.perf_counter() - begin:.0f} s", flush=True)
    del exact
    for mode, step in steps.items():
        sides[mode] = common.graph_of(step)
    repeats = 1 if name == "llama" else 3 if "16384" in name else 6 if case.gradients else 20
    times = common.interleave(sides, options.rounds, repeats)
    return {
        "case": name,
        "bar": case.bar,
        "times": {mode: vars(t) for mode, t in times.items()},
        "peaks": peaks,
        "errors": errors,
    }


def ratio_of(row: dict[str, Any]) -> tuple[float, str]:
    """How much faster than the best peer that was measured, and which."""
    times = {mode: t["microseconds"] for mode, t in row["times"].items()}
    best = min((mode for mode in CASES[row["case"]].peers if mode in times), key=times.__getitem__, default="")
    return (times[best] / times["postlude"], best) if best and "postlude" in times else (float("nan"), best)


def report(rows: Sequence[dict[str, Any]]) -> None:
    print("\nmilliseconds; peak memory in MB; largest relative error of a result or gradient")
    print(f"{'case':14}{'inductor':>10}{'autotune':>10}{'postlude':>10}{'spread':>8}{'over best':>10}{'bar':>6}", end="")
    print(f"{'MB inductor':>13}{'postlude':>10}{'error eager':>13}{'inductor':>10}{'postlude':>10}{'worst ratio':>13}")
    for row in rows:
        times, errors, peaks = row["times"], row["errors"], row["peaks"]
        cells = "".join(f"{times[m]['microseconds'] / 1e3:10.3f}" if m in times else f"{'–':>10}" for m in MODES)
        spread = max(t["spread"] for t in times.values())
        megabytes = "".join(
            f"{peaks[m] / 1e6:{w}.0f}" if m in peaks else f"{'–':>{w}}" for m, w in (("inductor", 13), ("postlude", 10))
        )
        largest = "".join(
            f"{max(errors[m]):{w}.2e}" if m in errors else f"{'–':>{w}}"
            for m, w in (("eager", 13), ("inductor", 10), ("postlude", 10))
        )
        pairs = zip(errors.get("postlude", ()), errors.get("inductor", ()), strict=False)
        worst = max((ours / max(theirs, 1e-12) for ours, theirs in pairs), default=float("nan"))
        print(f"{row['case']:14}{cells}{spread:8.1%}{ratio_of(row)[0]:9.3f}x{row['bar']:6.2f}{megabytes}{largest}{worst:13.2f}")


def explain(name: str, options: argparse.Namespace) -> None:
    """The Regions of each graph, what ended them, and the kernels of one step by time."""
    from postlude.ir import to_text
    from postlude.report import collecting

    case = CASES[name]
    for mode in options.modes:
        torch._dynamo.reset()
        module, inputs = make(case)
        step = step_of(case, module, compiled(module, mode), inputs)
        with collecting() as collection, torch._inductor.config.patch(force_disable_caches=True):
            step()
        for index, (found, _) in enumerate(collection.graphs):
            print(f"\n=== {name}, {mode}: graph {index}")
            counts: collections.Counter[str] = collections.Counter()
            for one in found:
                stops = "; ".join(dict.fromkeys([one.reason] if one.reason else one.stops.values()))
                text = to_text(one.region, lines=True) if one.region else "-"
                counts[f"{text}\n    absorbed {', '.join(one.absorbed)}\n    stopped by {stops}"] += 1
            for text, count in counts.items():
                print(f"{count} x {text}")
        profile(f"{name}, {mode}", step)
        del module, step
        torch.cuda.empty_cache()


def profile(title: str, step: Callable[[], Any], most: int = 40) -> None:
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = collections.defaultdict(list)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels[event.name].append(event.time_range.elapsed_us())
    total = sum(map(sum, kernels.values()))
    print(f"\n--- {title}: {sum(map(len, kernels.values()))} kernels, {total:.0f} us")
    for kernel, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:most]:
        print(f"{sum(times):10.1f} us {len(times):4d} x {sum(times) / len(times):9.2f}  {kernel[:150]}")


_X, _W, _V = "%x = operand [m, k] bf16;", "%w = operand [n, k] bf16;", "%v = operand [n, k] bf16;"
_PRODUCT = "%acc = contract %x, %w : f32;"
_TILES = "%t = operand [m, n] bf16; %u = operand [m, n] bf16;"
_GELU = (
    "%0 = const 0.5; %1 = mul %0, %h; %2 = const 0.7071067811865476; %3 = mul %2, %h; %4 = erf %3; %5 = const 1.0;"
    " %6 = add %4, %5; %7 = mul %1, %6;"
)
_DGELU = (
    "%0 = const 0.5; %1 = const 1.0; %2 = const 0.7071067811865476; %3 = mul %2, %t; %4 = erf %3; %5 = add %1, %4;"
    " %6 = mul %0, %5; %7 = const -0.5; %8 = mul %t, %t; %9 = mul %7, %8; %10 = exp %9; %11 = const 0.3989422804014327;"
    " %12 = mul %10, %11; %13 = mul %12, %t; %14 = add %6, %13; %15 = mul %acc, %14;"
)
_SILU = (
    "%0 = const 1.0; %1 = neg %acc; %2 = exp %1; %3 = add %0, %2; %4 = div %acc, %3; %5 = round_to bf16 %4; %6 = mul %acc1, %5;"
)
_DSWIGLU = (
    "%0 = const 1.0; %1 = neg %t; %2 = exp %1; %3 = add %0, %2; %4 = div %t, %3; %5 = round_to bf16 %4; %6 = mul %acc, %5;"
    " %7 = mul %acc, %u; %8 = reciprocal %3; %9 = mul %0, %8; %10 = mul %7, %9; %11 = sub %0, %9; %12 = mul %11, %t;"
    " %13 = add %0, %12; %14 = mul %10, %13;"
)
_NORM = (
    "%0 = add %acc, %t; %1 = const 1.52587890625e-05; %2 = mul %0, %g; %3 = mul %1, %2; %4 = mul %0, %0; %5 = reduce sum n %4;"
    " %6 = extent n; %7 = div %5, %6; %8 = const 1e-06; %9 = add %7, %8; %10 = rsqrt %9; %11 = const 65536.0; %12 = mul %10, %11;"
)
_STORED = "yield [m, n] bf16"
#: The kernels of training steps: operands, what is computed, results; n, k.
KERNELS = {
    "forward, up": (f"{_X} {_W} {_PRODUCT} {_STORED} %acc", INNER, HIDDEN),
    "forward, down": (f"{_X} {_W} {_PRODUCT} {_STORED} %acc", HIDDEN, INNER),
    "input's gradient, up": (f"{_X} %w = operand [k, n] bf16; {_PRODUCT} {_STORED} %acc", HIDDEN, INNER),
    "weight's gradient": (f"%x = operand [k, m] bf16; %w = operand [k, n] bf16; {_PRODUCT} {_STORED} %acc", HIDDEN, INNER),
    "residual": (f"{_X} {_W} %t = operand [m, n] bf16; {_PRODUCT} %0 = add %acc, %t; {_STORED} %0", HIDDEN, INNER),
    "gelu": (
        f"{_X} {_W} %r = operand [n] bf16; {_PRODUCT} %h = add %acc, %r; {_GELU} {_STORED} %h; {_STORED} %7",
        INNER,
        HIDDEN,
    ),
    "dgelu": (f"{_X} {_W} {_TILES.split(';')[0]}; {_PRODUCT} {_DGELU} {_STORED} %15", INNER, HIDDEN),
    "dgelu, bias": (
        f"{_X} {_W} {_TILES.split(';')[0]}; {_PRODUCT} {_DGELU} %16 = round_to bf16 %15; %17 = reduce sum m %16;"
        f" {_STORED} %15; yield [n] bf16 %17",
        INNER,
        HIDDEN,
    ),
    "swiglu": (
        f"{_X} {_W} {_V} {_PRODUCT} %acc1 = contract %x, %v : f32; {_SILU} {_STORED} %acc; {_STORED} %acc1; {_STORED} %6",
        INNER,
        HIDDEN,
    ),
    "dswiglu": (f"{_X} {_W} {_TILES} {_PRODUCT} {_DSWIGLU} {_STORED} %6; {_STORED} %14", INNER, HIDDEN),
    "products of tiles": (
        f"{_X} {_W} {_TILES} {_PRODUCT} %0 = mul %acc, %t; %1 = mul %acc, %u; {_STORED} %0; {_STORED} %1",
        INNER,
        HIDDEN,
    ),
    "norm before": (
        f"{_X} {_W} %t = operand [m, n] bf16; %g = operand [n] bf16; {_PRODUCT} {_NORM} {_STORED} %0; {_STORED} %3;"
        " yield [m] f32 %12",
        HIDDEN,
        HIDDEN,
    ),
    "norm behind": (f"{_X} {_W} %c = operand [m] f32; {_PRODUCT} %0 = mul %acc, %c; {_STORED} %0", HIDDEN, HIDDEN),
}


#: Configurations that single kernels are measured in: tile, cluster, whether two warpgroups alternate.
SWEPT = (
    (128, 128, 1, 2, True),
    (128, 160, 2, 1, True),
    (128, 160, 2, 2, True),
    (128, 192, 1, 2, True),
    (256, 128, 1, 2, False),
    (128, 256, 2, 1, False),
)


def kernels(options: argparse.Namespace) -> None:
    """Times of kernels of training steps in several configurations beside cuBLAS's plain product of these sizes."""
    from postlude.ir import normalize, parse
    from postlude.op import allocate_results
    from postlude.targets import cute

    processors, capability = torch.cuda.get_device_properties(0).multi_processor_count, torch.cuda.get_device_capability()
    rows = []
    for name, m in itertools.product(options.kernels, options.rows):
        text, n, k = KERNELS[name]
        region, _ = normalize(parse(f"region(m, n, k); {text}"))
        sizes = {"m": n, "n": k, "k": m} if name == "weight's gradient" else {"m": m, "n": n, "k": k}
        operands = [
            normal(*(sizes[axis] for axis in o.axes)).to(o.dtype) / (sizes["k"] ** 0.5 if "k" in o.axes else 1)
            for o in region.operands
        ]
        results = allocate_results(region, operands)
        pair = len(region.contractions)
        x, w = normal(sizes["m"], sizes["k"]), normal(pair * sizes["n"], sizes["k"])
        sides: dict[str, Callable[[], object]] = {"cublas": lambda x=x, w=w: F.linear(x, w)}  # type: ignore[misc]
        chosen = cute.candidates(region, *sizes.values(), capability, processors)[0]
        swept = [cute.Configuration(*fields) for fields in SWEPT if pair == 1 or fields[1] % 32 == 0]
        for configuration in dict.fromkeys((chosen, *swept)):
            kernel = cute.load(region, configuration)
            sides[str(configuration)] = lambda kernel=kernel, o=operands, r=results: kernel(*o, *r)  # type: ignore[misc]
        graphs = {}
        for side, run in sides.items():
            try:
                graphs[side] = common.graph_of(run)
            except Exception as error:  # too large for shared memory with all that this epilogue reads and stores
                print(f"  {side} can't be built: {type(error).__name__}", flush=True)
        times = common.interleave(graphs, options.rounds, 5)
        rows.append({"kernel": name, "sizes": sizes, "times": {side: vars(t) for side, t in times.items()}})
        own = {side: t.microseconds for side, t in times.items() if side != "cublas"}
        shown = ", ".join(f"{side} {each:.0f}" for side, each in sorted(own.items(), key=lambda item: item[1]))
        time, cublas = own[str(chosen)], times["cublas"].microseconds
        title = f"{name} {sizes['m']}x{sizes['n']}x{sizes['k']}"
        print(
            f"{title:40} cublas {cublas:6.0f} us, {chosen} {time:.0f}, {time / cublas:.3f} of it; {shown}",
            flush=True,
        )
        common.save(options.out, {"kernels": rows})
        del sides, graphs, operands, results, x, w
        torch.cuda.empty_cache()


def main() -> None:
    options = common.parser(__doc__)
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--modes", nargs="+", choices=list(MODES), default=["inductor", "postlude"])
    options.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    options.add_argument("--explain", action="store_true", help="print Regions and kernels, measure nothing")
    options.add_argument("--kernels", nargs="+", choices=list(KERNELS), help="single kernels only, in several configurations")
    options.add_argument("--rows", nargs="+", type=int, default=[4096, 16384], help="of single kernels")
    options.add_argument("--seconds", type=float, default=float("inf"), help="start no case after so many seconds")
    arguments = options.parse_args()
    torch._inductor.select_algorithm.PRINT_AUTOTUNE = False  # a table for every GEMM
    if arguments.kernels:
        kernels(arguments)
        return
    begin = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for name in arguments.case:
        if time.perf_counter() - begin > arguments.seconds:
            print(f"out of time before {name}")
            break
        if arguments.explain:
            explain(name, arguments)
            continue
        rows.append(run_case(name, arguments))
        ratio, best = ratio_of(rows[-1])
        shown = ", ".join(f"{m} {t['microseconds'] / 1e3:.3f} ms" for m, t in rows[-1]["times"].items())
        print(f"[{time.perf_counter() - begin:.0f} s] {name}: {shown}; {ratio:.3f}x over {best}", flush=True)
        common.save(arguments.out, {"command": sys.argv, "rows": rows})
        gc.collect()
        torch.cuda.empty_cache()
    if rows:
        report(rows)


if __name__ == "__main__":
    main()
