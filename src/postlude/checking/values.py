"""The tensors of a model's output by the path that a person would write: ``logits``, ``past_key_values[0][1]``."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

#: The name of an output that is one tensor.
WHOLE = "output"


def named_tensors(value: Any) -> dict[str, Tensor]:
    """All tensors in a nested value, by their path; numbers count as tensors without dimensions.

    Tuples, lists, mappings, dataclasses, named tuples and objects with attributes are walked, Hugging Face's outputs and caches
    among them. A tensor that is met twice is named twice.
    """
    return {name.removeprefix(".") or WHOLE: tensor for name, tensor in _walk(value, "", set())}


def _walk(value: Any, path: str, above: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, float | complex):
        yield path, torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.complex128)
    elif isinstance(value, int):  # and bool
        yield path, torch.tensor(value)
    elif id(value) not in above:
        for step, part in _parts(value):
            yield from _walk(part, path + step, above | {id(value)})


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """(step of the path, part) of a container; nothing of what is none."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]", part
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield f".{field.name}", getattr(value, field.name, None)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name in value._fields:
            yield f".{name}", getattr(value, name)
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield f"[{index}]", part
    elif not isinstance(value, str | bytes | type | nn.Module) and hasattr(value, "__dict__"):
        for name, part in vars(value).items():
            # Of a plain object only what holds tensors counts: its flags and counters are no outputs.
            if not isinstance(part, bool | int | float | complex):
                yield f".{name}", part
