"""The other two ways in: torch.export.export and make_fx, driven by the spec that `dynamic_spec` gave a function."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

from postlude.errors import SpecError
from postlude.shapes.decorate import RULES, TRACED, spec_of
from postlude.shapes.dims import to_dynamic_shapes
from postlude.shapes.rules import Rules, ScalarRule, TensorRule, bound_arguments, violation
from postlude.shapes.session import oblivious


def export(
    function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, **options: Any
) -> torch.export.ExportedProgram:
    """torch.export.export of a function or module that has a spec.

    What the spec says is part of the exported program, as ranges of its inputs and as assertions: it rejects calls that break the
    spec, where it runs without this package too. Lower bounds of sizes below 3 are not checked: torch.export
    leaves them out.

    Args:
        function: what `dynamic_spec` returned.
        args: example positional arguments.
        kwargs: example keyword arguments.
        options: what torch.export.export takes besides.

    Raises:
        SpecError: it has no spec.
        ShapeViolation: the example breaks it.
    """
    spec = _demand_spec(function)
    _check_example(function, args, kwargs or {})
    shapes = to_dynamic_shapes(spec, function, args, kwargs)
    options.setdefault("prefer_deferred_runtime_asserts_over_guards", True)
    with _traced(function, shapes) as module, oblivious():
        return torch.export.export(module, args, dict(kwargs or {}), dynamic_shapes=shapes, **options)


def make_fx(function: Any, **options: Any) -> Callable[..., torch.fx.GraphModule]:
    """torch.fx.experimental.proxy_tensor.make_fx of a function or module that has a spec.

    What is returned is called with example arguments, and returns the graph. Sizes that the spec lets vary are symbols in it,
    unbacked ones if the spec is guard-free. The graph itself checks nothing, and takes keyword arguments by position, after the
    others.

    Args:
        function: what `dynamic_spec` returned.
        options: what make_fx takes besides; tracing_mode is settled.

    Raises:
        SpecError: it has no spec, or code that it runs fixes a size that was to vary.
        ShapeViolation: the example breaks the spec.
    """
    _demand_spec(function)

    def trace(*args: Any, **kwargs: Any) -> torch.fx.GraphModule:
        _check_example(function, args, kwargs)
        rules = _rules(function)
        with _traced(function) as module, oblivious():
            fake_args, fake_kwargs, sizes = _symbolic(rules, _signature(function), args, kwargs)
            settled = {"tracing_mode": "fake", "_allow_non_fake_inputs": True, **options}
            names = list(fake_kwargs)

            def call(*flat: Any) -> Any:
                count = len(flat) - len(names)
                return module.forward(*flat[:count], **dict(zip(names, flat[count:], strict=True)))

            traced = proxy_tensor.make_fx(call, **settled)(*fake_args, *fake_kwargs.values())
        for where, size in sizes.items():
            if not isinstance(size.node.maybe_as_int(), type(None)):
                raise SpecError(f"{where} is to vary, but the code fixes it to {int(size)}", "code that works for every size")
        return traced

    return trace


def _demand_spec(function: Any) -> Any:
    spec = spec_of(function)
    if spec is None:
        raise SpecError(f"{function!r} has no spec", "what dynamic_spec(spec)(function) returned")
    return spec


def _forward(function: Any) -> Any:
    return function.forward if isinstance(function, torch.nn.Module) else function


def _rules(function: Any) -> Rules:
    found: Rules = getattr(_forward(function), RULES)
    return found


def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function.forward if isinstance(function, torch.nn.Module) else function)


def _check_example(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if (found := violation(_rules(function), bound_arguments(_signature(function), args, kwargs))) is not None:
        raise found


@contextlib.contextmanager
def _traced(function: Any, names: Iterable[str] = ()) -> Iterator[torch.nn.Module]:
    """A module that states the rules of the spec when it is traced, instead of checking them.

    Args:
        function: the function or module.
        names: arguments that are to have parameters of their own, instead of ``**kwargs``.
    """
    traced = _with_parameters(getattr(_forward(function), TRACED), names)
    if not isinstance(function, torch.nn.Module):
        module = torch.nn.Module()
        module.forward = traced
        yield module
        return
    kind, own = type(function), vars(function).get("forward")
    if own is not None:
        function.forward = traced
        try:
            yield function
        finally:
            function.forward = own
        return
    function.__class__ = type(kind.__name__, (kind,), {"forward": traced, "__module__": kind.__module__})
    try:
        yield function
    finally:
        function.__class__ = kind


def _with_parameters(function: Callable[..., Any], names: Iterable[str]) -> Callable[..., Any]:
    signature = inspect.signature(function)
    parameters = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
    new = [name for name in names if name not in signature.parameters]
    if len(parameters) == len(signature.parameters) or not new:
        return function

    @functools.wraps(function)
    def with_parameters(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in new]
    with_parameters.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return with_parameters


def _symbolic(
    rules: Rules, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """A call's arguments with symbols for what varies, and those symbols by the place where they are."""
    bound = signature.bind(*args, **kwargs)
    given = [rule for rule in rules.kinds if bound.arguments.get(rule.place.argument) is not None]
    names = {id(rule.place.find(bound.arguments)): str(rule.place) for rule in given if isinstance(rule, TensorRule)}
    integers = {str(rule.place) for rule in given if isinstance(rule, ScalarRule)}
    varying: dict[int, set[int]] = {}
    for measure in rules.measures:
        if measure.dimension is not None and str(measure.place) in names.values() and set(measure.expression.variables()):
            varying.setdefault(id(measure.place.find(bound.arguments)), set()).add(measure.dimension)

    environment = ShapeEnv(specialize_zero_one=False)
    mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
    kind = DimDynamic.UNBACKED if rules.guard_free else DimDynamic.DYNAMIC
    made: dict[int, torch.Tensor] = {}
    sizes: dict[str, Any] = {}

    def tensor(value: torch.Tensor) -> torch.Tensor:
        if id(value) not in made:
            dims = varying.get(id(value), set())
            context: Any = StatelessSymbolicContext(
                dynamic_sizes=[kind if index in dims else DimDynamic.STATIC for index in range(value.dim())]
            )
            name = names.get(id(value), f"static{len(made)}")
            made[id(value)] = mode.from_tensor(value, symbolic_context=context, source=ConstantSource(name))
            sizes.update({f"{name}.shape[{index}]": made[id(value)].shape[index] for index in dims})
        return made[id(value)]

    def integer(name: str, value: int) -> Any:
        if rules.guard_free:
            sizes[name] = environment.create_unbacked_symint()
        else:
            source = ConstantSource(name)
            symbol = environment.create_symbol(value, source, DimDynamic.DYNAMIC, positive=None, do_not_specialize_zero_one=True)
            sizes[name] = environment.create_symintnode(symbol, hint=value, source=source)
        return sizes[name]

    def symbolic(name: str, value: Any) -> Any:
        leaves, structure = pytree.tree_flatten_with_path(value)
        changed = []
        for path, leaf in leaves:
            where = name + pytree.keystr(path)
            if isinstance(leaf, torch.Tensor):
                changed.append(tensor(leaf))
            else:
                changed.append(integer(where, leaf) if where in integers else leaf)
        return pytree.tree_unflatten(changed, structure)

    with environment.ignore_fresh_unbacked_symbols():
        for name, value in bound.arguments.items():
            bound.arguments[name] = symbolic(name, value)
    return bound.args, bound.kwargs, sizes
