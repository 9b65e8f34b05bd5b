"""Target `cute`: Regions as CuTe DSL kernels for NVIDIA tensor cores, on QuACK's mainloops, compiled when they are first needed.

form.py            what each group of a Region is to a kernel, and what no kernel says
ops.py             op -> expression, and composites that have a better one
peephole.py        finds those composites
codegen.py         Region -> Python source
functions.py       what generated epilogues call
operands.py        epilogue operands that QuACK has no op for
tracing.py         how tensors come to a GEMM while it is traced
configurations.py  tiles and clusters, and which to take
build.py           source -> compiled object, through the content-addressed cache
ahead.py           the same ahead of time, in processes of their own
worker.py          such a process
launcher.py        compiled objects -> callable
toolchain.py       whether all this can be used here

Nothing is imported from CuTe or QuACK before a kernel is compiled or loaded: both are an extra.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from postlude.ir import Region
from postlude.targets.base import configuration_from
from postlude.targets.cute.configurations import Configuration
from postlude.targets.cute.toolchain import unavailable

if TYPE_CHECKING:
    from postlude.targets.cute.launcher import Kernel

__all__ = [
    "Configuration",
    "candidates",
    "configuration",
    "fingerprint",
    "fits",
    "load",
    "source",
    "submit",
    "submit_each",
    "unavailable",
    "unsupported",
    "worth_measuring",
]


@lru_cache(maxsize=1024)
def source(region: Region) -> str:
    """The Python source of a Region's kernels.

    Raises:
        UnsupportedRegion: this target has no kernel of its form.
    """
    from postlude.targets.cute.codegen import generate

    return generate(region)


def unsupported(region: Region) -> str | None:
    """Why this target has no kernel for a Region, or None."""
    from postlude.targets.cute.form import UnsupportedRegion

    try:
        source(region)
    except UnsupportedRegion as error:
        return str(error)
    return None


def fits(region: Region, operands: Sequence[Tensor]) -> str | None:
    """Why a Region's kernels can't read these operands (device, types, strides, alignment, empty axes), or None."""
    from postlude.targets.cute.launcher import fits

    return fits(region, operands)


def submit(region: Region, tensors: Sequence[Tensor], device: torch.device, *, rows_vary: bool) -> None:
    """Start compiling in the background for operands and results like these; see `launcher.submit`."""
    from postlude.targets.cute.launcher import submit
    from postlude.targets.cute.toolchain import prepare

    prepare(device)
    submit(region, tensors, device, rows_vary=rows_vary)


def submit_each(region: Region, tensors: Sequence[Tensor], configurations: Sequence[Configuration | None]) -> None:
    """Start compiling in the background what is to be measured; see `launcher.submit_each`."""
    from postlude.targets.cute.configurations import serves_pairs
    from postlude.targets.cute.form import forms
    from postlude.targets.cute.launcher import submit_each
    from postlude.targets.cute.toolchain import refused

    paired = any(form.paired for form in forms(region))
    if refused(tensors[0].device) is False:
        submit_each(region, tensors, [c for c in configurations if c is None or not paired or serves_pairs(c)])


def candidates(region: Region, m: int, n: int, k: int, capability: tuple[int, int], processors: int = 132) -> list[Configuration]:
    """Configurations worth measuring for a Region's first group: the one that is chosen, then by expected time."""
    from postlude.targets.cute.configurations import Problem, choose, ranked
    from postlude.targets.cute.form import forms

    form = forms(region)[0]
    problem = Problem(m, n * (2 if form.paired else 1), k, paired=form.paired, crowded=form.crowded)
    every = [choose(problem, capability[0], processors), *ranked(problem, capability[0], processors)]
    return list(dict.fromkeys(every))


def fingerprint(region: Region) -> str:
    """A hash of the source, and of what it is traced with."""
    from postlude.targets.cute.build import traced

    return hashlib.sha256(f"{source(region)}{traced()}".encode()).hexdigest()


def worth_measuring(region: Region, tensors: Sequence[Tensor]) -> list[Configuration]:
    """Configurations to measure for these operands and results, beside the one that is chosen."""
    from postlude.targets.cute.launcher import worth_measuring

    return worth_measuring(region, tensors)


def configuration(fields: Mapping[str, Any]) -> Configuration:
    """The configuration with these fields, one of those that are measured on some architecture.

    Raises:
        ValueError: it is none of them.
    """
    from postlude.targets.cute.configurations import every_configuration

    found = configuration_from(Configuration, fields)
    if found not in every_configuration():
        raise ValueError(f"{found} is no configuration that this version has kernels for")
    return found


def load(region: Region, configuration: Configuration | None = None) -> "Kernel":
    """The kernel: callable with the operands and the results. Kernels are compiled for what comes, at the first call.

    Args:
        region: the program.
        configuration: tiles and clusters for all groups; None leaves it to the sizes of each call.

    Raises:
        ValueError: the configuration is none for a Region with pairs.
    """
    from postlude.targets.cute.configurations import serves_pairs
    from postlude.targets.cute.form import forms
    from postlude.targets.cute.launcher import Kernel

    if configuration is not None and not serves_pairs(configuration) and any(form.paired for form in forms(region)):
        raise ValueError(f"{configuration} does not serve pairs of columns")
    return Kernel(region, configuration)
