"""Target `triton`: Regions as Triton kernels, for any GPU that Triton serves.

codegen.py       Region -> Triton source
attention.py     the kernel of an attention
writer.py        what all kernels share
codegen_ops.py   each op as a Triton expression
configs.py       which kernel in which tiles: tables per architecture
layout.py        how tensors lie in memory
launcher.py      source -> callable
cuda_driver.py   launches without Triton in between
workspace.py     memory of kernels that split k
"""

import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from postlude.ir import Region
from postlude.targets.base import configuration_from
from postlude.targets.triton.codegen import generate, obstacle

if TYPE_CHECKING:
    from postlude.targets.triton.configs import Config
    from postlude.targets.triton.launcher import Kernel


def unavailable() -> str | None:
    """Why nothing can be compiled with it here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    import torch

    return None if torch.cuda.is_available() else "no GPU is visible to torch"


def source(region: Region) -> str:
    """The Triton source of a Region's kernels.

    Raises:
        UnsupportedRegion: this target has no kernel of its form.
    """
    return generate(region).text


def unsupported(region: Region) -> str | None:
    """Why this target has no kernel for a Region, or None."""
    return obstacle(region)


def fingerprint(region: Region) -> str:
    """A hash of the source."""
    return hashlib.sha256(source(region).encode()).hexdigest()


def worth_measuring(region: Region, tensors: Sequence[Tensor]) -> "list[Config]":
    """The table's configurations for as many rows, and for the next numbers of rows."""
    from postlude.targets.triton.launcher import worth_measuring

    return worth_measuring(region, tensors)


def configuration(fields: Mapping[str, Any]) -> "Config":
    """The configuration with these fields.

    Raises:
        ValueError: no kernel has such constants.
    """
    from postlude.targets.triton.configs import Config, check

    config = configuration_from(Config, fields)
    check(config)
    return config


def load(region: Region, config: "Config | None" = None) -> "Kernel":
    """The kernel: callable with the operands and the results, tensors of one GPU.

    `config` is taken instead of what the tables say.

    Raises:
        UnsupportedRegion: this target has no kernel of its form.
    """
    from postlude.targets.triton.launcher import Kernel, load_module

    load_module(region)
    return Kernel(region, config)
