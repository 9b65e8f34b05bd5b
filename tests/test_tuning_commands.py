"""`postlude tune` and `postlude db`: what they print and keep, exit codes, and what a person sees when something is wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from postlude import cli
from postlude.select import tune
from postlude.select.database import Database
from postlude.select.knowledge import forget, knowledge
from postlude.select.measure import Measurement
from postlude.tuning_commands import duration
from tests.select.entries import entry
from tests.test_tune import measured

SCRIPT = """
import torch
from torch import nn

MODEL = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64))

def trained():
    return MODEL, torch.randn(4, 64)

def target():
    return MODEL.eval(), [(torch.randn(4, 64),), (torch.randn(100, 64),)]

def without():
    return torch.nn.ReLU(), torch.randn(4)

def fails():
    return MODEL.eval(), torch.randn(4, 63)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    torch._dynamo.reset()
    (tmp_path / "model_to_tune.py").write_text(SCRIPT)
    return str(tmp_path / "model_to_tune.py")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements are made up."""
    monkeypatch.setattr(tune, "measure", measured(1e-6, 2e-6))


def run(*arguments: str, **more: Any) -> Result:
    forget()
    return CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "200"}, **more)


def flat(text: str) -> str:
    return " ".join(text.split())


# tune ----------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
def test_tune_measures_all_sets_of_inputs_once(script: str, tuning_database: Path) -> None:
    result = run("tune", script)
    assert result.exit_code == 0, result.output
    assert "4 measured now, 0 were known" in result.stdout
    assert "2.00x" in result.stdout
    assert str(tuning_database) in result.stdout
    again = json.loads(run("tune", script, "--json").stdout)
    assert (again["ended"], again["measured"], again["known"], len(again["entries"])) == ("done", 0, 4, 4)
    assert json.loads(run("tune", script, "--again", "--json").stdout)["measured"] == 4
    assert len(list(Database(tuning_database).entries())) == 4


@pytest.mark.usefixtures("quick")
def test_a_model_in_training_is_tuned_backward(script: str) -> None:
    forward = json.loads(run("tune", script, "--json").stdout)
    trained = json.loads(run("tune", f"{script}:trained", "--json").stdout)
    regions = {one["call"]["region"] for one in trained["entries"]}
    assert not regions <= {one["call"]["region"] for one in forward["entries"]}


@pytest.mark.usefixtures("quick")
def test_frozen_models_are_tuned_packed(script: str) -> None:
    entries = json.loads(run("tune", script, "--freeze", "--json").stdout)["entries"]
    assert [one["call"]["packed"] for one in entries] == [True] * 4


@pytest.mark.usefixtures("quick")
def test_a_model_without_gemms_is_no_error(script: str) -> None:
    result = run("tune", f"{script}:without")
    assert result.exit_code == 0
    assert "No Region of this model has a kernel here" in flat(result.stdout)


@pytest.mark.parametrize(("name", "reason"), [("absent", "no function 'absent'"), ("fails", "the model raised")])
def test_tune_says_what_is_wrong_with_a_target(name: str, reason: str, script: str) -> None:
    result = run("tune", f"{script}:{name}")
    assert result.exit_code == 1
    assert reason in flat(result.stderr)
    assert "Traceback" not in result.output


def after(count: int, then: Callable[[], None]) -> Callable[..., Measurement]:
    """Measurements that are made up; once there are so many, something happens."""
    done = [0]

    def measure(plan: Any, names: Any, incumbent: Any, packing: Any, check: Callable[[], None]) -> Measurement:
        if done[0] == count:
            then()
            check()
        done[0] += 1
        return measured(1e-6, 2e-6)()

    return measure


def test_a_budget_keeps_what_was_measured(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def end() -> None:
        session = tune.session()
        assert session is not None
        assert session.deadline is not None
        assert 3000 < session.deadline - time.monotonic() <= 3600
        session.deadline = time.monotonic()

    monkeypatch.setattr(tune, "measure", after(3, end))
    result = run("tune", script, "--budget", "1h")
    assert result.exit_code == 0, result.output
    assert "3 measured now" in result.stdout
    assert "The budget of 1h is spent; what was measured is kept" in flat(result.stderr)
    monkeypatch.setattr(tune, "measure", measured(1e-6, 2e-6))
    assert "1 measured now, 3 were known" in run("tune", script).stdout  # it goes on from there


def test_every_run_measures_something_however_small_its_budget(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "measure", after(0, lambda: None))
    for known in range(3):
        result = run("tune", script, "--budget", "0.01s")  # less than the first compilation takes
        assert result.exit_code == 0, result.output
        assert f"1 measured now, {known} were known" in result.stdout
        assert "Run the same again to go on" in flat(result.stderr)
        assert "dynamo_pgo" not in result.output


def test_who_waits_for_another_process_waits_no_longer_than_the_budget(
    script: str, tuning_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "measure", pytest.fail)
    with tune.measuring(torch.device("cpu")):
        result = run("tune", script, "--budget", "0.01s")
    assert result.exit_code == 0, result.output
    assert "0 measured now" in result.stdout
    assert "another process was measuring" in flat(result.stderr)


def test_more_sets_of_inputs_than_dynamo_compiles_for_one_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limit is 8, and modules of torch itself share one code object with all others."""
    monkeypatch.setattr(tune, "measure", measured(1e-6, 2e-6))
    (tmp_path / "sets.py").write_text(
        "import torch\nfrom torch import nn\n\ndef target():\n"
        "    return nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), [(torch.randn(2 ** (i + 1), 8),) for i in range(10)]\n"
    )
    result = run("tune", str(tmp_path / "sets.py"))
    assert "10 measured now" in result.stdout, result.output


