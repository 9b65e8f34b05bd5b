"""What tests of capture share."""

import pytest

from postlude.capture import reach


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU's kernels own tiles: the rewritten graph can be run, which no GPU is needed for."""
    monkeypatch.setattr(reach, "REACH", {})
