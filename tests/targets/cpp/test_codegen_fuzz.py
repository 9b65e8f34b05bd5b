"""Generated Regions, compiled and run against the oracle: edge shapes, strides, offsets, all types."""

import os

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postlude.ir import Reduce, Region
from postlude.targets.cpp.codegen import supported
from tests.strategies import regions, tensors
from tests.targets.cpp.numerics import check

EXAMPLES = int(os.environ.get("POSTLUDE_FUZZ", "20"))

SIZES = st.sampled_from([0, 1, 2, 3, 5, 7, 15, 16, 17, 31, 33, 47, 63, 64, 65, 96, 129])

#: Pairs of sizes that the kernel of one Region runs with: compiling takes longest.
RUNS = 4


@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize="POSTLUDE_FUZZ" not in os.environ
)
@given(st.data(), regions())
def test_any_region(data: st.DataObject, region: Region) -> None:
    assert supported(region) is None
    for _ in range(RUNS):
        sizes = {axis: data.draw(SIZES) for axis in ("m", "n", "k")}
        if any(isinstance(statement, Reduce) for statement in region.body):
            sizes["n"] = max(sizes["n"], 1)  # the maximum of nothing is an error in ATen
        batch = data.draw(st.sampled_from([(2,), (1,), (0,), (2, 3), (1, 1, 4)]))
        operands = tensors(region, sizes, torch.Generator().manual_seed(data.draw(st.integers(0, 100))), batch)
        check(region, [_rearranged(data, operand) for operand in operands])


def _rearranged(data: st.DataObject, tensor: torch.Tensor) -> torch.Tensor:
    """The same values in another memory layout."""
    how = data.draw(st.sampled_from(["as it is", "transposed", "every second", "broadcast"]))
    if tensor.ndim == 0 or how == "as it is":
        return tensor
    if how == "transposed":
        return tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor
    if how == "every second":
        wide = tensor.new_zeros([2 * size for size in tensor.shape])
        view = wide[tuple(slice(1, None, 2) for _ in tensor.shape)]
        return view.copy_(tensor)
    dimension = data.draw(st.integers(0, tensor.ndim - 1))
    return tensor.narrow(dimension, 0, min(1, tensor.shape[dimension])).expand(tensor.shape)
