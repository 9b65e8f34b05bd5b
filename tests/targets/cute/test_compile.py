"""Generated modules compile for the architectures that have kernels, without a GPU."""

import importlib.util

import pytest

from postlude.targets.cute import Configuration
from postlude.targets.cute.build import Target, compile_kernel
from postlude.targets.cute.form import forms
from tests.targets.cute.catalogue import CATALOGUE

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("cutlass", "quack")), reason="the cuda extra is not installed"
)

TARGETS = {"sm_90a": Target(9, 0, (132, 66, 33))}
CONFIGURATIONS = {"sm_90a": Configuration(128, 192, 2, 1, pingpong=True)}


@pytest.mark.parametrize("architecture", TARGETS)
@pytest.mark.parametrize("name", CATALOGUE)
def test_compiles(name: str, architecture: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("POSTLUDE_CACHE_DIR", str(tmp_path))
    region = CATALOGUE[name]
    for index, form in enumerate(forms(region)):
        layout = tuple(_unit(a) for a in form.arguments)
        compiled = compile_kernel(region, index, False, layout, CONFIGURATIONS[architecture], TARGETS[architecture])
        compiled.export_to_c(object_file_path=str(tmp_path / "kernel.o"), function_name="launch")
        assert (tmp_path / "kernel.o").stat().st_size > 20_000


def test_the_transposed_problem_compiles(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("POSTLUDE_CACHE_DIR", str(tmp_path))
    region = CATALOGUE["everything"]
    (form,) = forms(region)
    layout = tuple(_unit(a) for a in form.arguments)
    compile_kernel(region, 0, False, layout, Configuration(256, 128, swapped=True), TARGETS["sm_90a"])


def _unit(argument) -> int | None:
    if argument.kind == "scalar":
        return None
    return argument.order[-1] if argument.order else len(argument.axes) - 1
