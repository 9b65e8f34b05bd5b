"""Each Region on the values that it really gets: its error beside eager's, and its time beside Inductor's and eager's."""

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from postlude import runtime
from postlude.capture import Captured
from postlude.capture.names import joined
from postlude.checking.accuracy import Error, as_good, bar, distance
from postlude.checking.result import EAGER, INDUCTOR, POSTLUDE, LeftAlone, RegionFound
from postlude.checking.sides import Runner
from postlude.checking.watching import Seen, Wide, watch
from postlude.demo.run import describe
from postlude.ir import Region, to_text
from postlude.ir.region import DTYPE_NAMES
from postlude.op import allocate_results
from postlude.select.clock import cycle
from postlude.targets.aten.interpreter import axis_sizes, batch_shape, evaluate
from postlude.twins import separate

#: Layers whose weights take turns while a Region is timed, so that one layer's are not always in the nearest cache.
LAYERS = 4
#: Seconds for one kind of Region, all sides together.
PATIENCE = 1.0
ROUNDS = 40

#: Inductor by itself, whatever is configured.
_ALONE = {"post_grad_custom_pre_pass": None, "triton.cudagraphs": False}


class Inspection:
    """Listens to a watched run, and times what it has heard afterwards."""

    def __init__(self) -> None:
        self.regions: list[RegionFound] = []
        self.left: list[LeftAlone] = []
        #: A few calls of each kind, kept for the clock.
        self.kept: dict[tuple[object, ...], list[Seen]] = {}

    def graph(self, captured: Sequence[Captured]) -> None:
        """Hear what became of the GEMMs of a graph."""
        self.left += [LeftAlone(joined(one.gemms), one.reason) for one in captured if one.region is None]

    def region(self, seen: Seen) -> None:
        """Hear of one call: compare it at once, for its values are freed soon."""
        found = _found(seen)
        self.regions.append(found)
        kept = self.kept.setdefault(found.kind, [])
        if len(kept) < LAYERS:
            kept.append(seen)

    def measure(self, progress: Callable[[str], object]) -> None:
        """Time every kind of Region against Inductor's code for the nodes that it replaced, and against those nodes in eager."""
        for number, (kind, calls) in enumerate(self.kept.items()):
            same = [region for region in self.regions if region.kind == kind]
            progress(f"Timing Region {number + 1} of {len(self.kept)}: {same[0].name}...")
            seconds, spreads = _times(calls)
            for region in same:
                region.seconds, region.spreads = seconds, spreads
        self.kept.clear()


def inspect(runner: Runner, options: dict[str, Any] | None) -> Inspection:
    """Run the model once with its Regions in sight. `runner` calls the model in eager.

    Raises:
        Whatever the model raises when it is compiled.
    """
    inspection = Inspection()
    watched = watch(separate(runner.call), inspection.region, inspection.graph, options)
    with (
        torch._inductor.config.patch(force_disable_caches=True),
        warnings.catch_warnings(),
        torch._dynamo.config.patch(recompile_limit=1 << 16, accumulated_recompile_limit=1 << 16),
    ):
        warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
        Runner(watched, runner.inputs, runner.state, runner.training).tensors()
    return inspection


def _found(seen: Seen) -> RegionFound:
    eager, exact, ours, against = _references(seen)
    blame: Literal["", "kernel", "capture", "torch.compile"] = ""
    worst = (-1.0, {EAGER: Error(0.0, 0.0), POSTLUDE: Error(0.0, 0.0)}, 0.0)
    for own, plain, right in zip(ours, eager, exact, strict=True):
        errors = {EAGER: distance(plain, right), POSTLUDE: distance(own, right)}
        allowed = bar(errors[EAGER], own.dtype)
        astray = errors[POSTLUDE].astray > errors[EAGER].astray
        badness = float("inf") if astray else errors[POSTLUDE].relative / allowed if allowed else errors[POSTLUDE].relative
        worst = max(worst, (badness, errors, allowed), key=lambda entry: entry[0])
    badness, errors, allowed = worst
    if badness > 1:
        blame = "kernel" if against == "program" else "torch.compile" if _shared(seen, exact) else _blame(seen, allowed)
    device = seen.operands[0].device.type
    return RegionFound(
        name=joined(seen.captured.gemms),
        backward=seen.backward,
        description=describe(to_text(seen.region, lines=True)),
        program=to_text(seen.region, lines=True),
        source=runtime.source(device, seen.program),
        target=runtime.target_of(device, seen.program),
        absorbed=[op.removeprefix("aten.") for op in seen.captured.absorbed],
        stopped_by=list(dict.fromkeys(seen.captured.stops.values())),
        shapes=_shapes(seen),
        dtype=str(seen.results[0].dtype).removeprefix("torch."),
        flops=_flops(seen.region, seen.operands),
        traffic=sum(map(_bytes, seen.operands)) + sum(map(_bytes, seen.results)),
        saved=seen.captured.bytes_saved,
        errors=errors,
        bar=allowed,
        against=against,
        blame=blame,
        choice=seen.captured.choice,
    )


