"""TARGET: what is found, and what a person reads where it is not."""

import sys
import types
from pathlib import Path

import pytest
import torch

from postlude.errors import TargetNotFound
from postlude.loading import load

SCRIPT = """
import torch
from torch import nn

MODEL = nn.Linear(4, 3)

def one():
    return MODEL, torch.zeros(2, 4)

def several():
    return MODEL, [(torch.zeros(2, 4),), {"input": torch.ones(5, 4)}]

def a_list():
    return sum, [torch.ones(2), torch.ones(2)]

def mixed():
    return MODEL, [(torch.zeros(2, 4),), torch.zeros(2, 4)]

def keys():
    return MODEL, [{0: torch.zeros(2, 4)}]

def needs(batch, *, length):
    return MODEL, torch.zeros(batch, 4)

def raises():
    raise ValueError("no weights here")

def three():
    return 3

NUMBER = 5
target = several
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "types.py"  # also the name of a module of the standard library
    path.write_text(SCRIPT)
    return str(path)


def test_arguments_after_the_model(script: str) -> None:
    example = load(f"{script}:one")
    (inputs,) = example.inputs
    assert isinstance(example.function, torch.nn.Linear)
    assert inputs.call(example.function).shape == (2, 3)
    assert sys.modules["types"] is types


def test_several_sets_of_inputs(script: str) -> None:
    example = load(script)  # its `target`
    assert [inputs.call(example.function).shape[0] for inputs in example.inputs] == [2, 5]


def test_a_list_of_tensors_is_an_argument(script: str) -> None:
    example = load(f"{script}:a_list")
    (inputs,) = example.inputs
    assert torch.equal(inputs.call(example.function), torch.full((2,), 2.0))


def test_a_module_is_found_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loading_example.py").write_text(SCRIPT)
    assert len(load("loading_example:several").inputs) == 2


def test_a_module_in_eval_mode_wants_no_gradients(script: str) -> None:
    example = load(f"{script}:one")
    assert example.wants_grad
    example.function.eval()  # type: ignore[attr-defined]
    assert not example.wants_grad


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (":absent", "no function 'absent'"),
        (":NUMBER", "NUMBER is not a function"),
        (":MODEL", "MODEL is a module; write a function"),
        (":three", "three() should return a tuple"),
        (":needs", "needs is called without arguments, and needs batch, length"),
        (":raises", "raises() raised ValueError: no weights here (types.py, line 26)"),
        (":mixed", "set 1 of the inputs that mixed() returned is a Tensor"),
        (":keys", "set 0 of the inputs that keys() returned is a dict"),
        (":", "a colon and the name of a function were expected"),
        (":two words", "a colon and the name of a function were expected"),
    ],
)
def test_what_is_wrong_is_said(script: str, name: str, reason: str) -> None:
    with pytest.raises(TargetNotFound) as error:
        load(script + name)
    assert reason in str(error.value)
    assert "return model, x" in str(error.value)


def test_a_file_that_can_not_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    broken, empty = tmp_path / "broken.py", tmp_path / "empty.py"
    broken.write_text("def target(:\n")
    empty.write_text("")
    for target, reason in {
        str(broken): "SyntaxError: invalid syntax",
        str(empty): "no function 'target'",
        str(tmp_path / "gone.py"): "No such file",
        str(tmp_path / "gone"): "a colon and the name of a function were expected",
        str(tmp_path / "gone.py:one"): "No such file",
        "no_such_package.module:one": "No module named 'no_such_package'",
    }.items():
        with pytest.raises(TargetNotFound) as error:
            load(target)
        assert reason in str(error.value)
