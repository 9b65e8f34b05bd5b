"""Which kernel a call on a GPU goes to: decided for each shape, by its rows, so that one graph serves every batch size."""

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from postlude.capture.sizes import hint
from postlude.errors import KernelBuildError
from postlude.ir import Apply, Reduce, Region
from postlude.select.entry import Entry
from postlude.select.knowledge import knowledge
from postlude.select.subject import Call, call_of, environment
from postlude.select.variants import Variant
from postlude.targets import aten
from postlude.targets.aten.interpreter import axis_sizes
from postlude.targets.base import target
from postlude.targets.planned import Launch, PlannedKernel, native

#: Up to this many rows the weights' way through memory takes longer than the arithmetic: Triton's skinny kernels.
FEW_ROWS = 64

#: The same for a product without an epilogue. On an H200 cuBLAS is as fast from 32 rows on (benchmarks/gpu_decode.py).
FEW_PLAIN_ROWS = 16

#: From this many rows on, products with large weights are faster by CuTe than by cuBLAS, without an epilogue too. On an H200 with
#: weights of 14336 x 4096: 0.95 to 0.97 of its time with 16384 rows, 0.96 to 1.00 with 4096 (gpu_training.py --kernels).
VERY_MANY_ROWS = 16384

#: Targets in the order in which they are asked, for few rows, for many, and for very many.
FEW = ("triton", "cute", "blas")
MANY = ("blas", "cute", "triton")
VERY_MANY = ("cute", "blas", "triton")


def few_rows(region: Region) -> int:
    """Up to how many rows a Region goes to the kernels for few."""
    return FEW_ROWS if has_epilogue(region) else FEW_PLAIN_ROWS


def has_epilogue(region: Region) -> bool:
    """Whether anything is computed from the products."""
    return any(isinstance(statement, Apply | Reduce) for statement in region.body)


def by_rows(region: Region, rows: int, names: Sequence[str]) -> list[str]:
    """The targets of these names in the order in which they are asked for so many rows."""
    order = FEW if rows <= few_rows(region) else MANY if rows < VERY_MANY_ROWS else VERY_MANY
    return [name for name in order if name in names]


