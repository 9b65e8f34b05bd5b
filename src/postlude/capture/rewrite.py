"""Puts a grown Region into the graph: one node of ``postlude::region`` in place of all absorbed nodes."""

import operator
from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.utils._sympy.functions import FloorDiv

from postlude.capture.forms import Form, depends_on, layout_order
from postlude.capture.grow import Growth
from postlude.capture.program import Source
from postlude.capture.sizes import Size, same_shape
from postlude.ir import Region, Yield, normalize, to_text, verify
from postlude.op import MAX_RESULTS, overload

aten = torch.ops.aten


#: Key in a node's `meta`: which operands are weights, by the kind of node that they come from.
WEIGHTS = "postlude_weights"


class NotExpressible(Exception):
    """The Region can't be put into the graph; the message says why. The graph is untouched."""


class Refused(Exception):
    """An absorbed node's value is needed outside in a form that no result has: grow again without the node."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.name)
        self.node = node


@dataclass(frozen=True)
class Plan:
    """A Region ready to be put in: the normal form, the source of each operand, and the nodes each result stands for.

    `permutations` are those of the nodes whose dimensions are another order of their result's. `memory` says which nodes of
    a result share memory in eager: those with another entry than the first get a copy.
    """

    region: Region
    sources: tuple[Source, ...]
    results: tuple[tuple[Node, ...], ...]
    absorbed: tuple[Node, ...]
    permutations: dict[Node, tuple[int, ...]]
    memory: dict[Node, Node]

    def weights(self, kind: str) -> tuple[int, ...]:
        """Right operands that come into the graph from outside: the only ones that may stay the same between calls.

        `kind` is ``"placeholder"`` for inputs and parameters, ``"get_attr"`` for the graph's own constants.
        """
        rights = {self.region.operand_index[c.right] for c in self.region.contractions}
        return tuple(i for i in sorted(rights) if self.sources[i].node.op == kind)


def plan(growth: Growth) -> Plan:
    """Decide the results and bring the Region to its normal form.

    Raises:
        NotExpressible: nothing of it is used, or the Region is none.
        Refused: a node must stay outside.
    """
    absorbed = set(growth.absorbed)
    for node in growth.moments:
        if node in growth.roots and node not in absorbed:
            raise NotExpressible("its log-sum-exp is needed in a form that a Region can't store")
    results: dict[Yield, list[Node]] = {}
    permutations: dict[Node, tuple[int, ...]] = {}
    for node, value in growth.values.items():
        if all(user in absorbed for user in node.users):
            continue
        axes = growth.program.types[value.name].axes
        if value.form is Form.REPEATED:
            raise Refused(node)
        if value.form is Form.PERMUTED:
            permutations[node] = value.permutation
            order = value.permutation if value.copied else ()
        else:
            order = layout_order(node.meta["val"], value.form, len(growth.batch))
        dtype = node.meta["val"].dtype
        name = growth.program.unrounded(value.name, dtype)
        results.setdefault(Yield(axes, dtype, name, order), []).append(node)
    if not results:
        raise NotExpressible("nothing of it is used")
    if len(results) > MAX_RESULTS:
        last = list(results.values())[-1][0]
        if last in growth.roots:
            raise NotExpressible(f"it would have more than {MAX_RESULTS} results")
        raise Refused(last)
    # Growth rules this out; a cycle would be found too late.
    if depends_on([source.node for source in growth.program.sources], absorbed):
        raise NotExpressible("it would read what is computed from its own results")
    region, origin = normalize(growth.program.region(tuple(results)))
    verify(region)
    sources = tuple(growth.program.sources[index] for index in origin)
    memory = {node: growth.values[node].memory for nodes in results.values() for node in nodes}
    return Plan(region, sources, tuple(map(tuple, results.values())), tuple(growth.absorbed), permutations, memory)


def extract(plan: Plan, inside: Collection[Node], outside: Iterable[Node]) -> Graph:
    """A graph of the nodes `inside` alone, with placeholders for those `outside`; its outputs are one node for each result.

    Placeholders have in their `meta` the node that they stand for, as ``"original"``.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in outside:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta |= {"val": node.meta.get("val"), "original": node}
    for node in plan.absorbed[0].graph.nodes:
        if node in inside:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[nodes[0]] for nodes in plan.results))
    return graph


def check_sizes(graph: Graph, plan: Plan) -> None:
    """Raise NotExpressible where a symbolic size that `put_in` needs is not to be had in the graph."""
    sizes = SizeNodes(graph)
    needed = [s.expand for s in plan.sources if s.expand] + [
        tuple(node.meta["val"].shape) for nodes in plan.results for node in nodes
    ]
    for shape in needed:
        for size in shape:
            sizes.check(size)


def put_in(graph: Graph, plan: Plan) -> Node:
    """Replace the absorbed nodes by the op. Its sizes were checked; the caller sorts the graph afterwards."""
    environment = next((e for source in plan.sources if (e := _environment(source.node.meta["val"])) is not None), None)
    # What views of fake values ask of sizes (is one 0, or 1?) is no reason to compile again: the kernels serve all.
    with environment.suppress_guards() if environment is not None else nullcontext():
        return _put_in(graph, plan)


def _environment(value: torch.Tensor) -> Any:
    sizes: Sequence[Any] = value.shape
    return next((size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)), None)