def test_an_interrupt_keeps_what_was_measured(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "measure", after(1, interrupt))
    result = run("tune", script)
    assert result.exit_code == 130
    assert "1 measured now" in result.stdout
    assert "Interrupted; what was measured is kept" in flat(result.stderr)
    assert len(list(knowledge().database.entries())) == 1


def test_a_signal_in_a_real_measurement_ends_it_at_once(script: str, tuning_database: Path) -> None:
    command = [sys.executable, "-m", "postlude.cli", "tune", script]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while not (tuning_database.exists() and list(Database(tuning_database).entries())) and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert time.monotonic() - begin < 10
    assert "Traceback" not in errors
    assert " measured now" in output
    assert list(Database(tuning_database).entries())


@pytest.mark.parametrize(("text", "seconds"), [("60s", 60), ("5m", 300), ("1.5h", 5400), ("90d", 90 * 86400), ("7", 7)])
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0s", "-1s", "1w", "soon", "nan", "99999999999d"])
def test_a_time_that_is_none_is_refused(text: str) -> None:
    result = run("tune", "a:b", "--budget", text)
    assert result.exit_code == 2
    assert "60s" in result.stderr


# db ------------------------------------------------------------------------------------------------------------------


def test_list_shows_what_is_there_and_what_holds_here(tuning_database: Path) -> None:
    assert "0 entries in" in run("db", "list").stdout
    assert not tuning_database.exists()
    knowledge().put(entry(0))
    knowledge().put(entry(1, fused=3e-6))
    output = run("db", "list").stdout
    assert "2 entries in" in output
    assert "a processor, avx2, 2 threads" in output
    assert "f32 GEMM, tanh" in output
    assert "unfused" in output
    record = json.loads(run("db", "list", "--json").stdout)
    assert [one["state"] for one in record["entries"]] == ["other device"] * 2


