"""Why a compilation was not enough: Dynamo's words about a guard that failed, read against the call that failed it.

Dynamo words a reason in one way per kind of guard, the same in torch 2.11 to 2.14. `_FORMS` is the list of them. A reason of
another form is handed on as it is: no explanation is better than a wrong one.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch

from postlude.errors import SpecError
from postlude.shapes import spec as specs
from postlude.shapes.places import Place, Step
from postlude.shapes.printing import code as printed

#: How Dynamo names the function that goes on behind a graph break.
RESUMED = "torch_dynamo_resume_in_"


@dataclass(frozen=True)
class Cause:
    """Why one earlier compilation did not serve a call.

    Attributes:
        kind: ``"size"``, ``"zero_one"`` (the size 0 or 1 of a dimension that varies), ``"equal"`` (two sizes were equal by
            chance), ``"condition"`` (code or an operator branches on a size), ``"integer"``, ``"value"``, ``"length"``,
            ``"keys"``, ``"rank"``, ``"stride"``, ``"dtype"``, ``"device"``, ``"requires_grad"``, ``"inference"``, ``"type"``,
            ``"none"``, ``"identity"``, ``"aliasing"``, ``"modes"`` (grad mode, autocast and other global state), ``"backend"``,
            or ``"other"``: then only `reason` says something.
        place: what changed, as the code would reach it: ``x``, ``self.lora.A``; empty where it is not one thing.
        origin: where that comes from: ``"argument"``, ``"attribute"`` (of the module), ``"global"``, ``"closure"``, ``"local"``
            (a value that crosses a graph break), or empty.
        dimension: which dimension of the tensor, or None.
        before: what the earlier compilation holds for.
        now: what this call brought.
        what: the same as a sentence.
        advice: what to do about it.
        spec: the entry of a `ShapesSpec` that prevents it; empty where no spec can.
        where: the line of code that asked for the guard, as far as Dynamo tells.
        reason: Dynamo's own words.
    """

    kind: str
    reason: str
    place: str = ""
    origin: str = ""
    dimension: int | None = None
    before: str = ""
    now: str = ""
    what: str = ""
    advice: str = ""
    spec: str = ""
    where: str = ""


@dataclass(frozen=True)
class Scene:
    """The call that no earlier compilation served.

    Attributes:
        code: of the function that is compiled.
        local: its arguments, and what it closes over.
        scope: its globals.
        varied: dimensions of arguments (None: an integer) that are known to differ from call to call.
    """

    code: CodeType
    local: Mapping[str, Any]
    scope: Mapping[str, Any]
    varied: Mapping[Place, Iterable[int | None]]


# Reading ---------------------------------------------------------------------------------------------------------------

#: Kinds and forms of reasons about a tensor: ``tensor 'x' rank mismatch. expected 2, actual 3``, and perhaps a hint after it.
_TENSOR_FORMS = (
    ("size", r"size mismatch at index (?P<dimension>\d+)\. expected (?P<before>\d+), actual (?P<now>\d+)"),
    ("stride", r"stride mismatch at index (?P<dimension>\d+)\. expected (?P<before>\d+), actual (?P<now>\d+)"),
    ("rank", r"rank mismatch\. expected (?P<before>\d+), actual (?P<now>\d+)"),
    ("dtype", r"dtype mismatch\. expected (?P<before>\w+), actual (?P<now>\w+)"),
    ("requires_grad", r"requires_grad mismatch\. expected requires_grad=(?P<before>\d)"),
    ("dispatch", r"dispatch key set mismatch\. expected \w+\((?P<before>[^)]*)\), actual \w+\((?P<now>[^)]*)\)"),
    ("device", r"Tensor device index mismatch\. Expected device index to be (?P<before>-?\d+), actual (?P<now>-?\d+)"),
)

#: The same for all other reasons.
_OTHER_FORMS = (
    ("type", r"expected type of '(?P<place>.+?)' to be (?P<before>a tensor type|<class '[^']*'>),[ ']*but found (?P<now>.*)"),
    ("modes", r"GLOBAL_STATE changed: (?P<before>.*\S)\s*"),
    ("aliasing", r"Duplicate tensors? found: (?P<before>.*)"),
    ("backend", r"BACKEND_MATCH failure.*"),
    ("identity", r"___check_obj_id\((?P<place>.+), \d+\)(, type=(?P<before>.*))?"),
    ("type", r"___check_type_id\((?P<place>.+), \d+\)(, type=(?P<before>.*))?"),
    ("type", r"TYPE_MISMATCH\((?P<place>.+)\)"),
    ("none", r"(?P<place>\S+) is (?P<before>None|not None)"),
    ("aliasing", r"(?P<before>\S+ is \S+)"),
    ("length", r"(?:set\.__len__|len)\((?P<place>[^()]+)\) == (?P<before>\d+)"),
    ("length", r"not (?P<place>[\w.\[\]'\"]+)"),
    ("keys", r"list\(dict\.keys\((?P<place>[^()]+)\)\)(?:\[\d+\])? == (?P<before>.+)"),
    ("keys", r"(?P<before>(?:not )?___dict_contains\(.+), (?P<place>[^(),]+)\)"),
    ("condition", r"(?P<before>.*\.size\(\)\[.*)"),
    ("value", r"(?P<place>[\w.\[\]'\"]+) == (?P<before>.+)"),
    ("condition", r"(?P<before>.*(?:<|>|==|!=).*)"),
)

#: Kind and form of a reason; the first form that matches counts.
_FORMS = [(kind, re.compile(rf"tensor '(?P<place>.+?)' {form}.*", re.DOTALL)) for kind, form in _TENSOR_FORMS]
_FORMS += [(kind, re.compile(form, re.DOTALL)) for kind, form in _OTHER_FORMS]

#: What Dynamo says where it took sizes to be equal that were equal in the first call.
_DUCK = "duck sizing added this equality"

_BOUND = re.compile(r"2 <= [^<>=]+( <= \d+)?$|[^<>=]+ != [01]$")
_SIZE = re.compile(r"(?P<place>[\w.\[\]'\"]+)\.size\(\)\[(?P<dimension>\d+)\]")


def explain(reason: str, scene: Scene) -> Cause:
    """What Dynamo's words about a failed guard mean for the one who called.

    Args:
        reason: as Dynamo words it: ``"0/0: tensor 'x' size mismatch at index 0. expected 4, actual 5"``.
        scene: the call that failed the guard.
    """
    told = re.sub(r"^\d+/\d+(?:_\d+)?: ", "", reason.partition("\nUser stack trace:")[0])
    guard, _, comment = told.partition("  # ")
    matches = ((kind, form.fullmatch(guard.strip())) for kind, form in _FORMS)
    kind, found = next(((kind, match.groupdict()) for kind, match in matches if match is not None), ("other", {}))
    place, origin = _place(found.get("place") or "", scene)
    cause = Cause(
        kind,
        reason,
        place=str(place or found.get("place") or ""),
        origin=origin,
        dimension=int(found["dimension"]) if found.get("dimension") else None,
        before=_short(found.get("before") or ""),
        now=_short(found.get("now") or ""),
        where=re.sub(r" \((?:user code shown|HINT|_dynamo/).*", "", comment.rpartition(")) and ")[2]).removeprefix("# ").strip(),
    )
    cause = _REFINED[kind](cause, place, comment, scene) if kind in _REFINED else cause
    return replace(cause, what=_what(cause), advice=_advice(cause), spec=_spec(cause, scene))


def _place(text: str, scene: Scene) -> tuple[Place | None, str]:
    """The place that a guard's source stands for, and where it comes from."""
    # What a module's attribute access does, undone.
    text = re.sub(r"\.(?:_modules|_parameters|_buffers|__dict__)\[['\"](\w+)['\"]\]", r".\1", text)
    text, in_globals = re.subn(r"^G\[['\"](\w+)['\"]\]", r"\1", text)
    try:
        place = Place.parse(text)
    except SpecError:
        return None, ""
    root = place.argument
    if in_globals:
        return place, "global"
    if root in scene.code.co_freevars:
        return place, "closure"
    if scene.code.co_name.startswith(RESUMED) or root not in arguments(scene.code):
        return place, "local"
    if place.steps and isinstance(scene.local.get(root), torch.nn.Module):
        return place, "attribute"
    return place, "argument"


