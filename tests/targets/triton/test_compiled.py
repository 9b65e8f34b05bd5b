"""Compiled kernels on a driver that takes notes, in a process without Triton's interpreter, whose kernels can't be compiled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.targets.triton import fake_cuda


@pytest.mark.skipif(fake_cuda.COMPILER is None, reason="no C compiler")
def test_on_a_fake_driver() -> None:
    cases = Path(__file__).with_name("compiled_cases.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(cases)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
