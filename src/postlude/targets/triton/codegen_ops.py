"""What each op of the IR is in Triton: one entry per op, an expression over tensors of the arithmetic's type.

``{0}``, ``{1}``, ... stand for the inputs, ``{type}`` for the type of the arithmetic. Functions of `libdevice` exist under these
names for NVIDIA and AMD, in float32 and float64. An op that is missing here cannot be generated, and a test says so.
"""

#: Op name -> Triton expression.
EXPRESSIONS: dict[str, str] = {
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "sign": "({0} > 0).to({type}) - ({0} < 0).to({type})",
    "exp": "libdevice.exp({0})",
    "exp2": "libdevice.exp2({0})",
    "expm1": "libdevice.expm1({0})",
    "log": "libdevice.log({0})",
    "log1p": "libdevice.log1p({0})",
    "log2": "libdevice.log2({0})",
    "log10": "libdevice.log10({0})",
    "sqrt": "libdevice.sqrt({0})",
    "rsqrt": "libdevice.rsqrt({0})",
    "reciprocal": "1.0 / {0}",
    "erf": "libdevice.erf({0})",
    "erfc": "libdevice.erfc({0})",
    "tanh": "libdevice.tanh({0})",
    "sigmoid": "1.0 / (1.0 + libdevice.exp(-{0}))",
    "relu": "tl.where({0} < 0, 0.0, {0})",  # keeps NaN
    "sin": "libdevice.sin({0})",
    "cos": "libdevice.cos({0})",
    "tan": "libdevice.tan({0})",
    "asin": "libdevice.asin({0})",
    "acos": "libdevice.acos({0})",
    "atan": "libdevice.atan({0})",
    "sinh": "libdevice.sinh({0})",
    "cosh": "libdevice.cosh({0})",
    "floor": "libdevice.floor({0})",
    "ceil": "libdevice.ceil({0})",
    "trunc": "libdevice.trunc({0})",
    "round": "libdevice.nearbyint({0})",
    "isnan": "{0} != {0}",
    "isinf": 'tl.abs({0}) == float("inf")',
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "maximum": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "pow": "libdevice.pow({0}, {1})",
    "atan2": "libdevice.atan2({0}, {1})",
    "fmod": "libdevice.fmod({0}, {1})",
    "remainder": "remainder({0}, {1})",
    "copysign": "libdevice.copysign({0}, {1})",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "logical_and": "{0} & {1}",
    "logical_or": "{0} | {1}",
    "logical_xor": "{0} ^ {1}",
    "logical_not": "{0} == 0",
    "where": "tl.where({0}, {1}, {2})",
}

#: Triton's `/` of float32 may be off by 2 in the last place. This is what stands for it where an op multiplies errors.
PRECISE: dict[str, str] = {
    "div": "tl.div_rn({0}, {1})",
    "reciprocal": "tl.div_rn(1.0, {0})",
    "sigmoid": "tl.div_rn(1.0, 1.0 + libdevice.exp(-{0}))",
}

#: Powers with one of these constants as exponent, as ATen computes them too.
POWERS: dict[float, str] = {
    1.0: "{0}",
    2.0: "{0} * {0}",
    3.0: "{0} * {0} * {0}",
    0.5: "libdevice.sqrt({0})",
    -0.5: "libdevice.rsqrt({0})",
    -1.0: "1.0 / {0}",
    -2.0: "1.0 / ({0} * {0})",
}

#: Functions that an expression calls, by their name; the source has those that it needs.
FUNCTIONS: dict[str, str] = {
    "remainder": '''\
@triton.jit
def remainder(a, b):
    """The remainder with the sign of the divisor."""
    rest = libdevice.fmod(a, b)
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)
''',
}
