"""Programmatic dependent launch of Inductor's own kernels, beside Regions.

With `triton.enable_pdl` Inductor launches its Triton kernels before the kernel ahead has ended. They may read before they wait
for it, where Inductor knows that nothing they read comes from it. What a Region reads and writes it doesn't know. So in a graph
with Regions each of Inductor's kernels waits before it touches any memory. What is left is most of the gain: the launch itself,
which takes longer than a small kernel runs.
"""

from typing import Any

from torch._inductor import config, scheduler
from torch._inductor.virtualized import V

#: Attribute of a graph under compilation that has Regions.
_MARK = "postlude_regions"


def mark(graph: Any) -> None:
    """Say that a graph under compilation has Regions."""
    setattr(graph, _MARK, True)


def enable() -> None:
    """Let Inductor's kernels in the graph under compilation start early; it looks itself whether the GPU can.

    Called within the patch of Inductor's configuration that lasts for the graph.
    """
    config.triton.enable_pdl = True


def install() -> None:
    """Let no kernel rely on what came before it in a graph with Regions; once per process.

    Inductor's scheduler keeps the node whose kernel was generated last. Where it has none, the next kernel waits first of all.
    """

    def get(self: Any) -> Any:
        return None if getattr(V.graph, _MARK, False) else self.__dict__.get("previous_node")

    def put(self: Any, node: Any) -> None:
        self.__dict__["previous_node"] = node

    scheduler.Scheduler.previous_node = property(get, put)  # type: ignore[assignment]
