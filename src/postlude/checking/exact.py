"""The reference: the user's model in float64, whatever types its code names.

Weights are converted in place, for as long as it takes. A mode replaces narrower types where the code asks for one
(``x.float()``, ``softmax(x, dtype=torch.float32)``), so that no part of the reference is computed in float32 by accident.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from postlude.checking.state import State

#: Types that a reference computes in its own type instead.
NARROW = (torch.float16, torch.bfloat16, torch.float32)

_CONVERSIONS = (Tensor.float, Tensor.half, Tensor.bfloat16)


class Widened(TorchFunctionMode):
    """Replaces every narrow floating-point type that is asked for by one type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call with the replaced types."""
        if func in _CONVERSIONS:
            return args[0].to(self.dtype)
        args, kwargs = tree_map(self._replaced, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _replaced(self, value: Any) -> Any:
        return self.dtype if isinstance(value, torch.dtype) and value in NARROW else value


@contextmanager
def widened(state: State, dtype: torch.dtype) -> Iterator[None]:
    """While open, the model computes in `dtype`."""
    default = torch.get_default_dtype()
    with state.converted(dtype):
        torch.set_default_dtype(dtype)
        try:
            with Widened(dtype):
                yield
        finally:
            torch.set_default_dtype(default)


def widen(value: Any, dtype: torch.dtype) -> Any:
    """An argument in `dtype`, where it is a floating-point tensor (or holds some)."""
    return tree_map(
        lambda part: (
            part.detach().to(dtype).requires_grad_(part.requires_grad)
            if isinstance(part, Tensor) and part.dtype.is_floating_point
            else part
        ),
        value,
    )
