"""What `postlude tune` does: compile a model for its example inputs with everything measured that is not known yet."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from postlude.loading import Example, Inputs
from postlude.select.tune import BudgetSpent, Session, tuning
from postlude.twins import separate


@dataclass(frozen=True)
class Tuned:
    """What a run did: its session, and what ended it: ``"done"``, ``"budget"`` or ``"interrupted"``."""

    session: Session
    ended: str


def tune(
    example: Example,
    *,
    budget: float | None = None,
    again: bool = False,
    options: dict[str, Any] | None = None,
    heard: Callable[[int, int], None] = lambda done, total: None,
) -> Tuned:
    """Measure every Region of a model for each of its sets of inputs, forward and, where gradients are wanted, backward.

    Args:
        example: the model and its inputs.
        budget: seconds after which no more is measured. What was measured until then is kept. The first Region that is not
            known is measured even where compiling has taken longer, so that every run gets further.
        again: measure also what is known.
        options: of the backend.
        heard: called with the number of GEMMs done and of all known so far.

    Raises:
        Whatever the model raises on these inputs.
    """
    function = separate(example.function)
    session = Session(None if budget is None else time.monotonic() + budget, again, heard)
    try:
        with tuning(session):
            for inputs in example.inputs:
                _run(function, inputs, example.wants_grad, {**(options or {}), "tune": True})
    except BudgetSpent:
        return Tuned(session, "budget")
    except KeyboardInterrupt:
        return Tuned(session, "interrupted")
    return Tuned(session, "done")


def _run(function: Callable[..., Any], inputs: Inputs, wants_grad: bool, options: dict[str, Any]) -> None:
    from torch._inductor import config

    from postlude.backend import postlude

    def backend(model: torch.fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        # A backend of its own: what Dynamo compiled for the set of inputs before is not taken for this.
        return postlude(model, given, options=options)

    compiled = torch.compile(function, backend=backend)
    # A graph from a cache would come without a look at its Regions.
    with (
        config.patch(force_disable_caches=True),
        torch._dynamo.config.patch(recompile_limit=1 << 16, accumulated_recompile_limit=1 << 16),
        torch.set_grad_enabled(wants_grad),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
        result = inputs.call(compiled)
        losses = [one.sum() for one in _tensors(result) if one.requires_grad and not one.is_complex()]
        if losses:
            torch.autograd.backward(losses)


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in a result of any structure."""
    from torch.utils._pytree import tree_leaves

    leaves = tree_leaves(value)
    if len(leaves) == 1 and not isinstance(leaves[0], Tensor) and hasattr(leaves[0], "__dict__"):
        leaves = tree_leaves(vars(leaves[0]))  # a class of outputs that pytree was not told about
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
