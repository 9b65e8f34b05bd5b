"""Generated Regions, compiled and run against the oracle: edge shapes, strides, offsets, all types.

POSTLUDE_FUZZ=500 tries that many Regions of each kind, other ones each time.
"""

import os

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from postlude.ir import OPS, Reduce, Region, normalize, parse, verify
from postlude.targets.cpp.codegen import supported
from tests.strategies import regions, tensors
from tests.targets.cpp.numerics import check

EXAMPLES = int(os.environ.get("POSTLUDE_FUZZ", "15"))
SETTINGS = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="POSTLUDE_FUZZ" not in os.environ,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrinking would compile hundreds of kernels
)

SIZES = st.sampled_from([0, 1, 2, 3, 5, 7, 15, 16, 17, 31, 33, 47, 63, 64, 65, 96, 129])
BATCHES = st.sampled_from([(2,), (1,), (0,), (2, 3), (1, 1, 4)])

#: Shapes that the kernel of one Region runs with: compiling takes longest.
RUNS = 4


@SETTINGS
@given(st.data(), regions())
def test_any_region(data: st.DataObject, region: Region) -> None:
    run(data, region, {"m": SIZES, "n": SIZES, "k": SIZES})


@st.composite
def masked(draw: st.DrawFn) -> Region:
    """One contraction with everything that the plain Regions lack: truth values, a result in another order, jumping ops."""
    short = draw(st.sampled_from(["f32", "bf16", "f16", "f64"]))
    wide = "f64" if short == "f64" else "f32"
    batch = draw(st.booleans())
    b = "b, " if batch else ""
    lines = [f"region({b}m, n, k)", f"%x = operand [{b}m, k] {short}", f"%w = operand [{b}k, n] {short}"]
    lines += [f"%mask = operand [{b}m, n] bool", f"%keep = operand [{b}m] bool", f"%tile = operand [{b}m, n] {short}"]
    lines += [f"%acc = contract %x, %w : {wide}", "%0 = where %mask, %acc, %tile", "%1 = lt %0, %tile"]
    floats, truths = ["%acc", "%tile", "%0"], ["%mask", "%keep", "%1"]
    for index in range(draw(st.integers(0, 6))):
        op = OPS[draw(st.sampled_from(sorted(OPS.keys() - {"pow", "tan", "exp", "exp2", "expm1", "sinh", "cosh"})))]
        inputs = [draw(st.sampled_from(floats if kind == "float" else truths)) for kind in op.inputs]
        lines.append(f"%a{index} = {op.name} {', '.join(inputs)}")
        (floats if op.result == "float" else truths).append(f"%a{index}")
    lines += [f"%u = add {floats[-1]}, %acc", f"%r = reduce {draw(st.sampled_from(['sum', 'max', 'min']))} n %u"]
    lines += [
        "%s = sub %u, %r",
        f"%t = {draw(st.sampled_from(['ge', 'ne']))} %s, {floats[-1]}",
        f"%o = logical_or %t, {truths[-1]}",
    ]
    order = draw(st.permutations((0, 1))) if not batch else ()
    lines += [f"yield [{b}m, n] {short} %s{' order ' if order else ''}{' '.join(map(str, order))}"]
    lines += [f"yield [{b}m, n] bool %o", f"yield [{b}m] {wide} %r"]
    return normalize(parse("; ".join(lines)))[0]


@SETTINGS
@given(st.data(), masked())
def test_truth_values_and_jumping_ops(data: st.DataObject, region: Region) -> None:
    run(data, region, {"m": SIZES, "n": SIZES, "k": SIZES})