def arguments(code: CodeType) -> list[str]:
    """Names of a function's parameters, * and ** included."""
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return list(code.co_varnames[:count])


def _now(place: Place | None, scene: Scene, origin: str) -> Any:
    """What is there in this call; an exception where that can't be said."""
    try:
        return place.find(scene.scope if origin == "global" else scene.local) if place is not None else LookupError()
    except Exception as error:  # what an attribute raises is the user's
        return error


def _short(value: object, most: int = 80) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= most else text[: most - 4] + " ..."


# Kinds that need more than the words -------------------------------------------------------------------------------------


def _dispatch(cause: Cause, place: Place | None, comment: str, scene: Scene) -> Cause:
    before, now = ([key.strip() for key in keys.split(",")] for keys in (cause.before, cause.now))
    if before[0] != now[0]:
        return replace(cause, kind="device", before=before[0], now=now[0])
    autograd = {key for key in {*before} ^ {*now} if key.startswith("Autograd") or key == "ADInplaceOrView"}
    if autograd and autograd == {*before} ^ {*now}:
        was, is_now = ("a normal tensor", "an inference tensor")[:: 1 if len(before) > len(now) else -1]
        return replace(cause, kind="inference", before=was, now=is_now)
    return replace(cause, kind="other")


def _condition(cause: Cause, place: Place | None, comment: str, scene: Scene) -> Cause:
    """A condition on sizes (`x.size()[0]`) or integers that the graph holds for."""
    found: dict[tuple[str, int | None], None]
    found = dict.fromkeys((m["place"], int(m["dimension"])) for m in _SIZE.finditer(cause.before))
    found = found or dict.fromkeys((name, None) for name in _names(cause.before))
    now: dict[str, int] = {}
    for text, dimension in found:
        place, origin = _place(text, scene)
        value = _now(place, scene, origin)
        if dimension is not None and isinstance(value, torch.Tensor) and dimension < value.ndim:
            now[f"{place}.shape[{dimension}]"] = value.shape[dimension]
        elif dimension is None and isinstance(value, int):
            now[str(place)] = value
    if not found or len(now) < len(found):
        return replace(cause, kind="other")
    text, dimension = next(iter(found))
    place, origin = _place(text, scene)
    cause = replace(
        cause,
        place=str(place),
        origin=origin,
        dimension=dimension,
        before=_SIZE.sub(lambda m: f"{_place(m['place'], scene)[0]}.shape[{m['dimension']}]", cause.before),
        now=", ".join(f"{name} == {value}" for name, value in now.items()),
    )
    if _DUCK in comment:
        return replace(cause, kind="equal", where="")
    # Dynamo compiles sizes 0 and 1 apart: as constants that a graph of other sizes never sees.
    if len(now) == 1 and {0, 1} & {*now.values()} and _BOUND.match(cause.before):
        return replace(cause, kind="zero_one", where="")
    return cause


