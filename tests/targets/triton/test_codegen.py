"""The generated text, once in full: a change of it should be meant."""

from pathlib import Path

import pytest

from postlude.ir import parse
from postlude.targets import triton
from postlude.targets.triton.codegen import UnsupportedRegion, generate

PROGRAM = """region(m, n, k); %x = operand [m, k] bf16; %w = operand [n, k] bf16; %bias = operand [n] bf16;
%res = operand [m, n] bf16; %acc = contract %x, %w : f32; %0 = add %acc, %bias; %1 = tanh %0; %2 = add %1, %res;
yield [m, n] bf16 %2"""


def test_linear_tanh_residual() -> None:
    expected = Path(__file__).with_name("expected_chained.txt").read_text()
    assert generate(parse(PROGRAM), rows=2, chained=True).text == expected


def test_unchained_kernels_run_on_every_gpu() -> None:
    text = generate(parse(PROGRAM)).text
    assert not any(word in text for word in ("gdc", "asm", "prefetch", "release", "extra.cuda"))


def test_an_axis_of_two_strides() -> None:
    source = generate(parse(PROGRAM), split=frozenset({(3, "m")}))
    assert "p_res + rows // s_res_m_inner * s_res_m_outer + rows % s_res_m_inner * s_res_m" in source.text
    assert [(s.axis, s.part) for s in source.strides if s.tensor == 3] == [
        ("m", "step"),
        ("m", "inner"),
        ("m", "outer"),
        ("n", "step"),
    ]


@pytest.mark.parametrize(
    ("rest", "reason"),
    [
        ("%0 = reduce sum n %acc; yield [m] f32 %0", "reduces over whole rows"),
        ("%0 = exp %acc; %acc1 = contract %0, %v : f32; yield [m, n1] f32 %acc1", "which the Region computes"),
    ],
)
def test_what_it_has_no_kernel_for(rest: str, reason: str) -> None:
    region = parse(
        "region(m, n, n1, k); %x = operand [m, k] f32; %w = operand [n, k] f32; %v = operand [n, n1] f32; "
        f"%acc = contract %x, %w : f32; {rest}"
    )
    assert reason in str(triton.unsupported(region))
    with pytest.raises(UnsupportedRegion, match="Use target 'aten'"):
        triton.source(region)


@pytest.mark.parametrize("type", ["f32", "f64"])
def test_what_is_cut_off_is_divided_precisely(type: str) -> None:
    """A quotient of 2.9999998 instead of 3 is cut to 2. In float64 `/` is precise already."""
    text = triton.source(
        parse(
            f"region(m, n, k); %x = operand [m, k] {type}; %w = operand [n, k] {type}; %acc = contract %x, %w : {type};"
            f" %c = const 3.0; %0 = div %acc, %c; %1 = trunc %0; %2 = div %1, %acc; yield [m, n] {type} %2"
        )
    )
    assert ("v0 = tl.div_rn(v_acc, v_c)" in text) == (type == "f32")
    assert "v2 = v1 / v_acc" in text
