"""The generated Python modules: their text, what they refuse, and that every op has an expression."""

import ast
from pathlib import Path

import pytest

from postlude.ir import OPS, parse
from postlude.targets import cute
from postlude.targets.cute import codegen
from postlude.targets.cute.ops import EXPRESSIONS, FAST_EXPRESSIONS, RULES
from postlude.targets.cute.peephole import match
from tests.targets.cute.catalogue import CATALOGUE

EXPECTED = Path(__file__).parent / "expected"


@pytest.mark.parametrize("name", ["gelu_erf", "everything", "swiglu", "totals", "paired", "heads"])
def test_source_is_as_expected(name: str) -> None:
    assert cute.source(CATALOGUE[name]) == (EXPECTED / f"{name}.txt").read_text()


@pytest.mark.parametrize("name", CATALOGUE)
def test_source_is_python(name: str) -> None:
    ast.parse(cute.source(CATALOGUE[name]))


def test_every_op_has_an_expression() -> None:
    assert set(EXPRESSIONS) == set(OPS)
    assert set(FAST_EXPRESSIONS) <= set(EXPRESSIONS)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.pattern)
def test_a_rule_is_found_in_its_own_pattern(rule) -> None:
    """The pattern, written as a program, matches itself, with commutative inputs exchanged too."""
    for exchanged in (False, True):
        lines: list[str] = []
        root = _write(ast.parse(rule.pattern, mode="eval").body, lines, exchanged)
        program = f"region(m, n, k); %acc = contract %acc, %acc : f32; {'; '.join(lines)}; yield [m, n] bf16 %{root}"
        found = match(root, {s.name: s for s in parse(program).body})
        assert found is not None
        assert found[0] == rule.expression
        assert all(letter == name for letter, name in found[1].items())


def _write(pattern: ast.expr, lines: list[str], exchanged: bool) -> str:
    if isinstance(pattern, ast.Name):
        return pattern.id
    if isinstance(pattern, ast.Constant):
        lines.append(f"%c{len(lines)} = const {float(pattern.value)!r}")
        return f"c{len(lines) - 1}"
    inputs = [_write(argument, lines, exchanged) for argument in pattern.args]
    if exchanged and OPS[pattern.func.id].commutative:
        inputs.reverse()
    lines.append(f"%s{len(lines)} = {pattern.func.id} {', '.join('%' + name for name in inputs)}")
    return f"s{len(lines) - 1}"


def test_results_of_float32_get_exact_functions() -> None:
    program = (
        "region(m, n, k); %x = operand [m, k] bf16; %w = operand [n, k] bf16; %acc = contract %x, %w : f32; %0 = exp %acc;"
        " %1 = sigmoid %0; %2 = sigmoid %acc; yield [m, n] f32 %1; yield [m, n] bf16 %2"
    )
    text = cute.source(parse(program))
    assert "f.exp(acc)" in text
    assert "f.sigmoid(v0)" in text
    assert "f.sigmoid_fast(acc)" in text


@pytest.mark.parametrize("jump", ["trunc", "floor"])
def test_what_is_cut_off_gets_exact_functions(jump: str) -> None:
    """A quotient of 2.9999998 instead of 3 is cut to 2, which a 16-bit type shows."""
    program = (
        "region(m, n, k); %x = operand [m, k] bf16; %w = operand [n, k] bf16; %row = operand [n] bf16;"
        f" %acc = contract %x, %w : f32; %0 = div %acc, %row; %1 = {jump} %0; %2 = exp %1; yield [m, n] bf16 %2"
    )
    text = cute.source(parse(program))
    assert "f.div(acc, row)" in text
    assert "f.exp_fast(" in text


REFUSED = {
    "attention": "region(b, m, n, n1, k); %x = operand [b, m, k] bf16; %w = operand [b, n, k] bf16; "
    " %w1 = operand [b, n, n1] bf16; %acc = contract %x, %w : f32; %0 = exp %acc;"
    " %acc1 = contract %0, %w1 : f32; yield [b, m, n1] bf16 %acc1",
    "whole rows": "region(m, n, k); %x = operand [m, k] bf16; %w = operand [n, k] bf16; %acc = contract %x, %w : f32;"
    " %0 = reduce max n %acc; %1 = sub %acc, %0; yield [m, n] bf16 %1",
    "f32": "region(m, n, k); %x = operand [m, k] f32; %w = operand [n, k] f32; "
    " %acc = contract %x, %w : f32; yield [m, n] f32 %acc",
    "along n": "region(m, n, k); %x = operand [m, k] bf16; %w = operand [k, n] bf16; %w1 = operand [k, n] bf16;"
    " %acc = contract %x, %w : f32; %acc1 = contract %x, %w1 : f32; %0 = mul %acc, %acc1; yield [m, n] bf16 %0",
}


@pytest.mark.parametrize(("reason", "program"), REFUSED.items())
def test_what_no_kernel_says_is_refused(reason: str, program: str) -> None:
    message = cute.unsupported(parse(program))
    assert message is not None
    assert reason in message


def test_names_that_python_would_take_are_changed() -> None:
    program = CATALOGUE["gelu_erf"]
    text = codegen.generate(program)
    renamed = parse(
        "region(m, n, k); %x = operand [m, k] bf16; %w = operand [n, k] bf16; %lambda = operand [n] bf16; %c = operand [n] bf16;"
        " %acc = contract %x, %w : f32; %0 = add %acc, %lambda; %1 = add %0, %c; yield [m, n] bf16 %1"
    )
    assert "row" in text
    ast.parse(cute.source(renamed))
    assert "operand_lambda" in cute.source(renamed)
    assert "operand_c" in cute.source(renamed)
