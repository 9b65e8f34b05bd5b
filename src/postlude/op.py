"""The op ``postlude::region``: one fused Region in a graph.

Its `program` argument is the Region's text, so a graph that holds it can be hashed, cached, saved and loaded in another
process with nothing beside it. There is one overload per number of results, each returning plain tensors, since a list of
tensors can't pass through Inductor's C++ wrapper on every supported torch. The op is functional, has no derivative
(capture runs after AOTAutograd) and accepts operands with any strides.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from postlude.ir import Region, parse, verify
from postlude.targets.aten.interpreter import result_shapes

#: Most results one Region may have. Llama's training forward needs 4.
MAX_RESULTS = 12

_LIBRARY = torch.library.Library("postlude", "FRAGMENT")


@lru_cache(maxsize=4096)
def region_of(program: str) -> Region:
    """The Region that a program text stands for, parsed and verified once."""
    region = parse(program)
    verify(region)
    return region


def allocate_results(region: Region, operands: Sequence[Tensor]) -> list[Tensor]:
    """Dense, uninitialised tensors for the results (fake ones for fake operands)."""
    shapes = result_shapes(region, [tuple(t.shape) for t in operands])
    return [
        operands[0].new_empty_strided(shape, result_strides(shape, result.order), dtype=result.dtype)
        for shape, result in zip(shapes, region.yields, strict=True)
    ]


def result_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor whose dimensions lie in memory in `order`, outermost first (empty: as they are)."""
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order or range(len(shape))):
        strides[dim] = step
        # As PyTorch does: a dimension of size 0 counts as 1.
        step = step * torch.sym_max(shape[dim], 1)
    return tuple(strides)


def _fake(program: str, operands: Sequence[Tensor]) -> Any:
    results = allocate_results(region_of(program), operands)
    return results[0] if len(results) == 1 else tuple(results)


def _execute(program: str, operands: Sequence[Tensor]) -> Any:
    from postlude.runtime import kernel

    region = region_of(program)
    results = allocate_results(region, operands)
    device = operands[0].device
    with nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device):
        kernel(device.type, program)(*operands, *results)
    return results[0] if len(results) == 1 else tuple(results)


def overload(results: int) -> torch._ops.OpOverload:
    """The overload of ``postlude::region`` with this many results."""
    op: torch._ops.OpOverload = getattr(torch.ops.postlude.region, f"results{results}")
    return op


def _define() -> None:
    for count in range(1, MAX_RESULTS + 1):
        returns = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
        name = f"region.results{count}"
        _LIBRARY.define(f"{name}(str program, Tensor[] operands) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, _execute, "CompositeExplicitAutograd")
        torch.library.register_fake(f"postlude::{name}", _fake, lib=_LIBRARY)


_define()
