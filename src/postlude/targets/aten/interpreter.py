"""The interpreter: one ATen call per statement, on any device, in float32, float64 or any wider type asked for.

Every value is kept as a tensor that broadcasts in row space: tiles ``[rows, n]``, columns ``[rows, 1]``, rows ``[1, n]``
and scalars ``[1, 1]``, where `rows` counts the batch too (values of a batch without rows: ``[batch, n]``). Plain to read before
fast.
"""

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from postlude.ir import OPS, Apply, Const, Contract, Extent, Operand, Reduce, Region, Round, Statement
from postlude.ir.ops import REDUCTIONS
from postlude.ir.region import INT4, PAIRS, ROW_AXES, UINT4
from postlude.quant.elements import DECODE_SCALE, ELEMENTS, decode
from postlude.quant.layout import unpack_pairs

#: Element types of the packed storage types.
_ELEMENTS = {torch.float4_e2m1fn_x2: ELEMENTS["e2m1"], INT4: ELEMENTS["int4"], UINT4: ELEMENTS["uint4"]}


def run(region: Region, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Evaluate a Region and copy each result into the given dense tensor."""
    for result, value in zip(results, evaluate(region, operands), strict=True):
        result.copy_(value)


def evaluate(
    region: Region, operands: Sequence[Tensor], *, arithmetic: torch.dtype | None = None, rounded: bool = True
) -> list[Tensor]:
    """Evaluate a Region.

    Args:
        region: the program.
        operands: one tensor per operand of the Region, any strides.
        arithmetic: type of the arithmetic; by default what the Region's contractions accumulate in. The tests' oracle
            passes float64.
        rounded: whether `round_to` and the results' types are honoured. The oracle passes False: its results stay in
            `arithmetic`.

    Returns:
        One dense tensor per `yield`.
    """
    arithmetic = arithmetic or region.contractions[0].accumulate
    state = _State(region, operands, arithmetic, rounded)
    for statement in region.body:
        state.values[statement.name] = _RULES[type(statement)](state, statement)
    shapes = result_shapes(region, [tuple(t.shape) for t in operands])
    results = []
    for shape, result in zip(shapes, region.yields, strict=True):
        value = state.values[result.value]
        value = value.expand(*state.extended(region.types[result.value].axes))
        dtype = result.dtype if rounded or result.dtype == torch.bool else arithmetic
        results.append(value.to(dtype).reshape(shape).contiguous())
    return results


def result_shapes(region: Region, shapes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Shape of each result from the operands' shapes (ints or SymInts)."""
    sizes = axis_sizes(region, shapes)
    batch = batch_shape(region, shapes)
    return [
        tuple(size for axis in result.axes for size in (batch if axis == "b" else (sizes[axis],))) for result in region.yields
    ]


def batch_shape(region: Region, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Sizes of the tensor dimensions that `b` stands for; empty without a batch."""
    if not region.batched:
        return ()
    first = region.contractions[0].right
    return tuple(shapes[region.operand_index[first]][:-2])


def axis_sizes(region: Region, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """Size of every axis but the batch."""
    sizes: dict[str, int] = {}
    contracted = {name for c in region.contractions for name in c.inputs}
    # Operands of contractions first: an epilogue tile may have more leading dimensions than its axes name.
    for operand, shape in sorted(zip(region.operands, shapes, strict=True), key=lambda pair: pair[0].name not in contracted):
        if operand.blocks:
            continue
        if operand.dtype in PAIRS:
            shape = (*shape[:-1], 2 * shape[-1])
        if operand.axes[:1] == ("m",):
            trailing = len(operand.axes) - 1
            sizes.setdefault("m", prod(shape[: len(shape) - trailing]))
            names, dims = operand.axes[1:], shape[len(shape) - trailing :] if trailing else ()
        elif operand.axes[:1] == ("b",) and operand.name not in contracted:
            continue  # its `m` may be spread over the leading dimensions; the contractions know all sizes
        else:
            names, dims = operand.axes, shape[len(shape) - len(operand.axes) :] if operand.axes else ()
        for axis, size in zip(names, dims, strict=True):
            if axis != "b":
                sizes.setdefault(axis, size)
    return sizes


class _State:
    """Values by name, and the sizes that statements need."""

    def __init__(self, region: Region, operands: Sequence[Tensor], arithmetic: torch.dtype, rounded: bool) -> None:
        self.region = region
        self.arithmetic = arithmetic
        self.rounded = rounded
        self.tensors = dict(zip((o.name for o in region.operands), operands, strict=True))
        self.device = operands[0].device
        shapes = [tuple(t.shape) for t in operands]
        self.sizes = axis_sizes(region, shapes)
        self.batch = prod(batch_shape(region, shapes))
        self.values: dict[str, Tensor] = {}
        contracted = {name for c in region.contractions for name in c.inputs}
        for operand in region.operands:
            if operand.name not in contracted:
                self.values[operand.name] = self._in_row_space(operand)

    def extended(self, axes: Sequence[str]) -> tuple[int, int]:
        """(rows, columns) of a value with these axes."""
        column = [self.sizes[axis] for axis in axes if axis not in ROW_AXES]
        rows = (self.batch if "b" in axes else 1) * (self.sizes["m"] if "m" in axes else 1)
        return rows, column[0] if column else 1

    def given_to(self, statement: Statement, name: str) -> Tensor:
        """A value as an elementwise statement reads it: one value per product of a batch stands in each of its rows."""
        value, axes = self.values[name], self.region.types[name].axes
        if "b" in axes and "m" not in axes and "m" in self.region.types[statement.name].axes:
            return value.repeat_interleave(self.sizes["m"], 0)
        return value

    def computed(self, tensor: Tensor) -> Tensor:
        """The tensor in the type of the arithmetic; truth values stay what they are."""
        return tensor if tensor.dtype == torch.bool else tensor.to(self.arithmetic)

    def _in_row_space(self, operand: Operand) -> Tensor:
        """An operand of the epilogue as [rows or 1, columns or 1]."""
        tensor, axes, rows = self.computed(self.tensors[operand.name]), operand.axes, self.region.row_axes
        if axes[: len(rows)] == rows or not axes:
            return tensor.reshape(self.extended(axes))  # rows first: they may be any number of dimensions
        column = next((axis for axis in axes if axis not in ROW_AXES), "")
        tensor = tensor.reshape([self.batch if axis == "b" else self.sizes[axis] for axis in axes])
        full = ("b", "m", column)
        tensor = tensor.permute([axes.index(axis) for axis in full if axis in axes])
        for position, axis in enumerate(full):
            if axis not in axes:
                tensor = tensor.unsqueeze(position)
        if "m" in axes:
            tensor = tensor.expand(self.batch, self.sizes["m"], tensor.shape[-1])
        return tensor.reshape(tensor.shape[0] * tensor.shape[1], tensor.shape[2])


def _contract(state: _State, statement: Contract) -> Tensor:
    contracted, column = state.region.contraction_axes(statement)
    rows = ("b", "m") if state.region.batched else ("m",)
    batch = ("b",) if state.region.batched else ()
    left = _arranged(state, statement.left, (*rows, contracted))
    right = _arranged(state, statement.right, (*batch, contracted, column))
    if statement.shift is not None:
        right = right - _spread(state, statement.shift, (*batch, contracted, column))
    if statement.scale is not None:
        right = right * _spread(state, statement.scale, (*batch, contracted, column))
    return torch.matmul(left, right).reshape(state.extended((*rows, column)))


def _arranged(state: _State, name: str, axes: tuple[str, ...]) -> Tensor:
    """A contraction's operand with exactly these axes, the batch as one dimension."""
    sizes = [state.batch if axis == "b" else state.sizes[axis] for axis in axes]
    if name not in state.tensors:
        return state.values[name].expand(state.extended(axes)).reshape(sizes)
    given = state.region.operands[state.region.operand_index[name]].axes
    tensor = _numbers(state, name)
    tensor = tensor.reshape([state.batch if axis == "b" else state.sizes[axis] for axis in given])
    return tensor.permute([given.index(axis) for axis in axes])


def _numbers(state: _State, name: str) -> Tensor:
    """An operand's numbers in the type of the arithmetic."""
    dtype, tensor = state.region.operands[state.region.operand_index[name]].dtype, state.tensors[name]
    if dtype in PAIRS:
        return decode(unpack_pairs(tensor), _ELEMENTS[dtype]).to(state.arithmetic)
    if dtype in DECODE_SCALE:
        return DECODE_SCALE[dtype](tensor).to(state.arithmetic)
    return state.computed(tensor)


def _spread(state: _State, name: str, axes: tuple[str, ...]) -> Tensor:
    """Scales in blocks, one for each number, with exactly these axes."""
    operand = state.region.operands[state.region.operand_index[name]]
    tensor = _numbers(state, name)
    for dim, (axis, block) in enumerate(zip(operand.axes, operand.blocks, strict=True)):
        if block != 1:
            tensor = tensor.repeat_interleave(block, dim).narrow(dim, 0, state.sizes[axis])
    return tensor.permute([operand.axes.index(axis) for axis in axes])


def _apply(state: _State, statement: Apply) -> Tensor:
    function: Callable[..., Tensor] = getattr(torch, OPS[statement.op].torch)
    return function(*(state.given_to(statement, name) for name in statement.inputs))


def _reduce(state: _State, statement: Reduce) -> Tensor:
    axes = state.region.types[statement.input].axes
    value = state.values[statement.input].expand(state.extended(axes))
    reduction: Callable[..., Tensor] = getattr(torch, REDUCTIONS[statement.kind])
    if statement.axis == "m":
        return reduction(value.unflatten(0, (-1 if state.sizes["m"] else state.batch, state.sizes["m"])), dim=1)
    return reduction(value, dim=-1, keepdim=True)


def _round(state: _State, statement: Round) -> Tensor:
    value = state.values[statement.input]
    return value.to(statement.dtype).to(value.dtype) if state.rounded else value


def _const(state: _State, statement: Const) -> Tensor:
    return torch.full((1, 1), statement.value, dtype=state.arithmetic, device=state.device)


def _extent(state: _State, statement: Extent) -> Tensor:
    return torch.full((1, 1), float(state.sizes[statement.axis]), dtype=state.arithmetic, device=state.device)


_RULES: dict[type[Statement], Callable[..., Tensor]] = {
    Contract: _contract,
    Apply: _apply,
    Reduce: _reduce,
    Round: _round,
    Const: _const,
    Extent: _extent,
}
