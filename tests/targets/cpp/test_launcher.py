"""Calling compiled objects."""

import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from postlude.errors import KernelLoadError
from postlude.targets.cpp import build, launcher
from tests.targets.cpp import toy

Loader = Callable[[str, int], launcher.Kernel]

#: Reports what a kernel was told: out[0] = threads, out[1] = dimensions of the first tensor, out[2] = its dtype code * 100 +
#: bits, out[3...] its shape and strides. Sleeps for as many milliseconds as the first element says, if that is a float.
PROBE = r"""
#include <postlude/abi.h>
#include <unistd.h>
extern "C" int postlude_run(const PostludeCall *call) {
  const DLTensor &first = call->tensors[0];
  double *out = (double *)call->tensors[call->count - 1].data;
  out[0] = call->threads;
  out[1] = first.ndim;
  out[2] = first.dtype.code * 100 + first.dtype.bits;
  for (int i = 0; i < first.ndim; ++i) out[3 + i] = first.shape[i], out[3 + first.ndim + i] = first.strides[i];
  if (first.dtype.code == 2 && first.dtype.bits == 32 && first.data) usleep(1000 * *(float *)first.data);
  return call->message && call->message_size >= 256 ? 0 : 1;
}
extern "C" int64_t postlude_pack_size(const DLTensor *, int32_t) { return 0; }
extern "C" int postlude_pack(const DLTensor *, int32_t, void *) { return 0; }
"""


def extension() -> ModuleType:
    module = launcher.extension()
    if module is None:
        pytest.skip("the launcher can't be compiled here")
    return module


@pytest.fixture(params=["stable functions", "attribute", "dlpack", "ctypes"])
def load(request: pytest.FixtureRequest) -> Iterator[Loader]:
    """Every way of seeing tensors."""
    if request.param == "ctypes":
        yield lambda path, operands: launcher.SlowKernel(path, 0, operands)
        return
    module = extension()
    functions = launcher._torch_functions()
    types = launcher._scalar_types(functions)
    usual = (torch.Tensor, functions, launcher.impl_offset(), types)
    if request.param == "attribute":
        module.configure(torch.Tensor, functions, 0, types)
    if request.param == "dlpack":
        few = {name: functions[name] for name in ("torch_get_num_threads", "dlpack_exchange_api") if name in functions}
        if len(few) < 2:
            pytest.skip("this torch has no exchange table")
        assert not module.configure(torch.Tensor, few, 0, types)
    try:
        yield lambda path, operands: module.Kernel(path, 0, operands)
    finally:
        module.configure(*usual)


@pytest.fixture
def kernel(load: Loader) -> launcher.Kernel:
    return load(str(build.build(toy.SOURCE)), 2)


@pytest.fixture
def probe(load: Loader) -> Callable[[Tensor], list[float]]:
    loaded = load(str(build.build(PROBE)), 1)

    def run(tensor: Tensor) -> list[float]:
        out = torch.zeros(32, dtype=torch.float64)
        loaded(tensor, out)
        return out.tolist()

    return run


def test_this_torch_has_the_fast_way() -> None:
    """On the versions we support, the slower ways are for the unforeseen."""
    extension()
    assert launcher.can_freeze()
    assert launcher.impl_offset() > 0


@pytest.mark.parametrize(
    "make",
    {
        "plain": lambda: torch.randn(4, 5),
        "parameter": lambda: nn.Parameter(torch.randn(4, 5)),
        "requires grad": lambda: torch.randn(4, 5, requires_grad=True),
        "result of autograd": lambda: torch.randn(4, 5, requires_grad=True) * 2,
        "transposed": lambda: torch.randn(5, 4).t(),
        "offset": lambda: torch.randn(6, 7)[2:, 1:6],
        "strided": lambda: torch.randn(8, 10)[::2, ::2],
        "expanded": lambda: torch.randn(1, 5).expand(4, 5),
        "unaligned": lambda: torch.randn(21)[1:].view(4, 5),
        "inference tensor": lambda: inference_tensor(),
        "no rows": lambda: torch.randn(0, 5),
        "no columns": lambda: torch.randn(4, 0),
        "copy on write": lambda: torch._lazy_clone(torch.randn(4, 5)),
        "buffer subclass": lambda: nn.Buffer(torch.randn(4, 5)),
    }.values(),
)
def test_kinds_of_tensors(kernel: launcher.Kernel, make: Callable[[], Tensor]) -> None:
    x = make()
    toy.check(kernel, x, torch.randn(6, x.shape[1]))
    toy.check(kernel, torch.randn(3, x.shape[1]), x)


def inference_tensor() -> Tensor:
    with torch.inference_mode():
        return torch.randn(4, 5)


@pytest.mark.parametrize("dtype", launcher.DLPACK, ids=str)
def test_dtypes(probe: Callable[[Tensor], list[float]], dtype: torch.dtype) -> None:
    code, bits = launcher.DLPACK[dtype]
    assert probe(torch.zeros(2, dtype=dtype))[2] == code * 100 + bits


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (2, 0, 3), (1, 2, 3, 4), (2,) * 8])
def test_shapes_and_strides(probe: Callable[[Tensor], list[float]], shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=torch.int32)
    dimensions = len(shape)
    told = probe(tensor)
    assert told[1] == dimensions
    assert told[3 : 3 + dimensions] == list(shape)
    assert told[3 + dimensions : 3 + 2 * dimensions] == list(tensor.stride())


