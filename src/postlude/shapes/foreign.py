"""Specs of torch.fx.experimental.dynamic_spec (torch 2.13 and later) as ours.

Their expressions are sympy's, over symbols that belong to their variables. Their variables are always unbacked symbols, so a spec
that comes from there is `guard_free`.
"""

from __future__ import annotations

import functools
import operator
import re
from typing import Any

from postlude.errors import SpecError
from postlude.shapes.expressions import COMPARISONS, OPERATORS, Expression, IntVar, Relation, ShapeVar, expression
from postlude.shapes.spec import DictSpec, ObjectSpec, ParamsSpec, SeqSpec, ShapesSpec, TensorSpec

_HOME = "torch.fx.experimental.dynamic_spec"
_FUNCTIONS = {"FloorDiv": "//", "CleanDiv": "//", "Mod": "%", "PythonMod": "%"}
_RELATIONS = {
    "Equality": "==",
    "Unequality": "!=",
    "StrictLessThan": "<",
    "LessThan": "<=",
    "StrictGreaterThan": ">",
    "GreaterThan": ">=",
}


def is_foreign(spec: object) -> bool:
    """Whether something is one of torch's own specs."""
    return type(spec).__module__ == _HOME


def from_torch(spec: Any) -> ShapesSpec:
    """A ShapesSpec or ParamsSpec of torch as one of ours.

    Raises:
        SpecError: it holds an expression that is not made of +, -, *, // and %.
    """
    reader = _Reader()
    if type(spec).__name__ == "ShapesSpec":
        params = reader.params(spec._params) if spec._params is not None else None
        return ShapesSpec(params, assumptions=[reader.relation(one.node.expr) for one in spec._assumptions], guard_free=True)
    if type(spec).__name__ == "ParamsSpec":
        return ShapesSpec(reader.params(spec), guard_free=True)
    raise SpecError(f"the spec is torch's {type(spec).__name__}", "torch's ShapesSpec or ParamsSpec")


def from_torch_parts(params: dict[str, Any]) -> ParamsSpec:
    """A dict by parameter, with specs of torch in it, as a ParamsSpec of ours."""
    reader = _Reader()
    return ParamsSpec({name: reader.value(value) for name, value in params.items()})


def has_foreign(value: Any) -> bool:
    """Whether a dict, or what is in it, holds specs of torch."""
    if isinstance(value, dict):
        return any(map(has_foreign, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(has_foreign, value))
    return is_foreign(value) or type(value).__name__ == "SymInt"


class _Reader:
    """One spec: the same variable of torch is the same variable of ours throughout."""

    def __init__(self) -> None:
        self.variables: dict[str, IntVar] = {}

    def params(self, spec: Any) -> ParamsSpec:
        entries = {name: self.value(value) for name, value in spec._named_args.items()}
        if spec._varargs is not None:
            entries["*args"] = [self.value(value) for value in spec._varargs]
        if spec._varkw is not None:
            entries["**kwargs"] = {name: self.value(value) for name, value in spec._varkw.items()}
        return ParamsSpec(entries)

    def value(self, spec: Any) -> Any:
        name = type(spec).__name__
        if isinstance(spec, list):
            return [self.value(value) for value in spec]
        if isinstance(spec, dict):
            return {key: self.value(value) for key, value in spec.items()}
        if not is_foreign(spec) and name != "SymInt":
            return spec
        if name == "TensorSpec":
            return TensorSpec([self.value(dim) for dim in spec._specs])
        if name == "SeqSpec":
            return SeqSpec([self.value(entry) for entry in spec._entries])
        if name == "DictSpec":
            return DictSpec({key: self.value(entry) for key, entry in spec._entries.items()})
        if name == "ObjectSpec":
            return ObjectSpec({key: self.value(entry) for key, entry in spec._fields.items()})
        if hasattr(spec, "sympy_sym"):
            return self.variable(spec.sympy_sym, spec)
        return self.expression(spec.node.expr, spec.node.shape_env)

    def variable(self, symbol: Any, declared: Any = None) -> IntVar:
        """The variable of a symbol. Its range is in the declaration, which an expression does not have at hand."""
        if symbol.name not in self.variables:
            name = re.sub(r"\W", "_", symbol.name.rpartition("#")[0])
            name = name if name.isidentifier() else f"v_{name}"
            if declared is not None:
                least, most, hint = declared.min, declared.max, declared.optimization_hint
                kind: type[IntVar] = ShapeVar if type(declared).__name__ == "ShapeVar" else IntVar
            else:
                from torch.fx.experimental import dynamic_spec

                bounds = dynamic_spec._get_spec_shape_env().var_to_range[symbol]
                least, most = (int(bound) if bound.is_Integer else None for bound in (bounds.lower, bounds.upper))
                kind, hint = IntVar if least is None or least < 0 else ShapeVar, None
            self.variables[symbol.name] = kind(name, min=least, max=most, optimization_hint=hint)
        return self.variables[symbol.name]

    def expression(self, expr: Any, env: Any = None) -> Expression:
        name = type(expr).__name__
        if expr.is_Symbol:
            return self.variable(expr)
        if expr.is_Integer:
            return _sure(expression(int(expr)))
        if name in ("Add", "Mul"):
            parts = [self.expression(part) for part in sorted(expr.args, key=lambda part: part.is_Integer)]
            return functools.reduce(operator.add if name == "Add" else operator.mul, parts)
        if name == "Pow" and expr.exp.is_Integer and expr.exp > 0:
            return functools.reduce(operator.mul, [self.expression(expr.base)] * int(expr.exp))
        if name in _FUNCTIONS:
            left, right = map(self.expression, expr.args)
            return _sure(expression(OPERATORS[_FUNCTIONS[name]][0](left, right)))
        raise SpecError(f"there is torch's {expr}", "an expression of +, -, *, // and %")

    def relation(self, expr: Any) -> Relation:
        symbol = _RELATIONS.get(type(expr).__name__)
        if symbol is None:
            raise SpecError(f"there is torch's {expr}", "one comparison; two are two assumptions")
        left, right = map(self.expression, expr.args)
        found = COMPARISONS[symbol](left, right)
        assert isinstance(found, Relation)
        return found


def _sure(found: Expression | None) -> Expression:
    assert found is not None
    return found