def _names(expression: str) -> set[str]:
    try:
        return {node.id for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Name)}
    except SyntaxError:
        return set()


def _value(cause: Cause, place: Place | None, comment: str, scene: Scene) -> Cause:
    value = _now(place, scene, cause.origin)
    cause = replace(cause, now="" if isinstance(value, Exception) else _short(repr(value)))
    return replace(cause, kind="integer") if type(value) is int and re.fullmatch(r"-?\d+", cause.before) else cause


def _length(cause: Cause, place: Place | None, comment: str, scene: Scene) -> Cause:
    value = _now(place, scene, cause.origin)
    return replace(cause, before=cause.before or "0", now=str(len(value)) if hasattr(value, "__len__") else "")


def _keys(cause: Cause, place: Place | None, comment: str, scene: Scene) -> Cause:
    value = _now(place, scene, cause.origin)
    return replace(cause, now=_short(list(value)) if isinstance(value, Mapping) else "")


def _kind_of(cause: Cause, place: Place | None, comment: str, scene: Scene) -> Cause:
    value = _now(place, scene, cause.origin)
    known = not isinstance(value, Exception)
    if cause.kind == "none":
        other = "something else" if cause.before == "None" else "None"
        return replace(cause, now=type(value).__name__ if known and value is not None else other)
    before = _class(cause.before).replace("a tensor type", "torch.Tensor")  # as torch 2.13 and 2.14 say it
    return replace(cause, before=before, now=type(value).__name__ if known else _class(cause.now))


