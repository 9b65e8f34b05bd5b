"""From a program to something that runs: the one place that knows which target serves which device."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from postlude.op import region_of
from postlude.targets.aten import run


@lru_cache(maxsize=4096)
def kernel(device: str, program: str) -> Callable[..., Any]:
    """A callable (*operands, *results) -> None for a program on a device type."""
    region = region_of(program)
    count = len(region.operands)

    def interpret(*tensors: Tensor) -> None:
        operands: Sequence[Tensor] = tensors[:count]
        run(region, operands, tensors[count:])

    return interpret


def reset() -> None:
    """Forget all kernels that were looked up."""
    kernel.cache_clear()
