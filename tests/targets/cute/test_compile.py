"""Generated modules compile for the architectures that have kernels, without a GPU."""

import importlib.util
from dataclasses import replace

import pytest

from postlude import cache
from postlude.ir import Region, to_text
from postlude.targets.cute import Configuration, ahead
from postlude.targets.cute.build import Specialization, Target, compile_kernel, object_path
from postlude.targets.cute.form import forms
from tests.targets.cute.catalogue import CATALOGUE

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("cutlass", "quack")), reason="the cuda extra is not installed"
)

TARGETS = {"sm_90a": Target(9, 0, (132, 66, 33)), "sm_100a": Target(10, 0, (148, 74, 36)), "sm_120a": Target(12, 0, (188, 0, 0))}
CONFIGURATIONS = {
    "sm_90a": Configuration(128, 192, 2, 1, pingpong=True),
    "sm_100a": Configuration(256, 128, 2, 1),
    "sm_120a": Configuration(128, 128),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("POSTLUDE_CACHE_DIR", str(tmp_path / "cache"))


def special(region: Region, index: int = 0, architecture: str = "sm_90a") -> Specialization:
    layout = tuple(_layout(a) for a in forms(region)[index].arguments)
    return Specialization(to_text(region), index, False, layout, CONFIGURATIONS[architecture], TARGETS[architecture])


#: What is compiled for architectures other than Hopper: all that is special to an epilogue's layout there.
ELSEWHERE = ("everything", "swiglu", "totals", "paired", "truths", "heads")


@pytest.mark.parametrize(
    ("name", "architecture"), [(n, a) for a in TARGETS for n in CATALOGUE if a == "sm_90a" or n in ELSEWHERE]
)
def test_compiles(name: str, architecture: str, tmp_path) -> None:
    region = CATALOGUE[name]
    for index in range(len(forms(region))):
        compiled = compile_kernel(special(region, index, architecture))
        compiled.export_to_c(object_file_path=str(tmp_path / "kernel.o"), function_name="launch")
        assert (tmp_path / "kernel.o").stat().st_size > 20_000


def test_the_transposed_problem_compiles() -> None:
    compile_kernel(replace(special(CATALOGUE["everything"]), configuration=Configuration(256, 128, swapped=True)))


def test_heads_that_lie_beside_each_other_compile() -> None:
    """Operands [b, m, k] that are views of [batch, m, heads, k]: their batch is two dimensions."""
    kernel = special(CATALOGUE["heads"])
    compile_kernel(replace(kernel, layout=((4, 3), (4, 3), (4, 3), *kernel.layout[3:])))


def test_kernels_are_compiled_ahead_by_other_processes() -> None:
    first, second = special(CATALOGUE["plain"]), special(CATALOGUE["gelu_tanh"])
    wrong = replace(first, configuration=Configuration(100, 100))
    later = ahead.submit([first], later=True, most=2)
    futures = ahead.submit([first, second, wrong], most=2)
    assert futures[0] is later[0]
    ahead.wait(first)
    assert cache.default().get(first.key()) is not None
    assert [future.result() == "" for future in futures] == [True, True, False]
    assert "tile shape" in futures[2].result()
    assert ahead.submit([first, second]) == []
    assert object_path(first).is_file()
    ahead.wait(replace(first, reverse=True))  # nobody compiles it: nothing to wait for


def _layout(argument) -> tuple[int, int]:
    if argument.kind == "scalar":
        return 1, -1
    dims = len(argument.order) or len(argument.axes)
    return dims, argument.order[-1] if argument.order else dims - 1
