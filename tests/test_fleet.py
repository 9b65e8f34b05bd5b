"""The commands of docs/fleet.md, run as they stand there, on two machines: two databases."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "fleet.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_commands_of_the_page(tmp_path: Path) -> None:
    (script,) = blocks("python")
    (tmp_path / "serve.py").write_text(script)
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    machines = [
        {**os.environ, "PYTHONPATH": path, "COLUMNS": "160", "POSTLUDE_TUNING_DB": str(tmp_path / f"{n}.db")} for n in "ab"
    ]

    def run(line: str, machine: int) -> str:
        program, *arguments = line.split()
        assert program == "postlude"
        command = [sys.executable, "-m", "postlude.cli", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=machines[machine], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    tune, show, export, take, prune = [line for block in blocks("sh") for line in block.splitlines()]
    assert "4 measured now, 0 were known" in run(tune, 0)
    assert "4 entries" in run(show, 0)
    run(export, 0)
    lines = (tmp_path / "tuned.jsonl").read_text().splitlines()
    assert len(lines) == 4
    assert str(tmp_path) not in "".join(lines)
    assert {json.loads(line)["sizes"]["m"] for line in lines} == {4, 100}
    assert "4 added, 0 replaced, 0 not newer than what was there, 0 rejected. 4 of 4 are for this machine" in run(take, 1)
    assert "0 measured now, 4 were known" in run(tune, 1)
    assert "0 entries removed" in run(prune, 1)
