"""Measures a planned Region's candidates against what Inductor makes of the same nodes, as they run in the model.

All are timed in this process at the graph's own shapes and strides, in turn, on inputs that the last cache does not hold
(clock.py), and judged by race.py. On a CPU both sides are lines of a wrapper that Inductor generated, called without what
surrounds a compiled function once for a whole model; on a GPU they are recorded in CUDA graphs. Inductor's settings are those of
the compilation under way. A candidate whose results are not Inductor's is none.
"""

import contextvars
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from postlude.capture.rewrite import Plan, extract
from postlude.capture.sizes import hint
from postlude.errors import KernelBuildError, KernelLoadError, MeasurementFailed
from postlude.inductor import FROZEN
from postlude.ir import to_text
from postlude.op import allocate_results, overload
from postlude.select.clock import cold_sets, cycle
from postlude.select.entry import Measured
from postlude.select.race import Result, race, winner
from postlude.select.variants import UNFUSED_VARIANT, Variant, start_compiling, variants

#: Inductor by itself, whatever is configured: without our pass, and without graphs of its own, since the clock records one.
_ALONE = {"post_grad_custom_pre_pass": None, "triton.cudagraphs": False}

#: Mean difference of a candidate's results from Inductor's over their mean size above which the candidate is wrong, by the bytes
#: of a result's elements. Rounding is a hundredth of it.
_WRONG = {1: 0.5, 2: 0.1, 4: 0.01, 8: 1e-6}


class NotACandidate(Exception):
    """A kernel does not take the tensors, or its results are wrong."""


#: What a kernel's fault looks like. Anything else is a fault in measuring it.
_KERNEL_FAULTS = (KernelBuildError, KernelLoadError, NotACandidate)


@dataclass(frozen=True)
class Packing:
    """Which weights of a Region are packed ahead of time, and whether they are constants."""

    operands: tuple[int, ...] = ()
    constant: bool = False


def packing_of(plan: Plan) -> Packing:
    """What an inference graph with the option `freeze` packs of a plan."""
    inputs = plan.weights("placeholder")
    # Inductor's own freezing makes constants of weights: nobody expects a later change to be seen.
    return Packing(inputs) if inputs else Packing(plan.weights("get_attr"), True)


@dataclass(frozen=True)
class Measurement:
    """What a race of candidates gave."""

    winner: str
    candidates: tuple[Measured, ...]
    rounds: int
    sets: int
    cold: int


