"""Variables that stand for sizes, arithmetic over them, and relations between them: plain data that prints as Python.

A variable is itself, whatever its name: two variables of one name may have two values. So `==` between expressions makes a
relation, as it does for the variables of torch.fx.experimental.dynamic_spec, and equality of specs is decided by what they print.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

#: What an expression may be made of, and how tightly Python binds it.
OPERATORS: dict[str, tuple[Callable[[Any, Any], Any], int]] = {
    "+": (operator.add, 1),
    "-": (operator.sub, 1),
    "*": (operator.mul, 2),
    "//": (operator.floordiv, 2),
    "%": (operator.mod, 2),
}
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

#: How a variable is called where something is printed or generated.
Names = Mapping["IntVar", str]


class Expression:
    """An integer that depends on variables. `evaluate` takes ints and SymInts alike."""

    def __add__(self, other: Any) -> Expression:
        return _binary("+", self, other)

    def __radd__(self, other: Any) -> Expression:
        return _binary("+", other, self)

    def __sub__(self, other: Any) -> Expression:
        return _binary("-", self, other)

    def __rsub__(self, other: Any) -> Expression:
        return _binary("-", other, self)

    def __mul__(self, other: Any) -> Expression:
        return _binary("*", self, other)

    def __rmul__(self, other: Any) -> Expression:
        return _binary("*", other, self)

    def __floordiv__(self, other: Any) -> Expression:
        return _binary("//", self, other)

    def __rfloordiv__(self, other: Any) -> Expression:
        return _binary("//", other, self)

    def __mod__(self, other: Any) -> Expression:
        return _binary("%", self, other)

    def __rmod__(self, other: Any) -> Expression:
        return _binary("%", other, self)

    def __neg__(self) -> Expression:
        return _binary("*", -1, self)

    def __eq__(self, other: object) -> Relation:  # type: ignore[override]
        return _relation("==", self, other)

    def __ne__(self, other: object) -> Relation:  # type: ignore[override]
        return _relation("!=", self, other)

    def __lt__(self, other: Any) -> Relation:
        return _relation("<", self, other)

    def __le__(self, other: Any) -> Relation:
        return _relation("<=", self, other)

    def __gt__(self, other: Any) -> Relation:
        return _relation(">", self, other)

    def __ge__(self, other: Any) -> Relation:
        return _relation(">=", self, other)

    __hash__ = object.__hash__

    def __bool__(self) -> NoReturn:
        raise TypeError(f"{self!r} stands for a size of calls to come: it has no truth value where a spec is written.")

    def variables(self) -> Iterator[IntVar]:
        """Every variable in it, in order, each as often as it occurs."""
        raise NotImplementedError

    def evaluate(self, values: Mapping[IntVar, Any]) -> Any:
        raise NotImplementedError

    def source(self, names: Names, binding: int = 0) -> str:
        """Python source; in parentheses where what stands around it binds more tightly."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.source({variable: variable.name for variable in self.variables()})