def test_what_is_exported_is_imported(tuning_database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [entry(index) for index in range(3)] + [
        entry(3, call=replace(entry(3).call, device="NVIDIA H200", threads=0, isa=""))
    ]
    for one in entries:
        knowledge().put(one)
    file = tmp_path / "tuned.jsonl"
    assert run("db", "export", str(file)).exit_code == 0
    assert run("db", "export", "-").stdout == file.read_text()
    assert len(run("db", "export", "-", "--device", "h200").stdout.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["tuned.jsonl"]
    monkeypatch.setenv("POSTLUDE_TUNING_DB", str(tmp_path / "other.db"))
    result = run("db", "import", "-", input=file.read_text())
    assert result.exit_code == 0, result.output
    assert "4 added, 0 replaced, 0 not newer than what was there, 0 rejected. 0 of 4 are for this machine" in result.stdout
    assert "0 added, 0 replaced, 4 not newer" in run("db", "import", str(file)).stdout
    assert sorted(e.key for e in Database(tmp_path / "other.db").entries()) == sorted(e.key for e in entries)
    tuning_database.unlink()
    monkeypatch.undo()


def test_lines_that_are_not_understood_are_reported_and_the_others_are_taken(tmp_path: Path, tuning_database: Path) -> None:
    file = tmp_path / "mixed.jsonl"
    newer = entry(1).to_json().replace('"version": 1', '"version": 2')
    file.write_bytes(
        b"\n".join([entry(0).to_json().encode(), b"", b"{", newer.encode(), b"\xff\xfe", entry(2).to_json().encode()])
    )
    result = run("db", "import", str(file))
    assert result.exit_code == 1
    assert "2 added" in result.stdout
    assert "3 rejected" in result.stdout
    for line, reason in ((3, "not JSON"), (4, "version 2: this Postlude reads version 1"), (5, "not UTF-8")):
        assert f"{file}:{line}: {reason}" in result.stderr
    assert len(list(Database(tuning_database).entries())) == 2


def test_an_import_runs_no_code(tmp_path: Path) -> None:
    """Neither a pickle nor an expression in any field is more than text that is refused."""
    import pickle

    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "attacked"),)

    record = json.loads(entry().to_json())
    record["candidates"][0]["configuration"] = {"tile_m": f"__import__('os').mkdir({str(tmp_path / 'attacked')!r})"}
    file = tmp_path / "attack.jsonl"
    file.write_bytes(pickle.dumps(Attack()) + b"\n" + json.dumps(record).encode())
    assert run("db", "import", str(file)).exit_code == 1
    assert not (tmp_path / "attacked").exists()


