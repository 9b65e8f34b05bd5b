"""Memory of kernels that split k: the parts of each tile's sum, and counters that are zero between launches.

Only the parts are allocated by the calling thread, for one call; counters, which stay, are allocated by another (see
`planned.elsewhere`).
"""

import threading
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from postlude.targets.planned import elsewhere

#: Counters that are allocated at once: 4 MB.
SLAB = 1 << 20

#: Fewest counters that a stream is given, so that it seldom needs more.
_OF_STREAM = 1 << 12


@dataclass(frozen=True)
class Workspace:
    """What a launch needs: elements of `dtype` for the parts, and one counter for each tile."""

    device: torch.device
    dtype: torch.dtype
    parts: int
    tiles: int

    @property
    def types(self) -> tuple[torch.dtype, torch.dtype]:
        """Types of the parts and of the counters, which is all that Triton asks for to compile a kernel."""
        return self.dtype, torch.int32

    @property
    def bytes(self) -> int:
        """Bytes of the parts."""
        return self.parts * self.dtype.itemsize

    def tensors(self, stream: int) -> tuple[Tensor, Tensor]:
        """Memory for one launch on the current stream, of which `stream` is the handle."""
        return torch.empty(self.parts, dtype=self.dtype, device=self.device), self.counters.take(self.tiles, stream)

    @cached_property
    def counters(self) -> "Counters":
        """The counters of the device."""
        return counters(self.device)


class Counters:
    """Counters of one device.

    A stream runs one kernel at a time, so a stream's kernels share counters. A kernel in a CUDA graph has counters of its own:
    several graphs may run at once. Nothing tells when a graph is gone, so what its kernels were given is never given again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.Lock()
        self.of_stream: dict[int, Tensor] = {}
        self.slabs: list[Tensor] = []
        self.rest = torch.empty(0, dtype=torch.int32)

    def take(self, count: int, stream: int) -> Tensor:
        """This many counters, all zero, for a launch on the current stream, of which `stream` is the handle."""
        if self.device.type == "cpu":
            return torch.zeros(count, dtype=torch.int32)
        if torch.cuda.is_current_stream_capturing():
            with self.lock:
                if len(self.rest) >= count:
                    return self._cut(count)
            # None can be allocated elsewhere before the capture has ended. These zeros become part of the graph.
            return torch.zeros(count, dtype=torch.int32, device=self.device)
        found = self.of_stream.get(stream)
        if found is None or len(found) < count or len(self.rest) < SLAB // 2:
            with self.lock:
                if len(self.rest) < SLAB // 2:  # what is left now is for graphs
                    self.rest = allocate_elsewhere(max(SLAB, 2 * count), self.device)
                    self.slabs.append(self.rest)
                if found is None or len(found) < count:
                    found = self.of_stream[stream] = self._cut(max(count, _OF_STREAM))
        return found

    def _cut(self, count: int) -> Tensor:
        """The next counters of the slab. They begin at a multiple of 16 bytes."""
        cut, self.rest = self.rest[:count], self.rest[count + -count % 4 :]
        return cut


def allocate_elsewhere(count: int, device: torch.device) -> Tensor:
    """Zeros that kernels of every stream may use at once, allocated by a thread of their own."""

    def allocate() -> Tensor:
        zeros = torch.zeros(count, dtype=torch.int32, device=device)
        torch.accelerator.current_stream(device).synchronize()
        return zeros

    return elsewhere(allocate)


@lru_cache(maxsize=64)
def counters(device: torch.device) -> Counters:
    """The counters of a device."""
    return Counters(device)
