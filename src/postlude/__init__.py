"""Postlude: matrix multiplications with what follows them, as one kernel.

    model = torch.compile(model, backend="postlude")

needs no import of this package. `explain` shows what the backend makes of a model, `check` whether
it is right and faster there. `quantize_` keeps a model's weights in 8 or 4 bits.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from postlude.checking.result import Check
    from postlude.checking.run import check
    from postlude.explanation import Explanation, explain
    from postlude.quant.model import QuantizationReport, quantize_

try:
    __version__ = version("postlude")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = ["Check", "Explanation", "QuantizationReport", "__version__", "check", "explain", "quantize_"]

#: Where each public name comes from.
_HOMES = {
    "Check": "postlude.checking.result",
    "check": "postlude.checking.run",
    "Explanation": "postlude.explanation",
    "explain": "postlude.explanation",
    "QuantizationReport": "postlude.quant.model",
    "quantize_": "postlude.quant.model",
}


def __getattr__(name: str) -> Any:
    """`import postlude` stays quick: torch is imported with the first use."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'postlude' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is there to be used, before its first use too."""
    return sorted(__all__)