def test_threads_are_those_of_the_calling_thread(probe: Callable[[Tensor], list[float]]) -> None:
    before = torch.get_num_threads()
    tensor = torch.zeros(1, dtype=torch.int32)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert probe(tensor)[0] == count == torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def test_gil_is_released_for_large_tensors(probe: Callable[[Tensor], list[float]]) -> None:
    tensor = torch.zeros(launcher_bytes() // 4 + 1)
    tensor[0] = 300
    ticks: list[float] = []
    thread = threading.Thread(target=lambda: probe(tensor))
    thread.start()
    while thread.is_alive():
        ticks.append(time.monotonic())
        time.sleep(0.01)
    assert len(ticks) > 5


def launcher_bytes() -> int:
    return 128 * 1024


def test_bad_arguments(kernel: launcher.Kernel) -> None:
    x, w, out = torch.randn(3, 5), torch.randn(6, 5), torch.empty(3, 6)
    with pytest.raises(RuntimeError, match=r"code 7.*3 tensors were expected, not 4"):
        kernel(x, w, out, out)
    with pytest.raises(TypeError):
        kernel(x, "w", out)
    with pytest.raises(TypeError):
        kernel(x.to_sparse(), w, out)
    with pytest.raises(TypeError):
        kernel(x, w, out.to("meta"))
    with pytest.raises(TypeError):
        kernel(x, w, out=out)
    toy.check(kernel, x, w)


def test_too_few_and_too_many() -> None:
    extension()
    kernel = toy.kernel()
    with pytest.raises(TypeError, match="2 operands and then its results"):
        kernel(torch.randn(3, 5))
    with pytest.raises(TypeError, match="at most 64"):
        kernel(*[torch.randn(3, 5)] * 65)


def test_fake_and_transformed_tensors_are_refused(kernel: launcher.Kernel) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x, w, out = torch.randn(3, 5), torch.randn(6, 5), torch.empty(3, 6)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    with pytest.raises((TypeError, RuntimeError)):
        kernel(fake, w, out)
    with pytest.raises((TypeError, RuntimeError)):
        torch.func.vmap(lambda row: (kernel(row, w, out), row)[1])(x.expand(2, 3, 5))


def test_reading_does_not_materialise() -> None:
    """A copy-on-write operand stays shared; a copy-on-write result gets memory of its own."""
    module = extension()
    kernel = toy.kernel()
    x, w, out = torch.randn(3, 5), torch.randn(6, 5), torch.zeros(3, 6)
    clones = [torch._lazy_clone(tensor) for tensor in (x, w, out)]
    addresses = [module.address(tensor) for tensor in (x, w, out)]
    kernel(x, w, out)
    assert [module.address(tensor) for tensor in (x, w)] == addresses[:2]
    assert module.address(out) != addresses[2]
    assert torch.count_nonzero(clones[2]) == 0


def test_references_are_balanced(kernel: launcher.Kernel) -> None:
    x, w, out = torch.randn(3, 5), torch.randn(6, 5), torch.empty(3, 6)
    before = [sys.getrefcount(tensor) for tensor in (x, w, out)] + [sys.getrefcount(kernel)]
    for _ in range(1000):
        kernel(x, w, out)
        with pytest.raises(RuntimeError):
            kernel(x, w, out, out)
    after = [sys.getrefcount(tensor) for tensor in (x, w, out)] + [sys.getrefcount(kernel)]
    assert before == after


def test_one_kernel_per_path() -> None:
    assert toy.kernel() is toy.kernel()
    assert toy.kernel().operands == 2
    assert Path(toy.kernel().path).exists()


def test_pack() -> None:
    extension()
    kernel = toy.kernel()
    weight = torch.randn(6, 5).t()
    assert kernel.pack_size(1, weight) == 120
    assert kernel.pack_size(0, weight) == 0
    packed = kernel.pack(1, weight, None)
    assert packed.nbytes == 120
    assert packed.address == weight.data_ptr()
    assert kernel.pack(0, weight, None) is None
    assert kernel.pack(1, torch.randn(0, 5), None) is None


def test_not_a_kernel(tmp_path: Path) -> None:
    with pytest.raises(KernelLoadError, match=r"missing\.so"):
        launcher.load(tmp_path / "missing.so", micro=0)
    other = build.build('extern "C" int something_else() { return 0; }\n')
    if launcher.extension():
        with pytest.raises(KernelLoadError, match="postlude_run"):
            launcher.load(other, micro=0)


def test_many_threads_call_one_kernel(kernel: launcher.Kernel) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(100):
                toy.check(kernel, torch.randn(3, 5), torch.randn(6, 5))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_without_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_headers() -> Path:
        raise FileNotFoundError("Python.h")

    monkeypatch.setattr(launcher, "_headers", no_headers)
    monkeypatch.setattr(launcher, "_extension", False)
    monkeypatch.setattr(launcher, "_kernels", {})
    with pytest.warns(UserWarning, match="python3-dev"):
        kernel = toy.kernel()
    assert isinstance(kernel, launcher.SlowKernel)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert launcher.extension() is None
    toy.check(kernel, torch.randn(3, 5), torch.randn(6, 5))
    assert kernel.frozen(print, (1,)) is kernel
    assert kernel.pack_size(1, torch.randn(3, 5)) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_after_load() -> None:
    code = """
        import os, torch
        from tests.targets.cpp import toy
        kernel = toy.kernel()
        toy.check(kernel, torch.randn(3, 5), torch.randn(6, 5))
        child = os.fork()
        if child == 0:
            toy.check(kernel, torch.randn(3, 5), torch.randn(6, 5))
            os._exit(0)
        raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=Path(__file__).parents[3])
