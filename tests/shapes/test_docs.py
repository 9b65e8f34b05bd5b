"""The code in docs/shapes.md runs, and prints what stands there."""

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "shapes.md").read_text(encoding="utf-8")


def test_examples(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 9
    names: dict[str, object] = {"__name__": "shapes"}
    for block in blocks:
        exec(compile(block, "docs/shapes.md", "exec"), names)
    printed = capsys.readouterr().out
    shown = re.findall(r"^    (\w.*)$", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL), re.MULTILINE)
    assert len(shown) == 2
    shown += ["3 compilations in 3 calls in ...", "0/1  argument x: declare the dimension", '    "n": IntVar("n"),']
    shown += ['ShapesSpec({"x": TensorSpec([ShapeVar("x_0"), STATIC]), "n": IntVar("n")})']
    printed = re.sub(r"\b\d+/(\d) ", r"0/\1 ", printed)  # whatever was compiled before
    for line in shown:
        assert line.removesuffix(" ...") in printed
