"""Every kernel form compiles for every architecture, without a GPU."""

import json
import os
import subprocess
import sys

import pytest

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100", "gfx942", "gfx1100")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_form_compiles(arch: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.targets.triton.ahead", arch], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) > 10
    assert [case for case in found if "error" in case] == []
