"""One compilation of a function with a spec: what Dynamo is told about its arguments while it compiles, and which guards stay.

Dynamo announces every compilation, first ones and later ones alike. Nothing is done in a call that compiles nothing, and the
user's tensors carry no marks afterwards.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
import torch.fx.experimental._config as symbolic_config
from torch._dynamo import mark_dynamic, maybe_mark_dynamic
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler
from torch._dynamo.decorators import error_on_graph_break, mark_unbacked
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from postlude.shapes.expressions import Expression, IntVar
from postlude.shapes.proof import implied
from postlude.shapes.rules import Measure, Rules, absent_arguments, size_of, steps

#: The name under which a front's globals hold its rules: so a call is recognised on the stack.
RULES = "__postlude_rules"

#: Attributes of tensors by which Dynamo is told about dimensions.
_MARKS = (
    "_dynamo_dynamic_indices",
    "_dynamo_dynamic_range",
    "_dynamo_weak_dynamic_indices",
    "_dynamo_unbacked_indices",
    "_dynamo_unbacked_bounds",
    "_dynamo_hint_overrides",
    "_dynamo_shape_ids",
    "_specialize_on",
    "_has_dynamo_dim_marking",
)


#: Whether a function with a guard-free spec is being compiled.
_unbacked = contextvars.ContextVar("unbacked", default=False)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def unbacked() -> bool:
    """For functions that Dynamo traces: whether their sizes may be unbacked, so that nothing can be asked of them."""
    return _unbacked.get()


@contextlib.contextmanager
def _all_unbacked() -> Iterator[None]:
    token = _unbacked.set(True)
    try:
        yield
    finally:
        _unbacked.reset(token)


def oblivious() -> contextlib.AbstractContextManager[Any]:
    """While this lasts, no guard is made where PyTorch's own code asks whether a backed size is 0 or 1."""
    patched: contextlib.AbstractContextManager[Any] = symbolic_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    return patched


def register() -> None:
    """Have Dynamo announce its compilations; `torch._dynamo.reset` forgets who asked for that."""
    if start not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(start)


def start(announced: CallbackArgs) -> None:
    """A compilation starts: prepare it, if a call of a function with a spec is on the stack."""
    if announced.callback_trigger is not CallbackTrigger.DYNAMO:
        return
    around: dict[str, FrameType] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and RULES not in frame.f_globals:
        around.setdefault(frame.f_code.co_name, frame)
        frame = frame.f_back
    if frame is None or frame.f_code.co_name != "front" or not {"compile_inner", "_compile"} <= set(around):
        return
    # What Dynamo closes at the end of this compilation, in its thread. Ends are not announced for each compilation, but when the
    # last of several threads' has ended.
    stack: contextlib.ExitStack = around["compile_inner"].f_locals["stack"]
    for context in _contexts(frame.f_globals[RULES], frame, around["_compile"]):
        stack.enter_context(context)


def _contexts(rules: Rules, call: FrameType, compiling: FrameType) -> Iterator[contextlib.AbstractContextManager[Any]]:
    arguments = call.f_locals
    there = [measure for measure in rules.measures if not _fixed(measure.expression) and _is_there(measure, arguments)]
    if rules.guard_free:
        # Behind a break of the graph sizes would be plain numbers, and compiled again for each.
        yield error_on_graph_break(True)
        yield _all_unbacked()
    else:
        yield oblivious()
    yield _marked(rules, [measure for measure in there if measure.dimension is not None], arguments)
    code, found = compiling.f_locals["code"], compiling.f_locals["locals"]
    for setting in ("unbacked_sources", "dynamic_sources"):
        integers = [
            source
            for measure in there
            if measure.dimension is None and (rules.guard_free and _never_negative(measure)) == (setting == "unbacked_sources")
            for source in _sources(measure, code, found)
        ]
        if not integers:
            continue
        before = getattr(torch.compiler.config, setting)
        # Entries are regular expressions, and separated by commas.
        entries = ["".join(c if c.isalnum() or c == "_" else "." for c in source) + "$" for source in integers]
        yield torch.compiler.config.patch(**{setting: ",".join(filter(None, [before, *entries]))})  # type: ignore[attr-defined]
    if _is_own(code, call):
        # Of a size in whose rule a variable has no value, since arguments were left out, the front has said nothing.
        told = steps(rules, absent_arguments(rules, arguments))
        checked = [measure for measure in rules.measures if all(variable in told for variable in measure.expression.variables())]
        sizes = {source: measure.expression for measure in checked for source in _sources(measure, code, found)}
        yield _filtered(compiling.f_locals["hooks"], sizes)


