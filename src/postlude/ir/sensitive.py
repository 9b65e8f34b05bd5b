"""Which values of a program must be exact to the last place: those whose relative error an op behind them multiplies.

Kernels may compute the others with faster functions, whose error a 16-bit result can't show. Behind a subtraction of nearly equal
numbers it can: there a kernel's error would be a multiple of eager's. So it is before an op whose value jumps.
"""

from collections.abc import Callable, Mapping
from math import copysign

from postlude.ir.ops import JUMPS
from postlude.ir.region import Apply, Const, Extent, Group, Reduce, Round, Statement

#: Ops whose relative error may be any multiple of their inputs': near 1, near -1, near a multiple of pi, with a large exponent.
AMPLIFYING = frozenset(("log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "pow"))

_NEVER_NEGATIVE = frozenset(("abs", "relu", "exp", "exp2", "sqrt", "rsqrt", "sigmoid", "erfc", "cosh"))
_KEEP_SIGN = frozenset(("expm1", "log1p", "erf", "tanh", "asin", "atan", "sinh", "reciprocal"))


def sensitive(group: Group) -> set[str]:
    """Those of a group's statements that an op depends on which jumps or multiplies errors, or a sum whose terms may cancel."""
    signs = _signs(group.statements)
    return group.behind(i for s in group.statements if _magnifies(s, signs) for i in s.inputs)


def _magnifies(statement: Statement, signs: Mapping[str, int]) -> bool:
    """Whether a statement's error may be more than a few times its inputs' errors."""
    if isinstance(statement, Reduce):
        return statement.kind == "sum" and not signs.get(statement.input)
    if not isinstance(statement, Apply):
        return False
    if statement.op in ("add", "sub"):
        first, second = (signs.get(i, 0) for i in statement.inputs)
        return not first or first != (second if statement.op == "add" else -second)
    return statement.op in JUMPS or statement.op in AMPLIFYING


def _signs(statements: tuple[Statement, ...]) -> dict[str, int]:
    """1 for values that are never negative, -1 for those never positive; others are left out, or 0."""
    signs: dict[str, int] = {}
    for statement in statements:
        if isinstance(statement, Const):
            signs[statement.name] = int(copysign(1.0, statement.value))
        elif isinstance(statement, Extent):
            signs[statement.name] = 1
        elif isinstance(statement, Round | Reduce):
            signs[statement.name] = signs.get(statement.input, 0)
        elif isinstance(statement, Apply):
            given = [signs.get(i, 0) for i in statement.inputs]
            signs[statement.name] = _sign(statement, given)
    return signs


def _sign(statement: Apply, given: list[int]) -> int:
    op = statement.op
    if op in _NEVER_NEGATIVE or (op == "mul" and statement.inputs[0] == statement.inputs[1]):
        return 1
    if op in _KEEP_SIGN:
        return given[0]
    rule = _RULES.get(op)
    return rule(*given) if rule else 0


_RULES: dict[str, Callable[..., int]] = {
    "neg": lambda x: -x,
    "add": lambda x, y: x if x == y else 0,
    "sub": lambda x, y: x if x == -y else 0,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x * y,
    "maximum": lambda x, y: 1 if 1 in (x, y) else x if x == y else 0,
    "minimum": lambda x, y: -1 if -1 in (x, y) else x if x == y else 0,
    "where": lambda _, x, y: x if x == y else 0,
}
