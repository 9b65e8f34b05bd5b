"""Functions with a code object of their own, on which Dynamo keeps what it compiles.

Without one, each compilation of a model would walk the guards of those before it, and count against their limit: modules of torch
itself (`nn.Sequential`) even share one code object in the whole process.
"""

import itertools
import types
from collections.abc import Callable
from typing import Any


def separate(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a model, with a code object of its own."""
    if isinstance(function, types.FunctionType):
        return _renewed(function)
    if isinstance(function, types.MethodType) and isinstance(function.__func__, types.FunctionType):
        return types.MethodType(_renewed(function.__func__), function.__self__)

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    assert isinstance(call, types.FunctionType)
    return _renewed(call)


def _renewed(function: types.FunctionType) -> types.FunctionType:
    # By the name Dynamo remembers which sizes have varied: one twin must not learn from another.
    code = function.__code__.replace(co_name=f"{function.__code__.co_name}_{next(_twins)}")
    twin = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__module__ = function.__module__
    twin.__qualname__ = function.__qualname__
    return twin


_twins = itertools.count()
