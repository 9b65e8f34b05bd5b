"""What TARGET means on the command line: where a model and its example inputs come from.

TARGET is ``package.module:name`` or ``path/to/file.py:name``; for a file the name may be left out and is then ``target``. Calling
``name()`` returns a tuple that begins with the model or function. After it come

- the arguments to call it with:                ``return model, x, mask``
- or one list, with one entry for each set of inputs, a tuple of arguments or a dict of arguments by name:
                                                ``return model, [(x, mask), {"x": longer, "mask": None}]``
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from postlude.errors import TargetNotFound

if TYPE_CHECKING:
    from types import ModuleType

#: The function that is looked for in a file where TARGET names none.
DEFAULT_NAME = "target"


@dataclass(frozen=True)
class Inputs:
    """One set of arguments."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def call(self, function: Callable[..., Any]) -> Any:
        """What `function` returns for them."""
        return function(*self.args, **self.kwargs)


@dataclass(frozen=True)
class Example:
    """A model or function, and sets of inputs to call it with, at least one."""

    name: str
    function: Callable[..., Any]
    inputs: tuple[Inputs, ...]

    @property
    def wants_grad(self) -> bool:
        """Whether calls should record gradients: a module in eval mode is there for inference."""
        return bool(getattr(self.function, "training", True))


def load(target: str) -> Example:
    """Call the function that `target` names.

    Raises:
        TargetNotFound: there is no such file, module or function, it raised, or it returned something else than is expected.
    """
    place, name = _split(target)
    try:
        module = _from_file(place) if place.endswith(".py") else _from_path(place)
    except Exception as error:
        raise TargetNotFound(target, _told(error)) from error
    make = getattr(module, name, None)
    if not callable(make):
        reason = f"there is no function {name!r} in it" if make is None else f"{name} is not a function"
        if name == DEFAULT_NAME and ":" not in target:
            reason = f"it has no function {name!r}; without one, a colon and the name of a function are expected at its end"
        raise TargetNotFound(target, reason)
    import torch

    if isinstance(make, torch.nn.Module):
        raise TargetNotFound(target, f"{name} is a module; write a function: def {DEFAULT_NAME}(): return {name}, example_input")
    if needed := _required(make):
        raise TargetNotFound(target, f"{name} is called without arguments, and needs {', '.join(needed)}")
    try:
        made = make()
    except Exception as error:
        raise TargetNotFound(target, f"{name}() raised {_told(error)}") from error
    if not isinstance(made, tuple) or not made or not callable(made[0]):
        raise TargetNotFound(target, f"{name}() should return a tuple: the model or function, then its arguments")
    return Example(target, made[0], _inputs(target, name, made[1:]))


def _split(target: str) -> tuple[str, str]:
    """The file or module, and the function's name."""
    place, separator, name = target.rpartition(":")
    if separator and name.isidentifier() and place:
        return place, name
    if target.endswith(".py"):
        return target, DEFAULT_NAME
    raise TargetNotFound(target, "a colon and the name of a function were expected at its end")


def _from_file(place: str) -> ModuleType:
    path = Path(place).resolve()
    if not path.is_file():
        raise FileNotFoundError("No such file")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as `python file.py` does
    # A name of its own: a file called types.py must not take another module's place.
    name = f"postlude_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Dynamo and pickle look functions up there
    spec.loader.exec_module(module)
    return module


def _from_path(place: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does
    return importlib.import_module(place)


def _required(function: Callable[..., Any]) -> list[str]:
    """Parameters without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions don't say
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variable]


def _inputs(target: str, name: str, given: tuple[Any, ...]) -> tuple[Inputs, ...]:
    if len(given) != 1 or not isinstance(given[0], list) or not any(isinstance(one, tuple | dict) for one in given[0]):
        return (Inputs(given),)
    sets = []
    for index, one in enumerate(given[0]):
        if isinstance(one, tuple):
            sets.append(Inputs(one))
        elif isinstance(one, dict) and all(isinstance(key, str) for key in one):
            sets.append(Inputs(kwargs=one))
        else:
            kind = type(one).__name__
            reason = (
                f"set {index} of the inputs that {name}() returned is a {kind}: a tuple or a dict by argument names is expected"
            )
            raise TargetNotFound(target, reason)
    return tuple(sets)


def _told(error: Exception) -> str:
    """Kind, message and place of an error, on one line."""
    text = str(error).strip().split("\n")[0]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
    where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own and not isinstance(error, SyntaxError) else ""
    return f"{type(error).__name__}: {text}{where}"
