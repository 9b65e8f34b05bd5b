"""The kernels' numbers on a GPU; the cases are in gpu_cases.py."""

import pytest

from postlude.targets import cute

_REASON = cute.unavailable()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(_REASON is not None, reason=str(_REASON))]


def _cases():
    from tests.targets.cute.gpu_cases import all_cases

    return [pytest.param(case, id=name) for name, case in all_cases()]


@pytest.mark.parametrize("case", _cases())
def test_numbers(case) -> None:
    case()
