"""Elementwise ATen overloads as Region ops: the table `ELEMENTWISE`.

Overloads that are one IR op as they stand come from `ir.ops`. Here are those with further arguments, and those that are
several ops. A rule gets the overload's arguments with tensors as value names and numbers as they are, and returns the name
of the result.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from postlude.capture.forms import Stop
from postlude.capture.program import Program
from postlude.ir import OPS

Rule = Callable[..., str]

aten = torch.ops.aten
prims = torch.ops.prims


def apply(program: Program, op: str, *arguments: Any) -> str:
    """Append op `op`; numbers become constants, truth values become 0 and 1 where numbers are wanted, and back."""
    names = [as_type(program, argument, wanted) for argument, wanted in zip(arguments, OPS[op].inputs, strict=True)]
    return program.apply(op, *names)


def as_type(program: Program, argument: Any, wanted: str) -> str:
    """A value name of the wanted type for a value name or a number."""
    name = program.const(float(argument)) if isinstance(argument, bool | int | float) else argument
    given = program.types[name].value
    if given == wanted:
        return name
    if wanted == "float":
        return program.apply("where", name, program.const(1.0), program.const(0.0))
    return program.apply("ne", name, program.const(0.0))


def _direct(op: str) -> Rule:
    return lambda program, *arguments: apply(program, op, *arguments)


def _scaled(op: str, *, reverse: bool = False) -> Rule:
    def rule(p: Program, a: Any, b: Any, alpha: Any = 1) -> str:
        first, second = (b, a) if reverse else (a, b)
        if alpha != 1:
            second = apply(p, "mul", second, alpha)
        return apply(p, op, first, second)

    return rule


def _divide(p: Program, a: Any, b: Any, rounding_mode: str | None = None) -> str:
    if rounding_mode == "floor":
        # floor(a / b) is off by one where a / b rounds up to an integer.
        raise Stop("floor division")
    quotient = apply(p, "div", a, b)
    return quotient if rounding_mode is None else apply(p, "trunc", quotient)


_POWERS: dict[float, Callable[[Program, str], str]] = {
    0.5: lambda p, x: apply(p, "sqrt", x),
    1.0: lambda p, x: x,
    2.0: lambda p, x: apply(p, "mul", x, x),
    3.0: lambda p, x: apply(p, "mul", apply(p, "mul", x, x), x),
    -0.5: lambda p, x: apply(p, "rsqrt", x),
    -1.0: lambda p, x: apply(p, "reciprocal", x),
}


def _power(p: Program, base: Any, exponent: Any) -> str:
    if isinstance(exponent, int | float) and isinstance(base, str) and float(exponent) in _POWERS:
        return _POWERS[float(exponent)](p, as_type(p, base, "float"))
    return apply(p, "pow", base, exponent)


def _clamp(p: Program, x: Any, low: Any = None, high: Any = None) -> str:
    if low is not None:
        x = apply(p, "maximum", x, low)
    if high is not None:
        x = apply(p, "minimum", x, high)
    return as_type(p, x, "float")


def _leaky_relu(p: Program, x: Any, slope: Any = 0.01) -> str:
    return apply(p, "where", apply(p, "gt", x, 0.0), x, apply(p, "mul", x, slope))


def _elu(p: Program, x: Any, alpha: Any = 1.0, scale: Any = 1.0, input_scale: Any = 1.0) -> str:
    negative = apply(p, "mul", apply(p, "expm1", apply(p, "mul", x, input_scale)), float(alpha) * float(scale))
    return apply(p, "where", apply(p, "gt", x, 0.0), apply(p, "mul", x, scale), negative)


def _gelu(p: Program, x: Any, approximate: str = "none") -> str:
    half = apply(p, "mul", x, 0.5)
    if approximate == "none":
        return apply(p, "mul", half, apply(p, "add", apply(p, "erf", apply(p, "mul", x, math.sqrt(0.5))), 1.0))
    cube = apply(p, "mul", apply(p, "mul", apply(p, "mul", x, x), x), 0.044715)
    inner = apply(p, "mul", apply(p, "add", x, cube), math.sqrt(2.0 / math.pi))
    return apply(p, "mul", half, apply(p, "add", apply(p, "tanh", inner), 1.0))


def _silu(p: Program, x: Any) -> str:
    return apply(p, "mul", x, apply(p, "sigmoid", x))


def _softplus(p: Program, x: Any, beta: Any = 1.0, threshold: Any = 20.0) -> str:
    scaled = apply(p, "mul", x, beta)
    soft = apply(p, "div", apply(p, "log1p", apply(p, "exp", scaled)), beta)
    return apply(p, "where", apply(p, "gt", scaled, threshold), x, soft)


def _mish(p: Program, x: Any) -> str:
    return apply(p, "mul", x, apply(p, "tanh", _softplus(p, x)))


def _hardsigmoid(p: Program, x: Any) -> str:
    return apply(p, "div", _clamp(p, apply(p, "add", x, 3.0), 0.0, 6.0), 6.0)


def _hardswish(p: Program, x: Any) -> str:
    return apply(p, "mul", x, _hardsigmoid(p, x))


def _threshold(p: Program, x: Any, threshold: Any, value: Any) -> str:
    return apply(p, "where", apply(p, "le", x, threshold), value, x)


def _threshold_backward(p: Program, gradient: Any, x: Any, threshold: Any) -> str:
    return apply(p, "where", apply(p, "le", x, threshold), 0.0, gradient)


def _sigmoid_backward(p: Program, gradient: Any, y: Any) -> str:
    return apply(p, "mul", gradient, apply(p, "mul", apply(p, "sub", 1.0, y), y))


def _tanh_backward(p: Program, gradient: Any, y: Any) -> str:
    return apply(p, "mul", gradient, apply(p, "sub", 1.0, apply(p, "mul", y, y)))


def _masked_fill(p: Program, x: Any, mask: Any, value: Any) -> str:
    return apply(p, "where", mask, value, x)


def _addcmul(p: Program, x: Any, a: Any, b: Any, value: Any = 1) -> str:
    return _scaled("add")(p, x, apply(p, "mul", a, b), value)


def _addcdiv(p: Program, x: Any, a: Any, b: Any, value: Any = 1) -> str:
    return _scaled("add")(p, x, apply(p, "div", a, b), value)


_COMPOSED: dict[Any, Rule] = {
    aten.add.Tensor: _scaled("add"),
    aten.add.Scalar: _scaled("add"),
    aten.sub.Tensor: _scaled("sub"),
    aten.sub.Scalar: _scaled("sub"),
    aten.rsub.Tensor: _scaled("sub", reverse=True),
    aten.rsub.Scalar: _scaled("sub", reverse=True),
    aten.div.Tensor_mode: _divide,
    aten.div.Scalar_mode: _divide,
    aten.pow.Tensor_Scalar: _power,
    aten.square.default: lambda p, x: _power(p, x, 2),
    aten.clamp.default: _clamp,
    aten.clamp.Tensor: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_min.Tensor: _clamp,
    aten.clamp_max.default: lambda p, x, high: _clamp(p, x, None, high),
    aten.clamp_max.Tensor: lambda p, x, high: _clamp(p, x, None, high),
    aten.hardtanh.default: lambda p, x, low=-1.0, high=1.0: _clamp(p, x, low, high),
    aten.relu6.default: lambda p, x: _clamp(p, x, 0.0, 6.0),
    aten.leaky_relu.default: _leaky_relu,
    aten.elu.default: _elu,
    aten.gelu.default: _gelu,
    aten.silu.default: _silu,
    aten.softplus.default: _softplus,
    aten.mish.default: _mish,
    aten.hardsigmoid.default: _hardsigmoid,
    aten.hardswish.default: _hardswish,
    aten.threshold.default: _threshold,
    aten.threshold_backward.default: _threshold_backward,
    aten.sigmoid_backward.default: _sigmoid_backward,
    aten.tanh_backward.default: _tanh_backward,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    aten.addcmul.default: _addcmul,
    aten.addcdiv.default: _addcdiv,
}


def _from_ops_table() -> dict[Any, Rule]:
    rules: dict[Any, Rule] = {}
    for op in OPS.values():
        for overload in op.aten:
            packet, _, name = overload.partition(".")
            rules[getattr(getattr(aten, packet), name)] = _direct(op.name)
    return rules


#: Rule of every elementwise overload that a Region can absorb. Composed rules win over the ops table's.
ELEMENTWISE: dict[Any, Rule] = {**_from_ops_table(), **_COMPOSED}

#: Overloads whose value jumps where their inputs change by a rounding: there the types that eager rounds to count.
COMPARISONS = frozenset(
    getattr(getattr(aten, packet), name)
    for op in OPS.values()
    if op.result == "bool" and "float" in op.inputs
    for packet, _, name in (overload.partition(".") for overload in op.aten)
)

#: Overloads that eager computes with Python numbers rounded to the tensor's type first.
ROUNDED_NUMBERS = COMPARISONS | {
    aten.maximum.default,
    aten.minimum.default,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
    aten.fmod.Scalar,
    aten.remainder.Scalar,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.masked_fill.Scalar,
}

#: Overloads that only change a tensor's type.
CASTS = (prims.convert_element_type.default, aten._to_copy.default)