def _class(text: str) -> str:
    return re.sub(r"<class '(?:builtins\.)?([^']*)'>", r"\1", text)


def _requires_grad(cause: Cause, place: Place | None, comment: str, scene: Scene) -> Cause:
    before = cause.before == "1"
    return replace(cause, before=str(before), now=str(not before))


_REFINED = {
    "dispatch": _dispatch,
    "condition": _condition,
    "value": _value,
    "length": _length,
    "keys": _keys,
    "none": _kind_of,
    "type": _kind_of,
    "identity": _kind_of,
    "requires_grad": _requires_grad,
}

# Saying ----------------------------------------------------------------------------------------------------------------

#: What changed. {it} is the argument, attribute, ... that did.
_WHAT = {
    "size": "{it}: dimension {dimension} was {before}, is {now}",
    "zero_one": "{it}: {size} was taken to be neither 0 nor 1, and is {now}",
    "equal": "{before} in the call that was compiled, now {now}",
    "condition": "compiled for {before}, now {now}",
    "integer": "{it} was {before}, is {now}",
    "value": "{it} was {before}, is {now}",
    "length": "{it}: length was {before}, is {now}",
    "keys": "{it}: its keys changed; the guard was {before}, they are {now}",
    "rank": "{it}: had {before} dimensions, has {now}",
    "stride": "{it}: stride of dimension {dimension} was {before}, is {now}",
    "dtype": "{it}: dtype was {before}, is {now}",
    "device": "{it}: device was {before}, is {now}",
    "requires_grad": "{it}: requires_grad was {before}, is {now}",
    "inference": "{it} was {before}, is {now}",
    "type": "{it}: type was {before}, is {now}",
    "none": "{it} was {before}, is {now}",
    "identity": "{it} is another object than before ({before})",
    "aliasing": "which arguments are one and the same tensor changed: {before}",
    "modes": "global state changed: {before}",
    "backend": "the function is compiled with another backend object",
}

_UNREACHED = {
    "attribute": "It belongs to the module, where a spec of arguments does not reach",
    "global": "It is a global, where a spec of arguments does not reach",
    "closure": "The function closes over it, where a spec of arguments does not reach",
    "local": "It crosses a graph break, where a spec of arguments does not reach: remove the break (TORCH_LOGS=graph_breaks)",
}

#: What to do for what a spec prevents, by where it comes from.
_DECLARE = {
    "size": "declare the dimension",
    "zero_one": "declare the dimension: under a spec 0 and 1 are sizes like others",
    "equal": "declare each dimension with a variable of its own",
    "condition": "the code or an operator branches on it: declare the range that is meant with min= and max=, or ask for"
    " guard_free=True, which makes the branch an error where it is compiled",
    "integer": "declare the integer",
}

#: What to do for what no spec of shapes prevents.
_ADVICE = {
    "value": "a graph is made for each value: keep to few, or pass a number as a tensor without dimensions",
    "length": "a graph is made for each length: pad the sequence, or stack its tensors in one with a dimension that varies",
    "keys": "a graph is made for each set of keys: pass the same keys in every call",
    "rank": "a graph is made for each number of dimensions: reshape before the call",
    "stride": "a graph is made for each memory layout: call .contiguous() first, or lay it out the same way each time",
    "dtype": "a graph is made for each dtype: convert before the call, or keep to few",
    "device": "a graph is made for each device",
    "requires_grad": "a graph is made for each: use requires_grad_() or detach() so that it is always the same",
    "inference": "inference tensors have graphs of their own: make and use inputs under torch.inference_mode() always, or never",
    "type": "a graph is made for each type: pass the same one",
    "none": "a graph is made with it and one without: pass it always, or never",
    "identity": "the object itself is a constant of the graph: keep one object and copy new values into its tensors (copy_), or"
    " compile once for each",
    "aliasing": "pass the same tensor twice always, or never (clone one)",
    "modes": "a graph is made for each state: call under the same grad mode, autocast and settings every time",
    "backend": "compile once and keep the compiled function; a backend made anew for each compilation is another backend",
}

_ELSEWHERE = {
    "attribute": "keep its size (pad LoRA factors to the largest rank), or pass it as an argument",
    "global": "pass it as an argument",
    "closure": "pass it as an argument",
    "local": "",
}


