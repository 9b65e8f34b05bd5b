"""Which kernel a call on a GPU goes to: decided anew for each call, by its rows, so that one graph serves every batch size."""

import warnings
from collections.abc import Sequence
from math import prod

from torch import Tensor

from postlude.errors import KernelBuildError
from postlude.ir import Region
from postlude.targets.base import Kernel, target

#: Up to this many rows the weights' way through memory takes longer than the arithmetic: Triton's skinny kernels.
FEW_ROWS = 64

#: Targets in the order in which they are tried, for few rows and for many.
FEW = ("triton", "cute", "blas")
MANY = ("blas", "cute", "triton")


class ByRows:
    """A Region's kernels on a GPU, each made when the first call needs it.

    A kernel that can't take a call's strides or alignment returns False, and the next one is asked.
    """

    def __init__(self, region: Region, names: Sequence[str]) -> None:
        self.region = region
        self.few = [name for name in FEW if name in names]
        self.many = [name for name in MANY if name in names]
        self.left = region.operand_index[region.contractions[0].left]
        rows_last = region.operands[self.left].axes[-1] == "m"
        #: The dimensions of the left operand that are rows of one product.
        self.rows = slice(-1, None) if rows_last else slice(-2, -1) if region.batched else slice(None, -1)
        self.kernels: dict[str, Kernel | None] = {}

    def __call__(self, *tensors: Tensor) -> None:
        """Run the first kernel that takes these tensors."""
        rows = prod(tensors[self.left].shape[self.rows])
        for name in self.few if rows <= FEW_ROWS else self.many:
            kernel = self.kernel(name)
            if kernel is not None and kernel(*tensors) is not False:
                return
        self.kernel("aten")(*tensors)  # type: ignore[misc]

    def kernel(self, name: str) -> Kernel | None:
        """A target's kernel; None where it could not be built, of which a warning tells once."""
        if name not in self.kernels:
            try:
                self.kernels[name] = _load(name, self.region)
            except KernelBuildError as error:
                warnings.warn(f"{error} Another target takes its place.", stacklevel=2)
                self.kernels[name] = None
        return self.kernels[name]


def _load(name: str, region: Region) -> Kernel:
    if name == "aten":
        from postlude.runtime import interpreter

        return interpreter(region)
    return target(name).load(region)
