"""The wheel: what is in it, and that torch.compile finds the back-end in it without an import."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from email.message import Message

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="needs the test extra")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


def read(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (found,) = (entry for entry in archive.namelist() if entry.endswith(f".dist-info/{name}"))
        return archive.read(found).decode()


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    return Parser().parsestr(read(wheel, "METADATA"))


def test_wheel_is_pure_and_holds_every_file_of_the_package(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if name.startswith("postlude/")}
    source = ROOT / "src"
    expected = {
        path.relative_to(source).as_posix()
        for path in (source / "postlude").rglob("*")
        if path.is_file() and path.suffix not in {".pyc", ".so", ".o"}
    }
    assert inside == expected
    assert {"postlude/py.typed", "postlude/demo/corpus.txt", "postlude/targets/cpp/include/postlude/abi.h"} <= inside


def test_metadata(wheel: Path, metadata: Message) -> None:
    assert metadata["Requires-Python"] == "<3.15,>=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Apache License" in read(wheel, "licenses/LICENSE")
    required = {line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert {line.partition(">")[0] for line in required} == {"torch", "rich", "typer", "platformdirs", "jinja2", "networkx"}
    assert {"bench", "demo", "lint", "test"} <= set(metadata.get_all("Provides-Extra", []))


def test_back_end_is_found_without_an_import(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    program = """
import sys, torch
x, weight = torch.randn(24, 40), torch.randn(40, 56)
assert "postlude" not in sys.modules
layer = torch.compile(lambda x: torch.relu(x @ weight), backend="postlude")
torch.testing.assert_close(layer(x), torch.relu(x @ weight))
print(sys.modules["postlude"].__file__)
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHONPATH": str(tmp_path / "site"), "POSTLUDE_CACHE_DIR": str(tmp_path / "kernels")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "site")


def test_corpus_is_worth_searching() -> None:
    from postlude.demo.minilm import corpus

    sentences = corpus()
    assert len(sentences) >= 100
    assert len(set(sentences)) == len(sentences)
    assert all(sentence == sentence.strip() and sentence.endswith(".") for sentence in sentences)
