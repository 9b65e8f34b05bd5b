"""Runs a model with its Regions in sight: the very graph that Inductor would compile, node by node, on the user's own values.

The graph is taken where Postlude's pass leaves it, and interpreted: each Region by the kernel that the compiled model calls,
every other node by ATen. So each Region sees the values that it sees in the model, and belongs to one place in it, which the
compiled code no longer tells: there, equal layers share a kernel. Beside each Region stands the part of the graph that it
replaced, to be computed in other ways from the same values.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils._pytree import tree_map

from postlude import runtime
from postlude.backend import RegionPass, compile_graph
from postlude.capture import Captured
from postlude.capture.grow import Growth
from postlude.capture.rewrite import Plan, extract
from postlude.checking.exact import NARROW
from postlude.inductor import FROZEN
from postlude.ir import Region
from postlude.op import allocate_results, region_of
from postlude.options import Options
from postlude.report import collect
from postlude.select.choice import Choice
from postlude.select.judge import Judge

aten = torch.ops.aten

#: Nodes that a part takes in from outside although the Region did not absorb them: they only look at a tensor in another way.
_VIEWS = (
    aten.permute.default, aten.transpose.int, aten.t.default, aten.view.default, aten.reshape.default, aten._unsafe_view.default,
    aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.slice.Tensor,
    aten.alias.default, aten.sym_size.int,
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """The nodes that a Region replaced, as a graph of its own.

    Attributes:
        module: the graph; one output for each result of the Region.
        outside: the nodes of the whole graph that its placeholders stand for.
        permutations: for each result the order of its dimensions in the output; None where it is only reshaped.
    """

    module: GraphModule
    outside: tuple[Node, ...]
    permutations: tuple[tuple[int, ...] | None, ...]

    def arranged(self, results: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """A Region's results in the shapes of the part's outputs `like`."""
        return [
            (result.permute(order) if order else result).reshape(output.shape)
            for result, order, output in zip(results, self.permutations, like, strict=True)
        ]


@dataclass(frozen=True)
class Seen:
    """One call of one Region.

    Attributes:
        captured: what capture did there.
        backward: whether it stands in a backward graph.
        program: the program that ran.
        region: the same as a Region.
        kernel: what ran it.
        operands: the values that it got.
        results: what it made of them.
        part: the nodes that it replaced.
        inputs: values of the part's placeholders; None where one of them is no longer computed.
    """

    captured: Captured
    backward: bool
    program: str
    region: Region
    kernel: Callable[..., Any]
    operands: list[Tensor]
    results: list[Tensor]
    part: Part
    inputs: list[Any] | None


Listener = Callable[[Seen], None]


def watch(
    function: Callable[..., Any], listener: Listener, on_graph: Callable[[list[Captured]], None], options: dict[str, Any] | None
) -> Callable[..., Any]:
    """`function`, compiled so that `listener` is told of every Region that it calls.

    Args:
        function: a module or function, not compiled.
        listener: called during calls, after each Region's kernel.
        on_graph: called with what became of each GEMM of a graph, as the graph is compiled.
        options: the backend's options.
    """

    def backend(model: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        outer = [0]

        def make_pass(own: Options, first: Any) -> RegionPass:
            return _WatchingPass(own, first, outer, on_graph)

        def inner(graph_module: GraphModule, example: Sequence[Any], **keywords: Any) -> Any:
            from torch._inductor.compile_fx import compile_fx_inner

            outer[0] = id(graph_module.graph)
            try:
                compiled: Any = compile_fx_inner(graph_module, example, **keywords)
            except _Rewritten as rewritten:
                return _boxed(_Watching(graph_module, rewritten, bool(keywords.get("is_backward")), listener))
            return compiled

        return compile_graph(model, inputs, None, options, make_pass, inner_compile=inner)

    return torch.compile(function, backend=backend)


class _Rewritten(BaseException):
    """Ends Inductor's work on a graph once our pass has rewritten it. Not an Exception, which Inductor would wrap."""

    def __init__(self, graph: Graph, captured: list[Captured], parts: dict[int, Part]) -> None:
        self.graph = graph
        self.captured = captured
        self.parts = parts


