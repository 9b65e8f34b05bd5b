"""The commands of docs/before-production.md, run as they stand there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "before-production.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "serve.py").write_text(blocks("python")[0])
    return tmp_path


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "160"}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=570)


def test_every_command_is_known() -> None:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    assert [line.split()[:2] for line in lines] == [["postlude", "check"]] * 3 + [["postlude", "bench"]]


@pytest.mark.parametrize("number", range(4))
def test_the_commands_of_the_page(number: int, folder: Path) -> None:
    _, *arguments = [line for block in blocks("sh") for line in block.splitlines()][number].split()
    # Whether a build on a busy machine is fast enough is not what is tested.
    allowed = ["--max-slowdown", "1000"] if arguments[0] == "check" else []
    done = run(["-m", "postlude.cli", *arguments, *allowed], folder)
    assert done.returncode == 0, done.stderr + done.stdout
    if "--html" in arguments:
        assert "GEMM + bias, GELU" in (folder / "report.html").read_text()
        assert "as accurate as eager" in done.stdout
    elif "--json" in arguments:
        record = json.loads(done.stdout)
        assert record["passed"] is True
        assert record["limits"] == {"slowdown": 1000.0, "error": 1e-5}
    elif arguments[0] == "check":
        assert "gradient of" in done.stdout
    else:
        assert "100x256x64 gelu, float32" in done.stdout


def test_the_function_of_the_page(folder: Path) -> None:
    script = blocks("python")[1].replace("max_slowdown=1.5", "max_slowdown=1000")
    done = run(["-c", script], folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Postlude is")
