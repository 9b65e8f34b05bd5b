"""Every kernel form compiles for GPUs that are not there.

For one architecture of each vendor; POSTLUDE_ARCHITECTURES=all compiles for all, or for those that it names.
"""

import json
import os
import subprocess
import sys

import pytest

ALL = ("sm_75", "sm_80", "sm_90", "sm_100", "gfx942", "gfx1100")
NAMED = os.environ.get("POSTLUDE_ARCHITECTURES", "sm_90 gfx942")
ARCHITECTURES = ALL if NAMED == "all" else tuple(NAMED.split())


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
