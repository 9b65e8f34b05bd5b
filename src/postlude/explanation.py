"""`postlude.explain`: what Postlude makes of a model, GEMM by GEMM."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from postlude.capture import Captured
from postlude.capture.names import joined, pattern
from postlude.ir import to_text
from postlude.report import collecting
from postlude.select.choice import Choice
from postlude.twins import separate

#: Operators that torch's modules call in inference for a whole layer, products and all. No graph shows what is in them.
_WHOLE_LAYERS = (torch._transformer_encoder_layer_fwd, torch._native_multi_head_attention)


@dataclass
class ExplainedRegion:
    """One row of an explanation: a Region, or a GEMM that was left to Inductor.

    Attributes:
        name: the modules that the GEMMs come from; the graph's own names where no module made them.
        gemms: number of matrix multiplications in it.
        program: the Region's text, one statement a line; empty where the GEMM was left alone.
        ops_absorbed: the absorbed ATen overloads, in graph order.
        target: the target that compiles it, or ``"inductor"``.
        stopped_by: what ended the growth, or why the GEMM was left alone: lines ``node: reason``.
        bytes_saved: bytes of GEMM results that are neither written to memory nor read again, for the example's sizes.
        choice: what was chosen to compute it, from which candidates, and why; None where it is no Region that could be judged.
    """

    name: str
    gemms: int
    program: str
    ops_absorbed: list[str]
    target: str
    stopped_by: list[str]
    bytes_saved: int
    choice: Choice | None = None
    _device: str = "cpu"
    _line: str = ""
    #: What ended the growth, each reason once, without the nodes' names.
    _reasons: tuple[str, ...] = ()

    @property
    def fused(self) -> bool:
        """Whether Postlude compiles it."""
        return bool(self.program)

    @cached_property
    def source(self) -> str:
        """The generated source code; empty where there is none."""
        from postlude.runtime import source

        return source(self._device, self._line) if self._line else ""


@dataclass(repr=False)
class Explanation:
    """All GEMMs of all graphs of a model, in graph order. Prints as a table.

    Attributes:
        regions: one for each Region, and for each GEMM that was left to Inductor.
        whole_layers: calls of operators that compute a layer in one piece, in which no GEMM can be found.
    """

    regions: list[ExplainedRegion] = field(default_factory=list)
    whole_layers: int = 0

    @property
    def gemms(self) -> int:
        """Number of matrix multiplications found."""
        return sum(region.gemms for region in self.regions)

    @property
    def fused_gemms(self) -> int:
        """Number of matrix multiplications in Regions."""
        return sum(region.gemms for region in self.regions if region.fused)

    @property
    def bytes_saved(self) -> int:
        """Bytes of memory traffic saved per call."""
        return sum(region.bytes_saved for region in self.regions)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table that `print` shows too."""
        if self.whole_layers:
            yield (
                "nn.TransformerEncoderLayer and nn.MultiheadAttention take torch's fast path for inference here"
                f" ({self.whole_layers}x): one operator for a whole layer, which no compiler looks into. To have it compiled,"
                " call torch.backends.mha.set_fastpath_enabled(False) first."
            )
        elif not self.regions:
            yield (
                "No matrix multiplication in the compiled graphs. torch.compile may have left parts of the model to eager:"
                " TORCH_LOGS=graph_breaks shows them."
            )
        if not self.regions:
            return
        table = Table("", "GEMMs", "kernel", "absorbed", "traffic saved", "stopped by", show_lines=False)
        for same in self._groups():
            region = same[0]
            table.add_row(
                f"{len(same)} x",
                pattern([one.name for one in same]),
                region.target,
                summary(region.ops_absorbed),
                human_bytes(sum(one.bytes_saved for one in same)) if region.fused else "",
                "; ".join(region._reasons[:2]) + (" ..." if len(region._reasons) > 2 else ""),
            )
        yield table
        absorbed = sum(len(region.ops_absorbed) for region in self.regions)
        yield (
            f"{self.fused_gemms} of {self.gemms} GEMMs in {sum(r.fused for r in self.regions)} Regions with {absorbed} other"
            f" ops, {len({r.program for r in self.regions if r.fused})} different programs;"
            f" {human_bytes(self.bytes_saved)} less memory traffic per call"
        )

    def _groups(self) -> list[list[ExplainedRegion]]:
        """Rows of the table: what is the same but for the layer that it stands in."""
        groups: dict[object, list[ExplainedRegion]] = {}
        for region in self.regions:
            key = (region.program, region.target, tuple(region.ops_absorbed), region._reasons)
            groups.setdefault(key, []).append(region)
        return list(groups.values())

    def __repr__(self) -> str:
        return f"<Explanation: {self.fused_gemms} of {self.gemms} GEMMs in {sum(r.fused for r in self.regions)} Regions>"

    def __str__(self) -> str:
        console = Console(width=160)
        with console.capture() as text:
            console.print(self)
        return text.get()


