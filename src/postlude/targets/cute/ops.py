"""What each op of the IR is in a generated CuTe module: one entry per op, an expression over functions.py.

``{0}``, ``{1}``, ... stand for the inputs. An op that is missing here can't be generated, and a test says so.
"""

from dataclasses import dataclass

# fmt: off
_UNARY = (
    "abs", "sign", "exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "erf", "erfc", "tanh",
    "sigmoid", "relu", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "floor", "ceil", "trunc", "round", "isnan",
    "isinf", "logical_not",
)
_BINARY = (
    "div", "maximum", "minimum", "pow", "atan2", "fmod", "remainder", "copysign", "eq", "ne", "lt", "le", "gt", "ge",
    "logical_and", "logical_or", "logical_xor",
)
# fmt: on

#: Op name -> expression that is as accurate as the op in CUDA's float32.
EXPRESSIONS: dict[str, str] = {
    "neg": "f.neg({0})",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    **{name: f"f.{name}({{0}})" for name in _UNARY},
    **{name: f"f.{name}({{0}}, {{1}})" for name in _BINARY},
    "where": "f.where({0}, {1}, {2})",
}

#: Cheaper expressions for values that only results of 16-bit types depend on.
FAST_EXPRESSIONS: dict[str, str] = {
    "div": "f.div_fast({0}, {1})",
    "reciprocal": "f.div_fast(1.0, {0})",
    "exp": "f.exp_fast({0})",
    "sigmoid": "f.sigmoid_fast({0})",
}

#: Powers with one of these constants as exponent.
POWERS: dict[float, str] = {
    1.0: "{0}",
    2.0: "{0} * {0}",
    3.0: "{0} * {0} * {0}",
    0.5: "f.sqrt({0})",
    -0.5: "f.rsqrt({0})",
    -1.0: "f.reciprocal({0})",
}


@dataclass(frozen=True)
class Rule:
    """A composite of ops and the expression that computes it better.

    Attributes:
        pattern: the composite as calls of ops; a single letter stands for any value, a number for a constant of that value.
            Commutative inputs match in either order.
        expression: what to write; the pattern's letters in braces.
    """

    pattern: str
    expression: str


#: Composites that occur in real models, for values that only results of 16-bit types depend on. The first that matches wins.
RULES: tuple[Rule, ...] = (
    # GELU, both kinds, decomposed: y/2 * (1 + erf(z)) and y/2 * (1 + tanh(z)). No cancellation where the bracket is near 0.
    Rule("mul(mul(y, 0.5), add(erf(z), 1))", "{y} * f.erf_gate_fast({z})"),
    Rule("mul(y, mul(add(erf(z), 1), 0.5))", "{y} * f.erf_gate_fast({z})"),
    Rule("mul(mul(y, 0.5), add(tanh(z), 1))", "{y} * f.sigmoid_fast({z} * 2.0)"),
    Rule("mul(y, mul(add(tanh(z), 1), 0.5))", "{y} * f.sigmoid_fast({z} * 2.0)"),
    # SiLU and sigmoid, decomposed: y / (1 + exp(-x)).
    Rule("div(1, add(exp(neg(x)), 1))", "f.sigmoid_fast({x})"),
    Rule("reciprocal(add(exp(neg(x)), 1))", "f.sigmoid_fast({x})"),
    Rule("div(y, add(exp(neg(x)), 1))", "{y} * f.sigmoid_fast({x})"),
)
