"""Code generation: the text for a few Regions, kept in expected/, and the numbers of kernels of every form.

After a wanted change of the generated text run with POSTLUDE_UPDATE_EXPECTED=1 and review the difference.
"""

import ctypes
import mmap
import os
from pathlib import Path

import pytest
import torch

from postlude.ir import OPS, Region, normalize, parse, verify
from postlude.targets import cpp
from postlude.targets.aten import evaluate
from postlude.targets.cpp.codegen import UnsupportedRegion, generate, supported
from postlude.targets.cpp.codegen_ops import EXPRESSIONS
from postlude.targets.cpp.codegen_plan import plan
from tests.targets.cpp.numerics import check, empty_results, run

EXPECTED = Path(__file__).parent / "expected"

LINEAR_GELU = """region(m, n, k)
  %x = operand [m, k] bf16
  %w = operand [n, k] bf16
  %row = operand [n] bf16
  %acc = contract %x, %w : f32
  %0 = add %acc, %row
  %1 = const 0.5
  %2 = mul %0, %1
  %3 = const 0.7071067811865476
  %4 = mul %0, %3
  %5 = erf %4
  %6 = const 1.0
  %7 = add %5, %6
  %8 = mul %2, %7
  yield [m, n] bf16 %8"""

RESIDUAL_LAYERNORM = """region(m, n, k)
  %x = operand [m, k] f32
  %w = operand [n, k] f32
  %row = operand [n] f32
  %tile = operand [m, n] f32
  %row1 = operand [n] f32
  %row2 = operand [n] f32
  %acc = contract %x, %w : f32
  %0 = add %acc, %row
  %1 = add %0, %tile
  %2 = reduce sum n %1
  %3 = extent n
  %4 = div %2, %3
  %5 = sub %1, %4
  %6 = mul %5, %5
  %7 = reduce sum n %6
  %8 = div %7, %3
  %9 = const 1e-12
  %10 = add %8, %9
  %11 = rsqrt %10
  %12 = mul %5, %11
  %13 = mul %12, %row1
  %14 = add %13, %row2
  yield [m, n] f32 %1
  yield [m, n] f32 %14
  yield [m] f32 %11"""

ATTENTION = """region(b, m, n, n1, k)
  %x = operand [b, m, k] bf16
  %w = operand [b, n, k] bf16
  %tile = operand [b, m, n] f32
  %w1 = operand [b, n, n1] bf16
  %acc = contract %x, %w : f32
  %0 = const 0.125
  %1 = mul %acc, %0
  %2 = add %1, %tile
  %3 = reduce max n %2
  %4 = sub %2, %3
  %5 = exp %4
  %6 = reduce sum n %5
  %7 = div %5, %6
  %8 = round_to bf16 %7
  %acc1 = contract %8, %w1 : f32
  yield [b, m, n1] bf16 %acc1 order 0 2 1 3"""

GATE_AND_UP = """region(m, n, k)
  %x = operand [m, k] f16
  %w = operand [n, k] f16
  %w1 = operand [k, n] f16
  %acc = contract %x, %w : f32
  %acc1 = contract %x, %w1 : f32
  %0 = sigmoid %acc
  %1 = mul %acc, %0
  %2 = mul %1, %acc1
  %3 = const 0.0
  %4 = gt %2, %3
  yield [m, n] f16 %2
  yield [m, n] bool %4"""

QKV = """region(m, n, n1, n2, k)
  %x = operand [k, m] f32
  %w = operand [n, k] f32
  %row = operand [n] f32
  %w1 = operand [n1, k] f32
  %w2 = operand [k, n2] f32
  %col = operand [m] f32
  %acc = contract %x, %w : f32
  %0 = add %acc, %row
  %acc1 = contract %x, %w1 : f32
  %1 = mul %acc1, %col
  %acc2 = contract %x, %w2 : f32
  yield [m, n] f32 %0
  yield [m, n1] f32 %1
  yield [m, n2] f32 %acc2"""

