"""`dynamic_spec`: a function with a spec. Its calls are checked before anything compiles them, or runs them."""

from __future__ import annotations

import copyreg
import functools
import inspect
import linecache
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._dynamo.callback import callback_handler
from torch._dynamo.eval_frame import always_optimize_code_objects

from postlude.errors import SpecError
from postlude.shapes import session
from postlude.shapes.foreign import from_torch, from_torch_parts, has_foreign, is_foreign
from postlude.shapes.generate import BUILTINS, facts, front
from postlude.shapes.rules import rules_for, violation
from postlude.shapes.spec import ParamsSpec, ShapesSpec
from postlude.shapes.text import parse

T = TypeVar("T")

#: Under which a function with a spec holds it.
ATTRIBUTE = "shapes_spec"
#: The function for tracers that run Python: it states the rules as torch._check, which becomes part of what is traced.
TRACED = "_shapes_traced"
RULES = "_shapes_rules"


def as_spec(spec: Any, function: Callable[..., Any] | None = None) -> ShapesSpec:
    """What was given as a spec, as a `ShapesSpec`. The short form needs the function, whose parameters it goes through.

    Raises:
        SpecError: it is nothing of that kind.
    """
    if isinstance(spec, ShapesSpec):
        return spec
    if is_foreign(spec):
        return from_torch(spec)
    if isinstance(spec, dict) and has_foreign(spec):
        return ShapesSpec(from_torch_parts(spec), guard_free=True)
    if isinstance(spec, str):
        return parse(spec, list(inspect.signature(function).parameters) if function is not None else [])
    if isinstance(spec, (ParamsSpec, Mapping)):
        return ShapesSpec(spec)
    raise SpecError(f"the spec is {spec!r}", "a ShapesSpec, a ParamsSpec, a dict of specs by parameter, or a short form")


def spec_of(function: Any) -> ShapesSpec | None:
    """The spec of a function or module that `dynamic_spec` was applied to."""
    target = function.forward if isinstance(function, torch.nn.Module) else function
    found = getattr(target, ATTRIBUTE, None)
    return found if isinstance(found, ShapesSpec) else None


def dynamic_spec(spec: Any, *, guard_free: bool | None = None) -> Callable[[T], T]:
    """A decorator that gives a spec to a function, a method or a module.

    Calls are checked, in eager and compiled. `torch.compile` of the result, with any backend, makes what varies symbolic from the
    first call on; so do `postlude.shapes.export` and `postlude.shapes.make_fx`. A module becomes an instance of a subclass of its
    class, with the spec on `forward`.

    Args:
        spec: a `ShapesSpec`, a `ParamsSpec`, a dict of specs by parameter, the short form that `parse` reads, or a spec of
            torch.fx.experimental.dynamic_spec, whose variables are guard-free.
        guard_free: overrules the spec's own.

    Raises:
        SpecError: the spec is none, or not one of this function.
    """
    if not isinstance(spec, str):
        as_spec(spec)

    def decorate(target: T) -> T:
        if isinstance(target, (staticmethod, classmethod)):
            return type(target)(decorate(target.__func__))
        called = _demand_signature(target.forward if isinstance(target, torch.nn.Module) else target)
        resolved = as_spec(spec, called)
        if guard_free is not None and guard_free != resolved.guard_free:
            resolved = ShapesSpec(resolved.params, assumptions=resolved.assumptions, guard_free=guard_free)
        if spec_of(target) is not None:
            raise SpecError(f"{_name(target)} has a spec already", "one spec for a function")
        if isinstance(target, torch.nn.Module):
            return _decorate_module(target, resolved)  # type: ignore[return-value]
        return _decorate_function(target, resolved)  # type: ignore[return-value, arg-type]

    return decorate


def _demand_signature(target: Any) -> Callable[..., Any]:
    try:
        if isinstance(target, type):
            raise TypeError("a class")
        inspect.signature(target)
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"it is given to {target!r}",
            "a function whose signature Python knows, a method or a module; of a class, its `forward`",
        ) from error
    return target  # type: ignore[no-any-return]


def _decorate_module(module: torch.nn.Module, spec: ShapesSpec) -> torch.nn.Module:
    """A module whose class has a checked `forward`: so its copies check, and call, their own."""
    inner = getattr(module, "_orig_mod", module)
    if "forward" in vars(inner):  # somebody replaced that of its class
        inner.forward = _decorate_function(inner.forward, spec)
    else:
        inner.__class__ = _Origin(type(inner), spec).made
    return module


