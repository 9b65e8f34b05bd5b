"""Whether a guard says no more than a spec: then what checks the spec need not be followed by the guard.

Guards are taken as the Python text that Dynamo prints of them. What is not understood, or not proved, stays a guard.
"""

from __future__ import annotations

import ast
import itertools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from postlude.shapes.expressions import Expression, IntVar

_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: sympy.Mod,
}
#: A comparison as the differences that must all be 0 or more. Equality is both ways.
_DIFFERENCES: dict[type, Callable[[Any, Any], tuple[Any, ...]]] = {
    ast.LtE: lambda a, b: (b - a,),
    ast.Lt: lambda a, b: (b - a - 1,),
    ast.GtE: lambda a, b: (a - b,),
    ast.Gt: lambda a, b: (a - b - 1,),
    ast.Eq: lambda a, b: (a - b, b - a),
}
#: Functions that are one of their two arguments: how it compares with the other.
_EXTREMES: dict[str, type] = {"min": ast.LtE, "max": ast.GtE, "torch.sym_min": ast.LtE, "torch.sym_max": ast.GtE}


class _Unproved(Exception):
    pass


def implied(guard: str, sizes: Mapping[str, Expression]) -> bool:
    """Whether every call that keeps to the spec passes a guard.

    Args:
        guard: Python source, as in ``2 <= L['x'].size()[0]``.
        sizes: what the spec says of sizes, by the text that stands for them: ``{"L['x'].size()[0]": 2 * n}``.
    """
    prover = _Prover({ast.dump(ast.parse(text, mode="eval").body): size for text, size in sizes.items()})
    try:
        return prover.true(ast.parse(guard.split("  #")[0].strip(), mode="eval").body)
    except (_Unproved, SyntaxError):
        return False


class _Prover:
    def __init__(self, sizes: Mapping[str, Expression]) -> None:
        self.sizes = sizes
        self.symbols: dict[IntVar, sympy.Expr] = {}
        self.ranges: dict[sympy.Symbol, ValueRanges[Any]] = {}

    def true(self, node: ast.expr) -> bool:
        if isinstance(node, ast.BoolOp):
            return (all if isinstance(node.op, ast.And) else any)([self.true(value) for value in node.values])
        if not isinstance(node, ast.Compare):
            raise _Unproved
        values = [self.value(part) for part in (node.left, *node.comparators)]
        return all(self.holds(type(op), *pair) for op, pair in zip(node.ops, itertools.pairwise(values), strict=True))

    def holds(self, comparison: type, a: Any, b: Any) -> bool:
        if comparison is ast.NotEq:
            return self.holds(ast.Lt, a, b) or self.holds(ast.Gt, a, b)
        if comparison not in _DIFFERENCES:
            raise _Unproved
        return all(self.not_negative(sympy.expand(difference)) for difference in _DIFFERENCES[comparison](a, b))

    def not_negative(self, difference: Any) -> bool:
        if difference.is_number:
            return bool(difference >= 0)
        return bool(bound_sympy(difference, self.ranges).lower >= 0)

    def value(self, node: ast.expr) -> Any:
        if (size := self.sizes.get(ast.dump(node))) is not None:
            return size.evaluate({variable: self.symbol(variable) for variable in size.variables()})
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return sympy.Integer(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return _ARITHMETIC[type(node.op)](self.value(node.left), self.value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self.value(node.operand)
        if isinstance(node, ast.Call) and len(node.args) == 2 and (order := _EXTREMES.get(ast.unparse(node.func))):
            a, b = map(self.value, node.args)
            for chosen, other in ((a, b), (b, a)):
                if self.holds(order, chosen, other):
                    return chosen
        raise _Unproved

    def symbol(self, variable: IntVar) -> sympy.Expr:
        """A variable as a multiple of a symbol whose range is known."""
        if variable not in self.symbols:
            symbol = sympy.Symbol(f"v{len(self.symbols)}", integer=True)
            step = variable.multiple_of
            least = -int_oo if variable.min is None else -(-variable.min // step)
            most = int_oo if variable.max is None else variable.max // step
            self.ranges[symbol] = ValueRanges(least, most)
            self.symbols[variable] = step * symbol
        return self.symbols[variable]
