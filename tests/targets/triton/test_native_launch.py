"""Triton's kernels launched from C: what the CUDA driver is told, and when Python is asked instead."""

import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from postlude.targets import plans
from postlude.targets.triton.cuda_driver import DriverLaunch, load_driver
from postlude.targets.triton.launcher import _Direct
from postlude.targets.triton.workspace import Workspace
from tests.targets.test_plans import STREAM, Machine, machine  # noqa: F401
from tests.targets.triton import fake_cuda

pytestmark = pytest.mark.skipif(fake_cuda.COMPILER is None, reason="no C compiler")

COUNTERS = 0x7000


class Gpu:
    """A kernel of two tensors and three integers on a GPU without silicon, and calls that Python was asked for."""

    def __init__(self, library: Any, workspace: int) -> None:
        self.record = fake_cuda.record(library)
        pointers = 4 if workspace else 2
        self.made = fake_cuda.kernel((8,) * pointers + (4, 8, 4, 8))
        metadata = SimpleNamespace(num_warps=8, shared=3000, launch_pdl=True)
        compiled = SimpleNamespace(function=ctypes.addressof(self.made), metadata=metadata)
        arguments = [*[0] * pointers, 7, -(2**40), -3, 0, 0]
        self.kernel = DriverLaunch(library, compiled, 55, arguments, pointers).native(0, workspace)
        self.asked: list[tuple[Tensor, ...]] = []
        self.call = plans.extension().Plans(lambda *tensors: self.asked.append(tensors) or True)  # type: ignore[union-attr, func-returns-value]
        self.tensors = (torch.zeros(4, 4), torch.zeros(4))
        self.call.add(self.tensors, self.kernel)

    @property
    def pointers(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self.tensors]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_driver.__wrapped__(fake_cuda.build(tmp_path_factory.mktemp("cuda")))


@pytest.fixture
def gpu(library: Any, machine: Machine) -> Iterator[Callable[[int], Gpu]]:  # noqa: F811
    yield lambda workspace: Gpu(library, workspace)
    record = fake_cuda.record(library)
    ctypes.memset(ctypes.byref(record), 0, ctypes.sizeof(record))


def test_the_driver_gets_all(gpu: Callable[[int], Gpu]) -> None:
    made = gpu(0)
    for call in range(3):
        assert made.call(*made.tensors) is True
        record = made.record
        assert (list(record.grid), list(record.block), record.shared) == ([55, 1, 1], [256, 1, 1], 3000)
        assert (record.stream, record.attributes, record.attribute, record.value) == (STREAM, 1, 6, 1)
        assert list(record.arguments)[:6] == [*made.pointers, 7, -(2**40) % 2**64, -3 % 2**32, 0]
        assert record.launches == call + 1
    assert not made.asked


def test_memory_and_counters(gpu: Callable[[int], Gpu], machine: Machine) -> None:  # noqa: F811
    """Memory is of the call; counters are those that Python said a stream has."""
    made = gpu(1000)
    assert made.call(*made.tensors)
    assert (len(made.asked), made.record.launches) == (1, 0)
    made.kernel.remember(STREAM + 1, 1)
    assert made.call(*made.tensors)
    assert (len(made.asked), made.record.launches) == (2, 0)
    made.kernel.remember(STREAM, 1)
    made.kernel.remember(STREAM, COUNTERS)
    assert made.call(*made.tensors)
    assert (len(made.asked), made.record.launches) == (2, 1)
    assert list(made.record.arguments)[3:7] == [COUNTERS, 7, -(2**40) % 2**64, -3 % 2**32]
    assert made.record.arguments[2] not in (0, *made.pointers)
    assert (machine.allocated, machine.alive) == ([1000], 0)


def test_many_streams(gpu: Callable[[int], Gpu]) -> None:
    """The last ones are known."""
    made = gpu(1000)
    for stream in (*range(1, 40), STREAM, *range(40, 50)):
        made.kernel.remember(stream, COUNTERS + stream)
    assert made.call(*made.tensors)
    assert (made.record.launches, made.record.arguments[3]) == (1, COUNTERS + STREAM)


@pytest.mark.parametrize(
    ("name", "value", "workspace"), [("answer", 2, 0), ("device", 1, 0), ("device", -1, 0), ("capturing", 1, 1000)]
)
def test_python_is_asked(gpu: Callable[[int], Gpu], name: str, value: int, workspace: int, machine: Machine) -> None:  # noqa: F811
    made = gpu(workspace)
    made.kernel.remember(STREAM, COUNTERS)
    setattr(made.record, name, value)
    assert made.call(*made.tensors)
    assert (len(made.asked), made.record.launches) == (1, 0)
    setattr(made.record, name, 0)
    assert made.call(*made.tensors)
    assert (len(made.asked), made.record.launches, machine.alive) == (1, 1, 0)


def test_no_memory(gpu: Callable[[int], Gpu], machine: Machine) -> None:  # noqa: F811
    made = gpu(1000)
    made.kernel.remember(STREAM, COUNTERS)
    machine.allocated.append(-1)
    assert made.call(*made.tensors)
    assert (len(made.asked), made.record.launches) == (1, 0)


def test_a_capture_needs_no_counters_without_a_workspace(gpu: Callable[[int], Gpu]) -> None:
    made = gpu(0)
    made.record.capturing = 1
    assert made.call(*made.tensors)
    assert (len(made.asked), made.record.launches) == (0, 1)


@pytest.mark.parametrize("count", [1, 300])
def test_malformed(gpu: Callable[[int], Gpu], count: int) -> None:
    with pytest.raises(ValueError, match="arguments"):
        plans.kernel((1, 1, 1), 1, 0, 1, 32, 0, early=True, tensors=2, arguments=(0,) * count, workspace=0, keep=None)


def test_python_tells_the_counters_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stream that is not captured."""
    told: list[tuple[int, int]] = []
    launched: list[list[int]] = []
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    workspace = Workspace(torch.device("cpu"), torch.float32, 10, 3)
    direct = _Direct(
        0, workspace, None, lambda stream, pointers: bool(launched.append(list(pointers))) or True, lambda: 0, lambda d: 9
    )
    direct.__dict__["kernel"] = SimpleNamespace(remember=lambda *pair: told.append(pair))
    direct([1, 2], [])
    assert told == [(9, launched[0][3])]
    capturing[0] = True
    direct([1, 2], [])
    assert len(told) == 1
    assert len(launched) == 2
