"""What goes wrong around a process: no compiler, no place to write, many at once. The result is right all the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

MODEL = """
import warnings, torch
from tests.test_backend import Block
model, x = Block(), torch.randn(6, 24)
with warnings.catch_warnings(record=True) as caught, torch.no_grad():
    warnings.simplefilter("always")
    compiled = torch.compile(model, backend="postlude")
    result = compiled(x)
    torch.testing.assert_close(result, model(x), rtol=1e-5, atol=1e-5)
ours = [str(w.message) for w in caught if "ostlude" in str(w.message)]
from postlude import runtime
print(len(ours), runtime.target_of("cpu", next(iter(runtime._kernels))[1]) if runtime._kernels else "none", *ours[:1])
"""


def start(cache: Path, **environment: str) -> subprocess.Popen[str]:
    inherited = {key: value for key, value in os.environ.items() if key != "CXX"}
    return subprocess.Popen(
        [sys.executable, "-c", MODEL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **inherited,
            "PYTHONPATH": str(ROOT),
            "POSTLUDE_CACHE_DIR": str(cache / "postlude"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            **environment,
        },
    )


def finish(process: subprocess.Popen[str]) -> list[str]:
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return out.strip().splitlines()[-1].split(maxsplit=2)


def test_without_a_compiler_the_model_runs_and_a_warning_says_why(tmp_path: Path) -> None:
    count, target, *message = finish(start(tmp_path, CXX="/nowhere/c++"))
    assert (count, target) == ("1", "none")
    assert "compiler" in message[0]


def test_eight_processes_on_an_empty_cache(tmp_path: Path) -> None:
    processes = [start(tmp_path) for _ in range(8)]
    assert [finish(process)[:2] for process in processes] == [["0", "cpp"]] * 8


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_cache(tmp_path: Path) -> None:
    (tmp_path / "postlude").mkdir()
    (tmp_path / "postlude").chmod(0o500)
    count, target, *message = finish(start(tmp_path))
    assert (count, target) == ("1", "cpp"), message


def test_cache_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "postlude").write_text("not a folder")
    count, target, *message = finish(start(tmp_path))
    assert (count, target) == ("1", "cpp"), message


def test_corrupt_objects_are_built_again(tmp_path: Path) -> None:
    assert finish(start(tmp_path))[1] == "cpp"
    objects = list((tmp_path / "postlude").rglob("*.so"))
    assert len(objects) >= 3
    for path in objects:
        path.chmod(0o600)
        path.write_bytes(path.read_bytes()[:100])
    assert finish(start(tmp_path))[:2] == ["0", "cpp"]
