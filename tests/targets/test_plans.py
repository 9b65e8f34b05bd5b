"""Plans that are launched from C, on the CPU: functions of Python stand for compiled kernels and for torch's streams."""

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from postlude.errors import CompilerNotFound
from postlude.targets import planned, plans
from postlude.targets.cpp import launcher
from postlude.targets.planned import Launch, PlannedKernel

STREAM = 0x42


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Any(ctypes.Structure):
    _fields_ = (("index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("tensor", ctypes.POINTER(_Tensor)))


_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(_Any), ctypes.c_int32, ctypes.c_void_p)
_CURRENT = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
_EMPTY = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    *(ctypes.c_int64, ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_int64)),
    *(ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)),
)
_DELETE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)
_SET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))


class Machine:
    """What a GPU's side sees: the stream that is set, and calls of one function."""

    def __init__(self) -> None:
        self.stream: int | None = None
        self.calls: list[tuple[int | None, list[tuple[int, tuple[int, ...], tuple[int, ...], int]]]] = []
        self.status = 0
        self.function = _FUNCTION(self._called)
        self.current = _CURRENT(self._current)
        self.set = _SET(self._set)
        self.empty = _EMPTY(self._empty)
        self.delete = _DELETE(self._delete)
        #: Bytes of what was allocated, and how much of that is there now.
        self.allocated: list[int] = []
        self.alive = 0
        self.memory = launcher.addresses(launcher.torch_library("torch_cpu"), plans._MEMORY)

    def address(self, callback: Any) -> int:
        return ctypes.cast(callback, ctypes.c_void_p).value or 0

    def _current(self, device: int, out: Any) -> int:
        out[0] = STREAM
        return 0

    def _empty(self, dims: int, sizes: Any, strides: Any, dtype: int, device_type: int, device: int, out: Any) -> int:
        assert (dims, strides[0], dtype, device_type, device) == (1, 1, 0, 1, 0)  # bytes, on the first GPU
        if self.allocated and self.allocated[-1] < 0:
            return 1
        self.allocated.append(sizes[0])
        self.alive += 1
        allocate = _EMPTY(self.memory["aoti_torch_empty_strided"])
        return int(allocate(dims, sizes, strides, dtype, 0, -1, out))

    def _delete(self, tensor: int) -> int:
        self.alive -= 1
        return int(_DELETE(self.memory["aoti_torch_delete_tensor_object"])(tensor))

    def _set(self, device_type: int, device: int, stream: int | None, old: Any) -> int:
        if old:
            old[0] = self.stream
        self.stream = stream
        return 0

    def _called(self, handle: object, arguments: Any, count: int, result: object) -> int:
        seen = []
        for i in range(count):
            assert arguments[i].index == 7  # a DLTensor
            t = arguments[i].tensor[0]
            seen.append((t.data, tuple(t.shape[: t.ndim]), tuple(t.strides[: t.ndim]), t.bits))
        self.calls.append((self.stream, seen))
        return self.status


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    module = plans.extension()
    assert module is not None
    made = Machine()
    functions = launcher.addresses(launcher.torch_library("torch_cpu"), plans._TENSOR)
    tensor = [functions[name] for name in plans._TENSOR]
    real = [*(made.memory[name] for name in plans._MEMORY), *plans._stream_functions()]
    ours = [made.address(callback) for callback in (made.empty, made.delete, made.current, made.set)]
    module.configure(torch.Tensor, launcher.impl_offset(), (*tensor, *ours))
    monkeypatch.setattr(plans, "_stream_functions", lambda: (1, 1))
    yield made
    module.configure(torch.Tensor, launcher.impl_offset(), (*tensor, *real))


class Counted(PlannedKernel):
    """A kernel that counts its plans and what is launched from Python."""

    def __init__(self, native: Callable[[Sequence[Tensor], Sequence[int]], object | None] | None = None) -> None:
        super().__init__()
        self.make = native
        self.planned = 0
        self.launched: list[tuple[int, ...]] = []

    def plan(self, tensors: Sequence[Tensor]) -> Launch:
        self.planned += 1
        return _CountedLaunch(self, [t.as_strided(t.shape, t.stride()) for t in tensors])


