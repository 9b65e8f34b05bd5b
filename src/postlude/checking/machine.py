"""What this machine can do at most, measured: the roofs of a roofline plot (Williams, Waterman, Patterson 2009)."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from postlude.select.clock import cycle

#: Side of the square matrices, and bytes of the copies, that are measured.
SIDE = {"cpu": 1024, "cuda": 8192}
MEMORY_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}
CACHE_BYTES = {"cpu": 1 << 20, "cuda": 16 << 20}


@dataclass(frozen=True)
class Roofs:
    """Peaks of one device for one element type.

    Attributes:
        flops: floating-point operations per second of torch's product of large square matrices, or of the fastest Region where
            that is more.
        memory: bytes per second, read and written, of a copy that no cache holds.
        cache: the same for a copy that stays in the last caches of the cores.
        how: what was measured, in words.
    """

    flops: float
    memory: float
    cache: float
    how: str


def roofs(device: torch.device, dtype: torch.dtype, seen: float = 0.0) -> Roofs:
    """Measure, about two seconds. `seen` is the highest rate of operations that was measured otherwise."""
    kind = device.type if device.type in SIDE else "cpu"
    side = SIDE[kind]
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    product = _fastest(torch.mm, left, right, out)
    rates = {}
    for name, size in (("memory", MEMORY_BYTES[kind]), ("cache", CACHE_BYTES[kind])):
        source = torch.zeros(size // 8, dtype=torch.int32, device=device)
        copies = 1 if name == "memory" else 64
        rates[name] = copies * 2 * source.nbytes / _fastest_copy(torch.empty_like(source), source, copies)
    how = f"{side} x {side} x {side} by torch.mm in {str(dtype).removeprefix('torch.')}; copies of {MEMORY_BYTES[kind] >> 20} and"
    return Roofs(
        max(seen, 2 * side**3 / product),
        rates["memory"],
        max(rates.values()),  # no cache is slower than memory: something else ran meanwhile
        f"{how} {CACHE_BYTES[kind] >> 20} MiB, read and written",
    )


def _fastest(function: Callable[..., object], left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> float:
    return _best(lambda left, right: function(left, right, out=out), (left, right))


def _fastest_copy(into: torch.Tensor, source: torch.Tensor, copies: int) -> float:
    def copy(into: torch.Tensor, source: torch.Tensor) -> None:
        for _ in range(copies):
            into.copy_(source)

    return _best(copy, (into, source))


def _best(function: Callable[..., object], values: tuple[torch.Tensor, ...]) -> float:
    with torch.no_grad():
        timed = cycle(function, [values])
        timed()
        end = time.perf_counter() + 0.5
        samples = [timed() for _ in range(3)]
        while time.perf_counter() < end:
            samples.append(timed())
    return min(samples)
