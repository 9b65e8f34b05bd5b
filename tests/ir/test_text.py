"""The text form, the verifier and the normal form."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from postlude.ir import Const, Region, RegionError, RegionSyntaxError, normalize, parse, to_text, verify
from postlude.targets.aten import evaluate
from tests.strategies import regions, tensors

LINEAR_GELU = """region(m, n, k)
  %x = operand [m, k] bf16
  %w = operand [n, k] bf16
  %row = operand [n] bf16
  %acc = contract %x, %w : f32
  %0 = add %acc, %row
  %1 = sigmoid %0
  yield [m, n] bf16 %1"""

ATTENTION = """region(b, m, n, n1, k)
  %x = operand [b, m, k] f32
  %w = operand [b, n, k] f32
  %w1 = operand [b, n, n1] f32
  %acc = contract %x, %w : f32
  %0 = reduce max n %acc
  %1 = sub %acc, %0
  %2 = exp %1
  %3 = reduce sum n %2
  %4 = div %2, %3
  %acc1 = contract %4, %w1 : f32
  yield [b, m, n1] f32 %acc1 order 0 2 1 3"""


@pytest.mark.parametrize("text", [LINEAR_GELU, ATTENTION])
def test_printing_and_parsing_are_inverses(text: str) -> None:
    region = parse(text)
    verify(region)
    assert to_text(region, lines=True) == text
    assert parse(to_text(region)) == region


@given(regions())
def test_every_region_reads_back(region: Region) -> None:
    line = to_text(region)
    assert parse(line) == region
    assert parse(to_text(region, lines=True)) == region
    assert not set("\"'\\\n") & set(line)


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_constants_read_back_bit_for_bit(value: float) -> None:
    region = parse(LINEAR_GELU)
    text = to_text(Region(region.axes, region.operands, (*region.body, Const("c", value)), region.yields))
    constant = parse(text).body[-1]
    assert isinstance(constant, Const)
    assert repr(constant.value) == repr(value)


@settings(deadline=None)
@given(regions(dtypes=(torch.float64,)), st.integers(0, 5), st.integers(0, 5), st.integers(0, 5))
def test_normal_form_keeps_the_meaning(region: Region, m: int, n: int, k: int) -> None:
    operands = tensors(region, {"m": m, "n": max(n, 1), "k": k}, torch.Generator().manual_seed(0))
    normal, origin = normalize(region)
    verify(normal)
    before = evaluate(region, operands)
    after = evaluate(normal, [operands[index] for index in origin])
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, equal_nan=True)


@given(regions())
def test_normal_form_is_stable(region: Region) -> None:
    normal, _ = normalize(region)
    again, origin = normalize(normal)
    assert again == normal
    assert origin == tuple(range(len(normal.operands)))


def test_equal_programs_share_one_normal_form() -> None:
    one = parse(LINEAR_GELU)
    other = parse(
        "region(m, c, q); %bias = operand [c] bf16; %a = operand [m, q] bf16; %b = operand [c, q] bf16;"
        " %p = contract %a, %b : f32; %dead = exp %p; %s = add %bias, %p; %t = sigmoid %s; %u = sigmoid %s;"
        " yield [m, c] bf16 %u"
    )
    verify(other)
    normal, origin = normalize(other)
    assert to_text(normal) == to_text(normalize(one)[0])
    assert origin == (1, 2, 0)


def test_zero_and_minus_zero_stay_apart() -> None:
    region = parse(
        "region(m, n, k); %x = operand [m, k] f32; %w = operand [k, n] f32; %a = contract %x, %w : f32;"
        " %p = const 0.0; %q = const -0.0; %s = mul %a, %p; %t = mul %a, %q; yield [m, n] f32 %s; yield [m, n] f32 %t"
    )
    assert sorted(repr(s.value) for s in normalize(region)[0].body if isinstance(s, Const)) == ["-0.0", "0.0"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("region(m, n, k)", "m, n, k", "starts with"),
        ("bf16 %1", "int4 %1", "unknown type"),
        ("sigmoid %0", "sigmoid", "no statement"),
        ("sigmoid %0", "sigmo %0", "no statement"),
        ("%0 = add", "0 = add", "expected '%name"),
    ],
)
def test_text_that_does_not_parse_is_named(old: str, new: str, message: str) -> None:
    with pytest.raises(RegionSyntaxError, match=message):
        parse(LINEAR_GELU.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("add %acc, %row", "add %acc, %nothing", "not defined before"),
        ("%1 = sigmoid", "%0 = sigmoid", "defined twice"),
        ("[n, k] bf16", "[n, j] bf16", "the Region declares"),
        ("[n, k] bf16", "[n, m] bf16", "contracts axes"),
        ("sigmoid %0", "logical_not %0", "takes"),
        ("sigmoid %0", "sigmoid %x", "elementwise"),
        ("sigmoid %0", "round_to bool %0", "floating point"),
        ("sigmoid %0", "reduce sum k %0", "reduces over"),
        ("sigmoid %0", "reduce sum m %row", "reduces over"),
        ("yield [m, n] bf16 %1", "yield [m] bf16 %1", "has axes"),
        ("yield [m, n] bf16 %1", "yield [m, n] bool %1", "yield says"),
        ("yield [m, n] bf16 %1", "yield [m, n] bf16 %row", "not computed"),
        ("%0 = add %acc, %row", "%0 = exp %acc", "is not used"),
        ("%0 = add %acc, %row", "%c = const 1.0; %0 = mul %row, %c", "does not depend on a contraction"),
        ("contract %x, %w : f32", "contract %x, %w : bf16", "accumulates in"),
    ],
)
def test_the_verifier_names_the_fault(old: str, new: str, message: str) -> None:
    assert old in LINEAR_GELU
    with pytest.raises(RegionError, match=message):
        verify(parse(LINEAR_GELU.replace(old, new)))
