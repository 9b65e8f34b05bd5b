"""Kernels for GPUs: what a call depends on, but for the pointers, is decided once and kept.

A plan is made for tensors of certain shapes, strides and alignment: which compiled kernel with which numbers. Later calls look
it up. Where shapes and strides never change, as at a call in a compiled graph without symbolic sizes, not even that is needed.
"""

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

#: Launches kernels on the current stream, given the pointers of all tensors and the tensors. False says that these pointers
#: can't be taken after all, and that nothing was done.
Launch = Callable[[Sequence[int], Sequence[Tensor]], object]

#: Plans of one kernel that are kept. Beyond that, shapes change so much that planning is part of every call.
_MOST_PLANS = 4096

#: Bytes to which kernels want pointers aligned; one that is aligned less is part of what a plan is made for.
ALIGNMENT = 16


class PlannedKernel:
    """Callable with the operands and the results, tensors of one GPU. A subclass says how to plan."""

    def __init__(self) -> None:
        self._plans: dict[tuple[object, ...], Launch | None] = {}
        self._lock = threading.Lock()

    def plan(self, tensors: Sequence[Tensor]) -> Launch | None:
        """What to launch for tensors like these, on the current device, or None if the kernels can't take them as they lie."""
        raise NotImplementedError

    def settings(self) -> object:
        """What else a plan depends on, read anew for each call."""
        return None

    def __call__(self, *tensors: Tensor) -> bool:
        """Launch; False, and nothing is done, if the kernels can't take these tensors."""
        pointers = [tensor.data_ptr() for tensor in tensors]
        launch = self._planned(pointers, tensors)
        return launch is not None and launch(pointers, tensors) is not False

    def fixed(self) -> Callable[..., bool]:
        """A callable like this kernel for tensors whose shapes, strides and device are always the same."""
        first: Launch | None = None
        aligned = ALIGNMENT - 1

        def call(*tensors: Tensor) -> bool:
            nonlocal first
            pointers = [tensor.data_ptr() for tensor in tensors]
            low = 0
            for pointer in pointers:
                low |= pointer
            if first is not None and not low & aligned:
                return first(pointers, tensors) is not False
            launch = self._planned(pointers, tensors)
            if not low & aligned:
                first = launch
            return launch is not None and launch(pointers, tensors) is not False

        return call

    def _planned(self, pointers: Sequence[int], tensors: Sequence[Tensor]) -> Launch | None:
        low = 0
        for pointer in pointers:
            low |= pointer
        key = (
            tensors[0].get_device(),
            self.settings(),
            tuple([pointer & (ALIGNMENT - 1) for pointer in pointers]) if low & (ALIGNMENT - 1) else None,
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
