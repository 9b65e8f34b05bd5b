"""What a target offers, and the targets of each device type."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from importlib import import_module
from typing import Any, Protocol, TypeVar, cast

from torch import Tensor

from postlude.ir import Region

#: A kernel: called with the operands, then the results that it fills. It may return False, which says that it can't take
#: these tensors and has done nothing.
Kernel = Callable[..., Any]


class Target(Protocol):
    """A package `postlude.targets.<name>`; these are its functions."""

    def unavailable(self) -> str | None:
        """Why nothing can be compiled with it on this machine, or None. Never raises."""

    def unsupported(self, region: Region) -> str | None:
        """Why it has no kernel of a Region's form, or None."""

    def source(self, region: Region) -> str:
        """The generated source of a Region's kernel."""

    def fingerprint(self, region: Region) -> str:
        """A hash of all that we write and that decides how fast a Region's kernels are: sources, and what they include."""

    def worth_measuring(self, region: Region, tensors: Sequence[Tensor]) -> Sequence[Any]:
        """Configurations to measure for operands and results like these, beside the target's own choice; best guess first."""

    def configuration(self, fields: Mapping[str, Any]) -> Any:
        """The configuration with these fields.

        Raises:
            ValueError: there is no such configuration; the message says why.
        """

    def load(self, region: Region, configuration: Any = ...) -> Kernel:
        """The kernel, in a configuration; by default in that which the target chooses for each call.

        Raises:
            KernelBuildError: the compiler refused the source.
        """


T = TypeVar("T")


def configuration_from(cls: type[T], given: Mapping[str, Any]) -> T:
    """A configuration, a flat dataclass, from plain data that somebody else may have written.

    Raises:
        ValueError: a field is missing, unknown, or of another type.
    """
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    if unknown := set(given) - set(known):
        raise ValueError(f"a configuration has no field {sorted(unknown)[0]!r}")
    for name, field in known.items():
        if name not in given:
            if field.default is MISSING:
                raise ValueError(f"a configuration needs the field {name!r}")
            continue
        value, kind = given[name], getattr(field.type, "__name__", field.type)
        if type(value).__name__ != kind:
            raise ValueError(f"{name} is {value!r}: expected {kind}")
    return cls(**given)


#: Targets by device type, `aten`, the interpreter, serves whatever none of them does.
TARGETS: dict[str, tuple[str, ...]] = {"cpu": ("cpp",), "cuda": ("cute", "triton", "blas")}

#: For each target a number that grows where earlier measurements say nothing about its kernels any more: another mainloop,
#: another meaning of a configuration. Changes that make kernels a little faster, or right where they were wrong, leave it.
GENERATIONS = {"cpp": 1, "cute": 1, "triton": 1, "blas": 1}


def target(name: str) -> Target:
    """A target by its name, imported when it is first needed."""
    return cast(Target, import_module(f"postlude.targets.{name}"))


def available(device_type: str) -> list[str]:
    """Names of the targets that can compile for a device type on this machine."""
    return [name for name in TARGETS.get(device_type, ()) if target(name).unavailable() is None]


def serving(device_type: str, region: Region) -> list[str]:
    """Names of the targets that have a kernel for a Region."""
    return [name for name in available(device_type) if target(name).unsupported(region) is None]