def _what(cause: Cause) -> str:
    if cause.kind not in _WHAT:
        return _short(cause.reason, 200)
    it = f"{cause.origin} {cause.place}".strip() or "a value"
    size = f"dimension {cause.dimension}" if cause.dimension is not None else "the integer"
    now = cause.now.rpartition("== ")[2] if cause.kind == "zero_one" else cause.now
    text = _WHAT[cause.kind].format(
        it=it, size=size, before=cause.before or "another", now=now or "another", dimension=cause.dimension
    )
    return f"{text} ({cause.where})" if cause.kind == "condition" and cause.where else text


def _advice(cause: Cause) -> str:
    if cause.kind in _DECLARE:
        if cause.origin == "argument":
            return _DECLARE[cause.kind]
        if cause.origin in _UNREACHED:
            integer = cause.kind == "integer" or cause.dimension is None
            rest = "pass it as an argument" if integer and cause.origin != "local" else _ELSEWHERE[cause.origin]
            return _UNREACHED[cause.origin] + (f"; {rest}" if rest else "")
        return ""
    return _ADVICE.get(cause.kind, "")


# Specs -----------------------------------------------------------------------------------------------------------------


def _spec(cause: Cause, scene: Scene) -> str:
    if cause.kind not in _DECLARE or cause.origin != "argument":
        return ""
    leaves: dict[Place, specs.LeafSpec] = {}
    for text, dimension in _SHAPE.findall(cause.before) if cause.kind == "equal" else [(cause.place, cause.dimension)]:
        place, origin = _place(text, scene)
        if place is not None and origin == "argument":
            dims = {*scene.varied.get(place, ()), int(dimension) if dimension is not None else None}
            leaves[place] = leaf(place, getattr(_now(place, scene, origin), "shape", 0), dims)
    entries = printed(specs.ParamsSpec(declare(leaves, scene.code)))
    return " ".join(entries.removeprefix("ParamsSpec({").removesuffix("})").split()).rstrip(",") + ","


_SHAPE = re.compile(r"([\w.\[\]'\"]+)\.shape\[(\d+)\]")


def leaf(place: Place, size: Sequence[int] | int, dimensions: Iterable[int | None]) -> specs.LeafSpec:
    """A spec for a tensor of this size (an integer has an int), with variables for some of its dimensions."""
    if isinstance(size, int):
        return specs.IntVar(place.identifier)
    varied = {*dimensions}
    return specs.TensorSpec(
        [specs.ShapeVar(f"{place.identifier}_{dim}") if dim in varied else specs.STATIC for dim in range(len(size))]
    )


def declare(leaves: Mapping[Place, specs.LeafSpec], code: CodeType) -> dict[str, Any]:
    """What a `ParamsSpec` is made of: the specs of places in the arguments of a function."""
    names = arguments(code)
    varkw = names[-1] if code.co_flags & inspect.CO_VARKEYWORDS else None
    varargs = names[code.co_argcount + code.co_kwonlyargcount] if code.co_flags & inspect.CO_VARARGS else None
    entries: dict[str, Any] = {}
    for root in dict.fromkeys(place.argument for place in leaves):
        nested = _nest([(place.steps, spec) for place, spec in leaves.items() if place.argument == root])
        if root == varargs and isinstance(nested, specs.SeqSpec):
            entries["*args"] = list(nested.entries)
        elif root == varkw and isinstance(nested, specs.DictSpec):
            entries["**kwargs"] = nested.entries
        else:
            entries[root] = nested
    return entries


def _nest(leaves: Sequence[tuple[tuple[Step, ...], Any]]) -> Any:
    """One spec for what lies under one place."""
    if not leaves[0][0]:
        return leaves[0][1]
    below: dict[Step, Any] = {}
    for steps, leaf in leaves:
        below.setdefault(steps[0], []).append((steps[1:], leaf))
    nested = {step: _nest(rest) for step, rest in below.items()}
    first = next(iter(nested))
    if first.attribute is not None:
        return specs.ObjectSpec({step.attribute: entry for step, entry in nested.items()})
    if isinstance(first.item, str):
        return specs.DictSpec({str(step.item): entry for step, entry in nested.items()})
    items = {int(step.item or 0): entry for step, entry in nested.items()}
    return specs.SeqSpec([items.get(index, specs.STATIC) for index in range(max(items) + 1)])
