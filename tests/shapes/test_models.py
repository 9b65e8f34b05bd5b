"""Hugging Face models with a spec compile once, whatever batch and length: a small part of benchmarks/shapes_recompiles.py."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from shapes_recompiles import DIMENSIONS, compilations, pairs


@pytest.mark.parametrize("name", DIMENSIONS)
def test_a_spec_is_one_compilation(name: str) -> None:
    calls = pairs(20, (4, 24))
    assert {(1, 1)} <= {*calls}
    assert any(batch == 1 < length for batch, length in calls)
    assert any(length == 1 < batch for batch, length in calls)
    seen = compilations(name, "spec", calls, "eager")
    assert (len(seen.compiles), len(seen.given_up)) == (1, 0), str(seen)


def test_so_it_is_with_postludes_kernels() -> None:
    seen = compilations("llama", "spec", [(3, 5), (1, 1), (1, 9), (2, 1), (2, 30)], "postlude")
    assert (len(seen.compiles), len(seen.given_up)) == (1, 0), str(seen)


def test_without_one_it_is_not() -> None:
    seen = compilations("bert", "default", [(3, 5), (2, 7), (1, 7), (2, 1)], "eager")
    assert len(seen.compiles) > 2
    assert {cause.kind for one in seen.recompiles for cause in one.causes} <= {"size", "zero_one", "equal", "condition"}
