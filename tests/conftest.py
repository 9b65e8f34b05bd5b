"""What must be settled before any test imports Triton: without a GPU, its kernels run in Triton's interpreter.

Triton reads the variable when a kernel is defined, its own library's kernels included, so it can't be set later.

What was tuned on this machine decides no test: each has a tuning database of its own, which is empty.
"""

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def tuning_database(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the test's tuning database; there is none yet."""
    path = tmp_path_factory.mktemp("tuning") / "tuning.db"
    monkeypatch.setenv("POSTLUDE_TUNING_DB", str(path))
    return path


@pytest.fixture(autouse=True)
def wide_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are not broken into lines, whatever width the process that runs the tests was told (workers of xdist: 80)."""
    from postlude import console

    for one in (console.output, console.messages):
        monkeypatch.setattr(one, "width", 200)