def _is_there(measure: Measure, arguments: Mapping[str, Any]) -> bool:
    """Whether what is measured is there still: behind a break of the graph the function may have changed its arguments."""
    try:
        value = measure.place.find(arguments)
    except (LookupError, AttributeError, TypeError):
        return False
    if measure.dimension is None:
        return isinstance(value, int)
    return isinstance(value, torch.Tensor) and value.dim() > measure.dimension


def _never_negative(measure: Measure) -> bool:
    """Whether an integer can be an unbacked symbol: as an argument, Dynamo takes those for sizes."""
    return isinstance(measure.expression, IntVar) and measure.expression.min is not None and measure.expression.min >= 0


def _fixed(expression: Expression) -> bool:
    """Whether an expression has one value only."""
    return all(variable.min is not None and variable.min == variable.max for variable in expression.variables())


def _is_own(code: CodeType, call: FrameType) -> bool:
    """Whether what is compiled is the function's own code, which nothing but its front calls."""
    return bool(code is call.f_globals["__own_code"])


def _sources(measure: Measure, code: CodeType, found: Mapping[str, Any]) -> list[str]:
    """What Dynamo may call a place, in the frame of this code that has these locals: also what it takes as ``**kwargs``."""
    argument = measure.place.argument
    roots = [f"L[{argument!r}]"] if argument in found else []
    if code.co_flags & inspect.CO_VARKEYWORDS:
        keywords = code.co_varnames[code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)]
        if argument in found.get(keywords, ()):
            roots.append(f"L[{keywords!r}][{argument!r}]")
    size = "" if measure.dimension is None else f".size()[{measure.dimension}]"
    return [root + "".join(map(str, measure.place.steps)) + size for root in roots]


@contextlib.contextmanager
def _marked(rules: Rules, measures: Sequence[Measure], arguments: Mapping[str, Any]) -> Iterator[None]:
    """Tensors with the marks of their dimensions; without, afterwards, whatever they had before."""
    tensors = {id(tensor): tensor for measure in measures for tensor in _with_inner(measure.place.find(arguments))}
    before = {
        key: {name: _copy(tensor.__dict__[name]) for name in _MARKS if name in tensor.__dict__} for key, tensor in tensors.items()
    }
    try:
        for measure in measures:
            mark_measure(rules, measure, measure.place.find(arguments), size_of(measure, arguments))
        yield
    finally:
        for key, tensor in tensors.items():
            for name in _MARKS:
                tensor.__dict__.pop(name, None)
            tensor.__dict__.update(before[key])


def _with_inner(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor, and those that it is made of where its class wraps others: marks go to them too."""
    yield tensor
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(inner := getattr(tensor, name), torch.Tensor):
                yield from _with_inner(inner)


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, (set, dict)) else value


def mark_measure(rules: Rules, measure: Measure, tensor: torch.Tensor, size: int) -> None:
    assert measure.dimension is not None
    variable = measure.expression if isinstance(measure.expression, IntVar) else None
    if rules.guard_free:
        hint = variable.optimization_hint if variable is not None else None
        name = f"{rules.function}.{rules.names[variable]}" if variable is not None else None
        mark_unbacked(tensor, measure.dimension, hint_override=hint or (size if size > 1 else None), shape_id=name)
    elif size > 1:
        mark_dynamic(tensor, measure.dimension)
    else:
        # Code that asks for a size of 0 or 1 gets an answer, and a compilation of its own; for other sizes that is an error.
        maybe_mark_dynamic(tensor, measure.dimension)


@contextlib.contextmanager
def _filtered(hooks: Any, sizes: Mapping[str, Expression]) -> Iterator[None]:
    """Guards on shapes are left out where the spec, which is checked before them, implies them all."""
    given: Callable[[Sequence[Any]], Sequence[bool]] | None = hooks.guard_filter_fn

    def keep(entries: Sequence[Any]) -> Sequence[bool]:
        kept = [True] * len(entries) if given is None else list(given(entries))
        for index, entry in enumerate(entries):
            if entry.guard_type == "SHAPE_ENV":
                guards = entry.orig_guard.code_list or []
                kept[index] = kept[index] and not all(implied(guard, sizes) for guard in guards)
        return kept

    hooks.guard_filter_fn = keep
    try:
        yield
    finally:
        hooks.guard_filter_fn = given