def _references(seen: Seen) -> tuple[list[Tensor], list[Tensor], list[Tensor], Literal["nodes", "program"]]:
    """(eager, float64, the kernel's results in the same shapes, what the former two are computed from)."""
    if seen.inputs is not None:
        try:
            exact = Wide(seen.part.module, torch.float64).run_on(seen.inputs)
            eager = list(seen.part.module(*seen.inputs))
            return eager, exact, seen.part.arranged(seen.results, exact), "nodes"
        except Exception:  # an op without a float64 kernel: there are many ways to say so
            pass
    exact = evaluate(seen.region, seen.operands, arithmetic=torch.float64, rounded=False)
    return evaluate(seen.region, seen.operands), exact, seen.results, "program"


def _shared(seen: Seen, exact: Sequence[Tensor]) -> bool:
    """Whether Inductor's code for the nodes is as far from the exact results: that is how torch.compile computes them."""
    compiled = _compiled(seen.part.module, seen.inputs or ())
    if compiled is None:
        return False
    theirs = seen.part.arranged(list(compiled(*(seen.inputs or ()))), exact)
    ours = seen.part.arranged(seen.results, exact)
    pairs = [(distance(own, right), distance(other, right)) for own, other, right in zip(ours, theirs, exact, strict=True)]
    return all(as_good(own, other, result.dtype) for (own, other), result in zip(pairs, seen.results, strict=True))


def _blame(seen: Seen, allowed: float) -> Literal["kernel", "capture"]:
    """Whether the kernel departs from its own program; if not, the program departs from the nodes."""
    exact = evaluate(seen.region, seen.operands, arithmetic=torch.float64, rounded=False)
    errors = [distance(own, right) for own, right in zip(seen.results, exact, strict=True)]
    plain = [distance(own, right) for own, right in zip(evaluate(seen.region, seen.operands), exact, strict=True)]
    faithful = all(e.within(max(allowed, bar(p, r.dtype)), p) for e, p, r in zip(errors, plain, seen.results, strict=True))
    return "capture" if faithful else "kernel"


def _shapes(seen: Seen) -> str:
    def one(tensor: Tensor) -> str:
        return f"{DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))}[{', '.join(map(str, tensor.shape))}]"

    return f"{', '.join(map(one, seen.operands))} -> {', '.join(map(one, seen.results))}"


def _flops(region: Region, operands: Sequence[Tensor]) -> float:
    """Multiplications and additions of the contractions; an epilogue's are few beside them."""
    shapes = [tuple(tensor.shape) for tensor in operands]
    sizes, batch = axis_sizes(region, shapes), prod(batch_shape(region, shapes))
    pairs = map(region.contraction_axes, region.contractions)
    return float(sum(2 * batch * sizes["m"] * sizes[contracted] * sizes[column] for contracted, column in pairs))


def _bytes(tensor: Tensor) -> int:
    """What is read of a tensor: dimensions that it only repeats count once."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return prod(sizes) * tensor.element_size()


def _times(calls: Sequence[Seen]) -> tuple[dict[str, float], dict[str, float]]:
    """Medians of seconds, and spreads, by side."""
    kernel = partial(_call_kernel, calls[0].kernel, calls[0].region)
    sides: dict[str, tuple[Callable[..., Any], list[Any]]] = {POSTLUDE: (kernel, [seen.operands for seen in calls])}
    if calls[0].inputs is not None:
        # The nodes may differ from layer to layer although the Regions do not, as where one of them is looked through.
        inputs = [seen.inputs for seen in calls if seen.inputs and _signature(seen.inputs) == _signature(calls[0].inputs)]
        module = calls[0].part.module
        sides[EAGER] = (module, inputs)
        if (compiled := _compiled(module, inputs[0])) is not None:
            sides[INDUCTOR] = (compiled, inputs)
    samples: dict[str, list[float]] = {}
    with torch.no_grad():
        timed = {name: clock for name, (function, values) in sides.items() if (clock := _clock(function, values)) is not None}
        for clock in timed.values():
            clock()
        end = time.perf_counter() + PATIENCE
        names = list(timed)
        for index in range(ROUNDS):
            for name in names[index % len(names) :] + names[: index % len(names)]:
                samples.setdefault(name, []).append(timed[name]())
            if time.perf_counter() > end and index >= 4:
                break
    medians = {name: statistics.median(times) for name, times in samples.items()}
    return medians, {name: _spread(times) / medians[name] for name, times in samples.items()}


def _signature(inputs: Sequence[Any]) -> list[object]:
    return [(v.shape, v.stride(), v.dtype) if isinstance(v, Tensor) else v for v in inputs]


def _call_kernel(kernel: Callable[..., Any], region: Region, *operands: Tensor) -> list[Tensor]:
    results = allocate_results(region, operands)
    kernel(*operands, *results)
    return results


def _clock(function: Callable[..., Any], values: Sequence[Any]) -> Callable[[], float] | None:
    """A clock; None for what can't be timed, such as nodes that no CUDA graph can hold."""
    try:
        return cycle(function, values)
    except Exception:
        return None


def _compiled(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any] | None:
    """A part compiled by Inductor alone; None where it refuses."""
    from torch._inductor.compile_fx import compile_fx

    clean = Graph()
    clean.output(clean.graph_copy(module.graph, {}))
    with torch.no_grad():
        try:
            compiled: Any = compile_fx(GraphModule({}, clean), list(inputs), config_patches=_ALONE)
            compiled(*inputs)
        except Exception:
            return None
    return compiled  # type: ignore[no-any-return]


def _spread(times: Sequence[float]) -> float:
    low, _, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / 2
