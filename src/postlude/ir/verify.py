"""The verifier: whether a Region means something, with errors that say where it does not."""

import torch

from postlude.ir.ops import OPS
from postlude.ir.region import CODES, ROW_AXES, Apply, Contract, Extent, Operand, Reduce, Region, Round, Statement, Type

_ACCUMULATE = {torch.float32, torch.float64}


class RegionError(ValueError):
    """A Region is not well formed."""


def verify(region: Region) -> None:
    """Check names, axes, types and results of a Region.

    Raises:
        RegionError: the first fault found, with the statement's name and what was expected.
    """
    if len(set(region.axes)) != len(region.axes) or "m" not in region.axes:
        raise RegionError(f"a Region declares each axis once and has rows 'm', got {region.axes}")
    types: dict[str, Type] = {}
    for operand in region.operands:
        _check_operand(region, operand, types)
        types[operand.name] = Type(region._ordered(operand.axes), "bool" if operand.dtype == torch.bool else "float")
    operands = {o.name: o for o in region.operands}
    for statement in region.body:
        if statement.name in types:
            raise RegionError(f"%{statement.name} is defined twice")
        for name in statement.inputs:
            if name not in types:
                raise RegionError(f"%{statement.name} uses %{name}, which is not defined before it")
        _check_statement(region, statement, types, operands)
        types[statement.name] = region._type(statement, types)
    _check_contracted_operands_stay_there(region)
    _check_results(region, types)


def _check_operand(region: Region, operand: Operand, seen: dict[str, Type]) -> None:
    if operand.name in seen:
        raise RegionError(f"%{operand.name} is defined twice")
    unknown = [axis for axis in operand.axes if axis not in region.axes]
    if unknown or len(set(operand.axes)) != len(operand.axes):
        raise RegionError(f"operand %{operand.name} has axes {operand.axes}; the Region declares {region.axes}")
    if operand.blocks and (len(operand.blocks) != len(operand.axes) or min(operand.blocks) < 1):
        raise RegionError(f"operand %{operand.name}: blocks {operand.blocks} do not belong to axes {operand.axes}")
    if "b" in operand.axes and operand.axes[0] != "b":
        raise RegionError(f"operand %{operand.name}: the batch 'b' is the first axis, got {operand.axes}")


def _check_statement(region: Region, statement: Statement, types: dict[str, Type], operands: dict[str, Operand]) -> None:
    where = f"%{statement.name}"
    inputs = [types[name] for name in statement.inputs]
    if isinstance(statement, Contract):
        left, right = inputs[:2]
        if statement.right not in operands:
            raise RegionError(f"{where} contracts %{statement.right}, which is computed; the right side is an operand")
        if statement.accumulate not in _ACCUMULATE:
            raise RegionError(f"{where} accumulates in {statement.accumulate}; expected float32 or float64")
        if "bool" in (left.value, right.value):
            raise RegionError(f"{where} contracts truth values")
        shared = (set(left.axes) & set(right.axes)) - set(ROW_AXES)
        columns = set(right.axes) - set(left.axes) - set(ROW_AXES)
        rows_fit = left.has_rows and not right.has_rows
        batch_fits = all(("b" in side.axes) == region.batched for side in inputs)
        if len(shared) != 1 or len(columns) != 1 or not rows_fit or not batch_fits or len(left.axes) > 3:
            expected = "[b, m, k] and [b, k, n]" if region.batched else "[m, k] and [k, n]"
            raise RegionError(f"{where} contracts axes {left.axes} with {right.axes}; expected some order of {expected}")
        _check_scales(region, statement, operands)
    elif isinstance(statement, Reduce):
        over = {"m", inputs[0].column} & set(inputs[0].axes)
        if statement.axis not in over or inputs[0].value != "float":
            raise RegionError(f"{where} reduces over {statement.axis!r} a {inputs[0].value} with axes {inputs[0].axes}")
    elif isinstance(statement, Round):
        if inputs[0].value != "float" or not statement.dtype.is_floating_point:
            raise RegionError(f"{where} rounds a {inputs[0].value} to {statement.dtype}; both are floating point")
    elif isinstance(statement, Extent):
        if statement.axis not in region.axes:
            raise RegionError(f"{where} asks for the size of {statement.axis!r}; the Region declares {region.axes}")
    elif isinstance(statement, Apply):
        if statement.op not in OPS:
            raise RegionError(f"{where}: there is no op {statement.op!r}; see ir/ops.py")
        op = OPS[statement.op]
        given = tuple(type.value for type in inputs)
        if given != op.inputs:
            raise RegionError(f"{where}: {op.name} takes {op.inputs}, got {given}")
        columns = {type.column for type in inputs if type.column}
        if len(columns) > 1:
            raise RegionError(f"{where}: {op.name} joins different column axes {sorted(columns)}")
        for name, type in zip(statement.inputs, inputs, strict=True):
            if name in operands and "b" not in type.axes and type.has_rows and region.batched:
                raise RegionError(f"{where}: %{name} has rows without the batch; expand it over 'b'")