class ByRows(PlannedKernel):
    """A Region's kernels on a GPU, each made when the first call needs it.

    A target that can't take a call's strides or alignment says so, and the next one is asked; at last the interpreter.
    """

    def __init__(self, region: Region, names: Sequence[str]) -> None:
        super().__init__()
        self.region = region
        self.names = names
        #: Whether float32 is multiplied, which plans of the kernels may do in several ways.
        self.float32 = any(region.operands[region.operand_index[c.right]].dtype == torch.float32 for c in region.contractions)
        self.kernels: dict[str, PlannedKernel | None] = {}
        #: Kernels that were measured to be fastest for some calls, by name, and where that is written.
        self.tuned: dict[str, tuple[Variant, Entry]] = {}
        #: What the database said of calls, whose rows come in buckets: each is asked for once, however many shapes are in it.
        self._told: dict[Call, str | None] = {}

    def settings(self) -> object:
        """What plans of any of the kernels depend on: how float32 is multiplied."""
        if not self.float32:
            return None
        return tuple([kernel.settings() for kernel in self.kernels.values() if kernel is not None])

    def plan(self, tensors: Sequence[Tensor]) -> Launch:
        """The plan of the first kernel that takes these tensors."""
        order = by_rows(self.region, _rows(self.region, tensors), self.names)
        if (best := self.known(tensors)) is not None:
            order = [best, *(name for name in order if name != best)]
        for position, name in enumerate(order):
            try:
                kernel = self.kernel(name)
                launch = kernel.plan(tensors) if kernel is not None else None
            except Exception as error:
                self.give_up(name, error)
                continue
            if launch is not None:
                return _OrOthers(self, name, launch, order[position + 1 :])
        return self.interpret

    def known(self, tensors: Sequence[Tensor]) -> str | None:
        """The name of the kernel that was measured to be fastest for tensors like these."""
        if knowledge().empty:
            return None
        device = tensors[0].device
        call = call_of(self.region, tensors[: len(self.region.operands)], device=device)
        if call not in self._told:
            found = knowledge().kernel(call, environment(device.type, self.region), self.names)
            self._told[call] = found[0].name if found is not None else None
            if found is not None:
                self.tuned[found[0].name] = found
        return self._told[call]

    def give_up(self, name: str, error: Exception) -> None:
        """Use a target no more, or one of its configurations: whatever its compiler raises, the user's model must run."""
        told = str(error) if isinstance(error, KernelBuildError) else f"Target {name} failed: {error!r}. Please report this."
        warnings.warn(f"{told} Another target takes its place.", stacklevel=3)
        self.kernels[name] = None
        if name in self.tuned:
            knowledge().mark_failed(self.tuned[name][1], name, told)

    def kernel(self, name: str) -> PlannedKernel | None:
        """A target's kernel, or a tuned one; None where it could not be built before, of which a warning has told."""
        if name not in self.kernels:
            plain = name in self.names  # what the target chooses for each call, tuned or not
            self.kernels[name] = _load(name, self.region) if plain else _load_tuned(self.tuned[name][0], self.region)
        return self.kernels[name]

    def interpret(self, pointers: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """A launch of ATen's calls."""
        count = len(self.region.operands)
        aten.run(self.region, tensors[:count], tensors[count:])


def _rows(region: Region, tensors: Sequence[Tensor]) -> int:
    """The rows of one product (a SymInt of fake tensors whose rows are not known)."""
    return axis_sizes(region, [tensor.shape for tensor in tensors[: len(region.operands)]])["m"]


def submit(region: Region, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Start compiling in the background what calls with tensors like these will need; operands and results, fake ones.

    Only CuTe's kernels are worth it: Triton's are compiled in a fraction of the time.
    """
    order = [name for name in MANY if name in names]
    rows = _rows(region, tensors)
    vary = not isinstance(rows, int)
    if order[:1] != ["cute"] or (not vary and rows <= few_rows(region)):
        return
    with unset_fake_temporarily():
        like = [
            torch.empty_strided([hint(s) for s in t.shape], [hint(s) for s in t.stride()], dtype=t.dtype, device="meta")
            for t in tensors
        ]
    try:
        target("cute").submit(region, like, tensors[0].device, rows_vary=vary)  # type: ignore[attr-defined]
    except Exception as error:  # the first call meets it again, with all that can be said about it
        logging.getLogger(__name__).debug("not compiled ahead: %s", error)


@dataclass(frozen=True)
class _OrOthers:
    """A launch may refuse (False) what only pointers show, or fail to compile what they need; then the others are asked."""

    kernels: ByRows
    name: str
    launch: Launch
    others: Sequence[str]

    def native(self, pointers: Sequence[int]) -> Any:
        """The launch's own."""
        try:
            return native(self.launch, pointers)
        except KernelBuildError:  # the call that follows meets it again
            return None

    def __call__(self, pointers: Sequence[int], tensors: Sequence[Tensor]) -> None:
        if self.kernels.kernel(self.name) is not None:
            try:
                if self.launch(pointers, tensors) is not False:
                    return
            except KernelBuildError as error:
                self.kernels.give_up(self.name, error)
        for name in self.others:
            try:
                kernel = self.kernels.kernel(name)
                if kernel is not None and kernel(*tensors):
                    return
            except KernelBuildError as error:
                self.kernels.give_up(name, error)
        self.kernels.interpret(pointers, tensors)


def _load(name: str, region: Region) -> PlannedKernel:
    kernel = target(name).load(region)
    assert isinstance(kernel, PlannedKernel)
    return kernel


def _load_tuned(variant: Variant, region: Region) -> PlannedKernel:
    kernel = variant.load(region)
    assert isinstance(kernel, PlannedKernel)
    return kernel
