"""What is compiled while a graph is compiled: the kernels that its calls will ask for. Nothing is compiled here."""

from collections.abc import Sequence

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from postlude.op import allocate_results
from postlude.select import rows
from postlude.targets.cute import ahead, launcher, toolchain
from postlude.targets.cute.build import Specialization, Target
from postlude.targets.cute.configurations import shortlist
from tests.targets.cute.catalogue import CATALOGUE

TARGET = Target(9, 0, (132, 66, 33))


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> dict[bool, list[Specialization]]:
    found: dict[bool, list[Specialization]] = {False: [], True: []}

    def submit(kernels: Sequence[Specialization], *, later: bool = False) -> list[object]:
        found[later] += kernels
        return []

    monkeypatch.setattr(ahead, "submit", submit)
    monkeypatch.setattr(launcher, "target_of", lambda device: TARGET)
    monkeypatch.setattr(toolchain, "prepare", lambda device: None)
    return found


def fakes(name: str, m: int, n: int, k: int, *, dynamic: bool = False) -> list[torch.Tensor]:
    """Operands and results as a graph has them; with `dynamic`, m is a symbol."""
    region = CATALOGUE[name]
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    sizes = {"m": m, "n": n, "k": k}
    operands = []
    for operand in region.operands:
        real = torch.empty([sizes[axis] for axis in operand.axes], dtype=operand.dtype, device="meta")
        kinds = [DimDynamic.DYNAMIC if dynamic and axis == "m" else DimDynamic.STATIC for axis in operand.axes]
        context = StatelessSymbolicContext(dynamic_sizes=kinds, constraint_sizes=[None] * real.ndim)
        operands.append(mode.from_tensor(real, symbolic_context=context))
    with mode:
        return [*operands, *allocate_results(region, operands)]


def submit(name: str, tensors: list[torch.Tensor], names: Sequence[str] = ("cute", "triton")) -> None:
    rows.submit(CATALOGUE[name], names, tensors)


def test_one_kernel_for_shapes_that_stay(submitted: dict[bool, list[Specialization]]) -> None:
    submit("gelu_tanh", fakes("gelu_tanh", 512, 4096, 4096))
    (kernel,) = submitted[False]
    assert submitted[True] == []
    assert kernel.layout == ((2, 1), (2, 1), (1, 0), (2, 1))
    assert kernel.target == TARGET
    assert kernel.configuration.tile_m == 128


def test_a_pair_in_both_orders_of_its_weights(submitted: dict[bool, list[Specialization]]) -> None:
    submit("swiglu", fakes("swiglu", 512, 4096, 4096))
    assert [kernel.reverse for kernel in submitted[False]] == [False]
    assert [kernel.reverse for kernel in submitted[True]] == [True]


def test_every_kernel_that_a_varying_number_of_rows_may_meet(submitted: dict[bool, list[Specialization]]) -> None:
    submit("gelu_tanh", fakes("gelu_tanh", 512, 4096, 4096, dynamic=True))
    every = {kernel.configuration for kernel in submitted[False] + submitted[True]}
    assert len(submitted[False]) == 1
    assert every == set(shortlist(4096, 4096, False, 9, 132))


@pytest.mark.parametrize(("m", "names"), [(8, ("cute", "triton")), (512, ("blas", "cute")), (512, ("triton",))])
def test_nothing_where_another_target_serves(m: int, names: Sequence[str], submitted: dict[bool, list[Specialization]]) -> None:
    submit("plain", fakes("plain", m, 4096, 4096), names)
    assert submitted == {False: [], True: []}


def test_nothing_where_kernels_can_not_read(submitted: dict[bool, list[Specialization]]) -> None:
    submit("plain", fakes("plain", 512, 4096, 4095))
    assert submitted == {False: [], True: []}
