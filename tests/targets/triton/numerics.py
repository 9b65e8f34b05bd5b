"""Runs a Region's kernels on the GPU, or in Triton's interpreter where there is none."""

from collections.abc import Sequence

import torch
from torch import Tensor

from postlude.ir import Region
from postlude.targets import triton
from postlude.targets.triton.configs import Config
from tests.targets.cpp import numerics
from tests.targets.cpp.numerics import empty_results

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run(region: Region, operands: Sequence[Tensor], config: Config | None = None) -> list[Tensor]:
    """The kernel's results, on the CPU."""
    results = empty_results(region, operands)
    there = [moved(result) for result in results]
    triton.load(region, config)(*map(moved, operands), *there)
    return [result.cpu() for result in there]


def check(region: Region, operands: Sequence[Tensor], config: Config | None = None) -> None:
    """Assert that the results are as near to the oracle as float32 arithmetic can be expected to come."""
    numerics.check(region, operands, lambda region, operands: run(region, operands, config))


def moved(tensor: Tensor) -> Tensor:
    """The tensor on the device, as it lies: same strides, same offset within its memory."""
    if DEVICE == "cpu":
        return tensor
    storage = tensor.untyped_storage().to(device=DEVICE)
    return torch.empty(0, dtype=tensor.dtype, device=DEVICE).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