@st.composite
def chains(draw: st.DrawFn) -> Region:
    """Attention-like: a product, a normalisation or none, a second product, an epilogue."""
    short = draw(st.sampled_from(["f32", "bf16", "f16", "f64"]))
    wide = "f64" if short == "f64" else "f32"
    b = draw(st.sampled_from(["b, ", ""]))
    first, second = draw(st.sampled_from(["m, k", "k, m"])), draw(st.sampled_from(["n, k", "k, n"]))
    third = draw(st.sampled_from(["n, n1", "n1, n"]))
    lines = [f"region({b}m, n, n1, k)", f"%x = operand [{b}{first}] {short}", f"%w = operand [{b}{second}] {short}"]
    lines += [f"%v = operand [{b}{third}] {short}", f"%tile = operand [{b}m, n] {draw(st.sampled_from([short, wide]))}"]
    lines += [f"%out = operand [{b}m, n1] {short}", f"%col = operand [{b}m] {wide}"]
    lines += [f"%acc = contract %x, %w : {wide}", "%0 = add %acc, %tile"]
    fed = "%0"
    if draw(st.booleans()):
        lines += ["%1 = reduce max n %0", "%2 = sub %0, %1", "%3 = exp %2", "%4 = reduce sum n %3", "%5 = div %3, %4"]
        fed = "%5"
    elif draw(st.booleans()):
        lines += ["%1 = sigmoid %0", "%2 = mul %1, %0"]
        fed = "%2"
    if short in ("bf16", "f16") and draw(st.booleans()):
        lines.append(f"%fed = round_to {short} {fed}")
        fed = "%fed"
    lines += [f"%acc1 = contract {fed}, %v : {wide}", "%8 = mul %acc1, %col", "%9 = add %8, %out"]
    last = "%9"
    if draw(st.booleans()):
        lines += ["%10 = mul %9, %9", "%11 = reduce sum n1 %10", "%12 = sub %9, %11", f"yield [{b}m] {wide} %11"]
        last = "%12"
    if draw(st.booleans()):
        lines.append(f"yield [{b}m, n] {short} {fed}")
    lines.append(f"yield [{b}m, n1] {short} {last}")
    operands_and_body = [line for line in lines if not line.startswith("yield")]
    return normalize(parse("; ".join(operands_and_body + [line for line in lines if line.startswith("yield")])))[0]


@SETTINGS
@given(st.data(), chains())
def test_chains(data: st.DataObject, region: Region) -> None:
    run(data, region, {"m": SIZES, "n": SIZES, "n1": SIZES, "k": SIZES})


def run(data: st.DataObject, region: Region, sizes: dict[str, st.SearchStrategy[int]]) -> None:
    """Check a Region with a few shapes and memory layouts."""
    verify(region)
    assert supported(region) is None
    reduced = {statement.axis for statement in region.body if isinstance(statement, Reduce)}
    for _ in range(RUNS):
        drawn = {axis: data.draw(strategy, label=axis) for axis, strategy in sizes.items()}
        # ATen refuses the maximum of nothing, and the oracle cannot judge one empty result beside another.
        drawn |= {axis: max(size, 1) for axis, size in drawn.items() if axis in reduced or (axis[0] == "n" and len(sizes) > 3)}
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 100), label="seed"))
        operands = tensors(region, drawn, generator, data.draw(BATCHES, label="batch"))
        check(region, [_rearranged(data, operand) for operand in operands])


def _rearranged(data: st.DataObject, tensor: torch.Tensor) -> torch.Tensor:
    """The same values in another memory layout, or some of them broadcast."""
    how = data.draw(st.sampled_from(["as it is", "transposed", "every second", "broadcast"]), label="layout")
    if tensor.ndim == 0 or how == "as it is":
        return tensor
    if how == "transposed":
        return tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor
    if how == "every second":
        wide = tensor.new_zeros([2 * size for size in tensor.shape])
        view = wide[tuple(slice(1, None, 2) for _ in tensor.shape)]
        return view.copy_(tensor)
    dimension = data.draw(st.integers(0, tensor.ndim - 1), label="dimension")
    return tensor.narrow(dimension, 0, min(1, tensor.shape[dimension])).expand(tensor.shape)