def test_merge_takes_another_database_also_a_corrupt_one(tmp_path: Path, tuning_database: Path) -> None:
    other = Database(tmp_path / "other.db")
    other.merge([entry(index) for index in range(200)])
    knowledge().put(entry(0, at="2030-01-01T00:00:00+00:00"))
    assert "199 added, 0 replaced, 1 not newer" in run("db", "merge", str(other.path)).stdout
    tuning_database.unlink()
    content = bytearray(other.path.read_bytes())
    leaves = [at for at in range(0, len(content), 4096) if content[at] == 10 and b"postlude-tuning" in content[at : at + 4096]]
    content[leaves[len(leaves) // 2]] = 255
    other.path.write_bytes(content)
    result = run("db", "merge", str(other.path))
    assert result.exit_code == 1
    assert "not all of it can be read" in result.stderr
    assert 100 < len(list(Database(tuning_database).entries())) < 200
    missing = run("db", "merge", str(tmp_path / "gone.db"))
    assert missing.exit_code == 1
    assert "there is no such file" in missing.stderr


def test_prune_removes_what_it_is_told(tuning_database: Path) -> None:
    def fill() -> None:
        knowledge().put(entry(0, at="2020-01-01T00:00:00+00:00"))
        knowledge().put(entry(1, failed={"cpp": "no"}, at="2099-01-01T00:00:00+00:00"))
        knowledge().put(entry(2, call=replace(entry(2).call, device="NVIDIA H200"), at="2099-01-01T00:00:00+00:00"))

    for arguments, left in {
        ("--older-than", "30d"): {2, 3},
        ("--failed",): {1, 3},
        ("--device", "h200"): {1, 2},
        ("--failed", "--device", "h200"): {1},
        ("--stale",): {1, 2, 3},  # whether entries of other devices hold can't be said here
        ("--all",): set(),
    }.items():
        fill()
        result = run("db", "prune", *arguments)
        assert result.exit_code == 0, result.output
        assert {dict(e.call.sizes)["n"] for e in Database(tuning_database).entries()} == left
        assert f"{3 - len(left)} entries removed" in result.stdout
    assert run("db", "prune").exit_code == 2


@pytest.mark.usefixtures("quick")
def test_stale_entries_are_those_of_other_versions_on_this_machine(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run("tune", script)
    record = json.loads(run("db", "list", "--json").stdout)
    assert [one["state"] for one in record["entries"]] == ["in use"] * 4
    assert "0 entries removed" in run("db", "prune", "--stale").stdout
    old = next(knowledge().database.entries())
    knowledge().put(replace(old, environment={**old.environment, "torch": "2.0.0"}))
    states = [one["state"] for one in json.loads(run("db", "list", "--json").stdout)["entries"]]
    assert sorted(states) == ["in use"] * 4 + ["stale"]
    assert "1 entries removed" in run("db", "prune", "--stale").stdout


def test_a_database_that_can_not_be_used_is_said_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POSTLUDE_TUNING_DB", str(tmp_path / "file" / "tuning.db"))
    (tmp_path / "one.jsonl").write_text(entry().to_json())
    result = run("db", "import", str(tmp_path / "one.jsonl"))
    assert result.exit_code == 1
    assert "tuning.db can't be used" in flat(result.stderr)
    assert "POSTLUDE_TUNING_DB" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("command", "file", "expected"),
    [
        ("import", "gone.jsonl", "Name files that postlude db export wrote"),
        ("merge", "gone.db", "Name other tuning databases"),
        ("export", "gone/tuned.jsonl", "Name a file in a folder that exists"),
    ],
)
def test_a_file_that_can_not_be_used_is_not_taken_for_the_database(
    command: str, file: str, expected: str, tmp_path: Path
) -> None:
    result = run("db", command, str(tmp_path / file))
    assert result.exit_code == 1
    assert f"{tmp_path / file} can't be used" in flat(result.stderr)
    assert expected in flat(result.stderr)
    assert "POSTLUDE_TUNING_DB" not in result.stderr
    assert "Traceback" not in result.output


def test_an_export_without_entries_is_told(tmp_path: Path, tuning_database: Path) -> None:
    Database(tuning_database).put(entry())
    file = tmp_path / "tuned.jsonl"
    result = run("db", "export", "--device", "No Such Chip", str(file))
    assert result.exit_code == 0
    assert f"written to {file}" in flat(result.stderr)
    assert "no entries of a device whose name contains 'No Such Chip'" in flat(result.stderr)
    assert "no entries" not in run("db", "export", str(file)).stderr


def test_a_corrupt_database_is_moved_aside_by_a_command_too(tuning_database: Path) -> None:
    knowledge().put(entry(0))
    content = tuning_database.read_bytes()
    tuning_database.write_bytes(b"no database, " + content[13:])
    result = run("db", "list")
    assert result.exit_code == 0
    assert "was corrupt" in result.stderr
    assert list(tuning_database.parent.glob("*corrupt*"))


def test_a_file_that_is_not_ours_is_a_clear_error_of_every_command(tuning_database: Path, tmp_path: Path) -> None:
    tuning_database.write_text("What I must not forget")
    (tmp_path / "one.jsonl").write_text(entry().to_json())
    for command in (("list",), ("export", str(tmp_path / "out")), ("import", str(tmp_path / "one.jsonl")), ("prune", "--all")):
        result = run("db", *command)
        assert result.exit_code == 1
        assert "it is no tuning database of Postlude's, and was left as it is" in result.stderr
    assert tuning_database.read_text() == "What I must not forget"
