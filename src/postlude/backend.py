"""The backend: what ``torch.compile(..., backend="postlude")`` calls.

It is TorchInductor with one more graph pass. The pass sits in Inductor's `post_grad_custom_pre_pass`: there the forward
and the backward graph pass by separately, decomposed, and the pass's `uuid` is part of the key of both compile caches, so
compiled graphs are found again in another process, and never taken for plain Inductor's.
"""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch._guards import TracingContext
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule, Node

from postlude import dependent_launch, runtime
from postlude.capture import Captured, capture, count_gemms
from postlude.capture.dequantize import expand
from postlude.capture.heads import share_heads
from postlude.capture.masks import drop_masks
from postlude.capture.outer import expand_outer_products
from postlude.capture.rewrite import WEIGHTS
from postlude.inductor import FROZEN, register
from postlude.ir import to_text
from postlude.options import Options
from postlude.quant.op import dequantize
from postlude.quant.weight import QuantizedTensor
from postlude.report import collect
from postlude.select import judge_for, tune
from postlude.select.judge import Judge
from postlude.select.knowledge import forget, knowledge
from postlude.targets import cpp
from postlude.targets.base import TARGETS, available

#: Inductor's option of programmatic dependent launch.
_PDL = "triton.enable_pdl"

#: Passes that are told whether the graph is one of inference: torch 2.13 has them, 2.11 has not.
_Aware: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)


class RegionPass(_Aware):
    """Inductor's graph pass that puts Regions into one graph."""

    def __init__(self, options: Options, first: Any = None) -> None:
        self.options = options
        #: A pass that was configured in the same place already, by the user or another package.
        self.first = first
        #: Whether Inductor's kernels may start early in graphs with Regions: unless the user has said what they may.
        self.chains = False

    def __call__(self, graph: Graph, is_inference: bool | None = None) -> None:
        """Rewrite `graph` in place."""
        if is_inference is None:
            is_inference = _is_inference()
        if _Aware is not CustomGraphPass and isinstance(self.first, _Aware):
            self.first(graph, is_inference)
        elif self.first is not None:
            self.first(graph)
        for rewrite in (share_heads, drop_masks, expand_outer_products):
            self.attempt(rewrite, graph)
        session = tune.session()
        with session.graph(count_gemms(graph)) if session else nullcontext():
            captured: list[Captured] = capture(graph, self.options.capture_settings(), self.judge(is_inference))
        expand(graph)
        for one in captured:
            if one.region and one.node:
                runtime.submit(one.device, to_text(one.region), _values(one.node) if self.options.compile_ahead else ())
                if self.options.freeze and is_inference:
                    weights = one.node.meta[WEIGHTS]
                    # Inductor's own freezing makes constants of weights: nobody expects a later change to be seen.
                    constant = not weights["placeholder"]
                    one.node.meta[FROZEN] = (weights["get_attr" if constant else "placeholder"], constant)
        if self.chains and any(one.region and one.node and one.device == "cuda" for one in captured):
            dependent_launch.enable()
        self.finish(graph, captured, is_inference)

    def finish(self, graph: Graph, captured: list[Captured], is_inference: bool) -> None:
        """Called with the rewritten graph, and with what became of each of its GEMMs."""
        collect(captured, is_inference)

    def attempt(self, rewrite: Callable[[Graph], object], graph: Graph) -> None:
        """Rewrite what attention need not read, or what is no product of matrices."""
        try:
            rewrite(graph)
        except Exception as error:  # the user's model must not fail for a fault of ours
            if self.options.fuse_all:
                raise
            warnings.warn(f"Postlude leaves the graph around its products as it is: {error!r}. Please report this.", stacklevel=2)

    def judge(self, is_inference: bool) -> Judge:
        """What chooses how a planned Region is computed."""
        return judge_for(self.options, is_inference)

    def uuid(self) -> Any:
        """Changes with the options, with every source file of the package, and with what is known of Regions."""
        return _uuid_with(self.first, self._own_uuid)

    def _own_uuid(self) -> str:
        known = knowledge()
        if self.options.tune:
            known.prepare()  # graphs are found again only beside the database that they were measured for
        parts = (source_digest(), self.options.key(), self.chains, _targets(), known.digest())
        return hashlib.sha256(repr(parts).encode()).hexdigest()


class JointPass(CustomGraphPass):
    """Inductor's pass over forward and backward in one graph, before they are parted.

    Here a mask is still computed beside the attention that reads it, and beside that attention's gradient. Once it is saved for
    the backward graph, nothing there tells what it is.
    """

    def __init__(self, regions: RegionPass, first: Any = None) -> None:
        self.regions = regions
        self.first = first

    def __call__(self, graph: Graph) -> None:
        """Rewrite `graph` in place."""
        if self.first is not None:
            self.first(graph)
        self.regions.attempt(drop_masks, graph)

    def uuid(self) -> Any:
        """As that of the other pass."""
        return _uuid_with(self.first, self.regions.uuid)


