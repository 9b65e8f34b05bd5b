"""Kernels for GPUs: what a call depends on, but for the pointers, is decided once and kept.

A plan is made for tensors of certain types, shapes, strides and alignment: which compiled kernel with which numbers. Later calls
look it up, in C (plans.c) where that can be had.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from postlude.targets import plans

T = TypeVar("T")

#: Launches kernels on the current stream, given the pointers of all tensors and the tensors. False says that these pointers
#: can't be taken after all, and that nothing was done. Where it has a method `native`, that gives, for these pointers, what
#: plans.c can launch by itself, or None.
Launch = Callable[[Sequence[int], Sequence[Tensor]], object]

#: Plans of one kernel that are kept. Beyond that, shapes change so much that planning is part of every call.
_MOST_PLANS = 4096

#: Bytes to which kernels want pointers aligned; one that is aligned less is part of what a plan is made for.
ALIGNMENT = 16


def elsewhere(function: Callable[[], T]) -> T:
    """Call a function in a thread of its own, and wait for it.

    Inductor records CUDA graphs with what the calling thread allocates in the graph's own pool, and refuses memory there that
    outlives the call. What another thread allocates is not meant.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


class PlannedKernel(ABC):
    """Callable with the operands and the results, tensors of one GPU. A subclass says how to plan."""

    def __init__(self) -> None:
        self._plans: dict[tuple[object, ...], Launch | None] = {}
        self._lock = threading.Lock()

    @abstractmethod
    def plan(self, tensors: Sequence[Tensor]) -> Launch | None:
        """What to launch for tensors like these, on the current device, or None if the kernels can't take them as they lie."""

    def settings(self) -> object:
        """What else a plan depends on, read anew for each call; None where that is nothing, and always will be."""
        return None

    def __call__(self, *tensors: Tensor) -> bool:
        """Launch; False, and nothing is done, if the kernels can't take these tensors."""
        pointers = [tensor.data_ptr() for tensor in tensors]
        launch = self._planned(pointers, tensors)
        return launch is not None and launch(pointers, tensors) is not False

    @cached_property
    def fast(self) -> Callable[..., bool]:
        """The same callable, but for most of what a call costs on the host."""
        extension = plans.extension() if self.settings() is None else None
        if extension is None:
            return self

        def planner(*tensors: Tensor) -> bool:
            pointers = [tensor.data_ptr() for tensor in tensors]
            launch = self._planned(pointers, tensors)
            if launch is None:
                return False
            if not any(pointer % ALIGNMENT for pointer in pointers):
                found.add(tensors, native(launch, pointers) or launch)
            return launch(pointers, tensors) is not False

        found = extension.Plans(planner)
        return found  # type: ignore[no-any-return]

    def _planned(self, pointers: Sequence[int], tensors: Sequence[Tensor]) -> Launch | None:
        low = 0
        for pointer in pointers:
            low |= pointer
        key = (
            tensors[0].get_device(),
            self.settings(),
            tuple([pointer & (ALIGNMENT - 1) for pointer in pointers]) if low & (ALIGNMENT - 1) else None,
            *[tensor.dtype for tensor in tensors],
            *[tensor.shape for tensor in tensors],
            *[tensor.stride() for tensor in tensors],
        )
        try:
            return self._plans[key]
        except KeyError:
            pass
        device = tensors[0].device
        if device.type == "cpu":
            launch = self.plan(tensors)
        else:
            with torch.get_device_module(device).device(device):
                launch = self.plan(tensors)
        with self._lock:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            return self._plans.setdefault(key, launch)


def native(launch: Launch, pointers: Sequence[int]) -> Any:
    """What plans.c can launch by itself instead, or None."""
    make = getattr(launch, "native", None)
    return make(pointers) if make is not None else None
