"""The sides of a check: one model run by eager, Inductor and Postlude, each with guards of its own."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from postlude.checking.result import EAGER, POSTLUDE, Compiling
from postlude.checking.values import named_tensors
from postlude.loading import Inputs
from postlude.options import Options
from postlude.twins import separate


@dataclass(frozen=True)
class Settings:
    """How a model is compiled: as for `torch.compile`. Options of Postlude's own are kept from Inductor."""

    options: dict[str, Any] | None = None
    mode: str | None = None
    dynamic: bool | None = None

    def compile(self, side: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The callable of one side. Nothing is compiled yet."""
        if side == EAGER:
            return function
        options = self.options if side == POSTLUDE else Options.split(self.options)[1]
        compiled: Any = torch.compile(
            separate(function), backend=side, mode=self.mode, options=options or None, dynamic=self.dynamic
        )
        return compiled  # type: ignore[no-any-return]


class Rewindable(Protocol):
    """What a runner needs of a model's state."""

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Tensors that want a gradient."""

    def rewind(self) -> None:
        """Put back what a call has changed."""


@dataclass
class Runner:
    """Calls one side with one set of inputs, with gradients or without.

    Attributes:
        call: the side.
        inputs: the arguments; never handed out, only copies of them.
        state: the model's.
        training: whether gradients are computed.
    """

    call: Callable[..., Any]
    inputs: Inputs
    state: Rewindable
    training: bool

    def fresh(self) -> Inputs:
        """A copy of the arguments, for a call that may change them."""
        known: dict[int, Any] = {}  # what is passed twice is one tensor in the copy too
        args, kwargs = tree_map(lambda v: known.setdefault(id(v), _copied(v)), (self.inputs.args, self.inputs.kwargs))
        return Inputs(args, kwargs)

    def tensors(self) -> dict[str, Tensor]:
        """Outputs, and gradients as ``gradient of NAME``, of one call from the model's state at the beginning."""
        self.state.rewind()
        inputs = self.fresh()
        with torch.set_grad_enabled(self.training):
            outputs = named_tensors(inputs.call(self.call))
            found = {name: _dense(tensor.detach()) for name, tensor in outputs.items()}
            found |= {f"gradient of {name}": gradient for name, gradient in self._gradients(outputs, inputs).items()}
        self.state.rewind()
        return found

    def timed(self) -> Callable[[], object]:
        """A function of no arguments that makes one call, the backward pass included, for a clock."""
        inputs = self.fresh()
        if not self.training:

            def forward() -> object:
                with torch.no_grad():
                    return inputs.call(self.call)

            return forward
        return lambda: self._gradients(named_tensors(inputs.call(self.call)), inputs)

    def _gradients(self, outputs: dict[str, Tensor], inputs: Inputs) -> dict[str, Tensor]:
        """Gradients of parameters and inputs, for fixed gradients of the outputs; those that the function left in `grad` too."""
        found = {name: p.grad for name, p in self.state.parameters.items() if p.grad is not None}
        ends = {name: tensor for name, tensor in outputs.items() if tensor.requires_grad}
        wanted = dict(self.state.parameters)
        for name, tensor in named_tensors({"args": inputs.args, **inputs.kwargs}).items():
            if tensor.requires_grad and tensor.is_leaf:
                wanted[f"input {name}"] = tensor
        if ends and wanted:
            given = [_cotangent(tensor, index) for index, tensor in enumerate(ends.values())]
            gradients = torch.autograd.grad(list(ends.values()), list(wanted.values()), given, allow_unused=True)
            found |= {name: gradient for name, gradient in zip(wanted, gradients, strict=True) if gradient is not None}
        return found


def _copied(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    copy = value.detach().clone(memory_format=torch.preserve_format)
    if value.layout == torch.strided and copy.stride() != value.stride() and value.numel():
        # `clone` closes gaps between rows, and writes out what is only repeated: other code would be compiled and timed.
        extent = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        copy = value.detach().as_strided((extent,), (1,)).clone().as_strided(value.shape, value.stride())
    return copy.requires_grad_(value.requires_grad)


def _dense(tensor: Tensor) -> Tensor:
    """A copy that can be compared element by element."""
    return tensor.clone() if tensor.layout == torch.strided else tensor.to_dense()


#: Gradients of outputs, by shape: made once, since a clock must not count them.
_cotangents: dict[object, Tensor] = {}


def _cotangent(output: Tensor, index: int) -> Tensor:
    """A fixed gradient for an output: 1 for a scalar, as a loss has it, else random. The same values on all sides."""
    if output.ndim == 0:
        return torch.ones_like(output)
    dtype = output.dtype
    key = (tuple(output.shape), dtype, output.device, index)
    if key not in _cotangents:
        generator = torch.Generator().manual_seed(index)
        # Values that bfloat16 holds exactly, so that every type gets the same.
        values = torch.randint(-64, 65, output.shape, generator=generator) / 64
        _cotangents[key] = values.to(output.device, dtype)
    return _cotangents[key]


def forget() -> None:
    """Free what runs have kept."""
    _cotangents.clear()


@contextmanager
def counting(compiling: Compiling) -> Iterator[None]:
    """Count what Dynamo compiles while open."""
    from torch._dynamo.callback import CallbackTrigger, callback_handler
    from torch._dynamo.utils import counters

    def begin(args: Any) -> None:
        if args.callback_trigger == CallbackTrigger.DYNAMO:
            compiling.compiles += 1

    graphs, broken = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    callback_handler.register_start_callback(begin)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(begin)
        compiling.graphs += counters["stats"]["unique_graphs"] - graphs
        new = {reason for reason, count in counters["graph_break"].items() if count > broken.get(reason, 0)}
        compiling.breaks += [_first_sentence(reason) for reason in sorted(new)]


def _first_sentence(reason: str) -> str:
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    return lines[0] if lines else reason


@contextmanager
def collecting_warnings(into: list[str]) -> Iterator[None]:
    """Keep what is warned of while open, each text once, instead of showing it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        text = str(warning.message)
        if "Postlude" in text and text not in into:
            into.append(text)
