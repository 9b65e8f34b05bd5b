"""The short form of benchmarks/tuning_kills.py: real tuning runs, with real measurements, killed at random moments."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "tuning_kills.py"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are forked")
def test_a_killed_run_loses_nothing_that_was_written() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--count", "3"], env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "3 runs killed" in done.stdout
    assert "none lost" in done.stdout
