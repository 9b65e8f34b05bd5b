"""All that calling a model may change: weights, buffers, gradients, attributes, training flags, optimizers, random numbers.

`State` takes it down once, and puts it back in place: the model that was checked is the user's own, never a copy, so that a
large one fits, and so that every side runs the same weights at the same addresses.
"""

import copy
import functools
import random
import sys
import types
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

#: How deep functions that a function calls by a global name are followed.
DEPTH = 3


class State:
    """What a callable reaches, and a copy of it.

    Attributes:
        modules: every module, by its path (``""`` for the callable itself).
        tensors: parameters, buffers and tensors that are plain attributes, by their path; each once.
    """

    def __init__(self, function: Any) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.tensors: dict[str, Tensor] = {}
        self.optimizers: list[Optimizer] = []
        self._known: set[int] = set()
        for name, found in reachable(function):
            if isinstance(found, nn.Module):
                self._add_module(name, found)
            elif isinstance(found, Optimizer):
                self.optimizers.append(found)
            else:
                self._add_tensor(name, found)
        self.random = random_state()
        self._copies = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        self._versions = {name: _version(tensor) for name, tensor in self.tensors.items()}
        self._gradients = {name: tensor.grad for name, tensor in self.tensors.items() if tensor.is_leaf}
        self._attributes = [(part, dict(part)) for module in self.modules.values() for part in _dictionaries(module)]
        self._containers = [(part, copy.copy(part)) for module in self.modules.values() for part in _containers(vars(module))]
        self._steps = [copy.deepcopy(optimizer.state_dict()) for optimizer in self.optimizers]
        self.clear_gradients()

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Tensors that want a gradient."""
        return {name: tensor for name, tensor in self.tensors.items() if tensor.requires_grad and tensor.is_leaf}

    @property
    def training(self) -> bool:
        """Whether a module is in training mode."""
        return any(module.training for module in self.modules.values())

    def clear_gradients(self) -> None:
        """Let no call accumulate into a gradient that is there."""
        for name in self._gradients:
            self.tensors[name].grad = None

    @property
    def changed(self) -> bool:
        """Whether a call has changed tensors or attributes since they were put back."""
        attributes = any(
            part.keys() != saved.keys() or any(part[key] is not value for key, value in saved.items())
            for part, saved in self._attributes
        )
        return (
            attributes
            or any(not _same_parts(part, saved) for part, saved in self._containers)
            or any(_version(tensor) not in (-1, self._versions[name]) for name, tensor in self.tensors.items())
        )

    def rewind(self) -> None:
        """Put everything back but the gradients, which stay away until `restore`. Cheap where nothing was changed."""
        self._rewind(lambda name: _version(self.tensors[name]) != self._versions[name])

    def restore(self) -> None:
        """Put everything back, gradients too, after comparing every bit."""
        self._rewind(lambda name: not same_bits(self.tensors[name], self._copies[name]))
        for name, gradient in self._gradients.items():
            self.tensors[name].grad = gradient

    def _rewind(self, differs: Any) -> None:
        for part, saved in self._attributes:
            for key in [key for key in part if key not in saved]:
                del part[key]
            for key, value in saved.items():
                if key not in part or part[key] is not value:
                    part[key] = value
        for part, saved in self._containers:
            if not _same_parts(part, saved):
                part.clear()
                (part.extend if isinstance(part, list | deque) else part.update)(saved)
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                if differs(name):
                    tensor.copy_(self._copies[name])
                    self._versions[name] = _version(tensor)
        for optimizer, steps in zip(self.optimizers, self._steps, strict=True):
            optimizer.load_state_dict(copy.deepcopy(steps))
        self.clear_gradients()
        set_random_state(self.random)

    @contextmanager
    def converted(self, dtype: torch.dtype) -> Iterator[None]:
        """While open, every floating-point tensor of the model has this type. The same storages come back afterwards."""
        floating = [tensor for tensor in self.tensors.values() if tensor.dtype.is_floating_point]
        before = [tensor.data for tensor in floating]
        try:
            for tensor in floating:
                tensor.grad = None
                tensor.data = tensor.data.to(dtype)
            yield
        finally:
            for tensor, data in zip(floating, before, strict=True):
                tensor.grad = None
                tensor.data = data

    def _add_module(self, name: str, module: nn.Module) -> None:
        for path, part in module.named_modules(prefix=name):
            if id(part) not in self._known:
                self._known.add(id(part))
                self.modules[path] = part
            for key, tensor in _own_tensors(part):
                self._add_tensor(f"{path}.{key}" if path else key, tensor)

    def _add_tensor(self, name: str, tensor: Tensor) -> None:
        if id(tensor) not in self._known:
            self._known.add(id(tensor))
            self.tensors[name] = tensor


def reachable(function: Any, name: str = "", depth: int = 0, seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """(name, module, tensor or optimizer) of all that a callable holds: in closures, defaults, globals that it names."""
    seen = set() if seen is None else seen
    if id(function) in seen or depth > 2 * DEPTH:
        return
    seen.add(id(function))
    if isinstance(function, nn.Module | Tensor | Optimizer):
        yield name, function
        return
    for key, part in _held(function):
        path = f"{name}.{key}" if name and key else name or key
        yield from reachable(part, path, depth + 1, seen)


def _held(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, types.FunctionType):
        if value.__module__.partition(".")[0] == "torch":
            return
        yield from zip(value.__code__.co_freevars, (_content(cell) for cell in value.__closure__ or ()), strict=True)
        yield from ((f"default{index}", part) for index, part in enumerate(value.__defaults__ or ()))
        yield from (value.__kwdefaults__ or {}).items()
        yield from ((key, value.__globals__[key]) for key in sorted(_names(value.__code__)) if key in value.__globals__)
    elif isinstance(value, types.MethodType):
        yield "", value.__self__
        yield "", value.__func__
    elif isinstance(value, functools.partial):
        yield "", value.func
        yield from ((f"[{index}]", part) for index, part in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, dict):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(index), part) for index, part in enumerate(value))
    elif not isinstance(value, type | types.ModuleType) and hasattr(value, "__dict__"):
        yield from vars(value).items()
        if callable(value):
            yield "", type(value).__call__


def _names(code: types.CodeType) -> set[str]:
    """Names that a function reads from its globals, those of functions inside it too."""
    inner = [_names(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return set(code.co_names).union(*inner)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for part in (module._parameters, module._buffers):
        yield from ((key, value) for key, value in part.items() if isinstance(value, Tensor))
    yield from _attribute_tensors("", vars(module), ())


#: Attributes of every module that hold what is walked otherwise, or no state.
_PYTORCHS = frozenset(vars(nn.Module()))


def _attribute_tensors(path: str, part: Any, above: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
    """Tensors that are attributes, or stand in lists, dicts and the like that are."""
    if isinstance(part, Tensor):
        yield path, part
    elif isinstance(part, dict | list | tuple | deque) and id(part) not in above:
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            if path or key not in _PYTORCHS:
                yield from _attribute_tensors(f"{path}.{key}" if path else str(key), value, (*above, id(part)))


def _containers(attributes: dict[str, Any]) -> Iterator[Any]:
    """Lists, dicts and the like that are attributes, and those inside them: a call may change them in place."""
    pending = [value for key, value in attributes.items() if key not in _PYTORCHS]
    seen: set[int] = set()
    while pending:
        part = pending.pop()
        if isinstance(part, list | dict | set | deque | tuple) and id(part) not in seen:
            seen.add(id(part))
            pending += _flat(part)
            if not isinstance(part, tuple):
                yield part


def _same_parts(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(_flat(one), _flat(other), strict=True))


def _flat(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


def _dictionaries(module: nn.Module) -> list[dict[str, Any]]:
    """Where a module keeps its attributes."""
    return [vars(module), module._parameters, module._buffers, module._modules]


def _version(tensor: Tensor) -> int:
    """Counts the tensor's changes in place; tensors of inference mode have no counter and are always compared."""
    return -1 if tensor.is_inference() else tensor._version


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bits: NaN equals NaN, and -0.0 is not 0.0."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.layout != torch.strided or one.is_quantized:
        return bool(torch.equal(one, other))
    one, other = one.detach().resolve_conj().contiguous(), other.detach().resolve_conj().contiguous()
    return bool(torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)))


def random_state() -> dict[str, Any]:
    """The state of every generator that a model may draw from."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if numpy := sys.modules.get("numpy"):
        state["numpy"] = numpy.random.get_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put `random_state` back."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
