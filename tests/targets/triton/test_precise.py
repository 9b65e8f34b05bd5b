"""Chains of ops whose terms cancel, under Triton's interpreter."""

import pytest

from tests import precise
from tests.targets.triton.numerics import run


@pytest.mark.parametrize("short", ["bf16", "f32"])
@pytest.mark.parametrize("name", precise.PROGRAMS)
def test_at_most_eagers_error_and_a_few_units_in_the_last_place(name: str, short: str) -> None:
    precise.check(name, short, run)
