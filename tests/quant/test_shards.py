"""FSDP2 shards quantised weights by rows; ranks are processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("scheme", "ranks", "says"),
    [
        ("nvfp4-weight", 2, "equal"),
        (
            "int8-weight",
            3,
            "A quantised weight of 128 rows is sharded over 3 ranks; expected ranks that divide its rows. Leave the layer out of"
            " quantize_ by filter=, or do not shard it.",
        ),
    ],
)
def test_shards(tmp_path: Path, scheme: str, ranks: int, says: str) -> None:
    """What FSDP2 can gather, and what it can't."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.quant.shards"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(tmp_path / "meeting"), scheme],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    for process in processes:
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == 0, printed
        assert says in printed.splitlines()
