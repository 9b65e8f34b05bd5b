"""Hugging Face models with a spec compile once, whatever batch and length: a small part of benchmarks/shapes_recompiles.py."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from shapes_recompiles import DIMENSIONS, compilations, pairs

#: Batches and lengths of which none is 1.
LARGER = [(batch, length) for batch, length in pairs(24, (4, 24)) if batch > 1 and length > 1]


@pytest.mark.parametrize("name", DIMENSIONS)
def test_a_spec_is_one_compilation(name: str) -> None:
    assert len({*LARGER}) > 8
    seen = compilations(name, "spec", LARGER, "eager")
    assert (len(seen.compiles), len(seen.given_up)) == (1, 0), str(seen)


@pytest.mark.xfail(reason="the models' code and PyTorch's operators ask whether a size is 1", raises=AssertionError)
@pytest.mark.parametrize("name", DIMENSIONS)
def test_so_it_is_with_sizes_of_1(name: str) -> None:
    seen = compilations(name, "spec", [(3, 5), (1, 1), (1, 9), (2, 1), (2, 20)], "eager")
    assert (len(seen.compiles), len(seen.given_up)) == (1, 0), str(seen)


def test_so_it_is_with_postludes_kernels() -> None:
    seen = compilations("llama", "spec", LARGER[:5], "postlude")
    assert (len(seen.compiles), len(seen.given_up)) == (1, 0), str(seen)


def test_without_one_it_is_not() -> None:
    seen = compilations("bert", "default", [(3, 5), (2, 7), (1, 7)], "eager")
    assert len(seen.compiles) > 2