def _uuid_with(first: Any, own: Callable[[], Any]) -> Any:
    """The `uuid` of a pass behind a user's: None, Inductor's sign for "do not cache", if that has none."""
    theirs = first.uuid() if isinstance(first, CustomGraphPass) else None
    if first is not None and not theirs:
        return None
    return hashlib.sha256(repr((known, theirs)).encode()).hexdigest() if (known := own()) else None


def _is_inference() -> bool:
    """Whether the graph under compilation is one of inference, from what AOTAutograd notes; False where that is not known."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    return metadata is not None and not getattr(metadata, "is_train", True)


@lru_cache(maxsize=1)
def source_digest() -> str:
    """Digest of the package's own sources and tuning entries: another version must not find this one's graphs."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".h", ".cpp", ".c", ".jsonl"):
            digest.update(path.relative_to(root).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _values(node: Node) -> list[torch.Tensor]:
    """The fake operands and results of an op's node."""
    results = node.meta["val"]
    return [*(operand.meta["val"] for operand in node.args[1]), *(results if isinstance(results, tuple) else (results,))]  # type: ignore[union-attr]


def _targets() -> dict[str, list[str]]:
    """What can be compiled on this machine, for each type of device that it has."""
    return {device: available(device) for device in TARGETS if device == "cpu" or torch.cuda.is_available()}


def postlude(
    model: GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph that Dynamo captured.

    Args:
        model: the graph.
        inputs: example inputs.
        mode: as for Inductor ("default", "reduce-overhead", "max-autotune", ...).
        options: Postlude's own (see `postlude.options.Options`), and any of Inductor's.

    Raises:
        OptionError: an option that neither Postlude nor Inductor knows, or a value that an own option can't have.
    """
    return compile_graph(model, inputs, mode, options, RegionPass)


def compile_graph(
    model: GraphModule,
    inputs: Sequence[Any],
    mode: str | None,
    options: dict[str, Any] | None,
    make_pass: Callable[[Options, Any], RegionPass],
    **keywords: Any,
) -> Callable[..., Any]:
    """`postlude` with a pass of the caller's, and keywords of `compile_fx`: for those who watch a graph being compiled."""
    from torch._inductor import config as inductor_config
    from torch._inductor.compile_fx import compile_fx

    own, inductor_options = Options.split(options)
    _register_once()
    if all(t.device.type == "cpu" for t in inputs if isinstance(t, torch.Tensor)) and not _can_compile():
        return model  # Inductor would raise; eager is slower, and right
    # What every kernel needs is compiled while AOTAutograd and Inductor are at work.
    for device, dtype in {(t.device.type, t.dtype) for t in inputs if isinstance(t, torch.Tensor)}:
        runtime.prepare(device, dtype)
    config = torch._TorchCompileInductorWrapper(mode, inductor_options, None).config
    if inductor_config.freezing and not _convolutions(model):
        # Freezing would turn linears into oneDNN's packed ones before our pass sees them. Ours are packed too.
        config["cpp.weight_prepack"] = False
        own = replace(own, freeze=True)

    def configured(name: str) -> Any:
        return config.get(name, getattr(inductor_config, name))

    config["post_grad_custom_pre_pass"] = regions = make_pass(own, configured("post_grad_custom_pre_pass"))
    config["joint_custom_pre_pass"] = JointPass(regions, configured("joint_custom_pre_pass"))
    if _PDL not in config:
        config[_PDL] = inductor_config.triton.enable_pdl  # back to it when a graph is compiled
        regions.chains = True
    if any(isinstance(t, QuantizedTensor) for t in inputs) or any(node.target is dequantize for node in model.graph.nodes):
        with inductor_config.patch(config):
            keywords["decompositions"] = _decompositions_but_ours()
    compiled: Any = compile_fx(model, inputs, config_patches=config, **keywords)
    return compiled  # type: ignore[no-any-return]


def _decompositions_but_ours() -> dict[Any, Callable[..., Any]]:
    """Inductor's, so that our pass finds the dequantisation of a weight as one node; it expands what it has no use for."""
    from torch._inductor.decomposition import select_decomp_table

    return {op: rule for op, rule in select_decomp_table().items() if op is not dequantize}


def _can_compile() -> bool:
    """Whether anything can be compiled for the CPU here. If not, a warning has said so."""
    if cpp.unavailable() is None:
        return True
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError):
        return False
    return True


def _convolutions(model: GraphModule) -> bool:
    """Whether the graph has convolutions, whose packing by oneDNN is worth more than ours of the linears."""
    names = ("conv1d", "conv2d", "conv3d", "conv_transpose", "convolution")
    return any(name in str(node.target) for node in model.graph.nodes if node.op == "call_function" for name in names)


@lru_cache(maxsize=1)
def _register_once() -> None:
    register()


def _reset() -> None:
    """`torch._dynamo.reset()` calls this: forget kernels, so that the next compile starts from nothing."""
    runtime.reset()
    forget()


postlude.reset = _reset  # type: ignore[attr-defined]