def measure(
    plan: Plan,
    names: Sequence[str],
    incumbent: str,
    packing: Packing,
    check: Callable[[], None] = lambda: None,
) -> Measurement:
    """Time all candidates for a plan.

    Args:
        plan: what was captured.
        names: targets that serve its Region, in the order of preference.
        incumbent: the candidate that is kept unless another is certainly faster.
        packing: which weights are packed.
        check: called now and then, before anything that takes long; what it raises ends the measurement.

    Raises:
        MeasurementFailed: Inductor's code for the nodes does not run, or there is not enough memory.
    """
    graph, comparable = subgraph(plan)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    device = plan.sources[0].node.meta["val"].device
    with torch.no_grad():
        try:
            first = [_example(node.meta["val"], seed) for seed, node in enumerate(inputs)]
            size = sum(_bytes(value) for value in first)
            sets = [first, *([_again(value) for value in first] for _ in range(cold_sets(device, size) - 1))]
            operands = _operands(plan, inputs, first)
            tensors = [*operands, *allocate_results(plan.region, operands)]
            tried = variants(plan.region, names, tensors)
            start_compiling(plan.region, tried, tensors)
            unfused = elsewhere(lambda: through_inductor(graph, first), check)
            wanted = _tensors(unfused(*first))
            cycles = {UNFUSED_VARIANT.name: cycle(unfused, sets)}
        except Exception as error:
            raise MeasurementFailed(error) from error
        errors: dict[str, str] = {}
        for variant in tried:
            check()
            try:
                fused = _fused(plan, inputs, variant, packing, first, check)
                if comparable:
                    _compare(_tensors(fused(*first)), wanted)
                # What Inductor's code writes to, or might, is not packed: packed weights are tensors of their own.
                own = [[_again(value) for value in values] for values in sets] if packing.operands else sets
                cycles[variant.name] = cycle(fused, own)
            except Exception as error:  # whatever a compiler raises: another candidate may do
                if variant.name == incumbent and not isinstance(error, _KERNEL_FAULTS):
                    raise MeasurementFailed(error) from error  # the rule holds: nothing was found out against it
                errors[variant.name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
        incumbent = incumbent if incumbent in cycles else UNFUSED_VARIANT.name
        results = race(cycles, incumbent, check)
    found = tuple(_measured(variant, results, errors) for variant in (*tried, UNFUSED_VARIANT))
    rounds = max(result.rounds for result in results.values())
    return Measurement(winner(results, incumbent), found, rounds, len(sets), size * len(sets))


def _measured(variant: Variant, results: Mapping[str, Result], errors: Mapping[str, str]) -> Measured:
    if variant.name in errors:
        return Measured(variant, error=errors[variant.name])
    time = results[variant.name].time
    return Measured(variant, time.median, time.low, time.high)


# Inputs --------------------------------------------------------------------------------------------------------------


def subgraph(plan: Plan) -> tuple[Graph, bool]:
    """The absorbed nodes alone, with what they read as placeholders; outputs are one node for each result.

    Capture looks through views and copies to the tensors that a kernel reads. They are part of the graph, but for copies that
    others read as well, which the Region does not save. Those are inputs of their own: then the second result is False, which
    says that the Region's results are not to be compared with the graph's.
    """
    absorbed, sources = set(plan.absorbed), {source.node for source in plan.sources}
    leads = set(sources)  # what depends on a source
    for node in plan.absorbed[0].graph.nodes:
        if any(read in leads for read in node.all_input_nodes):
            leads.add(node)
    inside, outside, comparable = set(absorbed), dict.fromkeys(source.node for source in plan.sources), True
    for node in reversed(plan.absorbed[0].graph.nodes):
        read = node not in inside and any(user in inside for user in node.users)
        if not read or node in sources:
            continue
        if node not in leads:
            outside.setdefault(node)
        elif _is_view(node) or all(user in inside for user in node.users):
            inside.add(node)
        else:
            outside.setdefault(node)
            comparable = False
    return extract(plan, inside, outside), comparable


def _is_view(node: Node) -> bool:
    """Whether a node's result shares memory with its first argument."""
    schema = getattr(node.target, "_schema", None)
    alias = schema.arguments[0].alias_info if schema is not None and schema.arguments else None
    return alias is not None and not alias.is_write


def _example(value: Any, seed: int) -> Any:
    """A random tensor like the fake one, or the hint of a symbolic size."""
    if not isinstance(value, Tensor):
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


def _again(value: Any) -> Any:
    """The same contents in other memory."""
    if not isinstance(value, Tensor):
        return value
    whole = value.as_strided((_span(value.shape, value.stride()),), (1,))
    return whole.clone().as_strided(value.shape, value.stride())


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if 0 not in shape else 0


def _bytes(value: Any) -> int:
    return _span(value.shape, value.stride()) * value.element_size() if isinstance(value, Tensor) else 0


def _operands(plan: Plan, inputs: Sequence[Node], values: Sequence[Any]) -> list[Tensor]:
    """The Region's operands among the values of the graph's inputs."""
    position = {node.meta["original"]: index for index, node in enumerate(inputs)}
    operands = []
    for source in plan.sources:
        tensor = values[position[source.node]]
        if source.expand is not None:
            tensor = tensor.expand([hint(size) for size in source.expand])
        operands.append(tensor.squeeze(source.squeeze) if source.squeeze else tensor)
    return operands


def _tensors(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def _compare(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Raise NotACandidate where results are grossly other ones."""
    for index, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
        if not theirs.dtype.is_floating_point or not theirs.numel():
            continue
        a, b = ours.reshape(theirs.shape).double(), theirs.double()
        finite = a.isfinite() & b.isfinite()
        difference = (a - b)[finite].abs().sum() / b[finite].abs().sum().clamp(min=1e-30)
        if difference > _WRONG[theirs.element_size()] or (a.isfinite() != b.isfinite()).double().mean() > 0.01:
            size = f"{float(difference):.1e} of its size"
            raise NotACandidate(f"result {index} differs from Inductor's by {size}: please report this")


# What is timed -------------------------------------------------------------------------------------------------------


def through_inductor(graph: Graph, inputs: Sequence[Any], mark: Callable[[Graph], None] | None = None) -> Callable[..., Any]:
    """The function that Inductor generates for a graph, without what surrounds it in a compiled model once for all nodes.

    `mark` is called with the graph after it was decomposed.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    made: list[Any] = []

    def inner(*args: Any, **kwargs: Any) -> Any:
        made.append(compile_fx_inner(*args, **kwargs))
        return made[-1]

    clean = Graph()
    clean.output(clean.graph_copy(graph, {}))
    patches = {**_ALONE, "post_grad_custom_pre_pass": mark}
    compiled: Any = compile_fx(GraphModule({}, clean), list(inputs), inner_compile=inner, config_patches=patches)
    call = getattr(made[-1], "current_callable", None) if len(made) == 1 else None
    if call is None:
        return compiled  # type: ignore[no-any-return]
    return lambda *values: call(list(values))


def elsewhere(function: Callable[[], Callable[..., Any]], check: Callable[[], None]) -> Callable[..., Any]:
    """Run inside no compilation, with the configuration of the one under way, which keeps its state in thread-local variables."""
    outcome: list[Any] = []
    context = contextvars.copy_context()

    def run() -> None:
        try:
            with torch.no_grad():
                outcome.append(context.run(function))
        except BaseException as error:
            outcome.append(error)

    # A daemon: whoever interrupts the measurement need not wait for the compiler.
    thread = threading.Thread(target=run, name="postlude-measure", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
        check()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    result: Callable[..., Any] = outcome[0]
    return result


def _fused(
    plan: Plan, inputs: Sequence[Node], variant: Variant, packing: Packing, first: Sequence[Any], check: Callable[[], None]
) -> Callable[..., Any]:
    if variant.target == "cpp":
        variant.load(plan.region, packing.operands, packing.constant)  # raises where the wrapper would have it interpreted
        return elsewhere(lambda: through_inductor(_with_op(plan, inputs), first, _marker(packing)), check)
    kernel = variant.load(plan.region)

    def call(*values: Any) -> list[Tensor]:
        operands = _operands(plan, inputs, values)
        results = allocate_results(plan.region, operands)
        if kernel(*operands, *results) is False:
            raise NotACandidate("it does not take tensors that lie so")
        return results

    return call


def _with_op(plan: Plan, inputs: Sequence[Node]) -> Graph:
    """The Region as one op, with the same inputs as the nodes that it stands for."""
    graph = Graph()
    placeholders = {node.meta["original"]: graph.placeholder(node.name) for node in inputs}
    operands = []
    for source in plan.sources:
        node = placeholders[source.node]
        if source.expand is not None:
            node = graph.call_function(torch.ops.aten.expand.default, (node, [hint(size) for size in source.expand]))
        if source.squeeze:
            node = graph.call_function(torch.ops.aten.squeeze.dims, (node, list(source.squeeze)))
        operands.append(node)
    results = len(plan.results)
    call = graph.call_function(overload(results), (to_text(plan.region), operands))
    graph.output((call,) if results == 1 else tuple(graph.call_function(operator.getitem, (call, i)) for i in range(results)))
    return graph


def _marker(packing: Packing) -> Callable[[Graph], None] | None:
    """Says at the op's node which operands are packed, as the backend's pass does."""
    if not packing.operands:
        return None

    def mark(graph: Graph) -> None:
        for node in graph.nodes:
            if getattr(node.target, "namespace", None) == "postlude":
                node.meta[FROZEN] = (packing.operands, packing.constant)

    return mark
