"""Dequantised weights in a graph: what no Region has taken in is expanded into operations that Inductor compiles."""

from typing import Any

from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from postlude.quant.op import decomposed, dequantize


def expand(graph: Graph) -> None:
    """Replace each ``postlude::dequantize`` that is left by its own operations, in place."""
    for node in graph.find_nodes(op="call_function", target=dequantize):
        _expand(graph, node)


def _expand(graph: Graph, node: Node) -> None:
    from torch._inductor.decomposition import select_decomp_table

    arguments: tuple[Any, ...] = node.args
    given = [tensor for tensor in arguments if isinstance(tensor, Node)]

    def compute(*values: Any) -> Any:
        those = iter(values)
        return decomposed(*(next(those) if isinstance(argument, Node) else argument for argument in arguments))

    fakes = [tensor.meta["val"] for tensor in given]
    with fakes[0].fake_mode:
        inner = make_fx(compute, select_decomp_table())(*fakes).graph
    places = dict(zip(inner.find_nodes(op="placeholder"), given, strict=True))
    with graph.inserting_before(node):
        result = graph.graph_copy(inner, places)
    assert isinstance(result, Node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
