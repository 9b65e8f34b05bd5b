"""Generated Regions against the oracle: edge shapes, strides, offsets, all types, every kernel form.

POSTLUDE_FUZZ=500 tries that many Regions of each kind, other ones each time.
"""

import os

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from postlude.ir import OPS, Region, normalize, parse
from postlude.targets import triton
from postlude.targets.triton.configs import Config
from tests.strategies import regions, tensors
from tests.targets.triton.numerics import check

EXAMPLES = int(os.environ.get("POSTLUDE_FUZZ", "25"))
SETTINGS = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="POSTLUDE_FUZZ" not in os.environ,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)

#: Around the blocks of the configurations below.
SIZES = st.sampled_from([0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 47, 64, 65, 97])
BATCHES = st.sampled_from([(2,), (1,), (0,), (2, 3), (1, 1, 4)])
CONFIGS = (
    None,  # what the tables say
    Config("gemm", 16, 16, 16, 2, 2),
    Config("gemm", 32, 16, 32, 4, 3, group_m=1, swap=True),
    Config("gemm", 16, 32, 16, 4, 2, split_k=3, group_m=2),
    Config("gemm", 16, 64, 32, 4, 1, split_k=2, swap=True),
)
GEMVS = tuple(Config("gemv", rows, 8, 32, 4, stages) for rows, stages in ((1, 1), (2, 3), (4, 1), (8, 2)))

#: Shapes, layouts and configurations of one Region.
RUNS = 4


@SETTINGS
@given(st.data(), regions().filter(lambda region: triton.unsupported(region) is None))
def test_any_region(data: st.DataObject, region: Region) -> None:
    run(data, region)


@st.composite
def masked(draw: st.DrawFn) -> Region:
    """What the plain Regions lack: truth values, results in another order, several groups and contracted axes, jumping ops."""
    short = draw(st.sampled_from(["f32", "bf16", "f16", "f64"]))
    wide = "f64" if short == "f64" else "f32"
    batch = draw(st.booleans())
    b = "b, " if batch else ""
    right, row = draw(st.sampled_from(["n, k", "k, n"])), draw(st.sampled_from(["n", f"{b}n", f"{b}n, m"]))
    lines = [f"region({b}m, n, n1, k, k1)", f"%x = operand [{b}m, k] {short}", f"%w = operand [{b}{right}] {short}"]
    lines += [f"%x1 = operand [{b}k1, m] {wide}", f"%w1 = operand [{b}n, k1] {short}", f"%w2 = operand [{b}n1, k] {short}"]
    lines += [f"%mask = operand [{b}m, n] bool", f"%keep = operand [{b}m] bool", f"%tile = operand [{b}m, n] {short}"]
    lines += [f"%row = operand [{row}] {short}", f"%row1 = operand [{b}n1] {short}", f"%one = operand [] {wide}"]
    lines += [f"%acc = contract %x, %w : {wide}", f"%acc1 = contract %x1, %w1 : {wide}", f"%acc2 = contract %x, %w2 : {wide}"]
    lines += ["%0 = where %mask, %acc, %tile", "%1 = lt %0, %tile", "%2 = add %acc1, %row"]
    floats, truths = ["%acc", "%tile", "%0", "%2", "%one"], ["%mask", "%keep", "%1"]
    for index in range(draw(st.integers(0, 6))):
        op = OPS[draw(st.sampled_from(sorted(OPS.keys() - {"pow", "tan", "exp", "exp2", "expm1", "sinh", "cosh"})))]
        inputs = [draw(st.sampled_from(floats if kind == "float" else truths)) for kind in op.inputs]
        lines.append(f"%a{index} = {op.name} {', '.join(inputs)}")
        (floats if op.result == "float" else truths).append(f"%a{index}")
    lines += [f"%u = add {floats[-1]}, %acc", "%s = sub %u, %2", "%v = mul %acc2, %row1", "%extent = extent n1"]
    lines += ["%v1 = add %v, %extent", f"%t = {draw(st.sampled_from(['ge', 'ne']))} %s, {floats[-1]}"]
    lines += [f"%o = logical_or %t, {truths[-1]}"]
    order = draw(st.permutations((0, 1))) if not batch else ()
    lines += [f"yield [{b}m, n] {short} %s{' order ' if order else ''}{' '.join(map(str, order))}"]
    lines += [f"yield [{b}m, n] bool %o", f"yield [{b}m, n1] {wide} %v1"]
    return normalize(parse("; ".join(lines)))[0]


@SETTINGS
@given(st.data(), masked())
def test_truth_values_groups_and_jumping_ops(data: st.DataObject, region: Region) -> None:
    run(data, region)


def run(data: st.DataObject, region: Region) -> None:
    """Check a Region with a few shapes, memory layouts and configurations."""
    assert triton.unsupported(region) is None
    for _ in range(RUNS):
        sizes = {axis: data.draw(SIZES, label=axis) for axis in region.axes if axis != "b"}
        config = data.draw(st.sampled_from(CONFIGS + tuple(c for c in GEMVS if sizes["m"] <= c.block_m)), label="config")
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 100), label="seed"))
        operands = tensors(region, sizes, generator, data.draw(BATCHES, label="batch"))
        if any(min(operand.shape, default=1) == 0 for operand in operands) and len(region.groups) > 1:
            continue  # the oracle can't judge one empty result beside another
        check(region, [_rearranged(data, operand) for operand in operands], config)


def _rearranged(data: st.DataObject, tensor: torch.Tensor) -> torch.Tensor:
    """The same values in another memory layout, or some of them broadcast."""
    how = data.draw(st.sampled_from(["as it is", "transposed", "every second", "broadcast", "permuted"]), label="layout")
    if tensor.ndim == 0 or how == "as it is":
        return tensor
    if how == "transposed":
        return tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor
    if how == "permuted":
        order = data.draw(st.permutations(range(tensor.ndim)), label="order")
        return tensor.permute(order).contiguous().permute([order.index(dimension) for dimension in range(tensor.ndim)])
    if how == "every second":
        wide = tensor.new_zeros([2 * size for size in tensor.shape])
        view = wide[tuple(slice(1, None, 2) for _ in tensor.shape)]
        return view.copy_(tensor)
    dimension = data.draw(st.integers(0, tensor.ndim - 1), label="dimension")
    return tensor.narrow(dimension, 0, min(1, tensor.shape[dimension])).expand(tensor.shape)
