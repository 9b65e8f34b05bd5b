"""Runs a Region's compiled kernel, and judges its numbers against the oracle in float64 and against eager in float32."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from postlude.ir import Apply, Contract, Region, Round, Statement
from postlude.targets import cpp
from postlude.targets.aten import evaluate, result_shapes

#: Ops whose value jumps: a last-bit difference of an input may change the result altogether.
JUMPING = {"floor", "ceil", "trunc", "round", "fmod", "remainder", "sign", "lt", "le", "gt", "ge", "eq", "ne", "copysign"}


def empty_results(region: Region, operands: Sequence[Tensor]) -> list[Tensor]:
    """Result tensors as the op allocates them, full of a value that no kernel leaves behind by chance."""
    results = []
    for shape, result in zip(result_shapes(region, [tuple(t.shape) for t in operands]), region.yields, strict=True):
        order = result.order or tuple(range(len(shape)))
        memory = torch.empty([shape[dimension] for dimension in order], dtype=result.dtype)
        memory.fill_(True if result.dtype == torch.bool else 12345.0)
        results.append(memory.permute([order.index(dimension) for dimension in range(len(shape))]))
    return results


def run(region: Region, operands: Sequence[Tensor]) -> list[Tensor]:
    """The compiled kernel's results."""
    results = empty_results(region, operands)
    cpp.load(region)(*operands, *results)
    return results


def check(region: Region, operands: Sequence[Tensor], run: Callable[[Region, Sequence[Tensor]], list[Tensor]] = run) -> None:
    """Assert that each result is as near to the float64 oracle as float32 arithmetic can be expected to come.

    The allowance of an element: a few roundings of the result's type, a few times what ATen's float32 misses, and what the
    oracle itself moves when the operands change in their last bits (so ill-conditioned programs are judged fairly), or when
    the tiles that meet bfloat16 in a second contraction are rounded to it, as some kernels do.
    """
    results = run(region, operands)
    if not any(result.numel() for result in results):
        return
    exact = evaluate(region, operands, arithmetic=torch.float64)
    eager = evaluate(region, operands)
    moved = [evaluate(region, _nudged(operands, seed), arithmetic=torch.float64) for seed in range(3)]
    halved = evaluate(_fed_in_bfloat16(region), operands, arithmetic=torch.float64)
    jumps = any(isinstance(s, Round) or (isinstance(s, Apply) and s.op in JUMPING) for s in region.body)
    for index, (result, oracle, ours) in enumerate(zip(results, exact, eager, strict=True)):
        assert result.dtype == region.yields[index].dtype
        wrong = (
            result != ours
            if result.dtype == torch.bool
            else _wrong(result, oracle, ours, [o[index] for o in moved], halved[index])
        )
        allowed = 1 + result.numel() // 50 if jumps else 0
        count = int(wrong.sum())
        assert count <= allowed, (
            f"result {index}: {count} of {wrong.numel()} values are wrong, the first: got {result[wrong][:3].tolist()},"
            f" exact {oracle[wrong][:3].tolist()}, eager {ours[wrong][:3].tolist()}"
        )


def _fed_in_bfloat16(region: Region) -> Region:
    """The Region with each tile that is contracted with bfloat16 into bfloat16 rounded to it first."""
    body: list[Statement] = []
    types = {o.name: o.dtype for o in region.operands}
    if {y.dtype for y in region.yields} != {torch.bfloat16}:
        return region
    for s in region.body:
        if isinstance(s, Contract) and s.left not in types and types[s.right] == torch.bfloat16:
            body.append(Round(f"{s.name}_left", torch.bfloat16, s.left))
            body.append(replace(s, left=f"{s.name}_left"))
        else:
            body.append(s)
    return replace(region, body=tuple(body))


def _nudged(operands: Sequence[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    nudged = []
    for tensor in operands:
        if tensor.dtype == torch.bool:
            nudged.append(tensor)
            continue
        size = 2.0**-23 if tensor.dtype != torch.float64 else 2.0**-50
        factor = 1 + size * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        nudged.append(tensor.double() * factor)
    return nudged


def _wrong(result: Tensor, exact: Tensor, eager: Tensor, moved: Sequence[Tensor], halved: Tensor) -> Tensor:
    got, exact, eager = result.double(), exact.double(), eager.double()
    eps = torch.finfo(result.dtype).eps
    slack = 512 if result.dtype == torch.float64 else 32  # for double, eager is the oracle itself and tells nothing of rounding
    arithmetic = torch.finfo(torch.float64 if result.dtype == torch.float64 else torch.float32)
    conditioning = torch.stack([(other.double() - exact).abs() for other in moved]).amax(0)
    allowance = 2 * eps * exact.abs() + 8 * (eager - exact).abs() + 64 * conditioning + slack * arithmetic.eps * exact.abs()
    if halved.dim() and halved.numel():
        by_rounding = (halved.double() - exact).abs().nan_to_num(nan=0.0, posinf=0.0)
        allowance += 4 * by_rounding.amax(-1, keepdim=True)  # which way each number is rounded is chance
    allowance = allowance.nan_to_num(nan=0.0, posinf=torch.inf) + 64 * arithmetic.tiny + torch.finfo(result.dtype).smallest_normal
    near = (got - exact).abs() <= allowance
    # Not finite: as the oracle or as eager has it (float32 overflows earlier than float64).
    same = (got == exact) | (got == eager) | (got.isnan() & (exact.isnan() | eager.isnan()))
    # What overflows in the one and not in the other is beyond judging.
    overflown = ~eager.isfinite() & ~got.isfinite()
    return ~(near | same | overflown)
