"""What each op of the IR is in C++: one entry per op, an expression over vectors of include/postlude/math.h.

``{0}``, ``{1}``, ... stand for the inputs. An op that is missing here cannot be generated, and a test says so.
"""

#: One or a few instructions: as cheap to compute again as to keep in memory.
CHEAP: dict[str, str] = {
    "neg": "-{0}",
    "abs": "abs({0})",
    "relu": "relu({0})",
    "floor": "floor({0})",
    "ceil": "ceil({0})",
    "trunc": "trunc({0})",
    "round": "round({0})",
    "isnan": "isnan({0})",
    "isinf": "isinf({0})",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "maximum": "maximum({0}, {1})",
    "minimum": "minimum({0}, {1})",
    "copysign": "copysign({0}, {1})",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "logical_and": "{0} & {1}",
    "logical_or": "{0} | {1}",
    "logical_xor": "{0} ^ {1}",
    "logical_not": "~{0}",
    "where": "select({0}, {1}, {2})",
}

#: The others.
EXPENSIVE: dict[str, str] = {
    "sign": "sign({0})",
    "exp": "exp({0})",
    "exp2": "exp2({0})",
    "expm1": "expm1({0})",
    "log": "log({0})",
    "log1p": "log1p({0})",
    "log2": "log2({0})",
    "log10": "log10({0})",
    "sqrt": "sqrt({0})",
    "rsqrt": "rsqrt({0})",
    "reciprocal": "1 / {0}",
    "erf": "erf({0})",
    "erfc": "erfc({0})",
    "tanh": "tanh({0})",
    "sigmoid": "sigmoid({0})",
    "sin": "sin({0})",
    "cos": "cos({0})",
    "tan": "tan({0})",
    "asin": "asin({0})",
    "acos": "acos({0})",
    "atan": "atan({0})",
    "sinh": "sinh({0})",
    "cosh": "cosh({0})",
    "div": "{0} / {1}",
    "pow": "pow({0}, {1})",
    "atan2": "atan2({0}, {1})",
    "fmod": "fmod({0}, {1})",
    "remainder": "remainder({0}, {1})",
}

#: Op name -> C++ expression.
EXPRESSIONS: dict[str, str] = CHEAP | EXPENSIVE

#: Powers with one of these constants as exponent, as ATen computes them too.
POWERS: dict[float, str] = {
    1.0: "{0}",
    2.0: "{0} * {0}",
    3.0: "{0} * {0} * {0}",
    0.5: "sqrt({0})",
    -0.5: "rsqrt({0})",
    -1.0: "1 / {0}",
    -2.0: "1 / ({0} * {0})",
}

#: Accumulator of each reduction.
ACCUMULATORS: dict[str, str] = {"sum": "Sum", "max": "Max", "min": "Min"}
