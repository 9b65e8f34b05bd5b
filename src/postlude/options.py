"""Options of ``torch.compile(..., backend="postlude", options={...})`` that are Postlude's own."""

import difflib
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch._inductor.config

from postlude.capture import Settings
from postlude.errors import OptionError

ROUNDINGS = ("once", "eager")


@dataclass(frozen=True)
class Options:
    """Postlude's own options.

    Attributes:
        rounding: ``"once"``: an epilogue is float32 arithmetic, rounded where a result is stored. ``"eager"``: every op
            rounds to the type that eager PyTorch would store there.
        freeze: inference only: weights may be prepacked. A weight that changes is packed anew.
        tune: measure the kernels of each Region that the user's database does not know against what Inductor makes of it, keep
            the fastest, and remember it.
        compile_ahead: on a GPU, start compiling CuTe's kernels while the graph is compiled, in processes of their own that take
            about a gigabyte each. Otherwise the first call compiles them, one after the other.
        fuse_all: keep every legal Region, also one that is not expected to pay, and raise where capture fails. For tests
            and for looking at code.
    """

    rounding: str = "once"
    freeze: bool = False
    tune: bool = False
    compile_ahead: bool = False
    fuse_all: bool = False

    def __post_init__(self) -> None:
        if self.rounding not in ROUNDINGS:
            raise OptionError("rounding", self.rounding, " or ".join(map(repr, ROUNDINGS)))
        for name in ("freeze", "tune", "compile_ahead", "fuse_all"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(name, getattr(self, name), "True or False")

    @classmethod
    def split(cls, options: dict[str, Any] | None) -> "tuple[Options, dict[str, Any] | None]":
        """Postlude's options, and the rest for Inductor (None if there is none).

        Raises:
            OptionError: a name that neither has, or a value that an own option can't have.
        """
        names = {field.name for field in fields(cls)}
        own = {key: value for key, value in (options or {}).items() if key in names}
        rest = {key: value for key, value in (options or {}).items() if key not in names}
        known = torch._inductor.config.get_config_copy()
        for key in rest:
            if key.replace("-", "_") not in known:
                close = difflib.get_close_matches(key, [*names, *known], n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                own_names = ", ".join(sorted(names - {"fuse_all"}))  # that one is no promise to users
                raise OptionError(key, rest[key], f"one of Postlude's options ({own_names}) or of Inductor's{hint}")
        return cls(**own), rest or None

    def key(self) -> str:
        """Text that differs where the rewritten graph may differ."""
        return repr(self)

    def capture_settings(self) -> Settings:
        """What capture needs to know."""
        return Settings(eager_rounding=self.rounding == "eager", strict=self.fuse_all)
