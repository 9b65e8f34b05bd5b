"""Measures a planned Region against what Inductor makes of the same nodes, at the graph's own shapes and strides.

Both sides run in this process, call by call in turn, on random data, over several sets of weights so that a weight is not
always found in the nearest cache. Each side counts by its median; a difference within the spread is no difference.
"""

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from postlude import runtime
from postlude.capture.grow import Growth
from postlude.capture.rewrite import Plan
from postlude.capture.sizes import hint
from postlude.ir import to_text
from postlude.op import allocate_results
from postlude.select.clock import timers

#: Sets of inputs that take turns.
SETS = 3
ROUNDS = 30
#: A measurement ends after this many seconds, with at least 3 rounds.
PATIENCE = 1.0

#: Inductor by itself, whatever is configured: without our pass, and without graphs of its own, since the clock records one.
_ALONE = {"post_grad_custom_pre_pass": None, "triton.cudagraphs": False}


@dataclass(frozen=True)
class Timing:
    """Medians in seconds, and the larger of both sides' interquartile ranges over their median."""

    fused: float
    unfused: float
    spread: float

    @property
    def pays(self) -> bool:
        """Whether the Region is not slower beyond the spread."""
        return self.fused <= self.unfused * (1 + min(self.spread, 0.05))


def measure(plan: Plan, growth: Growth) -> Timing:
    """Time a plan. Takes a second or two, most of it Inductor's compile of the nodes."""
    graph = subgraph(plan)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    sets = [
        [_example(node.meta["val"], index * len(inputs) + number) for number, node in enumerate(inputs)] for index in range(SETS)
    ]
    unfused = _in_clean_thread(lambda: _compile(graph, sets[0]))
    fused = _fused(plan, inputs)
    return _race(fused, unfused, sets)


def subgraph(plan: Plan) -> Graph:
    """The absorbed nodes alone, with what they read as placeholders; outputs are one node for each result."""
    absorbed = set(plan.absorbed)
    graph = Graph()
    copies: dict[Node, Node] = {}
    order = [node for node in plan.absorbed[0].graph.nodes if node in absorbed]
    outside = dict.fromkeys(source for node in order for source in node.all_input_nodes if source not in absorbed)
    for source in plan.sources:
        outside.setdefault(source.node)
    for node in outside:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta["val"] = node.meta["val"]
        copies[node].meta["original"] = node
    for node in order:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[nodes[0]] for nodes in plan.results))
    return graph


def _example(value: Any, seed: int) -> Any:
    """A random tensor like the fake one, or the hint of a symbolic size."""
    if not isinstance(value, torch.Tensor):
        return int(hint(value))
    shape = [hint(size) for size in value.shape]
    strides = [hint(stride) for stride in value.stride()]
    tensor = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
    if value.dtype == torch.bool:
        return tensor.fill_(True)
    if value.dtype.is_floating_point:
        generator = torch.Generator(value.device).manual_seed(seed)
        flat = torch.randn(_span(shape, strides), generator=generator, device=value.device).to(value.dtype)
        return flat.as_strided(shape, strides)
    return tensor.zero_()


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size > 0)


def _compile(graph: Graph, inputs: Sequence[Any]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    clean = Graph()
    clean.output(clean.graph_copy(graph, {}))
    with torch.no_grad():
        compiled: Any = compile_fx(GraphModule({}, clean), list(inputs), config_patches=_ALONE)
        compiled(*inputs)
    return compiled  # type: ignore[no-any-return]


def _in_clean_thread(function: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Run inside no compilation: the one under way keeps its state in thread-local variables."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name="postlude-measure")
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    result: Callable[..., Any] = outcome[0]
    return result


def _fused(plan: Plan, inputs: Sequence[Node]) -> Callable[..., Any]:
    kernel = runtime.kernel(plan.sources[0].node.meta["val"].device.type, to_text(plan.region))
    position = {node.meta["original"]: index for index, node in enumerate(inputs)}

    def call(*values: Any) -> list[Tensor]:
        operands = []
        for source in plan.sources:
            tensor = values[position[source.node]]
            if source.expand is not None:
                tensor = tensor.expand([hint(size) for size in source.expand])
            operands.append(tensor.squeeze(source.squeeze) if source.squeeze else tensor)
        results = allocate_results(plan.region, operands)
        kernel(*operands, *results)
        return results

    return call


def _race(fused: Callable[..., Any], unfused: Callable[..., Any], sets: Sequence[Sequence[Any]]) -> Timing:
    times: tuple[list[float], list[float]] = ([], [])
    with torch.no_grad():
        calls = (timers(fused, sets), timers(unfused, sets))
        end = time.perf_counter() + PATIENCE
        for index in range(ROUNDS + 2):
            for side in (0, 1) if index % 2 else (1, 0):
                times[side].append(calls[side][index % len(sets)]())
            if time.perf_counter() > end and index >= 4:
                break
    medians = [statistics.median(side[2:]) for side in times]
    spread = max(_spread(side[2:]) / median for side, median in zip(times, medians, strict=True))
    return Timing(medians[0], medians[1], spread)


def _spread(times: Sequence[float]) -> float:
    ordered = sorted(times)
    return ordered[3 * len(ordered) // 4] - ordered[len(ordered) // 4]
