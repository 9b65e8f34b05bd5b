"""What was chosen for a Region, from what, and why: what reports show."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

#: The candidate that every Region has: its nodes go back to Inductor.
UNFUSED = "unfused"

#: Where a choice may come from.
Origin: TypeAlias = Literal["user database", "shipped database", "measured", "rule"]


@dataclass(frozen=True)
class Candidate:
    """One way to compute a Region.

    Attributes:
        name: ``"unfused"``; the target that computes it where that chooses its own configuration (``"cpp"``); else the target
            and the configuration.
        seconds: median time of a call; None where it was not measured.
        spread: half the width of the 95 % confidence interval of the median, over the median.
        error: why it could not be built or run, or None.
    """

    name: str
    seconds: float | None = None
    spread: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Choice:
    """The candidate that won.

    Attributes:
        winner: its name; ``"unfused"`` where the nodes went back to Inductor.
        origin: ``"user database"``, ``"shipped database"``, ``"measured"`` (in this process, just now) or ``"rule"``.
        reason: one sentence.
        candidates: all that were considered, the winner among them; those of a rule have no times.
    """

    winner: str
    origin: Origin
    reason: str
    candidates: tuple[Candidate, ...] = ()

    @property
    def unfused(self) -> bool:
        """Whether the nodes go back to Inductor."""
        return self.winner == UNFUSED
