"""Times calls: by the clock on a CPU; on a GPU as a CUDA graph between two events, so that the host does not count.

One call for each set of inputs, in turn, is one cycle. Where the sets together are larger than the last cache, nothing that a
call reads is in it: the weights and activations of a real model are not either, by the time it comes to the same layer again.
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

#: All sets together are so many times the last cache.
_COLD = 2

#: Most sets, least sets, and most bytes of all. Where these bind, a large shared cache may hold a part of the inputs.
_MOST_SETS, _LEAST_SETS, _MOST_BYTES = 64, 3, 1 << 29


def cycle(function: Callable[..., Any], sets: Sequence[Sequence[Any]]) -> Callable[[], float]:
    """A function that calls `function` with each set of arguments in turn, and returns the seconds of one call, on average."""
    on_gpu = any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for values in sets for value in values)
    return (_graph if on_gpu else _calls)(function, sets)


def cold_sets(device: torch.device, size: int) -> int:
    """How many sets of inputs of `size` bytes take turns, so that the last cache does not hold them."""
    wanted = -(-_COLD * last_cache(device) // max(size, 1))
    return max(_LEAST_SETS, min(wanted, _MOST_SETS, _MOST_BYTES // max(size, 1)))


def last_cache(device: torch.device) -> int:
    """Bytes of the last cache: a GPU's L2, the largest that a core sees."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return _cpu_cache()


def _cpu_cache(folder: str = "/sys/devices/system/cpu/cpu0/cache") -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = []
    for path in Path(folder).glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text or 0))
    if not sizes and hasattr(os, "sysconf") and "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names:
        sizes.append(os.sysconf("SC_LEVEL3_CACHE_SIZE"))
    return max(sizes, default=0) or 32 << 20


def _calls(function: Callable[..., Any], sets: Sequence[Sequence[Any]]) -> Callable[[], float]:
    function(*sets[0])  # compiles what it needs

    def timed() -> float:
        begin = time.perf_counter()
        for values in sets:
            function(*values)
        return (time.perf_counter() - begin) / len(sets)

    return timed


def _graph(function: Callable[..., Any], sets: Sequence[Sequence[Any]]) -> Callable[[], float]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for values in sets:
            function(*values)  # compiles what it needs
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for values in sets:
            function(*values)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def timed() -> float:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3 / len(sets)

    return timed