def explain(model_or_fn: Callable[..., Any], *args: Any, options: dict[str, Any] | None = None, **kwargs: Any) -> Explanation:
    """Compile a model for example inputs and say what became of each of its matrix multiplications.

    The model runs once, in the grad mode of the caller: under ``torch.no_grad()`` its inference graph is explained,
    otherwise the forward graph of training (and the backward graph if `model_or_fn` itself calls ``backward``).

    Args:
        model_or_fn: a module or function, not compiled.
        *args: example inputs.
        options: the backend's options.
        **kwargs: example inputs by name.

    Raises:
        Whatever the model raises on these inputs.
    """
    from torch._inductor import config

    from postlude.backend import postlude

    whole_layers = 0

    def backend(model: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        nonlocal whole_layers
        whole_layers += sum(node.target in _WHOLE_LAYERS for node in model.graph.nodes)
        return postlude(model, inputs, options=options)

    compiled = torch.compile(separate(model_or_fn), backend=backend)
    # A graph from a cache would come without a word about how it was made.
    with (
        collecting() as collection,
        config.patch(force_disable_caches=True),
        torch._dynamo.config.patch(recompile_limit=1 << 16, accumulated_recompile_limit=1 << 16),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
        compiled(*args, **kwargs)
    regions = []
    for index, (captured, _) in enumerate(collection.graphs):
        prefix = f"graph {index}: " if len(collection.graphs) > 1 else ""
        regions += [_explained(one, prefix) for one in captured]
    return Explanation(regions, whole_layers)


def _explained(captured: Captured, prefix: str) -> ExplainedRegion:
    from postlude.runtime import target_of

    region = captured.region
    stops = [f"{node}: {reason}" for node, reason in captured.stops.items()]
    line = to_text(region) if region else ""
    return ExplainedRegion(
        name=prefix + joined(captured.gemms),
        gemms=len(region.contractions) if region else len(captured.gemms),
        program=to_text(region, lines=True) if region else "",
        ops_absorbed=[op.removeprefix("aten.") for op in captured.absorbed],
        target=target_of(captured.device, line) if region else "inductor",
        stopped_by=[captured.reason] if captured.reason else stops,
        bytes_saved=captured.bytes_saved,
        choice=captured.choice,
        _device=captured.device,
        _line=line,
        _reasons=tuple(dict.fromkeys([captured.reason] if captured.reason else captured.stops.values())),
    )


def summary(ops: list[str]) -> str:
    """``add, 2 mul, erf``: op names without overloads, views left out."""
    counts: dict[str, int] = {}
    for op in ops:
        name = op.split(".")[0].strip("<>").removeprefix("built-in function ")
        if name not in ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "expand", "clone", "getitem", "alias"):
            counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count} {name}" if count > 1 else name for name, count in counts.items())


def human_bytes(count: int) -> str:
    """``1.5 MB``: decimal units, as memory bandwidth is given."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError
