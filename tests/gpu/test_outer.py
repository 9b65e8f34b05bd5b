"""Products over one element: eager's bits, in no kernel of their own."""

import pytest
import torch

from tests.capture.test_outer import CASES


@pytest.mark.parametrize("name", CASES)
def test_eager_bits(name: str) -> None:
    function, inputs = CASES[name]
    inputs = tuple(x.cuda() for x in inputs)
    compiled = torch.compile(function, backend="postlude")
    wanted, found = function(*inputs), compiled(*inputs)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        compiled(*inputs)
        torch.cuda.synchronize()
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if name == "angles" else {"rtol": 0, "atol": 0}  # sines and cosines of others
    torch.testing.assert_close(found, wanted, equal_nan=True, **tolerance)
    assert torch.equal(found.signbit() | found.isnan(), wanted.signbit() | wanted.isnan())
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert not any("gemm" in name for name in names), names