class _Origin:
    """What a class that `dynamic_spec` made was made of. It pickles, where the class does not, which no module has."""

    def __init__(self, kind: type[torch.nn.Module], spec: ShapesSpec) -> None:
        self.parts = kind, spec

        def reduce(module: torch.nn.Module, protocol: Any) -> Any:
            reduced = kind.__reduce_ex__(module, protocol)
            if reduced[0] is not copyreg.__newobj__ or reduced[1][0] is not self.made:  # type: ignore[attr-defined]
                return reduced
            return (_Origin.new, (self, *reduced[1][1:]), *reduced[2:])

        forward = _decorate_function(kind.forward, spec)
        body = {"forward": forward, "__reduce_ex__": reduce, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        self.made = type(kind.__name__, (kind,), body)

    def new(self, *args: Any) -> torch.nn.Module:
        return self.made.__new__(self.made, *args)  # type: ignore[no-any-return]

    def __reduce__(self) -> Any:
        return _Origin, self.parts

    def __deepcopy__(self, memo: Any) -> _Origin:
        return self


def _decorate_function(function: Callable[..., Any], spec: ShapesSpec) -> Callable[..., Any]:
    name = _name(function)
    signature = inspect.signature(function)
    rules = rules_for(spec, signature, name)
    compiled = hasattr(function, "_torchdynamo_orig_callable")
    own = compiled or inspect.signature(function, follow_wrapped=False) == signature
    inner, own_code = _isolated(function)
    stating = {"__inner": inner, "__check": torch._check}
    traced = _compiled(facts(rules, signature, marked=False), "stated", name, signature, dict(stating))
    if rules.guard_free and own:
        inner = _compiled(facts(rules, signature, marked=True), "stated", name, signature, stating)
        own_code = inner.__code__

    def doubt(arguments: Mapping[str, Any]) -> None:
        if (found := violation(rules, arguments)) is not None:
            raise found

    _leave_alone(doubt, _FrameAction.SKIP)
    if own_code is not None:
        # Dynamo passes over functions in whose arguments it sees no tensor, which may be within an object.
        always_optimize_code_objects[own_code] = True
    names: dict[str, Any] = {**BUILTINS, "__inner": inner, "__doubt": doubt, session.RULES: rules, "__own_code": own_code}
    names |= {"__hook": session.start, "__hooks": callback_handler.start_callbacks, "__register": session.register}
    checked: Callable[..., Any] = _compiled(front(rules, signature, own=own), "front", name, signature, names)
    if "__bind" in names:
        names["__bind"].__qualname__ = name  # in Python's errors where arguments are missing
        # Dynamo must not compile it: for each size it would do so anew.
        _leave_alone(names["__bind"], _FrameAction.SKIP)
    functools.update_wrapper(checked, function)
    for attribute in [attribute for attribute in vars(checked) if attribute.startswith("_torchdynamo")]:
        delattr(checked, attribute)
    # What Dynamo traces where another compiled function calls this one.
    told = {
        "__inner": traced if own else names["__inner"],
        "__unbacked": session.unbacked,
        "__doubt": torch._dynamo.disable(doubt, reason=f"this call breaks the shape spec of {name}"),
    }
    nested = _compiled(front(rules, signature, own=own, inlined=True), "front", name, signature, names | told)
    checked._torchdynamo_inline = nested  # type: ignore[attr-defined]
    setattr(checked, ATTRIBUTE, spec)
    setattr(checked, TRACED, traced)
    setattr(checked, RULES, rules)
    _leave_alone(checked, _FrameAction.DEFAULT)
    return checked


def _name(function: Any) -> str:
    named = type(function).forward if isinstance(function, torch.nn.Module) else function
    return str(getattr(named, "__qualname__", type(function).__name__))


def _isolated(function: Callable[..., Any]) -> tuple[Callable[..., Any], types.CodeType | None]:
    """A function with code of its own, where it has code: what is compiled for it serves no call that its front did not check."""
    if inspect.ismethod(function):
        inner, code = _isolated(function.__func__)
        return types.MethodType(inner, function.__self__), code
    if not isinstance(function, types.FunctionType) or hasattr(function, "_torchdynamo_orig_callable"):
        return function, None
    code = function.__code__.replace()
    copy = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(copy, function), code


def _compiled(source: str, name: str, about: str, signature: inspect.Signature, names: dict[str, Any]) -> Any:
    """A function from generated source, which tracebacks and debuggers show."""
    filename = f"<{name} of the shape spec of {about}, {id(names):x}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), names)
    weakref.finalize(names[name], linecache.cache.pop, filename, None).atexit = False
    for function in (names[name], names.get("__bind")):
        if function is not None and (name != "front" or function is names.get("__bind") or "__bind" not in names):
            parameters = signature.parameters.values()
            positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
            function.__defaults__ = tuple(p.default for p in positional if p.default is not p.empty)
            function.__kwdefaults__ = {
                p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty
            }
    return names[name]


def _leave_alone(function: Any, callees: _FrameAction) -> None:
    """Dynamo runs a function as it is, and does with what it calls as told."""
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, callees))


_leave_alone(session.register, _FrameAction.SKIP)