class IntVar(Expression):
    """An integer argument that varies from call to call.

    Args:
        name: what messages and printed specs call it; needn't be unique.
        min: the least value, None for none.
        max: the greatest value, None for none.
        multiple_of: the value is divisible by it.
        optimization_hint: a usual value, which kernels are chosen for.

    Raises:
        ValueError: no value could meet the rules.
    """

    _anonymous = itertools.count()

    def __init__(
        self,
        name: str | None = None,
        *,
        min: int | None = None,
        max: int | None = None,
        multiple_of: int = 1,
        optimization_hint: int | None = None,
    ) -> None:
        self.name = name if name is not None else f"anon{next(IntVar._anonymous)}"
        given = {"min": min, "max": max, "multiple_of": multiple_of, "optimization_hint": optimization_hint}
        for argument, value in given.items():
            optional = value is None and argument != "multiple_of"
            if not optional and (not isinstance(value, int) or isinstance(value, bool)):
                raise ValueError(f"{self.name}: {argument}={value!r}, where an int was expected.")
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ValueError(f"The name of a variable is a Python identifier, which {self.name!r} is not.")
        self.min = min
        self.max = max
        self.multiple_of = multiple_of
        self.optimization_hint = optimization_hint
        if multiple_of < 1:
            raise ValueError(f"{self.name}: multiple_of={multiple_of}, where 1 or more was expected.")
        if max is not None and min is not None and -(-min // multiple_of) * multiple_of > max:
            raise ValueError(f"{self.name}: no multiple of {multiple_of} lies between min={min} and max={max}.")
        if optimization_hint is not None and self.broken_rule(optimization_hint) is not None:
            raise ValueError(f"{self.name}: optimization_hint={optimization_hint}, but {self.broken_rule(optimization_hint)}.")

    def broken_rule(self, value: int) -> str | None:
        """The rule that a value breaks, in words."""
        if self.min is not None and value < self.min:
            return f"{self.name} >= {self.min}"
        if self.max is not None and value > self.max:
            return f"{self.name} <= {self.max}"
        if value % self.multiple_of:
            return f"{self.name} % {self.multiple_of} == 0"
        return None

    def variables(self) -> Iterator[IntVar]:
        yield self

    def evaluate(self, values: Mapping[IntVar, Any]) -> Any:
        return values[self]

    def source(self, names: Names, binding: int = 0) -> str:
        return names[self]

    def definition(self) -> str:
        """The call that makes an equal variable."""
        arguments = [f'"{self.name}"']
        if self.min != self._least():
            arguments.append(f"min={self.min}")
        if self.max is not None:
            arguments.append(f"max={self.max}")
        if self.multiple_of != 1:
            arguments.append(f"multiple_of={self.multiple_of}")
        if self.optimization_hint is not None:
            arguments.append(f"optimization_hint={self.optimization_hint}")
        return f"{type(self).__name__}({', '.join(arguments)})"

    def __repr__(self) -> str:
        return self.definition()

    @staticmethod
    def _least() -> int | None:
        return None


class ShapeVar(IntVar):
    """A dimension that varies from call to call: an `IntVar` that is not negative."""

    def __init__(
        self,
        name: str | None = None,
        *,
        min: int = 0,
        max: int | None = None,
        multiple_of: int = 1,
        optimization_hint: int | None = None,
    ) -> None:
        if isinstance(min, int) and min < 0:
            raise ValueError(f"{name or 'ShapeVar'}: min={min}, but a size is never negative; IntVar is for other integers.")
        super().__init__(name, min=min, max=max, multiple_of=multiple_of, optimization_hint=optimization_hint)

    @staticmethod
    def _least() -> int | None:
        return 0


class Constant(Expression):
    """A number within an expression."""

    def __init__(self, value: int) -> None:
        self.value = value

    def variables(self) -> Iterator[IntVar]:
        yield from ()

    def evaluate(self, values: Mapping[IntVar, Any]) -> Any:
        return self.value

    def source(self, names: Names, binding: int = 0) -> str:
        return str(self.value) if self.value >= 0 or binding < 2 else f"({self.value})"


class Binary(Expression):
    """Two expressions and one of `OPERATORS` between them."""

    def __init__(self, symbol: str, left: Expression, right: Expression) -> None:
        self.symbol = symbol
        self.left = left
        self.right = right

    def variables(self) -> Iterator[IntVar]:
        yield from self.left.variables()
        yield from self.right.variables()

    def evaluate(self, values: Mapping[IntVar, Any]) -> Any:
        return OPERATORS[self.symbol][0](self.left.evaluate(values), self.right.evaluate(values))

    def source(self, names: Names, binding: int = 0) -> str:
        own = OPERATORS[self.symbol][1]
        text = f"{self.left.source(names, own)} {self.symbol} {self.right.source(names, own + 1)}"
        return f"({text})" if own < binding else text


class Relation:
    """A comparison of two expressions that every call must meet."""

    def __init__(self, symbol: str, left: Expression, right: Expression) -> None:
        self.symbol = symbol
        self.left = left
        self.right = right

    def variables(self) -> Iterator[IntVar]:
        yield from self.left.variables()
        yield from self.right.variables()

    def evaluate(self, values: Mapping[IntVar, Any]) -> Any:
        return COMPARISONS[self.symbol](self.left.evaluate(values), self.right.evaluate(values))

    def source(self, names: Names) -> str:
        return f"{self.left.source(names)} {self.symbol} {self.right.source(names)}"

    def __repr__(self) -> str:
        return self.source({variable: variable.name for variable in self.variables()})

    def __bool__(self) -> NoReturn:
        raise TypeError(
            f"`{self!r}` is a rule for calls to come and has no truth value yet. Pass it in ShapesSpec(assumptions=[...]); write"
            " `a <= b` and `b <= c` as two assumptions, and `and` likewise."
        )


def expression(value: Any) -> Expression | None:
    """An expression or a number as an expression; None for anything else."""
    if isinstance(value, Expression):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return Constant(value)
    return None


def _binary(symbol: str, left: Any, right: Any) -> Expression:
    a, b = expression(left), expression(right)
    if a is None or b is None:
        unknown: Expression = NotImplemented
        return unknown
    if symbol in ("//", "%") and isinstance(b, Constant) and b.value == 0:
        raise ZeroDivisionError(f"{a!r} {symbol} 0 in a shape spec")
    return Binary(symbol, a, b)


def _relation(symbol: str, left: Any, right: Any) -> Relation:
    a, b = expression(left), expression(right)
    if a is None or b is None:
        unknown: Relation = NotImplemented
        return unknown
    return Relation(symbol, a, b)