#: One Region of each form, with the sizes of its axes.
FORMS = {
    "linear_gelu": LINEAR_GELU,
    "residual_layernorm": RESIDUAL_LAYERNORM,
    "attention": ATTENTION,
    "gate_and_up": GATE_AND_UP,
    "qkv": QKV,
    "double": RESIDUAL_LAYERNORM.replace("f32", "f64"),
    "masked": """region(b, m, n, k)
  %x = operand [b, m, k] f32
  %w = operand [b, k, n] f32
  %tile = operand [b, m, n] bool
  %scalar = operand [] f32
  %row = operand [n] bf16
  %col = operand [b, m] f16
  %acc = contract %x, %w : f32
  %0 = where %tile, %acc, %scalar
  %1 = add %0, %row
  %3 = sub %1, %col
  %4 = reduce min n %3
  %5 = isnan %4
  yield [b, m, n] f32 %3
  yield [b, m] f32 %4
  yield [b, m] bool %5""",
    "row_reduced": """region(m, n, k)
  %x = operand [m, k] f32
  %w = operand [n, k] f32
  %row = operand [n] f32
  %acc = contract %x, %w : f32
  %0 = reduce sum n %row
  %1 = mul %acc, %0
  %2 = extent m
  %3 = add %1, %2
  %4 = extent k
  %5 = sub %3, %4
  yield [m, n] f32 %5""",
    "scratch_rows": """region(m, n, k)
  %x = operand [m, k] f32
  %w = operand [n, k] f32
  %acc = contract %x, %w : f32
  %0 = tanh %acc
  %1 = exp %acc
  %2 = reduce sum n %0
  %3 = reduce max n %1
  %4 = mul %acc, %2
  %5 = mul %0, %3
  %6 = add %4, %5
  %7 = add %6, %1
  %8 = reduce sum n %7
  %9 = div %7, %8
  yield [m, n] f32 %9
  yield [m, n] f32 %0""",
}  # fmt: skip


def region_of(text: str) -> Region:
    region = parse(text)
    verify(region)
    return region


def unverified(*lines: str) -> Region:
    """A Region whose results need not depend on a contraction: what is tested is an op, on values that no product changes."""
    return parse("; ".join(["region(m, n, k)", *lines]))


def operands_for(region: Region, sizes: dict[str, int], batch: tuple[int, ...] = (2, 3), seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    operands = []
    for operand in region.operands:
        shape = [size for axis in operand.axes for size in (batch if axis == "b" else (sizes[axis],))]
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
        operands.append(value > 0 if operand.dtype == torch.bool else value.to(operand.dtype))
    return operands


@pytest.mark.parametrize("name", ["linear_gelu", "residual_layernorm", "attention", "masked"])
def test_the_generated_text(name: str) -> None:
    text = generate(region_of(FORMS[name]))
    path = EXPECTED / f"{name}.cpp"
    if "POSTLUDE_UPDATE_EXPECTED" in os.environ:
        path.write_text(text)
    assert text == path.read_text(), f"the generated text has changed; see the docstring of {__file__}"


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    "sizes", [(37, 70, 33, 19), (6, 64, 16, 64), (1, 1, 1, 1), (5, 3, 0, 7), (0, 4, 4, 4), (130, 257, 40, 100)], ids=str
)
def test_every_form(name: str, sizes: tuple[int, int, int, int]) -> None:
    region = region_of(FORMS[name])
    m, n, k, other = sizes
    check(region, operands_for(region, {"m": m, "n": n, "k": k, "n1": other, "n2": other + 1}))


@pytest.mark.parametrize("name", FORMS)
def test_the_normal_form_computes_the_same(name: str) -> None:
    region = region_of(FORMS[name])
    operands = operands_for(region, {"m": 9, "n": 20, "k": 8, "n1": 5, "n2": 6})
    normal, order = normalize(region)
    for given, normalized in zip(run(region, operands), run(normal, [operands[i] for i in order]), strict=True):
        torch.testing.assert_close(given, normalized)


def test_rows_without_columns() -> None:
    """A sum over no columns is 0, and a maximum is -inf."""
    region = region_of("""region(m, n, k)
      %x = operand [m, k] f32
      %w = operand [n, k] f32
      %acc = contract %x, %w : f32
      %0 = reduce sum n %acc
      %1 = reduce max n %acc
      yield [m] f32 %0
      yield [m] f32 %1""")
    total, largest = run(region, [torch.randn(5, 4), torch.randn(0, 4)])
    assert total.tolist() == [0.0] * 5
    assert largest.tolist() == [-torch.inf] * 5


