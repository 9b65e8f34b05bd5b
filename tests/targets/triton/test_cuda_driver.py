"""Launches by the CUDA driver: what the driver is told, and when it is left to Triton's launcher."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from postlude.targets.triton import cuda_driver
from postlude.targets.triton.cuda_driver import cuda_launch, load_driver
from tests.targets.triton import fake_cuda

pytestmark = pytest.mark.skipif(fake_cuda.COMPILER is None, reason="no C compiler")

SIGNATURE = {"p_x": "*bf16", "r0": "*bf16", "m": "i32", "s_x_m": "i32", "s_x_k": "constexpr", "s_w": "i64", "BLOCK": "constexpr"}
VALUES = (0, 0, 3, -5, 1, -(2**40), 64)
SIZES = (8, 8, 4, 4, 8)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_driver.__wrapped__(fake_cuda.build(tmp_path_factory.mktemp("cuda")))


@pytest.fixture
def record(library: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_cuda.Record]:
    monkeypatch.setattr(cuda_driver, "load_driver", lambda: library)
    record = fake_cuda.record(library)
    yield record
    ctypes.memset(ctypes.byref(record), 0, ctypes.sizeof(record))


def launch(sizes: tuple[int, ...] = SIZES, **metadata: object) -> Callable[[int, Sequence[int]], bool] | None:
    kernel = fake_cuda.kernel(sizes)
    known = {"num_warps": 4, "shared": 1000, "launch_pdl": False, "num_ctas": 1, "launch_cooperative_grid": False}
    known |= {"global_scratch_size": 0, "profile_scratch_size": 0}
    compiled = SimpleNamespace(
        function=ctypes.addressof(kernel),
        metadata=SimpleNamespace(**known | metadata),
        src=SimpleNamespace(signature=SIGNATURE),
    )
    found = cuda_launch(compiled, 77, VALUES)
    if found is not None:
        found.made = kernel  # type: ignore[attr-defined] # so that it lives as long
    return found


@pytest.mark.parametrize("scratch", [0, 1, 2])
def test_the_driver_gets_grid_stream_and_arguments(record: fake_cuda.Record, scratch: int) -> None:
    call = launch(SIZES + (8,) * scratch)
    assert call is not None
    assert call(2**47 + 16, [2**46, 2**63 + 8])
    assert (list(record.grid), list(record.block), record.shared) == ([77, 1, 1], [128, 1, 1], 1000)
    assert (record.stream, record.attributes) == (2**47 + 16, 0)
    expected = [2**46, 2**63 + 8, 3, -5 % 2**32, -(2**40) % 2**64] + [0] * scratch
    assert list(record.arguments)[: len(expected)] == expected
    assert call(0, [1, 2])
    assert (record.stream, list(record.arguments)[:3], record.launches) == (None, [1, 2, 3], 2)


def test_a_chained_kernel_may_start_early(record: fake_cuda.Record) -> None:
    call = launch(launch_pdl=True)
    assert call is not None
    assert call(1, [1, 2])
    assert (record.attributes, record.attribute, record.value) == (1, 6, 1)


def test_threads_do_not_mix_their_arguments(record: fake_cuda.Record) -> None:
    call = launch()
    assert call is not None
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda i: call(i, [i, i]), range(400)))
    assert record.launches == 400
    assert record.stream == record.arguments[0] == record.arguments[1]


def test_a_refused_launch_is_told(record: fake_cuda.Record) -> None:
    call = launch()
    assert call is not None
    record.answer = 201
    assert not call(1, [1, 2])


@pytest.mark.parametrize("sizes", [SIZES[:-1], (*SIZES, 4), (*SIZES, 8, 8, 8), (8, 8, 8, 4, 8)])
def test_other_parameters_are_left_to_triton(record: fake_cuda.Record, sizes: tuple[int, ...]) -> None:
    assert launch(sizes) is None


@pytest.mark.parametrize(
    "metadata", [{"num_ctas": 2}, {"launch_cooperative_grid": True}, {"global_scratch_size": 64}, {"profile_scratch_size": 1}]
)
def test_other_ways_to_launch_are_left_to_triton(record: fake_cuda.Record, metadata: dict[str, object]) -> None:
    assert launch(**metadata) is None


def test_no_driver() -> None:
    assert load_driver.__wrapped__("libcuda_that_is_not_there.so.1") is None
    assert load_driver.__wrapped__("libm.so.6") is None
