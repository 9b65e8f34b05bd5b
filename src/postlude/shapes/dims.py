"""Specs and PyTorch's other ways to say what varies: torch.export's dynamic_shapes, and marks on tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.export import Dim
from torch.utils import _pytree as pytree

from postlude.errors import SpecError
from postlude.shapes.expressions import Constant, Expression, IntVar, ShapeVar, expression
from postlude.shapes.printing import unique_names, variables
from postlude.shapes.rules import bound_arguments, linear, rules_for, size_of, violation
from postlude.shapes.spec import STATIC, DictSpec, IntermediateSpec, ObjectSpec, ParamsSpec, SeqSpec, ShapesSpec, TensorSpec


def to_dynamic_shapes(
    spec: ShapesSpec, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A spec as `dynamic_shapes` of torch.export.export for a call with these arguments.

    Variables become `Dim`s with their ranges, multiples of one (plus a number) derived dimensions. Dimensions that follow from
    several variables, and integer arguments, are Dim.DYNAMIC. Assumptions have no place there: `export` states them in the graph.
    What ``**kwargs`` takes stands beside the other parameters; `export` gives torch.export a signature where it does.

    Args:
        spec: the spec.
        function: the function or module.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Raises:
        SpecError: the spec is not one of this function.
    """
    target = function.forward if isinstance(function, torch.nn.Module) else function
    signature = inspect.signature(target)
    bound = signature.bind(*args, **(kwargs or {}))
    dims = _Dims(spec)
    result: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            result[name] = dims.value(SeqSpec(spec.params.varargs), value)
        elif kind is inspect.Parameter.VAR_KEYWORD:
            result |= dims.value(DictSpec(spec.params.varkw), value)
        else:
            result[name] = dims.value(spec.params.named.get(name, STATIC), value)
    return result


