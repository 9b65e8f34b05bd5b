"""What generated modules compute, evaluated on the CPU (emulated.py): against the oracle, and against eager's own error."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from postlude.ir import Region
from postlude.targets import cute
from tests import precise
from tests.strategies import regions, tensors
from tests.targets.cpp.numerics import check
from tests.targets.cute.catalogue import CATALOGUE
from tests.targets.cute.emulated import run


@pytest.mark.parametrize("name", CATALOGUE)
def test_catalogue(name: str) -> None:
    region = CATALOGUE[name]
    operands = tensors(region, {"m": 13, "n": 24, "n1": 9, "k": 16}, torch.Generator().manual_seed(0), (2, 3))
    operands[0] /= 4  # the oracle's own GELU cancels where the argument is below -8
    check(region, operands, run)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
@given(
    regions(dtypes=(torch.bfloat16, torch.float16), tiled=True).filter(lambda region: cute.unsupported(region) is None),
    *[st.sampled_from((1, 2, 5, 17))] * 3,
)
def test_any_region(region: Region, m: int, n: int, k: int) -> None:
    check(region, tensors(region, {"m": m, "n": n, "k": k}, torch.Generator().manual_seed(m)), run)


@pytest.mark.parametrize("short", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("name", precise.PROGRAMS)
def test_at_most_eagers_error_and_a_few_units_in_the_last_place(name: str, short: str) -> None:
    precise.check(name, short, run)
