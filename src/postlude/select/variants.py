"""The candidates for a Region: each target's kernels in each configuration worth measuring, and `unfused`.

A variant is plain data: a target's name and a configuration's fields. What is read from a database becomes one only if the target
knows the configuration.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from postlude.ir import Region
from postlude.select.choice import UNFUSED
from postlude.targets.base import TARGETS, Kernel, target


@dataclass(frozen=True)
class Variant:
    """One candidate.

    Attributes:
        target: a target's name, or ``"unfused"``.
        configuration: the target's; None where the target chooses for each call.
    """

    target: str
    configuration: Any = None

    @property
    def name(self) -> str:
        """What reports call it; distinct for distinct variants."""
        return self.target if self.configuration is None else f"{self.target} {self.configuration}"

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        fields = {"configuration": asdict(self.configuration)} if self.configuration is not None else {}
        return {"target": self.target, **fields}

    def load(self, region: Region, frozen: tuple[int, ...] = (), constant: bool = False) -> Kernel:
        """The kernel.

        Raises:
            KernelBuildError: the compiler refused it.
            ValueError: the configuration is none for this Region.
        """
        if self.target == "cpp":
            from postlude.targets import cpp

            return cpp.load(region, frozen, constant)
        if self.configuration is None:
            return target(self.target).load(region)
        return target(self.target).load(region, self.configuration)


UNFUSED_VARIANT = Variant(UNFUSED)

_TARGETS = frozenset(name for names in TARGETS.values() for name in names)


def variant_from(given: Mapping[str, Any]) -> Variant:
    """A variant from plain data that somebody else may have written.

    Raises:
        ValueError: there is no such target or configuration; the message says why.
    """
    name, configuration = given.get("target"), given.get("configuration")
    if unknown := set(given) - {"target", "configuration"}:
        raise ValueError(f"a candidate has no field {sorted(unknown)[0]!r}")
    if name == UNFUSED and configuration is None:
        return UNFUSED_VARIANT
    if name not in _TARGETS:
        raise ValueError(f"there is no target {name!r}")
    if configuration is None:
        return Variant(name)
    if not isinstance(configuration, dict):
        raise ValueError(f"a configuration is {type(configuration).__name__}: expected an object")
    return Variant(name, target(name).configuration(configuration))


def variants(region: Region, names: Sequence[str], tensors: Sequence[Tensor]) -> list[Variant]:
    """What is worth measuring for operands and results like these, but for `unfused`: best guess first.

    Args:
        region: the program.
        names: targets that serve it, in the order of preference.
        tensors: operands and results, on their device.
    """
    own = [Variant(name) for name in names]
    return own + [Variant(name, one) for name in names for one in target(name).worth_measuring(region, tensors)]


def start_compiling(region: Region, tried: Sequence[Variant], tensors: Sequence[Tensor]) -> None:
    """Let what takes seconds to compile be compiled in other processes, several at once, while the first are measured.

    Only CuTe's kernels do. What goes wrong here is met again, with all that can be said about it, when the variant is called.
    """
    configurations = [variant.configuration for variant in tried if variant.target == "cute"]
    if configurations:
        with suppress(Exception):
            target("cute").submit_each(region, tensors, configurations)  # type: ignore[attr-defined]
