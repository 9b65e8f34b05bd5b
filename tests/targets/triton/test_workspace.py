"""Counters of kernels that split k: whose they are, and that the calling thread allocates none."""

import threading
from collections.abc import Callable

import pytest
import torch

from postlude.targets.triton import workspace
from postlude.targets.triton.workspace import SLAB, Counters

Take = Callable[[int], torch.Tensor]


class Gpu:
    """A GPU as far as counters see it: whether the current stream is being captured. Memory lies on the CPU."""

    def __init__(self) -> None:
        self.stream = 7
        self.capturing = False
        self.allocations: list[tuple[int, int]] = []

    def zeros(self, count: int, **options: object) -> torch.Tensor:
        self.allocations.append((count, threading.get_ident()))
        return torch.full((count,), 0, dtype=torch.int32)

    def synchronize(self) -> None:
        """Nothing is under way."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.capturing)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: gpu)
    monkeypatch.setattr(workspace.torch, "zeros", gpu.zeros)
    return gpu


@pytest.fixture
def take(gpu: Gpu) -> Take:
    counters = Counters(torch.device("cuda", 0))
    return lambda count: counters.take(count, gpu.stream)


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def test_a_stream_keeps_its_counters_and_shares_them_with_none(gpu: Gpu, take: Take) -> None:
    first = take(100)
    assert take(60).data_ptr() == first.data_ptr()
    gpu.stream = 8
    other = take(60)
    assert not overlap(first, other)
    gpu.stream = 7
    more = take(5001)
    assert len(more) >= 5001
    assert not overlap(more, other)
    gpu.stream = 9
    assert take(1).data_ptr() % 16 == first.data_ptr() % 16


def test_the_calling_thread_allocates_nothing(gpu: Gpu, take: Take) -> None:
    for stream in range(20):
        gpu.stream = stream
        take(10)
    assert [count for count, _ in gpu.allocations] == [SLAB]
    assert gpu.allocations[0][1] != threading.get_ident()


def test_each_launch_in_a_graph_has_counters_of_its_own(gpu: Gpu, take: Take) -> None:
    eager = take(100)
    gpu.capturing = True
    taken = [take(101) for _ in range(5)]
    assert not any(overlap(a, b) for i, a in enumerate(taken) for b in [eager, *taken[:i]])
    assert len(gpu.allocations) == 1


def test_a_capture_without_a_slab_gets_zeros_of_its_graph(gpu: Gpu, take: Take) -> None:
    gpu.capturing = True
    assert take(100).tolist() == [0] * 100
    assert gpu.allocations == [(100, threading.get_ident())]
    gpu.capturing = False
    take(100)
    assert [count for count, _ in gpu.allocations] == [100, SLAB]


def test_what_graphs_used_up_is_replaced_outside_of_them(gpu: Gpu, take: Take) -> None:
    eager = take(100)
    gpu.capturing = True
    in_graphs = [take(SLAB // 4) for _ in range(3)]
    gpu.capturing = False
    assert take(100).data_ptr() == eager.data_ptr()
    gpu.capturing = True
    own = take(SLAB // 2)
    assert not any(overlap(own, taken) for taken in in_graphs)
    assert [count for count, _ in gpu.allocations] == [SLAB, SLAB]


def test_more_tiles_than_a_slab_has(gpu: Gpu, take: Take) -> None:
    taken = take(SLAB + 1)
    assert len(taken) == SLAB + 1
    assert take(SLAB + 1).data_ptr() == taken.data_ptr()
    assert len(gpu.allocations) == 1
