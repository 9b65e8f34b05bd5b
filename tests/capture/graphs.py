"""Graphs as Inductor would hand them to capture, without compiling anything."""

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import aot_function
from torch.fx import Graph, GraphModule

from postlude.capture import Captured, Settings, capture
from postlude.capture.capture import Judge


class CapturedFunction:
    """A function whose graph went through capture, and is then interpreted node by node.

    Attributes:
        graph: the rewritten graph of the last trace.
        found: what capture says of it.
    """

    graph: Graph
    found: list[Captured]

    def __init__(self, function: Callable[..., Any], *, dynamic: bool, settings: Settings, judge: Judge) -> None:
        from torch._inductor.decomposition import select_decomp_table

        def compile(module: GraphModule, inputs: Any) -> GraphModule:
            self.found = capture(module.graph, settings, judge)
            self.graph = module.graph
            module.recompile()
            return module

        self._function = aot_function(function, fw_compiler=compile, decompositions=select_decomp_table(), dynamic=dynamic)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        with torch.no_grad():
            return self._function(*inputs)


def captured(
    function: Callable[..., Any],
    *inputs: torch.Tensor,
    dynamic: bool = False,
    settings: Settings | None = None,
    judge: Judge = lambda plan, growth: None,
) -> tuple[CapturedFunction, list[Captured]]:
    """The rewritten function, and what capture says of it."""
    rewritten = CapturedFunction(function, dynamic=dynamic, settings=settings or Settings(), judge=judge)
    rewritten(*inputs)
    return rewritten, rewritten.found
