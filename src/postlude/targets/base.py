"""What a target offers, and the targets of each device type."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol, cast

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

    def load(self, region: Region) -> Kernel:
        """The kernel.

        Raises:
            KernelBuildError: the compiler refused the source.
        """


#: Targets by device type, `aten`, the interpreter, serves whatever none of them does.
TARGETS: dict[str, tuple[str, ...]] = {"cpu": ("cpp",), "cuda": ("cute", "triton", "blas")}


def target(name: str) -> Target:
    """A target by its name, imported when it is first needed."""
    return cast(Target, import_module(f"postlude.targets.{name}"))


def available(device_type: str) -> list[str]:
    """Names of the targets that can compile for a device type on this machine."""
    return [name for name in TARGETS.get(device_type, ()) if target(name).unavailable() is None]


def serving(device_type: str, region: Region) -> list[str]:
    """Names of the targets that have a kernel for a Region."""
    return [name for name in available(device_type) if target(name).unsupported(region) is None]