def _put_in(graph: Graph, plan: Plan) -> Node:
    sizes = SizeNodes(graph)
    positions = {node: index for index, node in enumerate(graph.nodes)}
    anchor = max(plan.absorbed, key=positions.__getitem__)
    with graph.inserting_after(anchor):
        point = graph.call_function(operator.add, (0, 0))  # everything goes before this one
    with graph.inserting_before(point):
        operands = [_operand(graph, source, sizes) for source in plan.sources]
        call = _call(graph, overload(len(plan.results)), to_text(plan.region), operands)
        call.meta[WEIGHTS] = {kind: plan.weights(kind) for kind in ("placeholder", "get_attr")}
        many = len(plan.results) > 1
        for index, nodes in enumerate(plan.results):
            result = _call(graph, operator.getitem, call, index) if many else call
            if nodes[0] not in plan.permutations:
                # By the storages of fake values Inductor knows which nodes share memory: keep the original's.
                result.meta["val"] = nodes[0].meta["val"].reshape(result.meta["val"].shape)
            copies: dict[Node, Node] = {}  # first replacement in each memory
            for node in nodes:
                memory = plan.memory[node]
                replacement = _shaped(graph, copies.get(memory, result), node, plan, sizes)
                if copies and memory not in copies:
                    replacement = _call(graph, aten.clone.default, replacement)
                copies.setdefault(memory, replacement)
                replacement.meta["val"] = node.meta["val"]
                node.replace_all_uses_with(
                    replacement, delete_user_cb=lambda user: user not in plan.absorbed, propagate_meta=False
                )
    graph.erase_node(point)
    for node in sorted(plan.absorbed, key=positions.__getitem__, reverse=True):
        graph.erase_node(node)
    return call


def _shaped(graph: Graph, source: Node, node: Node, plan: Plan, sizes: "SizeNodes") -> Node:
    """`source` in the dimensions of `node`."""
    if node in plan.permutations:
        return _call(graph, aten.permute.default, source, list(plan.permutations[node]))
    if same_shape(node.meta["val"].shape, source.meta["val"].shape):
        return source
    return _call(graph, aten.reshape.default, source, [sizes.node(size) for size in node.meta["val"].shape])


def _operand(graph: Graph, source: Source, sizes: "SizeNodes") -> Node:
    node = source.node
    if source.expand is not None and not same_shape(node.meta["val"].shape, source.expand):
        node = _call(graph, aten.expand.default, node, [sizes.node(size) for size in source.expand])
    if source.squeeze:
        node = _call(graph, aten.squeeze.dims, node, list(source.squeeze))
    return node


def _call(graph: Graph, target: Any, *arguments: Any) -> Node:
    """A call with its fake value."""
    node = graph.call_function(target, arguments)
    values = torch.fx.node.map_arg(arguments, lambda n: n.meta["val"])
    node.meta["val"] = target(*values)
    return node


def read_sizes_from_inputs(graph: Graph) -> None:
    """Let sizes of computed tensors be read from the graph's inputs where both are the same symbol.

    Otherwise a size of a tensor that becomes part of a Region would depend on the Region.
    """
    known: dict[sympy.Expr, Node] = {}
    inputs = graph.find_nodes(op="placeholder")
    for node in inputs:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            known.setdefault(value.node.expr, node)
    for node in graph.find_nodes(op="call_function", target=aten.sym_size.int):
        value = node.meta.get("val")
        if not isinstance(value, torch.SymInt):
            continue
        expression = value.node.expr
        if expression not in known and (place := _input_with(inputs, expression)):
            with graph.inserting_after(inputs[-1]):
                known[expression] = _call(graph, aten.sym_size.int, *place)
        if known.get(expression, node) is not node:
            node.replace_all_uses_with(known[expression])
            graph.erase_node(node)


def _input_with(inputs: Sequence[Node], expression: sympy.Expr) -> tuple[Node, int] | None:
    for node in inputs:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and size.node.expr == expression:
                    return node, dim
    return None


class SizeNodes:
    """Nodes (or plain ints) for sizes, symbolic ones composed from what the graph already has."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.known: dict[sympy.Expr, Node] = {}
        self.dims: dict[sympy.Expr, tuple[Node, int]] = {}
        for node in graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt):
                self.known.setdefault(value.node.expr, node)
            elif node.op == "placeholder" and isinstance(value, torch.Tensor):
                for dim, size in enumerate(value.shape):
                    if isinstance(size, torch.SymInt):
                        self.dims.setdefault(size.node.expr, (node, dim))

    def check(self, size: Size) -> None:
        """Raise NotExpressible where `node` would fail."""
        if isinstance(size, torch.SymInt):
            self._check(size.node.expr)

    def node(self, size: Size) -> Node | int:
        """The size as an argument of a node inserted now."""
        return size if isinstance(size, int) else self._node(size.node.expr, size)

    def _check(self, expression: sympy.Expr) -> None:
        if expression.is_Integer or expression in self.known or expression in self.dims:
            return
        if expression.func not in _OPERATORS:
            raise NotExpressible(f"the graph has no node for the size {expression}")
        for part in expression.args:
            self._check(part)

    def _node(self, expression: sympy.Expr, like: torch.SymInt) -> Node | int:
        if expression.is_Integer:
            return int(expression)
        if expression in self.known:
            return self.known[expression]
        if expression in self.dims:
            return _call(self.graph, aten.sym_size.int, *self.dims[expression])
        parts: Sequence[Any] = [self._node(part, like) for part in expression.args]
        result = parts[0]
        for part in parts[1:]:
            result = _call(self.graph, _OPERATORS[expression.func], result, part)
        return result  # type: ignore[no-any-return]


_OPERATORS: dict[Any, Any] = {sympy.Add: operator.add, sympy.Mul: operator.mul, FloorDiv: operator.floordiv}