class _Dims:
    """The Dim of each variable of a spec."""

    def __init__(self, spec: ShapesSpec) -> None:
        self.dims = {variable: _dim(variable, name) for variable, name in unique_names(variables(spec)).items()}

    def value(self, spec: IntermediateSpec, value: Any) -> Any:
        """Dims for a value, in its own structure, as torch.export wants them."""
        if isinstance(value, torch.Tensor):
            entries = list(spec) if isinstance(spec, TensorSpec) else [STATIC] * value.dim()
            return {index: self.dim(entry) for index, entry in enumerate(entries)}
        if isinstance(value, int) and not isinstance(value, bool):
            return Dim.DYNAMIC if isinstance(spec, Expression) and not isinstance(spec, Constant) else None
        if isinstance(value, Mapping):
            entries_by_key = spec.entries if isinstance(spec, (DictSpec, ObjectSpec)) else {}
            return {key: self.value(entries_by_key.get(key, STATIC), item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            given = list(spec) if isinstance(spec, SeqSpec) else []
            given += [STATIC] * (len(value) - len(given))
            return type(value)(self.value(entry, item) for entry, item in zip(given, value, strict=True))
        if type(value) in pytree.SUPPORTED_NODES:
            # An object: its parts in the order in which it is taken apart.
            leaves, context = pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
            names = (
                context[0]
                if isinstance(context, (list, tuple)) and context and isinstance(context[0], (list, tuple))
                else context
            )
            fields = spec.entries if isinstance(spec, (ObjectSpec, DictSpec)) else {}
            return [self.value(fields.get(name, STATIC), leaf) for name, leaf in zip(names, leaves, strict=True)]
        return None

    def dim(self, entry: Any) -> Any:
        found = expression(entry)
        if found is None or isinstance(found, Constant):
            return Dim.STATIC
        involved = set(found.variables())
        if len(involved) == 1:
            (variable,) = involved
            solved = linear(found, variable)
            if solved is not None and solved[0] > 0:
                offset = solved[1].evaluate({})
                scaled = self.dims[variable] if solved[0] == 1 else solved[0] * self.dims[variable]
                return scaled if offset == 0 else scaled + offset
        return Dim.DYNAMIC


def _dim(variable: IntVar, name: str) -> Any:
    step = variable.multiple_of
    least = max(0, variable.min or 0)
    if variable.min == variable.max and variable.min is not None:
        return Dim.STATIC
    if step == 1:
        return Dim(name, min=least, max=variable.max)
    return step * Dim(f"{name}_parts", min=-(-least // step), max=None if variable.max is None else variable.max // step)


def from_dynamic_shapes(dynamic_shapes: Mapping[str, Any], *, guard_free: bool = False) -> ShapesSpec:
    """The `dynamic_shapes` of a torch.export.export call, by parameter, as a spec.

    `Dim`s become variables, derived ones expressions; each Dim.DYNAMIC or Dim.AUTO is a variable of its own.

    Raises:
        SpecError: it is not a dict by parameter, or holds something else.
    """
    if not isinstance(dynamic_shapes, Mapping):
        raise SpecError("dynamic_shapes are not by parameter", "a dict from the names of parameters")
    known: dict[str, ShapeVar] = {}
    entries = {name: _from(value, name, known) for name, value in dynamic_shapes.items()}
    return ShapesSpec(ParamsSpec({name: entry for name, entry in entries.items() if entry is not STATIC}), guard_free=guard_free)


def _from(value: Any, name: str, known: dict[str, ShapeVar]) -> Any:
    if value is None or (isinstance(value, (Mapping, list, tuple)) and not value):
        return STATIC
    if isinstance(value, Mapping) and all(isinstance(key, int) for key in value):
        return TensorSpec([_size(value.get(index), f"{name}_{index}", known) for index in range(max(value) + 1)])
    if isinstance(value, Mapping):
        return DictSpec({key: _from(item, f"{name}_{key}", known) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        if all(item is None or isinstance(item, int) or _is_dim(item) for item in value):
            return TensorSpec([_size(item, f"{name}_{index}", known) for index, item in enumerate(value)])
        return SeqSpec([_from(item, f"{name}_{index}", known) for index, item in enumerate(value)])
    if _is_dim(value):
        return IntVar(name)
    raise SpecError(f"dynamic_shapes hold {value!r}", "Dims, None, numbers, and dicts and lists of them")


def _is_dim(value: Any) -> bool:
    return type(value).__name__ in ("Dim", "_DerivedDim", "_StaticDim", "_DimHint")


def _size(value: Any, name: str, known: dict[str, ShapeVar]) -> Any:
    kind = type(value).__name__
    if value is None or isinstance(value, int):
        return value
    if kind == "_StaticDim":
        return value.value
    if kind == "_DimHint":
        if value.type.name == "STATIC":
            return STATIC
        return ShapeVar(name, min=value.min or 0, max=value.max)
    if kind == "_DerivedDim":
        root = _size(value.root, name, known)
        # The function of a derived dimension is linear: two points tell it.
        offset, slope = int(value.fn(0)), int(value.fn(1)) - int(value.fn(0))
        scaled = root if slope == 1 else slope * root
        return scaled if offset == 0 else scaled + offset
    if kind == "Dim":
        most = value.max if isinstance(value.max, int) and value.max < 2**62 else None
        return known.setdefault(value.__name__, ShapeVar(value.__name__, min=int(value.min), max=most))
    raise SpecError(f"dynamic_shapes hold {value!r}", "Dims, None and numbers")


def mark(spec: ShapesSpec, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Mark the tensors of a call as torch.compile wants them: mark_dynamic, or mark_unbacked for a guard-free spec.

    For compilers that `dynamic_spec` does not reach. The marks stay on the tensors.

    Raises:
        SpecError: the spec is not one of this function.
        ShapeViolation: the arguments do not keep to it.
    """
    from postlude.shapes.session import mark_measure

    signature = inspect.signature(function)
    rules = rules_for(spec, signature, getattr(function, "__qualname__", type(function).__name__))
    arguments = bound_arguments(signature, args, kwargs)
    if (found := violation(rules, arguments)) is not None:
        raise found
    for measure in rules.measures:
        if (
            measure.dimension is not None
            and arguments.get(measure.place.argument) is not None
            and set(measure.expression.variables())
        ):
            mark_measure(rules, measure, measure.place.find(arguments), size_of(measure, arguments))


def from_marks(arguments: Mapping[str, Any]) -> ShapesSpec:
    """A spec from tensors that mark_dynamic, maybe_mark_dynamic or mark_unbacked was applied to.

    Args:
        arguments: the arguments of a call by name.
    """
    entries: dict[str, Any] = {}
    guard_free = False
    for name, tensor in arguments.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        unbacked: set[int] = getattr(tensor, "_dynamo_unbacked_indices", set())
        marked = (
            getattr(tensor, "_dynamo_dynamic_indices", set()) | getattr(tensor, "_dynamo_weak_dynamic_indices", set()) | unbacked
        )
        ranges = {one.dim: one for one in getattr(tensor, "_dynamo_dynamic_range", ())}
        hints = getattr(tensor, "_dynamo_hint_overrides", {})
        guard_free = guard_free or bool(unbacked)
        dims: list[Any] = [STATIC] * tensor.dim()
        for index in sorted(marked):
            given = ranges.get(index)
            least, most = (given.min or 0, given.max) if given is not None else (0, None)
            dims[index] = ShapeVar(f"{name}_{index}", min=least, max=most, optimization_hint=hints.get(index))
        if marked:
            entries[name] = TensorSpec(dims)
    return ShapesSpec(entries, guard_free=guard_free)
