"""What an element of an integer or boolean tensor is, as a formula of its indices, where a graph computes it from nothing else.

Models build attention's masks from ranges, comparisons and reshapes. `Elements` follows such nodes for one symbolic element
and gives numbers as sympy expressions, truth as a conjunction of inequalities. What depends on a graph's inputs, or goes
beyond what is needed for masks, is `Unknown`; so is what a tensor's type may not hold, which would wrap or be rounded there.
Sizes may be symbolic.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isnan
from typing import Any, TypeAlias, TypeVar

import sympy
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node

aten = torch.ops.aten
prims = torch.ops.prims

Index: TypeAlias = tuple[sympy.Expr, ...]
Result = TypeVar("Result")

#: Cases that are told apart before giving up.
_MOST_CASES = 32

#: No symbolic size is larger: the scores of so many queries or keys fill no memory.
_LARGEST = 2**24


class Unknown(Exception):
    """An element has no formula here."""


class Split(Exception):
    """An element has one formula where `index` is 0, and another where it is not."""

    def __init__(self, index: sympy.Symbol) -> None:
        super().__init__(str(index))
        self.index = index


@dataclass(frozen=True)
class Truth:
    """All of some expressions are at least 0. Without any it is true; `never` makes it false."""

    atleast0: frozenset[sympy.Expr] = frozenset()
    never: bool = False


TRUE, FALSE = Truth(), Truth(never=True)


@dataclass(frozen=True)
class Choice:
    """One number where a condition holds, another where it does not."""

    condition: Truth
    yes: sympy.Expr
    no: sympy.Expr


Element: TypeAlias = "sympy.Expr | Truth | Choice"


class Elements:
    """Formulas of elements.

    Args:
        limits: indices that occur, each from 0 to below its limit.
    """

    def __init__(self, limits: Mapping[sympy.Symbol, sympy.Expr]) -> None:
        self.limits = limits
        self._known: dict[tuple[Node, Index], Element] = {}

    def __call__(self, node: Node, index: Index) -> Element:
        """The element of a node's tensor at an index.

        Raises:
            Unknown: it has no formula.
            Split: it has one for each of two cases.
        """
        key = (node, index)
        if key not in self._known:
            rule = _RULES.get(node.target)
            if rule is None or not isinstance(node.meta.get("val"), torch.Tensor):
                raise Unknown(node.name)
            if any(not known.kwarg_only for known in node.target._schema.arguments if known.name in node.kwargs):  # type: ignore[union-attr]
                raise Unknown(f"{node.name} names its arguments")
            self._known[key] = self._held(rule(self, node, index), node.meta["val"].dtype)
        return self._known[key]

    def cases(self, function: Callable[["Elements", Index], Result], lengths: Sequence[sympy.Expr]) -> Iterator[Result]:
        """What a function finds for any index below `lengths`: one result for each case that has a formula of its own.

        Raises:
            Unknown: the function raised it, or there are too many cases.
        """
        symbols = [sympy.Dummy("i", integer=True, nonnegative=True) for _ in lengths]
        todo = [(tuple(symbols), dict(zip(symbols, lengths, strict=True)))]
        for _ in range(_MOST_CASES):
            if not todo:
                return
            index, limits = todo.pop()
            try:
                result = function(Elements({**self.limits, **limits}), index)
            except Split as split:
                if split.index not in limits:
                    raise
                later = sympy.Dummy("i", integer=True, nonnegative=True)
                rest = {symbol: limit for symbol, limit in limits.items() if symbol != split.index}
                todo.append((tuple(at.subs(split.index, 0) for at in index), rest))
                todo.append((tuple(at.subs(split.index, later + 1) for at in index), {**rest, later: limits[split.index] - 1}))
            else:
                yield result
        raise Unknown("too many cases")

    def number(self, value: Any, index: Index) -> sympy.Expr:
        """An argument that is a number: a constant, a size, or an element of a tensor that broadcasts to `index`."""
        element = self.argument(value, index)
        if not isinstance(element, sympy.Expr):
            raise Unknown(str(value))
        return element

    def truth(self, value: Any, index: Index) -> Truth:
        """An argument that is true or false."""
        element = self.argument(value, index)
        if not isinstance(element, Truth):
            raise Unknown(str(value))
        return element

    def argument(self, value: Any, index: Index) -> Element:
        """An argument of a node."""
        if isinstance(value, Node) and isinstance(value.meta.get("val"), torch.Tensor):
            return self(value, _aligned(value, index))
        return constant(value)

    def atleast0(self, expression: sympy.Expr) -> Truth:
        """Whether an expression is 0 or more: decided where its bounds decide it."""
        expression = sympy.expand(expression)
        if self._bound(expression, upper=False).is_nonnegative:
            return TRUE
        if self._bound(expression, upper=True).is_negative:
            return FALSE
        return Truth(frozenset([expression]))

    def equal(self, left: sympy.Expr, right: sympy.Expr) -> Truth:
        """Whether two numbers are equal, if that does not depend on an index."""
        difference = sympy.expand(left - right)
        if difference == 0:
            return TRUE
        if difference.is_nonzero or self._bound(difference, upper=False).is_positive:
            return FALSE
        if self._bound(difference, upper=True).is_negative:
            return FALSE
        raise Unknown(f"{left} == {right}")

    def _held(self, element: Element, dtype: torch.dtype) -> Element:
        """What a tensor of a type holds of an element: a constant is rounded to it.

        Raises:
            Unknown: it may hold something else.
        """
        if isinstance(element, Truth) != (dtype == torch.bool):
            raise Unknown(f"{element} in {dtype}")
        if isinstance(element, Truth):
            return element
        if isinstance(element, Choice):
            return Choice(element.condition, self._number_held(element.yes, dtype), self._number_held(element.no, dtype))
        return self._number_held(element, dtype)

    def _number_held(self, number: sympy.Expr, dtype: torch.dtype) -> sympy.Expr:
        if dtype.is_floating_point and number.is_number:
            with unset_fake_temporarily():
                return size(torch.tensor(float(number), dtype=dtype).item())
        if not self.is_held(number, dtype):
            raise Unknown(f"{number} in {dtype}")
        return number

    def is_held(self, number: sympy.Expr, dtype: torch.dtype) -> bool:
        """Whether a type holds a whole number, for every index, without wrapping or rounding."""
        if dtype.is_complex or dtype == torch.bool or not number.is_integer:
            return False
        most = int(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max
        return self._magnitude(number) <= most and (dtype.is_signed or self.atleast0(number) == TRUE)

    def _magnitude(self, number: sympy.Expr) -> int:
        """What the absolute value of a number does not exceed."""
        total = 0
        for term, factor in sympy.expand(number).as_coefficients_dict().items():
            term = term.subs(self.limits)
            term = term.subs(dict.fromkeys(term.free_symbols, _LARGEST))
            if not term.is_number:
                raise Unknown(str(number))
            total += abs(factor * term)
        return int(total)

    def _bound(self, expression: sympy.Expr, *, upper: bool) -> sympy.Expr:
        """The least or greatest value of an expression that is linear in the indices."""
        for index in expression.free_symbols & self.limits.keys():
            factor = expression.coeff(index)
            rest = sympy.expand(expression - factor * index)
            if index in rest.free_symbols or not factor.is_number:
                raise Unknown(f"{expression} is not linear")
            expression = rest + factor * ((self.limits[index] - 1) if (factor > 0) == upper else 0)
        return sympy.expand(expression)


def constant(value: Any) -> Element:
    """A Python value, or a size of the graph."""
    if isinstance(value, Node):
        value = value.meta.get("val")
    if isinstance(value, bool):
        return TRUE if value else FALSE
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # sympy's 0.0 is not its 0
    if isinstance(value, (int, float)) and not isnan(value):
        return sympy.oo * (1 if value > 0 else -1) if value in (inf, -inf) else sympy.sympify(value)
    if isinstance(value, torch.SymInt):
        return sympy.sympify(value.node.expr)
    raise Unknown(str(value))


def size(value: Any) -> sympy.Expr:
    """A size as an expression."""
    found = constant(value)
    assert isinstance(found, sympy.Expr)
    return found


def _aligned(node: Node, index: Index) -> Index:
    """The index of an element of `node` that broadcasting brings to `index`."""
    shape = node.meta["val"].shape
    if len(shape) > len(index):
        raise Unknown(node.name)
    last = index[len(index) - len(shape) :]
    return tuple(sympy.Integer(0) if length == 1 else at for length, at in zip(map(size, shape), last, strict=True))


# One rule for each op ---------------------------------------------------------------------------------------------------------

Rule = Callable[[Elements, Node, Index], Element]


def _iota(of: Elements, node: Node, index: Index) -> Element:
    return size(node.kwargs["start"]) + size(node.kwargs["step"]) * index[0]


def _full(of: Elements, node: Node, index: Index) -> Element:
    return constant(node.args[1] if node.target is aten.full.default else node.args[0])


def _same(of: Elements, node: Node, index: Index) -> Element:
    return of.argument(node.args[0], index)


def _unsqueeze(of: Elements, node: Node, index: Index) -> Element:
    dim = int(node.args[1]) % len(index)  # type: ignore[arg-type]
    return of.argument(node.args[0], index[:dim] + index[dim + 1 :])


def _squeeze(of: Elements, node: Node, index: Index) -> Element:
    shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    dims: Any = node.args[1] if len(node.args) > 1 else range(len(shape))
    named = {int(d) % max(len(shape), 1) for d in ([dims] if isinstance(dims, int) else dims)}
    dropped = {d for d, length in enumerate(shape) if d in named and size(length) == 1}
    rest = iter(index)
    return of.argument(node.args[0], tuple(sympy.Integer(0) if d in dropped else next(rest) for d in range(len(shape))))


def _permute(of: Elements, node: Node, index: Index) -> Element:
    order: Any = node.args[1]
    source = [sympy.Integer(0)] * len(index)
    for dim, at in zip(order, index, strict=True):
        source[dim % len(index)] = at
    return of.argument(node.args[0], tuple(source))


def _view(of: Elements, node: Node, index: Index) -> Element:
    """A view that adds or drops dimensions of size 1."""
    before = list(map(size, node.args[0].meta["val"].shape))  # type: ignore[union-attr]
    after = list(map(size, node.meta["val"].shape))
    if [length for length in before if length != 1] != [length for length in after if length != 1]:
        raise Unknown(node.name)
    rest = iter(at for at, length in zip(index, after, strict=True) if length != 1)
    return of.argument(node.args[0], tuple(sympy.Integer(0) if length == 1 else next(rest) for length in before))


def _slice(of: Elements, node: Node, index: Index) -> Element:
    source, dim, start, _, step = list(node.args) + [0, None, None, 1][len(node.args) - 1 :]
    begin = size(0 if start is None else start)
    at = int(dim) % len(index)  # type: ignore[arg-type]
    if begin.is_negative:
        begin += size(source.meta["val"].shape[at])  # type: ignore[union-attr]
    if not begin.is_nonnegative:
        raise Unknown(node.name)
    return of.argument(source, (*index[:at], begin + size(step) * index[at], *index[at + 1 :]))


def _index(of: Elements, node: Node, index: Index) -> Element:
    source, tensors = node.args[:2]
    if not isinstance(tensors, (list, tuple)) or len(tensors) != source.meta["val"].ndim:  # type: ignore[union-attr]
        raise Unknown(node.name)
    if any(t is None or t.meta["val"].dtype == torch.bool for t in tensors):  # type: ignore[union-attr]
        raise Unknown(node.name)
    at = tuple(of.number(tensor, index) for tensor in tensors)
    if any(of.atleast0(one) != TRUE for one in at):
        raise Unknown(f"{node.name} may count from the end")
    return of.argument(source, at)


def _cat(of: Elements, node: Node, index: Index) -> Element:
    tensors: Any = node.args[0]
    dim = int(node.args[1]) % len(index) if len(node.args) > 1 else 0  # type: ignore[arg-type]
    at = sympy.expand(index[dim])
    if any(tensor.meta["val"].ndim != len(index) for tensor in tensors):
        raise Unknown(f"{node.name} skips an empty vector")
    for place, tensor in enumerate(tensors, 1):  # of which some may be the same
        length = size(tensor.meta["val"].shape[dim])
        if place == len(tensors) or of.atleast0(length - 1 - at) == TRUE:
            return of.argument(tensor, (*index[:dim], at, *index[dim + 1 :]))
        if of.atleast0(at - length) != TRUE:
            symbols = at.free_symbols & of.limits.keys()
            if length == 1 and len(symbols) == 1:
                raise Split(*symbols)
            raise Unknown(node.name)
        at = sympy.expand(at - length)
    raise Unknown(node.name)


def _pad(of: Elements, node: Node, index: Index) -> Element:
    """Only what is not padding."""
    source, amounts = node.args[:2]
    at = list(index)
    for place, before in enumerate(amounts[::2]):  # type: ignore[index, arg-type]
        dim = len(index) - 1 - place
        at[dim] = sympy.expand(at[dim] - size(before))
        length = size(source.meta["val"].shape[dim])  # type: ignore[union-attr]
        if of.atleast0(at[dim]) != TRUE or of.atleast0(length - 1 - at[dim]) != TRUE:
            raise Unknown(node.name)
    return of.argument(source, tuple(at))


def _cumsum(of: Elements, node: Node, index: Index) -> Element:
    """Only of what is the same number all along the dimension."""
    if not index:
        raise Unknown(f"{node.name} of a scalar")
    dim = int(node.args[1]) % len(index)  # type: ignore[arg-type]
    length = size(node.meta["val"].shape[dim])
    found = set()
    for values in of.cases(lambda inner, at: inner.argument(node.args[0], (*index[:dim], *at, *index[dim + 1 :])), [length]):
        if values in (FALSE, TRUE):
            found.add(sympy.Integer(values == TRUE))
        elif isinstance(values, sympy.Expr) and values.is_number:
            found.add(values)
        else:
            raise Unknown(node.name)
    if len(found) != 1:
        raise Unknown(node.name)
    return found.pop() * (index[dim] + 1)


def _arithmetic(operation: Callable[[sympy.Expr, sympy.Expr], sympy.Expr]) -> Rule:
    def rule(of: Elements, node: Node, index: Index) -> Element:
        if node.kwargs.get("alpha", 1) != 1 or node.meta["val"].dtype not in (torch.int32, torch.int64):
            raise Unknown(node.name)
        return sympy.expand(operation(of.number(node.args[0], index), of.number(node.args[1], index)))

    return rule


def _comparison(operation: Callable[[Elements, sympy.Expr, sympy.Expr], Truth]) -> Rule:
    def rule(of: Elements, node: Node, index: Index) -> Element:
        left, right = of.argument(node.args[0], index), of.number(node.args[1], index)
        compared_as = torch.result_type(*map(_example, node.args[:2]))

        def compared(number: Element) -> Truth:
            if not all(isinstance(n, sympy.Expr) and of.is_held(n, compared_as) for n in (number, right)):
                raise Unknown(f"{number} and {right} in {compared_as}")
            return operation(of, number, right)

        if isinstance(left, Choice):
            return _chosen(left.condition, compared(left.yes), compared(left.no))
        return compared(left)

    return rule


def _example(argument: Any) -> Any:
    """An argument as type promotion sees it."""
    value = argument.meta["val"] if isinstance(argument, Node) else argument
    return 0 if isinstance(value, torch.SymInt) else value


def _and(of: Elements, node: Node, index: Index) -> Element:
    left, right = of.truth(node.args[0], index), of.truth(node.args[1], index)
    return FALSE if left.never or right.never else Truth(left.atleast0 | right.atleast0)


def _or(of: Elements, node: Node, index: Index) -> Element:
    left, right = of.truth(node.args[0], index), of.truth(node.args[1], index)
    if TRUE in (left, right):
        return TRUE
    if left.never or right.never or left == right:
        return right if left.never else left
    raise Unknown(node.name)


def negated(truth: Truth) -> Truth:
    """What holds where this does not.

    Raises:
        Unknown: that is one of several conditions.
    """
    if len(truth.atleast0) > 1:
        raise Unknown("one of several conditions does not hold")
    return Truth(frozenset(sympy.expand(-expression - 1) for expression in truth.atleast0), truth == TRUE)


def _chosen(condition: Truth, yes: Truth, no: Truth) -> Truth:
    """One truth where a condition holds, another where it does not. The condition is none that is decided."""
    if yes == no:
        return yes
    if no == FALSE:
        return Truth(condition.atleast0 | yes.atleast0)
    if yes == FALSE and no == TRUE:
        return negated(condition)
    raise Unknown("conditions of another form")


def _not(of: Elements, node: Node, index: Index) -> Element:
    return negated(of.truth(node.args[0], index))


def _where(of: Elements, node: Node, index: Index) -> Element:
    condition = of.truth(node.args[0], index)
    if not condition.atleast0:
        return of.argument(node.args[2 if condition.never else 1], index)
    yes, no = (of.argument(value, index) for value in node.args[1:3])
    if isinstance(yes, sympy.Expr) and isinstance(no, sympy.Expr):
        return Choice(condition, yes, no)
    if isinstance(yes, Truth) and isinstance(no, Truth):
        return _chosen(condition, yes, no)
    raise Unknown(node.name)


_COMPARISONS: dict[str, Callable[[Elements, sympy.Expr, sympy.Expr], Truth]] = {
    "le": lambda of, a, b: of.atleast0(b - a),
    "lt": lambda of, a, b: of.atleast0(b - a - 1),
    "ge": lambda of, a, b: of.atleast0(a - b),
    "gt": lambda of, a, b: of.atleast0(a - b - 1),
    "eq": lambda of, a, b: of.equal(a, b),
    "ne": lambda of, a, b: negated(of.equal(a, b)),
}
_ARITHMETIC: dict[str, Callable[[sympy.Expr, sympy.Expr], sympy.Expr]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
}

_RULES: dict[Any, Rule] = {
    prims.iota.default: _iota,
    aten.full.default: _full,
    aten.scalar_tensor.default: _full,
    aten.clone.default: _same,
    aten.alias.default: _same,
    aten.expand.default: _same,
    prims.convert_element_type.default: _same,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.permute.default: _permute,
    aten.view.default: _view,
    aten.reshape.default: _view,
    aten.slice.Tensor: _slice,
    aten.index.Tensor: _index,
    aten.cat.default: _cat,
    aten.constant_pad_nd.default: _pad,
    aten.cumsum.default: _cumsum,
    aten.where.self: _where,
    aten.bitwise_and.Tensor: _and,
    aten.bitwise_or.Tensor: _or,
    aten.bitwise_not.default: _not,
    aten.logical_and.default: _and,
    aten.logical_or.default: _or,
    aten.logical_not.default: _not,
    **{getattr(getattr(aten, n), kind): _comparison(o) for n, o in _COMPARISONS.items() for kind in ("Tensor", "Scalar")},
    **{getattr(getattr(aten, n), kind): _arithmetic(o) for n, o in _ARITHMETIC.items() for kind in ("Tensor", "Scalar")},
}