def test_operands_of_any_memory_layout() -> None:
    region = region_of(FORMS["masked"])
    x, w, mask, scalar, row, col = operands_for(region, {"m": 7, "n": 21, "k": 9}, batch=(2, 3))
    exact = [result.clone() for result in run(region, [x, w, mask, scalar, row, col])]
    layouts = [
        x.transpose(0, 1).contiguous().transpose(0, 1),
        w.mT.contiguous().mT,
        mask.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        torch.cat([scalar.reshape(1), torch.ones(3)])[0],
        torch.stack([row, row], dim=-1)[..., 1],
        torch.nn.functional.pad(col, (3, 4))[..., 3:-4],
    ]
    for given, tensor in zip([x, w, mask, scalar, row, col], layouts, strict=True):
        assert torch.equal(given, tensor)
    for got, want in zip(run(region, layouts), exact, strict=True):
        assert torch.equal(got, want)


def test_broadcast_operands() -> None:
    """Stride 0 in any dimension, as Inductor hands over expanded tensors."""
    region = region_of(FORMS["masked"])
    operands = operands_for(region, {"m": 6, "n": 18, "k": 5}, batch=(2, 3))
    operands[2] = operands[2][:, :1, :1].expand(2, 3, 6, 18)
    check(region, operands)
    operands[2] = operands[2][..., :1].expand(2, 3, 6, 18)
    operands[4] = operands[4][:1].expand(18)
    operands[5] = operands[5][:1, :, :1].expand(2, 3, 6)
    check(region, operands)


def test_operands_without_rows_in_a_batch() -> None:
    """Axes [b] and [b, n]: one value, one row for each item of the batch."""
    region = region_of("""region(b, m, n, k)
      %x = operand [b, m, k] f32
      %w = operand [b, n, k] f32
      %row = operand [b, n] bf16
      %col = operand [b] f32
      %acc = contract %x, %w : f32
      %0 = add %acc, %row
      %1 = mul %0, %col
      yield [b, m, n] f32 %1""")
    x, w, row, col = operands_for(region, {"m": 7, "n": 37, "k": 9}, batch=(2, 3))
    for row_layout in (row, row.mT.contiguous().mT, row[:, :1].expand(2, 3, 37)):
        (result,) = run(region, [x, w, row_layout, col])
        torch.testing.assert_close(result, (x @ w.mT + row_layout.float().unsqueeze(2)) * col[..., None, None])


def test_a_tile_whose_first_dimension_is_the_columns() -> None:
    region = region_of("""region(m, n, k)
      %x = operand [m, k] f32
      %w = operand [n, k] f32
      %tile = operand [n, m] bf16
      %acc = contract %x, %w : f32
      %0 = add %acc, %tile
      yield [m, n] bf16 %0 order 1 0""")
    x, w, tile = operands_for(region, {"m": 21, "n": 70, "k": 9})
    (result,) = run(region, [x, w, tile])
    assert result.mT.is_contiguous()
    torch.testing.assert_close(result, (x @ w.mT + tile.mT).bfloat16())


