"""The code of docs/quantization.md, run as it stands there."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = (Path(__file__).parents[1] / "docs" / "quantization.md").read_text()


def test_the_code_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/quantization.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "2 of 2 linear layers in int8_row" in printed
    assert "1 of 1 linear layers in uint4_32" in printed
    x = torch.randn(1, 256, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(names["compiled"](x), names["model"](x), rtol=0.02, atol=0.02)
