"""Finds the composites of ops.RULES in a Region's program."""

import ast
from collections.abc import Mapping
from functools import lru_cache
from math import isclose

from postlude.ir import OPS, Apply, Const, Statement
from postlude.targets.cute.ops import RULES, Rule

#: How far a constant may be from the pattern's: 0.7978845608 and 0.79788458 are one number to a model's author.
_TOLERANCE = 1e-6


def match(name: str, statements: Mapping[str, Statement]) -> tuple[str, dict[str, str]] | None:
    """The expression of the first rule that the value `name` matches, and the values that its letters stand for."""
    for rule in RULES:
        found: dict[str, str] = {}
        if _matches(_pattern(rule), name, statements, found):
            return rule.expression, found
    return None


@lru_cache
def _pattern(rule: Rule) -> ast.expr:
    return ast.parse(rule.pattern, mode="eval").body


def _matches(pattern: ast.expr, name: str, statements: Mapping[str, Statement], found: dict[str, str]) -> bool:
    statement = statements.get(name)
    if isinstance(pattern, ast.Name):
        return found.setdefault(pattern.id, name) == name
    if isinstance(pattern, ast.Constant):
        return isinstance(statement, Const) and isclose(statement.value, pattern.value, rel_tol=_TOLERANCE)  # type: ignore[arg-type]
    assert isinstance(pattern, ast.Call)
    assert isinstance(pattern.func, ast.Name)
    if not isinstance(statement, Apply) or statement.op != pattern.func.id:
        return False
    orders = [statement.inputs, statement.inputs[::-1]] if OPS[statement.op].commutative else [statement.inputs]
    for inputs in orders:
        attempt = dict(found)
        if all(_matches(p, i, statements, attempt) for p, i in zip(pattern.args, inputs, strict=True)):
            found.update(attempt)
            return True
    return False
