"""The epilogue ops: one table entry per op.

An entry says what capture may turn into it (ATen overloads whose tensor arguments are the op's inputs in order, and that
have no other argument that changes the value), what it means (a function of the `torch` namespace, which the aten target
calls in float32 or float64), and what it takes and gives. Expressions of the compiled targets are tables of the targets,
keyed by these names. ATen overloads with further arguments (`alpha`, bounds, slopes) are in `capture.translate`.
"""

from dataclasses import dataclass
from typing import Literal

ValueType = Literal["float", "bool"]


@dataclass(frozen=True)
class Op:
    """One elementwise op of the Region's epilogue program.

    Attributes:
        name: the name in the text form.
        inputs: type of each input.
        result: type of the result.
        torch: the function in the `torch` namespace that defines the value.
        aten: `aten` overloads (``"name.overload"``) that are this op as they stand.
        commutative: whether the two inputs may be exchanged.
    """

    name: str
    inputs: tuple[ValueType, ...]
    result: ValueType
    torch: str
    aten: tuple[str, ...] = ()
    commutative: bool = False

    @property
    def arity(self) -> int:
        """Number of inputs."""
        return len(self.inputs)


def _unary(name: str, torch: str | None = None, aten: tuple[str, ...] | None = None) -> Op:
    return Op(name, ("float",), "float", torch or name, (f"{name}.default",) if aten is None else aten)


def _binary(name: str, aten: tuple[str, ...], *, torch: str | None = None, commutative: bool = False) -> Op:
    return Op(name, ("float", "float"), "float", torch or name, aten, commutative)


def _compare(name: str, *, commutative: bool = False) -> Op:
    return Op(name, ("float", "float"), "bool", name, (f"{name}.Tensor", f"{name}.Scalar"), commutative)


def _logical(name: str, aten: tuple[str, ...]) -> Op:
    return Op(name, ("bool", "bool"), "bool", name, aten, commutative=True)


_TABLE = (
    _unary("neg"),
    _unary("abs"),
    _unary("sign"),
    _unary("exp"),
    _unary("exp2"),
    _unary("expm1"),
    _unary("log"),
    _unary("log1p"),
    _unary("log2"),
    _unary("log10"),
    _unary("sqrt"),
    _unary("rsqrt"),
    _unary("reciprocal"),
    _unary("erf"),
    _unary("erfc"),
    _unary("tanh"),
    _unary("sigmoid"),
    _unary("relu"),
    _unary("sin"),
    _unary("cos"),
    _unary("tan"),
    _unary("asin"),
    _unary("acos"),
    _unary("atan"),
    _unary("sinh"),
    _unary("cosh"),
    _unary("floor"),
    _unary("ceil"),
    _unary("trunc"),
    _unary("round"),  # halves to even
    Op("isnan", ("float",), "bool", "isnan", ("isnan.default",)),
    Op("isinf", ("float",), "bool", "isinf", ("isinf.default",)),
    _binary("add", (), commutative=True),
    _binary("sub", ()),
    _binary("mul", ("mul.Tensor", "mul.Scalar"), commutative=True),
    _binary("div", ("div.Tensor", "div.Scalar"), torch="true_divide"),
    _binary("maximum", ("maximum.default",), commutative=True),  # NaN if either is NaN
    _binary("minimum", ("minimum.default",), commutative=True),
    _binary("pow", ("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar")),
    _binary("atan2", ("atan2.default",)),
    _binary("fmod", ("fmod.Tensor", "fmod.Scalar")),  # sign of the dividend
    _binary("remainder", ("remainder.Tensor", "remainder.Scalar")),  # sign of the divisor
    _binary("copysign", ("copysign.Tensor", "copysign.Scalar")),
    _compare("eq", commutative=True),
    _compare("ne", commutative=True),
    _compare("lt"),
    _compare("le"),
    _compare("gt"),
    _compare("ge"),
    _logical("logical_and", ("logical_and.default", "bitwise_and.Tensor")),
    _logical("logical_or", ("logical_or.default", "bitwise_or.Tensor")),
    _logical("logical_xor", ("logical_xor.default", "bitwise_xor.Tensor")),
    Op("logical_not", ("bool",), "bool", "logical_not", ("logical_not.default", "bitwise_not.default")),
    Op("where", ("bool", "float", "float"), "float", "where", ("where.self", "where.ScalarOther", "where.ScalarSelf")),
)

#: Every epilogue op by its name.
OPS: dict[str, Op] = {op.name: op for op in _TABLE}

#: Ops whose value jumps: what is off in the last place before one may be off by 1 behind it.
JUMPS = {name for name, op in OPS.items() if op.result == "bool"} | {
    "floor", "ceil", "trunc", "round", "sign", "fmod", "remainder",
}  # fmt: skip

#: Row reductions and the `torch` function over a dimension that defines each.
REDUCTIONS: dict[str, str] = {"sum": "sum", "max": "amax", "min": "amin"}
