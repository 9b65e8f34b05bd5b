"""`QuantizedTensor`: a matrix that is kept in a number format, and is a tensor to everybody else.

It holds plain tensors (codes, scales, ...) and looks like the matrix that they stand for, in that matrix's own dtype. What moves
tensors about (detach, clone, `.to`, split by rows, copy_) is done to the parts. Every other operation gets the dequantised
matrix, so a product in eager is exactly that, and a graph under compilation holds ``postlude::dequantize`` before it. Where the
scheme says so, `torch.nn.functional.linear` also quantises its input.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map

from postlude.errors import QuantizationError
from postlude.quant.blocks import Quantized, quantize
from postlude.quant.formats import ALL, format_named
from postlude.quant.op import dequantize
from postlude.quant.products import linear
from postlude.quant.schemes import Scheme

aten = torch.ops.aten

#: Types whose bytes are kept.
_AS_BYTES = (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu)

#: The parts of a matrix, in order. Only what its format has is there.
PARTS = ("codes", "scale", "zero_point", "matrix_scale")


class QuantizedTensor(Tensor):
    """A matrix [n, k] in the number format of a scheme's weights.

    Attributes:
        scheme: the scheme.
        codes, scale, zero_point, matrix_scale: as in `postlude.quant.Quantized`.
    """

    scheme: Scheme
    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    matrix_scale: Tensor | None

    @staticmethod
    def __new__(cls, scheme: Scheme, parts: Mapping[str, Tensor], dtype: torch.dtype) -> "QuantizedTensor":
        """From parts, for a matrix that looks as if it had `dtype`."""
        codes = parts["codes"]
        columns = codes.shape[1] * (2 if format_named(scheme.weight).element.packed else 1)
        return torch.Tensor._make_wrapper_subclass(
            cls, (codes.shape[0], columns), dtype=dtype, device=codes.device, requires_grad=False
        )

    def __init__(self, scheme: Scheme, parts: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self.scheme = scheme
        for name in PARTS:
            setattr(self, name, parts.get(name))

    @classmethod
    def quantize(cls, matrix: Tensor, scheme: Scheme) -> "QuantizedTensor":
        """Quantise a matrix [n, k].

        Raises:
            QuantizationError: it is not a matrix of floating point numbers that the format can hold.
        """
        if matrix.ndim != 2:
            raise QuantizationError(f"a weight has {matrix.ndim} dimensions", "2", "Leave such layers out")
        made = quantize(matrix.detach(), format_named(scheme.weight))
        parts = {name: part for name in PARTS if (part := getattr(made, name)) is not None}
        # TorchInductor does not compile all of torch's narrow types.
        parts |= {name: part.view(torch.uint8) for name, part in parts.items() if part.dtype in _AS_BYTES}
        return cls(scheme, parts, matrix.dtype)

    @property
    def parts(self) -> dict[str, Tensor]:
        """The tensors that it holds, by name."""
        return {name: part for name in PARTS if (part := getattr(self, name)) is not None}

    def dequantize(self) -> Tensor:
        """The matrix as a plain tensor, in its dtype."""
        return dequantize(self.codes, self.scale, self.zero_point, self.matrix_scale, self.scheme.weight, self.dtype)  # type: ignore[no-any-return]

    def quantized(self) -> Quantized:
        """Its format and parts."""
        return Quantized(format_named(self.scheme.weight), **self.parts)

    # What torch.compile, torch.export and serialisation ask for ------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Scheme, torch.dtype]]:
        return list(self.parts), (self.scheme, self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, parts: dict[str, Tensor], context: tuple[Scheme, torch.dtype], size: object, stride: object
    ) -> "QuantizedTensor":
        return cls(context[0], parts, context[1])

    def _stable_hash_for_caching(self) -> str:
        """What compiled code depends on, as torch's caches ask for it."""
        parts = [(name, tuple(p.shape), p.stride(), str(p.dtype), str(p.device)) for name, p in self.parts.items()]
        return hashlib.sha256(repr((self.scheme, str(self.dtype), parts)).encode()).hexdigest()

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """As bytes: pickle by itself does not know the storages of torch's narrow types."""
        parts = {
            name: (part.contiguous().view(torch.uint8) if part.ndim else part, part.dtype) for name, part in self.parts.items()
        }
        return _rebuild, (self.scheme.weight, self.scheme.activation, parts, self.dtype, isinstance(self, torch.nn.Parameter))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"QuantizedTensor({self.scheme.weight}, {list(self.shape)}, {self.dtype}, device={self.device}"
            f"{f', activations in {self.scheme.activation}' if self.scheme.activation else ''})"
        )

    # What FSDP2 asks for -----------------------------------------------------------------------------------------------------

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: object, module: object, mp_policy: object
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """The parts that are gathered, of equally many rows on each rank.

        Raises:
            QuantizationError: the ranks do not divide the rows. FSDP2 then takes parts of the weight's own shape only.
        """
        if outer_size[0] % mesh.size():
            raise QuantizationError(
                f"a quantised weight of {outer_size[0]} rows is sharded over {mesh.size()} ranks",
                "ranks that divide its rows",
                "Leave the layer out of quantize_ by filter=, or do not shard it",
            )
        return tuple(part for name, part in self.parts.items() if self._by_rows(name)), {"rows": outer_size[0]}

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: dict[str, Any], param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole matrix from the gathered parts."""
        if out is not None:
            return None  # its parts lie in the gathered memory already
        gathered = iter(outputs)
        parts = {
            name: next(gathered).view(-1, *part.shape[1:]) if self._by_rows(name) else part for name, part in self.parts.items()
        }
        whole = type(self)(self.scheme, parts, param_dtype)
        return whole._rows(0, metadata["rows"]), tuple(outputs)

    # Rows --------------------------------------------------------------------------------------------------------------------

    def _by_rows(self, name: str) -> bool:
        """Whether a part has rows that belong to the matrix's rows."""
        return name == "codes" or (name != "matrix_scale" and format_named(self.scheme.weight).block[0] != ALL)

    def _rows(self, start: int, stop: int) -> "QuantizedTensor":
        """Rows [start, stop) as a view.

        Raises:
            QuantizationError: they would cut a block in two.
        """
        block = format_named(self.scheme.weight).block[0] or 1
        if start % block or (stop % block and stop != self.shape[0]):
            raise QuantizationError(
                f"rows {start} to {stop} were asked of a matrix whose blocks have {block} rows",
                f"multiples of {block}",
                "Choose a format with scales for each row, or another number of shards",
            )
        parts = {
            name: part[start // (1 if name == "codes" else block) : -(-stop // (1 if name == "codes" else block))]
            if self._by_rows(name)
            else part
            for name, part in self.parts.items()
        }
        return type(self)(self.scheme, parts, self.dtype)

    def _each(self, do: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> "QuantizedTensor":
        return type(self)(self.scheme, {name: do(part) for name, part in self.parts.items()}, dtype or self.dtype)

    # Dispatch ----------------------------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            if isinstance(weight, QuantizedTensor) and weight.scheme.activation is not None:
                return linear(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (handler := _HANDLERS.get(func)) is not None:
            return handler(func, args, kwargs)
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if isinstance(given, QuantizedTensor) and argument.alias_info is not None and argument.alias_info.is_write:
                raise QuantizationError(
                    f"{func} would change a quantised weight in place",
                    "weights that stay as they are",
                    "Change `weight.dequantize()` and quantise that",
                )
        plain = lambda value: value.dequantize() if isinstance(value, QuantizedTensor) else value  # noqa: E731
        return func(*tree_map(plain, tuple(args)), **tree_map(plain, dict(kwargs)))


# What is done to the parts ---------------------------------------------------------------------------------------------------

_Handler = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]
_HANDLERS: dict[Any, _Handler] = {}


def _handles(*overloads: Any) -> Callable[[_Handler], _Handler]:
    def register(handler: _Handler) -> _Handler:
        _HANDLERS.update(dict.fromkeys(overloads, handler))
        return handler

    return register


@_handles(aten.detach.default, aten.alias.default, aten.clone.default, aten.contiguous.default)
def _on_parts(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return return_and_correct_aliasing(func, args, kwargs, args[0]._each(func))


@_handles(aten.empty_like.default, aten.zeros_like.default, aten._pin_memory.default)
def _new_parts(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    device = {name: kwargs[name] for name in ("device", "pin_memory") if kwargs.get(name) is not None}
    return args[0]._each(lambda part: func(part, **device), kwargs.get("dtype"))


@_handles(aten._to_copy.default)
def _to(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    rest = {name: value for name, value in kwargs.items() if name not in ("dtype", "memory_format", "layout")}
    return return_and_correct_aliasing(func, args, kwargs, args[0]._each(lambda part: func(part, **rest), kwargs.get("dtype")))


@_handles(aten.view.default, aten._unsafe_view.default, aten.as_strided.default)
def _view(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """FSDP2 flattens what it is going to gather by itself, and puts views of the same shape on what it has gathered."""
    matrix, size = args[0], list(args[1])
    if size in ([-1], list(matrix.shape)) and (len(args) < 4 or not args[3]):
        return return_and_correct_aliasing(func, args, kwargs, matrix._each(aten.alias.default))
    return func(matrix.dequantize(), *args[1:], **kwargs)


@_handles(aten.split.Tensor)
def _split(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    matrix, size = args[:2]
    if (args[2] if len(args) > 2 else kwargs.get("dim", 0)) != 0:
        return func(matrix.dequantize(), *args[1:], **kwargs)
    rows = matrix.shape[0]
    return [matrix._rows(start, min(start + size, rows)) for start in range(0, max(rows, 1), size)]


@_handles(aten.slice.Tensor)
def _slice(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    matrix, dim, start, stop, step = [*args, None, None, None, None][:5]
    if dim not in (None, 0) or step not in (None, 1):
        return func(matrix.dequantize(), *args[1:], **kwargs)
    first, last, _ = slice(start, stop).indices(matrix.shape[0])
    return return_and_correct_aliasing(func, args, kwargs, matrix._rows(first, max(first, last)))


@_handles(aten.new_zeros.default)
def _zeros(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    matrix, size = args[0], tuple(args[1])
    if len(size) != 2 or size[1] != matrix.shape[1] or kwargs.get("dtype", matrix.dtype) not in (None, matrix.dtype):
        return torch.zeros(size, **{"dtype": matrix.dtype, "device": matrix.device, **kwargs})
    return _new_zeros(matrix, size, kwargs.get("device"))


def _new_zeros(matrix: QuantizedTensor, size: tuple[int, int], device: torch.device | None = None) -> QuantizedTensor:
    block = format_named(matrix.scheme.weight).block[0] or 1
    parts = {}
    for name, part in matrix.parts.items():
        rows = (size[0] if name == "codes" else -(-size[0] // block),) if matrix._by_rows(name) else part.shape[:1]
        shape = (*rows, *part.shape[1:])
        parts[name] = (
            torch.zeros(shape, dtype=torch.uint8, device=device or part.device).view(part.dtype)
            if part.itemsize == 1
            else (part.new_zeros(shape, device=device))
        )
    return QuantizedTensor(matrix.scheme, parts, matrix.dtype)


@_handles(aten.copy_.default)
def _copy_op(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    to, source = args[:2]
    if not isinstance(to, QuantizedTensor):
        return func(to, source.dequantize(), *args[2:], **kwargs)
    if to.shape != source.shape:
        raise QuantizationError(
            f"a weight {list(source.shape)} was to be copied into one of {list(to.shape)}", "equal sizes", "Check the checkpoint"
        )
    if not isinstance(source, QuantizedTensor) or source.scheme.weight != to.scheme.weight:
        numbers = source.dequantize() if isinstance(source, QuantizedTensor) else source
        source = QuantizedTensor.quantize(numbers, to.scheme)
    return _copy(to, source)


def _copy(to: QuantizedTensor, source: QuantizedTensor) -> QuantizedTensor:
    """Copies the parts into the first rows."""
    for name, part in source.parts.items():
        target = to.parts[name]
        (target[: part.shape[0]] if target.ndim and to._by_rows(name) else target).copy_(part)
    return to


def _rebuild(
    weight: str, activation: str | None, parts: dict[str, tuple[Tensor, torch.dtype]], dtype: torch.dtype, parameter: bool
) -> QuantizedTensor:
    """What `QuantizedTensor.__reduce_ex__` took apart."""
    viewed = {name: part.view(own) if part.ndim else part for name, (part, own) in parts.items()}
    made = QuantizedTensor(Scheme(weight, activation), viewed, dtype)
    return torch.nn.Parameter(made, requires_grad=False) if parameter else made  # type: ignore[return-value]


torch.serialization.add_safe_globals([_rebuild])