class _CountedLaunch:
    def __init__(self, kernel: Counted, tensors: Sequence[Tensor]) -> None:
        self.kernel, self.tensors = kernel, tensors

    def __call__(self, pointers: Sequence[int], tensors: Sequence[Tensor]) -> None:
        assert [t.data_ptr() for t in tensors] == list(pointers)
        self.kernel.launched.append(tuple(pointers))

    def native(self, pointers: Sequence[int]) -> object | None:
        return self.kernel.make(self.tensors, pointers) if self.kernel.make else None


def tensors(rows: int = 3) -> list[Tensor]:
    return [torch.randn(rows, 4, 8), torch.randn(16, 8), torch.empty(rows, 4, 16)]


def flat(given: Sequence[Tensor]) -> tuple[Any, ...]:
    """Arguments of a function that takes rows as one dimension."""
    return tuple((i, (2, 32), (t.numel() // t.shape[-1], t.shape[-1]), (t.shape[-1], 1)) for i, t in enumerate(given))


def test_plans_are_kept_by_shape_stride_type_and_alignment() -> None:
    kernel = Counted()
    call = kernel.fast
    assert call is not kernel
    one, other = tensors(), tensors(5)
    odd = [torch.empty(97)[1:].view(3, 4, 8), *one[1:]]
    double = [t.double() for t in one]
    transposed = [one[0], torch.randn(8, 16).t(), one[2]]
    for given, plans_made in ((one, 1), (one, 1), (other, 2), (odd, 3), (odd, 3), (double, 4), (transposed, 5), (one, 5)):
        assert call(*given) is True
        assert kernel.planned == plans_made
    assert len(kernel.launched) == 8


def test_many_plans() -> None:
    kernel = Counted()
    call = kernel.fast
    for _ in range(2):
        for n in range(1, 300):
            call(torch.empty(n, 4))
    assert kernel.planned == 299


def test_a_refusal_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Counted()
    monkeypatch.setattr(kernel, "plan", lambda given: lambda pointers, given: False)
    assert [kernel.fast(*tensors()) for _ in range(2)] == [False, False]
    nothing = Counted()
    monkeypatch.setattr(nothing, "plan", lambda given: None)
    assert nothing.fast(*tensors()) is False


def test_what_is_no_tensor_is_an_error() -> None:
    with pytest.raises(AttributeError):
        Counted().fast(1, 2)
    with pytest.raises(TypeError, match="by name"):
        Counted().fast(x=1)


def test_settings_are_asked_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Counted()
    monkeypatch.setattr(kernel, "settings", lambda: "some")
    assert kernel.fast is kernel


def test_a_native_plan_gets_pointers_views_and_the_stream(machine: Machine) -> None:
    address = machine.address(machine.function)
    kernel = Counted(lambda given, pointers: plans.plan(((address, flat(given)), (address, flat(given)[:1])), 0, machine))
    call = kernel.fast
    first, second = tensors(), tensors()
    machine.stream = 7
    assert all(call(*given) for given in (first, first, second))
    assert len(kernel.launched) == 1  # the call that planned
    assert machine.stream == 7
    for index, given in ((0, first), (2, second)):
        stream, seen = machine.calls[index]
        assert stream == STREAM
        assert [data for data, *_ in seen] == [t.data_ptr() for t in given]
        assert [shape for _, shape, *_ in seen] == [(12, 8), (16, 8), (12, 16)]
        assert [strides for _, _, strides, _ in seen] == [(8, 1), (8, 1), (16, 1)]
    assert len(machine.calls[1][1]) == 1


def test_a_workspace_is_there_while_a_call_lasts(machine: Machine) -> None:
    """All functions of a call share it; the call after has another."""
    address = machine.address(machine.function)
    workspace = (plans.WORKSPACE, (2, 32), (25,), (1,))

    def steps(given: Sequence[Tensor]) -> tuple[Any, ...]:
        return (address, (*flat(given), workspace)), (address, flat(given)[:1]), (address, (workspace,))

    kernel = Counted(lambda given, pointers: plans.plan(steps(given), 0, machine, workspace=100))
    call, given = kernel.fast, tensors()
    for _ in range(3):
        assert call(*given) is True
    assert len(kernel.launched) == 1  # the call that planned
    assert machine.allocated == [100, 100]
    assert machine.alive == 0
    first, second, third = (seen for _, seen in machine.calls[:3])
    assert [data for data, *_ in first[:3]] == [t.data_ptr() for t in given]
    assert first[3] == third[0]
    assert first[3][1:3] == ((25,), (1,))
    assert first[3][0]
    assert len(second) == 1


def test_python_tells_where_there_is_no_memory(machine: Machine) -> None:
    steps = ((machine.address(machine.function), ((plans.WORKSPACE, (2, 32), (25,), (1,)),)),)
    kernel = Counted(lambda given, pointers: plans.plan(steps, 0, machine, workspace=100))
    call, given = kernel.fast, tensors()
    call(*given)
    machine.allocated.append(-1)
    assert call(*given) is True
    assert len(kernel.launched) == 2
    assert machine.calls == []


def test_a_plan_of_more_tensors_than_are_given_is_refused(machine: Machine) -> None:
    given = tensors()
    made = plans.plan(((machine.address(machine.function), flat(given)),), 0, machine)
    found = plans.extension().Plans(lambda *tensors: True)
    with pytest.raises(ValueError, match="for 3 tensors, got 2"):
        found.add(tuple(given[:2]), made)
    found.add(tuple(given), made)
    with pytest.raises(ValueError, match="takes a workspace"):
        plans.plan(((1, ((plans.WORKSPACE, (2, 32), (25,), (1,)),)),), 0, machine)


def test_what_a_native_function_refuses_goes_to_python(machine: Machine) -> None:
    kernel = Counted(lambda given, pointers: plans.plan(((machine.address(machine.function), flat(given)),), 0, machine))
    call, given = kernel.fast, tensors()
    call(*given)
    machine.status = -1
    assert call(*given) is True
    assert len(machine.calls) == 1
    assert len(kernel.launched) == 2
    assert machine.stream is None


@pytest.mark.parametrize("reach", [1 << 40, 64])
def test_a_plan_for_an_order_of_two_weights_holds_for_that_order(reach: int, machine: Machine) -> None:
    both = torch.zeros(2, 16, 8)

    def native(given: Sequence[Tensor], pointers: Sequence[int]) -> object | None:
        lower, upper = (0, 1) if pointers[0] < pointers[1] else (1, 0)
        steps = ((machine.address(machine.function), flat(given)),)
        return plans.plan(steps, 0, machine, lower=lower, upper=upper, reach=reach)

    kernel = Counted(native)
    call = kernel.fast
    for given in (both.unbind(), both.unbind(), both.flip(0).unbind(), both.unbind()[::-1], both.unbind()[::-1]):
        call(*given)
    assert len(kernel.launched) + len(machine.calls) == 5
    assert len(machine.calls) == (3 if reach > 512 else 0)  # one plan, found twice; and one of the other order, found once


def test_malformed_plans_are_refused() -> None:
    module = plans.extension()
    assert module is not None
    for steps in (
        ((1, ((0, (2, 32), (2,), ()),)),),
        ((1, ((99, (2, 32), (2,), (1,)),)),),
        ((1, ((0, (2, 32), (1,) * 9, (1,) * 9),)),),
    ):
        with pytest.raises(ValueError, match="malformed"):
            module.Plan(steps, 0, None)


def test_without_a_compiler_there_is_no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise CompilerNotFound("c++")

    monkeypatch.setattr(launcher.toolchain, "compiler", missing)
    with pytest.warns(UserWarning, match="can't be compiled: "):
        assert plans.extension.__wrapped__() is None


def test_streams_are_left_to_python_with_another_tvm_ffi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tvm_ffi", ModuleType("tvm_ffi"))  # has no libinfo
    assert plans._stream_functions.__wrapped__()[1] == 0


def test_python_does_it_where_nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "extension", lambda: None)
    kernel = Counted()
    for _ in range(3):
        assert kernel.fast(*tensors()) is True
    assert kernel.planned == 1
    assert planned.native(lambda pointers, given: None, ()) is None
