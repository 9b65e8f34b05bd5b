"""Target `cpp`: Regions as C++ kernels for the CPU, compiled when they are first needed.

codegen.py     Region -> C++ source
include/       what the source includes: drivers, packing, vector math
micro.cpp      the microkernels: one library per machine
toolchain.py   which compiler, which instruction set
build.py       source -> shared object, through the content-addressed cache
launcher.py    shared object -> callable
freeze.py      weights packed ahead of time, never stale
"""

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NoReturn

from torch import Tensor

from postlude.ir import Region
from postlude.ir.region import DTYPE_NAMES
from postlude.targets.base import Kernel


@lru_cache(maxsize=1)
def unavailable() -> str | None:
    """Why there is no compiler that works, or None. Says so once, as a warning."""
    from postlude.errors import CompilerFailed, CompilerNotFound
    from postlude.targets.cpp import toolchain

    try:
        toolchain.compiler()
    except (CompilerNotFound, CompilerFailed) as error:
        warnings.warn(
            f"{error} Until then Inductor does all the work, or eager PyTorch if Inductor finds no compiler.", stacklevel=2
        )
        return "there is no C++ compiler"
    return None


@lru_cache(maxsize=1024)
def source(region: Region) -> str:
    """The C++ source of a Region's kernel.

    Raises:
        UnsupportedRegion: this target has no kernel of its form.
    """
    from postlude.targets.cpp.codegen import generate

    return generate(region)


def unsupported(region: Region) -> str | None:
    """Why this target has no kernel for a Region, or None."""
    from postlude.targets.cpp.codegen import UnsupportedRegion

    try:
        source(region)
    except UnsupportedRegion as error:
        return str(error)
    return None


def fingerprint(region: Region) -> str:
    """A hash of a Region's source, and of all that every kernel includes or is called through."""
    from postlude.targets.cpp import build

    shared = b"".join((build.HERE / name).read_bytes() for name in ("micro.cpp", "launcher.c"))
    return hashlib.sha256(f"{source(region)}{build.include_digest()}".encode() + shared).hexdigest()


def worth_measuring(region: Region, tensors: Sequence[Tensor]) -> tuple[()]:
    """None: the kernels choose by the sizes of each call."""
    return ()


def configuration(fields: Mapping[str, object]) -> NoReturn:
    """There are none."""
    raise ValueError("target cpp has no configurations")


def submit(region: Region) -> None:
    """Start building the kernel and what every kernel needs, in the background."""
    from postlude.targets.cpp import build, launcher

    launcher.submit(_element(region))
    build.submit(source(region))


def load(region: Region, frozen: tuple[int, ...] = (), constant: bool = False) -> Kernel:
    """The kernel: callable with the operands and the results.

    Operands `frozen` may be packed ahead of time; `constant` says that their contents are declared never to change.
    """
    from postlude.targets.cpp import build, freeze, launcher

    # All at once: the microkernels may have to be compiled too.
    build.submit_micro(_element(region))
    path = build.build(source(region))
    kernel = launcher.load(path, operands=len(region.operands), micro=build.micro_table(_element(region)))
    return freeze.freeze(kernel, frozen, constant=constant) if frozen else kernel


def _element(region: Region) -> str:
    """Storage type of the weights, which decides the library of microkernels; before that of codes, what they are decoded to."""
    from postlude.targets.cpp.codegen import CODES, panel_type

    for contraction in region.contractions:
        right = region.operands[region.operand_index[contraction.right]].dtype
        if right in CODES:
            left = region.operands[region.operand_index[contraction.left]].dtype
            return f"{DTYPE_NAMES[panel_type(left)]} {CODES[right]}"
    return DTYPE_NAMES[region.operands[region.operand_index[region.contractions[0].right]].dtype]