def _check_scales(region: Region, statement: Contract, operands: dict[str, Operand]) -> None:
    """Codes, their scale and their shift: operands over the same axes, in blocks along the contracted one."""
    where, right = f"%{statement.name}", operands[statement.right]
    if right.blocks:
        raise RegionError(f"{where} contracts %{right.name} in blocks")
    given = [operands.get(name) for name in (statement.scale, statement.shift) if name is not None]
    if given and right.dtype not in CODES:
        raise RegionError(f"{where} scales or shifts %{right.name}, whose {right.dtype} are numbers already")
    for operand in given:
        if operand is None or operand.axes != right.axes or not operand.blocks:
            raise RegionError(f"{where}: a scale or shift is an operand in blocks over {right.axes}, got {operand}")


def _check_contracted_operands_stay_there(region: Region) -> None:
    """An operand of a contraction has a contracted axis, so no elementwise op may read it."""
    contracted = {name for c in region.contractions for name in c.inputs} & set(region.operand_index)
    for statement in region.body:
        if not isinstance(statement, Contract):
            for name in set(statement.inputs) & contracted:
                raise RegionError(f"%{statement.name} reads %{name}, an operand of a contraction, elementwise")


def _check_results(region: Region, types: dict[str, Type]) -> None:
    if not region.contractions or not region.yields:
        raise RegionError("a Region has at least one contraction and one result")
    reached: set[str] = set()
    for statement in region.body:
        if isinstance(statement, Contract) or reached.intersection(statement.inputs):
            reached.add(statement.name)
    for result in region.yields:
        if result.value not in types or result.value in region.operand_index:
            raise RegionError(f"result %{result.value} is not computed by the Region")
        if result.value not in reached:
            raise RegionError(f"result %{result.value} does not depend on a contraction")
        type = types[result.value]
        if result.axes != type.axes:
            raise RegionError(f"result %{result.value} has axes {type.axes}, the yield says {result.axes}")
        if (result.dtype == torch.bool) != (type.value == "bool"):
            raise RegionError(f"result %{result.value} is a {type.value}, the yield says {result.dtype}")
        if sorted(result.order) != list(range(len(result.order))):
            raise RegionError(f"result %{result.value}: order {result.order} is not a permutation")
    right = {c.right for c in region.contractions}
    beside = {name for c in region.contractions for name in (c.scale, c.shift)}
    for operand in region.operands:
        if (operand.dtype in CODES and operand.name not in right | beside) or (operand.blocks and operand.name not in beside):
            raise RegionError(f"operand %{operand.name}: codes and blocks stand on the right of contractions only")
    used = {name for s in region.body for name in s.inputs}
    for operand in region.operands:
        if operand.name not in used:
            raise RegionError(f"operand %{operand.name} is not used")