def at_the_end_of_a_page(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose last byte is followed by memory that may not be touched."""
    size, page = tensor.numel() * tensor.element_size(), mmap.PAGESIZE
    pages = (size + page - 1) // page * page
    memory = mmap.mmap(-1, pages + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address + pages), ctypes.c_size_t(page), 0) == 0
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=pages - size)
    return flat.view(tensor.shape).copy_(tensor)


@pytest.mark.skipif(not hasattr(mmap, "MAP_PRIVATE") or os.uname().sysname != "Linux", reason="uses mprotect")
@pytest.mark.parametrize("name", FORMS)
def test_nothing_beyond_the_tensors_is_touched(name: str) -> None:
    region = region_of(FORMS[name])
    for m, n, k, other in ((3, 21, 5, 7), (7, 64, 16, 64), (13, 79, 33, 1)):
        operands = operands_for(region, {"m": m, "n": n, "k": k, "n1": other, "n2": other})
        guarded = [at_the_end_of_a_page(operand) for operand in operands]
        results = [
            at_the_end_of_a_page(result) if result.is_contiguous() else result for result in empty_results(region, operands)
        ]
        cpp.load(region)(*guarded, *results)
        for got, want in zip(results, run(region, operands), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_more_dimensions_than_are_joined() -> None:
    """Nine row dimensions of which no two lie behind each other."""
    region = region_of("""region(m, n, k)
      %x = operand [m, k] f32
      %w = operand [n, k] f32
      %tile = operand [m, n] f32
      %acc = contract %x, %w : f32
      %0 = add %acc, %tile
      yield [m, n] f32 %0""")
    tile = torch.randn([3] * 9 + [4])[(slice(2),) * 9]
    x, w = torch.randn(2**9, 5), torch.randn(4, 5)
    result = torch.empty(2**9, 4)
    cpp.load(region)(x, w, tile, result)
    torch.testing.assert_close(result, x @ w.T + tile.reshape(-1, 4))


SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -3.5, 1e-40, 1e30, -1e30, torch.inf, -torch.inf, torch.nan, 3.0, -0.3, 2.0]


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_special_values_of_every_op(dtype: str) -> None:
    """NaN, infinities and zeros of both signs, as ATen has them, through one kernel with all ops."""
    lines = [f"%x = operand [m, k] {dtype}", f"%w = operand [n, k] {dtype}"]
    lines += [f"%a = operand [m, n] {dtype}", f"%c = operand [m, n] {dtype}", "%t = operand [m, n] bool"]
    lines += [f"%acc = contract %x, %w : {dtype}"]
    names = [name for name in OPS if set(OPS[name].inputs) == {"float"} and OPS[name].result == "float"]
    lines += [f"%o{i} = {name} {', '.join(['%a', '%c'][: OPS[name].arity])}" for i, name in enumerate(names)]
    lines += ["%s = where %t, %a, %c", f"yield [m, n] {dtype} %acc", f"yield [m, n] {dtype} %s"]
    lines += [f"yield [m, n] {dtype} %o{i}" for i in range(len(names))]
    region = unverified(*lines)
    kind = torch.float32 if dtype == "f32" else torch.float64
    a, c = (side.contiguous() for side in torch.meshgrid(torch.tensor(SPECIAL), torch.tensor([*SPECIAL, 7.0]), indexing="ij"))
    operands = [torch.ones(16, 1, dtype=kind), torch.ones(17, 1, dtype=kind), a.to(kind), c.to(kind), a > 0]
    wanted = evaluate(region, operands)
    for name, got, want in zip(["acc", "where", *names], run(region, operands), wanted, strict=True):
        if name in ("fmod", "remainder"):  # ATen's vectors give NaN for a subnormal divisor
            got, want = (torch.cat([value[:, :7], value[:, 8:]], dim=1) for value in (got, want))
        torch.testing.assert_close(
            got, want, rtol=1e-5 if dtype == "f32" else 1e-13, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )
        both_zero = (got == 0) & (want == 0)
        assert torch.equal(got[both_zero].signbit(), want[both_zero].signbit()), f"{name} gives a zero of the wrong sign"


def test_comparisons_and_truth_values() -> None:
    lines = ["%x = operand [m, k] f32", "%w = operand [n, k] f32", "%a = operand [m, n] f32", "%c = operand [m, n] f32"]
    lines += ["%acc = contract %x, %w : f32"]
    names = [name for name in OPS if OPS[name].result == "bool"]
    for i, name in enumerate(names):
        inputs = ["%a", "%c"] if OPS[name].inputs[0] == "float" else ["%o0", "%o1"]
        lines.append(f"%o{i} = {name} {', '.join(inputs[: OPS[name].arity])}")
    region = unverified(*lines, "yield [m, n] f32 %acc", *(f"yield [m, n] bool %o{i}" for i in range(len(names))))
    a, c = (side.contiguous() for side in torch.meshgrid(torch.tensor(SPECIAL), torch.tensor([*SPECIAL, 7.0]), indexing="ij"))
    operands = [torch.ones(16, 1), torch.ones(17, 1), a, c]
    for name, got, want in zip(["acc", *names], run(region, operands), evaluate(region, operands), strict=True):
        assert torch.equal(got, want), name


def test_nan_passes_through_reductions() -> None:
    region = region_of("""region(m, n, k)
      %x = operand [m, k] f32
      %w = operand [n, k] f32
      %acc = contract %x, %w : f32
      %0 = reduce max n %acc
      %1 = reduce min n %acc
      %2 = reduce sum n %acc
      yield [m] f32 %0
      yield [m] f32 %1
      yield [m] f32 %2""")
    for columns in (1, 5, 16, 40, 100):
        for position in {0, columns // 2, columns - 1}:
            x = torch.randn(3, 1)
            w = torch.randn(columns, 1)
            w[position] = torch.nan
            for result in run(region, [x, w]):
                assert result.isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_survives_a_kernel(dtype: torch.dtype) -> None:
    short = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    region = unverified(
        f"%x = operand [m, k] {short}",
        f"%w = operand [n, k] {short}",
        f"%a = operand [m, n] {short}",
        "%acc = contract %x, %w : f32",
        "%0 = neg %a",
        f"yield [m, n] {short} %0",
        "yield [m, n] f32 %acc",
    )
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).reshape(256, 256)
    got, _ = run(region, [torch.zeros(256, 1, dtype=dtype), torch.zeros(256, 1, dtype=dtype), every])
    # With avx512_bf16 a subnormal result becomes 0.
    subnormal = (every != 0) & (every.abs().float() < 2.0**-126)  # no float16 is that small
    same = (got == -every) & (got.signbit() == (-every).signbit()) | got.isnan() & every.isnan()
    assert same[~subnormal].all()
    assert (got[subnormal].abs().float() < 2.0**-126).all()


def test_powers_with_a_constant_exponent() -> None:
    lines = ["%x = operand [m, k] f32", "%w = operand [n, k] f32", "%acc = contract %x, %w : f32"]
    exponents = [1.0, 2.0, 3.0, 0.5, -0.5, -1.0, -2.0, 2.5, 4.0, 0.0]
    for i, exponent in enumerate(exponents):
        lines += [f"%c{i} = const {exponent!r}", f"%p{i} = pow %acc, %c{i}"]
    region = unverified(*lines, *(f"yield [m, n] f32 %p{i}" for i in range(len(exponents))))
    x = torch.randn(20, 1)
    w = torch.randn(30, 1)
    for exponent, got in zip(exponents, run(region, [x, w]), strict=True):
        torch.testing.assert_close(got, (x @ w.T).pow(exponent), rtol=1e-6, atol=0, equal_nan=True)


def test_long_rows_are_summed_as_well_as_in_eager() -> None:
    region = region_of("""region(m, n, k)
      %x = operand [m, k] f32
      %w = operand [n, k] f32
      %acc = contract %x, %w : f32
      %0 = reduce sum n %acc
      yield [m] f32 %0""")
    x, w = torch.ones(1, 1), torch.rand(200_003, 1)
    (total,) = run(region, [x, w])
    exact = w.double().sum()
    assert abs(total.item() - exact) <= 2 * abs(w.sum().double() - exact) + 2e-7 * exact


def test_a_softmax_takes_three_passes_and_no_scratch_row() -> None:
    region = region_of(ATTENTION)
    passes = plan(region, region.groups[0])
    assert len(passes.passes) == 3
    assert passes.scratch_rows == 0
    assert [p.keeps for p in passes.passes] == [["2"], ["5"], []]


def test_a_cheap_value_is_computed_again() -> None:
    region = region_of(RESIDUAL_LAYERNORM)
    passes = plan(region, region.groups[0])
    assert [p.keeps for p in passes.passes] == [["1"], [], []]
    assert all("5" in [s.name for s in p.statements] for p in passes.passes[1:])


def test_every_op_has_an_expression() -> None:
    assert EXPRESSIONS.keys() == OPS.keys()


def test_unsupported_regions_are_refused_with_a_reason() -> None:
    region = region_of("""region(m, n, n1, k)
      %x = operand [m, k] f32
      %w = operand [n, k] f32
      %w1 = operand [n1, k] f32
      %acc = contract %x, %w : f32
      %acc1 = contract %x, %w1 : f32
      %0 = reduce sum n %acc
      %1 = mul %acc1, %0
      yield [m, n1] f32 %1
      yield [m, n] f32 %acc""")
    assert "columns 'n'" in (supported(region) or "")
    with pytest.raises(UnsupportedRegion, match="%0 over the columns 'n' is needed by results over 'n1'"):
        generate(region)


def test_a_result_in_another_order_of_memory() -> None:
    region = region_of(ATTENTION)
    operands = operands_for(region, {"m": 7, "n": 9, "k": 8, "n1": 16})
    (result,) = run(region, operands)
    assert result.stride() == empty_results(region, operands)[0].stride()
    assert result.transpose(1, 2).is_contiguous()
