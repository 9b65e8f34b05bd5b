"""`postlude check`: exit codes, what is printed, what is written."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from postlude import cli
from postlude.checking.command import MISSED
from postlude.checking.faults import planted
from postlude.checking.regions import Inspection

SCRIPT = """
import torch
from torch import nn

def target():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).eval()
    return model, [(torch.randn(6, 32),), {"input": torch.randn(9, 32)}]

def failing():
    return nn.Linear(4, 4), torch.randn(2, 3)

def printing():
    print("made")
    linear = nn.Linear(16, 16).eval()

    def model(x):
        print("called")
        return torch.relu(linear(x))

    return model, torch.randn(2, 16)

def nothing():
    return (lambda x: None), torch.randn(2, 3)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    return str(path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["check", *arguments], env={"COLUMNS": "150"})


def test_all_is_well(script: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    result = run(script, "--seconds", "0.02", "--max-slowdown", "1000", "--html", str(page))
    assert result.exit_code == 0, result.output
    assert "as accurate as eager" in result.stdout
    assert "cold" in result.stdout
    assert "GEMM + bias, GELU" in result.stdout
    assert "http" not in page.read_text().replace("http://www.w3.org", "")
    # Compile times are those of processes of their own.
    assert "–" not in next(line for line in result.stdout.splitlines() if line.strip().startswith("Postlude") and "sets" in line)


def test_a_missed_bar_has_its_own_exit_code(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inspection, "measure", lambda self, progress: None)
    quick = ("--seconds", "0.02", "--no-compile-times", "--max-slowdown", "1000")
    with planted("2"):
        result = run(script, *quick, "--json")
    assert result.exit_code == MISSED
    record = json.loads(result.stdout)
    assert record["passed"] is False
    assert record["worst_region"] == "2"
    assert run(script, *quick, "--max-error", "1e-12").exit_code == MISSED


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "No such file"),
        (":absent", "no function 'absent'"),
        (":failing", "The model fails in eager, before anything is compiled, for set 0 of the inputs: RuntimeError"),
        (":nothing", "The model's output has no tensors"),
    ],
)
def test_what_can_not_be_checked_is_said(script: str, name: str, reason: str) -> None:
    result = run(script + name if name else script.replace("mine", "gone"))
    assert result.exit_code == 1
    assert reason in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


def test_a_report_that_can_not_be_written_is_told_before_the_work(script: str) -> None:
    result = run(script, "--html", "/no/such/folder/report.html")
    assert result.exit_code == 1
    assert "/no/such/folder" in result.stderr
    assert "Traceback" not in result.output


def test_a_check_is_part_of_the_public_names() -> None:
    import postlude

    assert {"check", "Check"} <= set(dir(postlude))
    assert postlude.check.__module__ == "postlude.checking.run"
    assert torch.is_grad_enabled()


def test_what_the_model_prints_is_no_part_of_the_json(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Inspection, "measure", lambda self, progress: None)
    result = run(f"{script}:printing", "--seconds", "0.02", "--no-compile-times", "--max-slowdown", "1000", "--json")
    assert json.loads(result.stdout)["passed"], result.output
    assert "made" in result.stderr
    assert "called" in result.stderr


def test_a_report_that_is_there_stays_where_the_check_fails(script: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text("of yesterday")
    assert run(f"{script}:failing", "--html", str(page)).exit_code == 1
    assert page.read_text() == "of yesterday"


@pytest.mark.parametrize(
    ("option", "number"), [("--max-slowdown", "nan"), ("--max-error", "nan"), ("--seconds", "nan"), ("--seconds", "inf")]
)
def test_limits_that_nothing_misses_are_refused(script: str, option: str, number: str) -> None:
    assert run(script, option, number).exit_code == 2
