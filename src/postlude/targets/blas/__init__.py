"""Target `blas`: products without an epilogue, by PyTorch's own library call into the results' memory.

For many rows cuBLAS is as fast as a plain product gets. A Region that serves few rows with a kernel of its own comes here
when a call has many.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NoReturn

import torch
from torch import Tensor

from postlude.ir import Contract, Region
from postlude.targets.planned import Launch, PlannedKernel


def unavailable() -> str | None:
    """Never: PyTorch brings it."""
    return None


def unsupported(region: Region) -> str | None:
    """Only contractions whose results are stored as they are, in the operands' type."""
    if region.batched:
        return "a batch"
    if region.coded:
        return "weights that are codes"
    if any(not isinstance(statement, Contract) for statement in region.body):
        return "an epilogue"
    if any(y.order or y.dtype != region.operands[0].dtype for y in region.yields):
        return "a result of another type or order"
    return None


def source(region: Region) -> str:
    """The calls, as Python."""
    return "\n".join(f"torch.mm({c.left[1:]}, {c.right[1:]}, out={c.name[1:]})" for c in region.contractions)


def fingerprint(region: Region) -> str:
    """What is called; how fast that is depends on PyTorch alone."""
    return source(region)


def worth_measuring(region: Region, tensors: Sequence[Tensor]) -> tuple[()]:
    """None: the library chooses."""
    return ()


def configuration(fields: Mapping[str, object]) -> NoReturn:
    """There are none."""
    raise ValueError("target blas has no configurations")


def load(region: Region) -> PlannedKernel:
    """One `torch.mm` for each result."""
    contractions = {c.name: c for c in region.contractions}
    calls = []
    for index, result in enumerate(region.yields):
        left, right = (region.operand_index[name] for name in contractions[result.value].inputs)
        rows_last = region.operands[left].axes[-1] == "m"
        columns_first = region.operands[right].axes[0] == result.axes[-1]
        calls.append((left, rows_last, right, columns_first, len(region.operands) + index))

    return _Products(calls)


class _Products(PlannedKernel):
    """Calls of the library: (left, its rows are last, right, its columns are first, result), tensors by their position."""

    def __init__(self, calls: list[tuple[int, bool, int, bool, int]]) -> None:
        super().__init__()
        self.calls = calls

    def plan(self, tensors: Sequence[Tensor]) -> Launch:
        """The library takes every tensor."""
        return self.launch

    def launch(self, pointers: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """One product after the other."""
        for left, rows_last, right, columns_first, result in self.calls:
            x, w, out = tensors[left], tensors[right], tensors[result]
            torch.mm(x.t() if rows_last else _flat(x), w.t() if columns_first else w, out=_flat(out))


def _flat(tensor: Tensor) -> Tensor:
    """Rows of any number of dimensions as one; a result is dense, so that this is a view of it."""
    return tensor if tensor.ndim == 2 else tensor.reshape(prod(tensor.shape[:-1]), tensor.shape[-1])
