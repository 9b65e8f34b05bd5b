"""`quantize_`: a model's linear layers, in place."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from postlude.quant.schemes import Scheme, scheme_named
from postlude.quant.weight import QuantizedTensor

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.console import ConsoleOptions, RenderResult

#: Called with a module and its name: whether it is to be quantised.
Filter = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class Layer:
    """What became of one layer.

    Attributes:
        name: the module's name.
        shape: of its weight, (n, k).
        reason: why it was left alone; empty if it was quantised.
        bytes_before, bytes_after: of its weight.
        error: norm of the weight's change over the norm of the weight; NaN where that is unknown (on the meta device).
    """

    name: str
    shape: tuple[int, ...]
    reason: str = ""
    bytes_before: int = 0
    bytes_after: int = 0
    error: float = float("nan")


@dataclass(frozen=True)
class QuantizationReport:
    """What `quantize_` did. Prints as a table.

    Attributes:
        scheme: the scheme.
        layers: all linear layers that the filter let through, in the model's order.
    """

    scheme: Scheme
    layers: list[Layer] = field(default_factory=list)

    @property
    def quantized(self) -> list[Layer]:
        """The layers that were quantised."""
        return [layer for layer in self.layers if not layer.reason]

    @property
    def left_alone(self) -> list[Layer]:
        """The layers that were not."""
        return [layer for layer in self.layers if layer.reason]

    def __rich_console__(self, console: "RichConsole", options: "ConsoleOptions") -> "RenderResult":
        from rich.table import Table

        from postlude.explanation import human_bytes

        table = Table("layer", "n x k", "weights", "error", "bytes before", "after")
        for layer in self.layers:
            size = " x ".join(map(str, layer.shape))
            if layer.reason:
                table.add_row(layer.name, size, f"left alone: {layer.reason}", "", human_bytes(layer.bytes_before), "")
            else:
                error = f"{layer.error:.2%}" if layer.error == layer.error else "unknown"
                sizes = human_bytes(layer.bytes_before), human_bytes(layer.bytes_after)
                table.add_row(layer.name, size, self.scheme.weight, error, *sizes)
        yield table
        before, after = (sum(getattr(layer, name) for layer in self.quantized) for name in ("bytes_before", "bytes_after"))
        activations = f", activations in {self.scheme.activation}" if self.scheme.activation else ""
        yield (
            f"{len(self.quantized)} of {len(self.layers)} linear layers in {self.scheme.weight}{activations}:"
            f" {human_bytes(before)} of weights are {human_bytes(after)}"
        )

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=160)
        with console.capture() as text:
            console.print(self)
        return text.get()


def quantize_(model: nn.Module, scheme: str | Scheme, *, filter: Filter | None = None) -> QuantizationReport:
    """Quantise the weights of a model's `torch.nn.Linear` layers, in place.

    A quantised weight is a `QuantizedTensor`, which state_dict, `.to`, torch.compile with any backend, FSDP2, deepcopy, pickle
    and torch.export take as they take any weight; `postlude.quant.flatten` makes plain tensors of a state_dict for files that
    know no others (safetensors). It needs no gradient any more: the weight is not trained, what is before it may be. Layers whose
    shape the format does not fit, or whose weight something else reads, are left alone, and the report says so.

    Args:
        model: any module.
        scheme: ``"fp8-weight"``, ``"nvfp4-weight"``, ``"int8-weight"``, ``"int4-weight"`` (weights only), ``"fp8"``, ``"mxfp8"``,
            ``"nvfp4"`` (the layers' inputs as well, at each call), or a `Scheme`.
        filter: called with each linear layer and its name; only those for which it is true are quantised.

    Raises:
        QuantizationError: there is no such scheme.
    """
    wanted = scheme_named(scheme)
    report = QuantizationReport(wanted)
    readers = _readers(model)
    made: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or (filter is not None and not filter(module, name)):
            continue
        weight = module.weight
        if (reason := _unfit(module, readers.get(id(weight), []), wanted)) is not None:
            report.layers.append(Layer(name, tuple(weight.shape), reason, _bytes(weight)))
            continue
        if id(weight) not in made:
            made[id(weight)] = nn.Parameter(QuantizedTensor.quantize(weight, wanted), requires_grad=False)
        module.weight = made[id(weight)]
        after = module.weight
        assert isinstance(after, QuantizedTensor)
        report.layers.append(Layer(name, tuple(weight.shape), "", _bytes(weight), _bytes(after), _error(weight, after)))
    return report


def _readers(model: nn.Module) -> dict[int, list[tuple[str, nn.Module]]]:
    """Which modules have which parameter."""
    readers: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter in module._parameters.values():
            if parameter is not None:
                readers.setdefault(id(parameter), []).append((name, module))
    return readers


def _unfit(module: nn.Linear, readers: list[tuple[str, nn.Module]], scheme: Scheme) -> str | None:
    weight: Any = module.weight
    if isinstance(weight, QuantizedTensor):
        return f"is in {weight.scheme.weight} already"
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}"
    if not weight.is_floating_point() or weight.dtype == torch.float64:
        return f"its weight is {weight.dtype}"
    if type(module).forward is not nn.Linear.forward:
        return f"{type(module).__name__} computes something else"
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "attention reads its weight itself"
    others = [name for name, reader in readers if not isinstance(reader, nn.Linear)]
    if others:
        return f"{others[0] or 'the model'} has the same weight"
    n, k = weight.shape
    if n == 0 or k == 0:
        return "is empty"
    for format in scheme.formats:
        columns = format.block[1] or (2 if format.element.packed else 1)
        if k % columns:
            return f"{format.name} needs a multiple of {columns} columns"
    return None


def _bytes(weight: Tensor) -> int:
    parts = weight.parts.values() if isinstance(weight, QuantizedTensor) else (weight,)
    return sum(part.numel() * part.itemsize for part in parts)


def _error(weight: Tensor, quantized: QuantizedTensor) -> float:
    if weight.is_meta:
        return float("nan")
    with torch.no_grad():
        exact = weight.detach().float()
        return float((quantized.dequantize().float() - exact).norm() / exact.norm().clamp(min=1e-30))
