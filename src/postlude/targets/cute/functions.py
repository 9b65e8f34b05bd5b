"""What the epilogue ops are on a GPU: functions that generated modules call for each element while they are traced.

A value is a `Float32`, a `Boolean`, or a Python number where it is a constant. On sm_100 it is a pair of these, for two
neighbouring elements, since the hardware adds and multiplies two at once; `lanewise` lets every function here take both.

Two functions of one name differ in accuracy: `exp` is as accurate as CUDA's own, `exp_fast` has a relative error of a few
times 1e-6 or better over its whole range, which no result of a 16-bit type can show.
"""

import functools
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32
from quack.epilogue import F2

_LOG2_E = 1.4426950408889634


def lanewise(function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply a function of single elements to pairs too, one lane after the other."""

    @functools.wraps(function)
    def apply(*values: Any) -> Any:
        if not any(isinstance(value, tuple) for value in values):
            return function(*map(_single, values))
        lanes = ([_single(v[lane] if isinstance(v, tuple) else v) for v in values] for lane in (0, 1))
        return F2(*(function(*lane) for lane in lanes))

    return apply


def _single(value: Any) -> Any:
    return Float32(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _select(condition: Any, first: Any, second: Any) -> Float32:
    return Float32(cutlass.select_(condition, Float32(first), Float32(second)))


# Arithmetic. Generated code writes `+`, `-` and `*` where both sides are elements; these stand where one may be a scalar.

add = lanewise(lambda x, y: x + y)
sub = lanewise(lambda x, y: x - y)
mul = lanewise(lambda x, y: x * y)
div = lanewise(lambda x, y: x / y)
div_fast = lanewise(lambda x, y: cute.math.div(x, y, full=True))
neg = lanewise(lambda x: -x)
reciprocal = lanewise(lambda x: Float32(1.0) / x)
abs = lanewise(cute.math.abs)
copysign = lanewise(cute.math.copysign)
floor = lanewise(cute.math.floor)
ceil = lanewise(cute.math.ceil)
trunc = lanewise(cute.math.trunc)
round = lanewise(cute.math.roundeven)
sqrt = lanewise(cute.math.sqrt)
maximum = lanewise(lambda x, y: cute.math.max(x, y, propagate_nan=True))
minimum = lanewise(lambda x, y: cute.math.min(x, y, propagate_nan=True))
relu = lanewise(lambda x: cute.math.max(x, Float32(0.0), propagate_nan=True))
to_bf16 = lanewise(lambda x: x.to(BFloat16).to(Float32))
to_f16 = lanewise(lambda x: x.to(Float16).to(Float32))


@lanewise
def sign(x: Float32) -> Float32:
    return _select(x > 0.0, 1.0, 0.0) - _select(x < 0.0, 1.0, 0.0)


@lanewise
def fmod(x: Float32, y: Float32) -> Float32:
    return cute.math.rem(x, y)


@lanewise
def remainder(x: Float32, y: Float32) -> Float32:
    rest = cute.math.rem(x, y)
    differ = (rest != 0.0) & ((rest < 0.0) ^ (y < 0.0))
    return _select(differ, rest + y, rest)


# Exponentials and logarithms

exp = lanewise(cute.math.exp)
exp2 = lanewise(cute.math.exp2)
exp_fast = lanewise(lambda x: cute.math.exp2(x * _LOG2_E, fastmath=True))
expm1 = lanewise(cute.math.expm1)
log = lanewise(cute.math.log)
log1p = lanewise(cute.math.log1p)
log2 = lanewise(cute.math.log2)
log10 = lanewise(cute.math.log10)
pow = lanewise(cute.math.pow)
rsqrt = lanewise(cute.math.rsqrt)
tanh = lanewise(cute.math.tanh)
sigmoid = lanewise(lambda x: Float32(1.0) / (cute.math.exp(-x) + 1.0))
erf = lanewise(cute.math.erf)
erfc = lanewise(cute.math.erfc)


@lanewise
def sigmoid_fast(x: Float32) -> Float32:
    return cute.math.rcp(cute.math.exp2(x * -_LOG2_E, fastmath=True) + 1.0, approx=True, ftz=True)


#: log2(erfc(t) / 2) as a polynomial in t, lowest power first: a minimax fit on [0, 4.4] that keeps falling beyond.
#: With it erfc has a relative error of at most 6.4e-6 on that interval.
_LOG2_HALF_ERFC = (
    -1.0,
    -1.6280632019042969,
    -0.9170815944671631,
    -0.15242984890937805,
    0.0339103527367115,
    -0.005223656073212624,
    0.0004860956687480211,
    -2.0317977032391354e-05,
)


@lanewise
def erf_gate_fast(x: Float32) -> Float32:
    """(1 + erf(x)) / 2 without the cancellation where erf(x) is near -1."""
    distance = cute.math.abs(x)
    exponent = Float32(_LOG2_HALF_ERFC[-1])
    for coefficient in _LOG2_HALF_ERFC[-2::-1]:
        exponent = exponent * distance + coefficient
    tail = Float32(cute.math.exp2(exponent, fastmath=True))
    return _select(x > 0.0, 1.0 - tail, tail)


# Trigonometry

sin = lanewise(cute.math.sin)
cos = lanewise(cute.math.cos)
tan = lanewise(cute.math.tan)
asin = lanewise(cute.math.asin)
acos = lanewise(cute.math.acos)
atan = lanewise(cute.math.atan)
atan2 = lanewise(cute.math.atan2)
sinh = lanewise(cute.math.sinh)
cosh = lanewise(cute.math.cosh)

# Truth values

true = lanewise(lambda x: x != 0.0)
eq = lanewise(lambda x, y: x == y)
ne = lanewise(lambda x, y: x != y)
lt = lanewise(lambda x, y: x < y)
le = lanewise(lambda x, y: x <= y)
gt = lanewise(lambda x, y: x > y)
ge = lanewise(lambda x, y: x >= y)
isnan = lanewise(lambda x: Boolean(cute.math.isnan(x)))
isinf = lanewise(lambda x: Boolean(cute.math.isinf(x)))
logical_and = lanewise(lambda x, y: x & y)
logical_or = lanewise(lambda x, y: x | y)
logical_xor = lanewise(lambda x, y: x ^ y)
logical_not = lanewise(lambda x: x ^ Boolean(True))
where = lanewise(_select)
