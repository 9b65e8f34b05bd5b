"""Times single calls: by the clock on a CPU; on a GPU as a CUDA graph between two events, so that the host does not count."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch


def timers(function: Callable[..., Any], sets: Sequence[Sequence[Any]]) -> list[Callable[[], float]]:
    """For each set of arguments a function that calls `function` with it and returns the seconds that took."""
    on_gpu = any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for values in sets for value in values)
    timed = _graph if on_gpu else partial(partial, _call)
    return [timed(function, values) for values in sets]


def _call(function: Callable[..., Any], values: Sequence[Any]) -> float:
    begin = time.perf_counter()
    function(*values)
    return time.perf_counter() - begin


def _graph(function: Callable[..., Any], values: Sequence[Any]) -> Callable[[], float]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function(*values)  # compiles what it needs
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(*values)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def timed() -> float:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3

    return timed