class _WatchingPass(RegionPass):
    """The pass, which also keeps the nodes that each Region replaces."""

    def __init__(self, options: Options, first: Any, outer: list[int], on_graph: Callable[[list[Captured]], None]) -> None:
        super().__init__(options, first)
        self.outer = outer
        self.on_graph = on_graph
        self.parts: dict[int, tuple[Region, Part]] = {}

    def judge(self, is_inference: bool) -> Judge:
        """The judge; a plan that it keeps is about to be put in, and its nodes are still there."""
        judged = super().judge(is_inference)

        def judge(plan: Plan, growth: Growth) -> Choice:
            choice = judged(plan, growth)
            if not choice.unfused:
                self.parts[id(plan.region)] = (plan.region, _part(plan))
            return choice

        return judge

    def finish(self, graph: Graph, captured: list[Captured], is_inference: bool) -> None:
        """Stop here, unless this is the graph of a branch of control flow."""
        collect(captured, is_inference)
        self.on_graph(captured)
        if id(graph) == self.outer[0]:
            parts = {id(one.region): self.parts[id(one.region)][1] for one in captured if one.region is not None}
            raise _Rewritten(graph, captured, parts)


def _part(plan: Plan) -> Part:
    inside = set(plan.absorbed)
    sources = {source.node for source in plan.sources}
    pending = list(plan.absorbed)
    while pending:
        for node in pending.pop().all_input_nodes:
            # What nobody else needs is gone once the Region is there, for it reads what lies behind.
            needless = node.op == "call_function" and all(user in inside for user in node.users)
            if node not in inside and node not in sources and (needless or node.target in _VIEWS):
                inside.add(node)
                pending.append(node)
    order = [node for node in plan.absorbed[0].graph.nodes if node in inside]
    outside = tuple(dict.fromkeys(source for node in order for source in node.all_input_nodes if source not in inside))
    permutations = tuple(plan.permutations.get(nodes[0]) for nodes in plan.results)
    return Part(GraphModule({}, extract(plan, inside, outside)), outside, permutations)


class _Watching(Interpreter):
    """Runs a rewritten graph."""

    def __init__(self, module: GraphModule, rewritten: _Rewritten, backward: bool, listener: Listener) -> None:
        super().__init__(module, graph=rewritten.graph)
        self.backward = backward
        self.listener = listener
        self.regions = {
            one.node: (one, rewritten.parts[id(one.region)])
            for one in rewritten.captured
            if one.node is not None and one.region is not None
        }
        self._keep_inputs_of_parts()

    def run_node(self, n: Node) -> Any:
        """A Region is run by its kernel, and told."""
        if n not in self.regions:
            return super().run_node(n)
        captured, part = self.regions[n]
        (program, operands), _ = self.fetch_args_kwargs_from_env(n)
        region = region_of(program)
        device = operands[0].device
        kernel = runtime.kernel(device.type, program, *n.meta.get(FROZEN, ((), False)))
        with nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device):
            results = allocate_results(region, operands)
            kernel(*operands, *results)
            known = all(node in self.env for node in part.outside)
            inputs = [self.env[node] for node in part.outside] if known else None
            self.listener(Seen(captured, self.backward, program, region, kernel, list(operands), results, part, inputs))
        return results[0] if len(results) == 1 else tuple(results)

    def _keep_inputs_of_parts(self) -> None:
        """Let no value be freed before the last part that it is an input of."""
        position = {node: index for index, node in enumerate(self.graph.nodes)}
        last = {node: user for user, nodes in self.user_to_last_uses.items() for node in nodes}
        for region, (_, part) in self.regions.items():
            for node in part.outside:
                user = last.get(node)
                if node in position and user is not None and position[user] < position[region]:
                    self.user_to_last_uses[user].remove(node)
                    self.user_to_last_uses.setdefault(region, []).append(node)
                    last[node] = region


def _boxed(interpreter: Interpreter) -> Callable[[list[Any]], Any]:
    """A graph as AOTAutograd calls it: with a list of arguments."""

    def run(arguments: list[Any]) -> Any:
        values = list(arguments)
        arguments.clear()
        return interpreter.run(*values)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class Wide(Interpreter):
    """Runs a part in one floating-point type, whatever types its nodes name."""

    def __init__(self, module: GraphModule, dtype: torch.dtype) -> None:
        super().__init__(module)
        self.dtype = dtype

    def run_on(self, inputs: Sequence[Any]) -> list[Tensor]:
        """The part's outputs for inputs of any type."""
        outputs: Any = self.run(*(self._widened(value) for value in inputs))
        return list(outputs)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call with the replaced types."""
        args, kwargs = tree_map(lambda v: self.dtype if isinstance(v, torch.dtype) and v in NARROW else v, (args, kwargs))
        return super().call_function(target, args, kwargs)

    def _widened(self, value: Any) -> Any:
        narrow = isinstance(value, Tensor) and value.dtype.is_floating_point
        return value.to(self.dtype) if narrow else value
