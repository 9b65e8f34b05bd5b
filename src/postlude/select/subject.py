"""What a measurement is about, and where it holds: the key of an entry of the tuning database.

A `Call` is a Region with sizes, layouts and a device. It is computed in the same way from fake tensors while a graph is compiled,
and from the tensors of a call. Rows come in buckets, so that one entry serves many batch sizes. An environment is what else the
times depend on: versions of what generates and compiles kernels. An entry of another environment is not taken.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import gcd, inf, prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from postlude.capture.sizes import hint
from postlude.errors import PostludeError
from postlude.ir import Region, to_text
from postlude.ir.region import ROW_AXES
from postlude.op import region_of
from postlude.targets.aten.interpreter import axis_sizes, batch_shape
from postlude.targets.base import serving, target

if TYPE_CHECKING:
    from postlude.capture.rewrite import Plan

#: Bytes of alignment that kernels tell apart.
_ALIGNMENT = 16

#: Packages whose versions decide what a kernel for a GPU is, or how fast.
_GPU_PACKAGES = ("triton", "nvidia-cutlass-dsl", "quack-kernels")

#: Inductor's settings that change what Regions are compared with.
_PEER_SETTINGS = ("max_autotune", "max_autotune_gemm", "freezing", "coordinate_descent_tuning")


@dataclass(frozen=True)
class Call:
    """A Region at sizes and layouts on a device.

    Attributes:
        region: the Region's text.
        sizes: axis and size, rows by their bucket (all axes of a batched Region, whose axes are lengths).
        layout: how each operand lies, see `layout`.
        device: name of the GPU or processor.
        isa: instruction set of the kernels; empty on a GPU.
        threads: threads of a call; 0 on a GPU.
        packed: whether weights are packed ahead of time.
        float32: how float32 is multiplied where there is any: ``"highest"``, ``"high"`` or ``"medium"``.
    """

    region: str
    sizes: tuple[tuple[str, int], ...]
    layout: tuple[str, ...]
    device: str
    isa: str = ""
    threads: int = 0
    packed: bool = False
    float32: str = ""

    def digest(self) -> str:
        """Names the call in the database."""
        return digest(asdict(self))


def digest(value: object) -> str:
    """A short hash of plain data."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# Buckets and layouts -------------------------------------------------------------------------------------------------


def bucket(size: int) -> int:
    """The smallest number not below `size` of 0, 1, 2, 4, ..., 64, 96, 128, 192, ...: powers of two, and from 64 on half-way too.

    Tiles have 64, 96, 128, 192 or 256 rows.
    """
    if size <= 1:
        return size
    power = 1 << (size - 1).bit_length()
    return 3 * power // 4 if power > 64 and size <= 3 * power // 4 else power


def layout(axes: Sequence[str], shape: Sequence[int], strides: Sequence[int], itemsize: int, pointer: int = 0) -> str:
    """How a tensor lies in memory, as far as kernels tell layouts apart: ``"2 1 @16"`` for a dense matrix.

    For each dimension its place in the order of strides, from 1 for the innermost; ``+`` after it where there is a gap below it,
    ``0`` for a stride of 0, ``-`` for a size of 1. Dimensions of the first axis count as one where one stride describes them.
    After ``@``, the bytes that the address and all strides are multiples of, 16 at most.
    """
    dims: list[tuple[int, int]] = []
    leading = len(shape) - len(axes) + 1 if axes and axes[0] in ROW_AXES else 0
    for index, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if 0 < index < leading and (dims[-1][0] == 1 or size == 1 or dims[-1][1] == stride * size):
            outer = dims.pop()
            dims.append((outer[0] * size, stride if size != 1 else outer[1]))
        else:
            dims.append((size, stride))
    ordered = sorted({stride for size, stride in dims if size > 1 and stride})
    dense, gaps = 1, set()
    for stride in ordered:
        if stride != dense:
            gaps.add(stride)
        dense = stride * max(size for size, own in dims if own == stride and size > 1)
    words = []
    for size, stride in dims:
        place = "0" if stride == 0 else f"{ordered.index(stride) + 1}{'+' * (stride in gaps)}" if size > 1 else "-"
        words.append("-" if size == 1 else place)
    align = gcd(_ALIGNMENT, pointer, *(stride * itemsize for stride in ordered if stride != 1))
    return " ".join([*words, f"@{align}"])


def call_of(region: Region, operands: Sequence[Tensor], *, device: torch.device, packed: bool = False, real: bool = True) -> Call:
    """The call of a Region with these operands.

    Args:
        region: the program.
        operands: its tensors; those of the `meta` device say sizes and strides.
        device: where they are, or will be.
        packed: whether weights are packed ahead of time.
        real: whether addresses are known. Otherwise they are taken to be aligned.
    """
    shapes = [tuple(operand.shape) for operand in operands]
    sizes = axis_sizes(region, shapes)
    if region.batched:
        sizes = {axis: bucket(size) for axis, size in sizes.items()} | {"b": bucket(prod(batch_shape(region, shapes)))}
    else:
        sizes = sizes | {"m": bucket(sizes["m"])}
    layouts = tuple(
        layout(o.axes, t.shape, t.stride(), o.dtype.itemsize, t.data_ptr() if real else 0)
        for o, t in zip(region.operands, operands, strict=True)
    )
    multiplied = {region.operands[region.operand_index[c.right]].dtype for c in region.contractions}
    on_cpu = device.type == "cpu"
    return Call(
        region=to_text(region),
        sizes=tuple(sorted(sizes.items())),
        layout=layouts,
        device=device_name(device),
        isa=_isa() if on_cpu else "",
        threads=torch.get_num_threads() if on_cpu else 0,
        packed=packed,
        float32=torch.get_float32_matmul_precision() if torch.float32 in multiplied else "",
    )


def planned_operands(plan: Plan) -> list[Tensor]:
    """The operands of a planned Region, on the `meta` device, at the sizes of the example."""
    operands = []
    with unset_fake_temporarily():
        for source in plan.sources:
            value = source.node.meta["val"]
            tensor = torch.empty_strided(
                [hint(size) for size in value.shape],
                [hint(stride) for stride in value.stride()],
                dtype=value.dtype,
                device="meta",
            )
            if source.expand is not None:
                tensor = tensor.expand([hint(size) for size in source.expand])
            operands.append(tensor.squeeze(source.squeeze) if source.squeeze else tensor)
    return operands


def planned_call(plan: Plan, *, packed: bool = False) -> Call:
    """The call of a planned Region at the sizes of the example."""
    with unset_fake_temporarily():
        device = plan.sources[0].node.meta["val"].device
        return call_of(plan.region, planned_operands(plan), device=device, packed=packed, real=False)


#: Smallest and largest size that calls may have.
Bounds = Mapping[str, tuple[float, float]]


def planned_bounds(plan: Plan) -> dict[str, tuple[float, float]]:
    """The bounds of each axis of a planned Region that varies from call to call."""
    shapes = []
    for source in plan.sources:
        shape = list(source.expand if source.expand is not None else source.node.meta["val"].shape)
        shapes.append([size for dim, size in enumerate(shape) if dim not in source.squeeze])
    sizes: dict[str, Any] = {**axis_sizes(plan.region, shapes)}
    if plan.region.batched:
        sizes["b"] = prod(batch_shape(plan.region, shapes))
    return {axis: _bounds(size) for axis, size in sizes.items() if not isinstance(size, int)}


def _bounds(size: torch.SymInt) -> tuple[float, float]:
    found = size.node.shape_env.bound_sympy(size.node.expr)
    return max(float(found.lower), 0.0), float(found.upper)


def same_graph(one: Call, other: Call, bounds: Bounds) -> bool:
    """Whether one graph serves two calls: they differ in nothing but sizes within `bounds`, and how dimensions of size 1 lie."""
    if replace(one, sizes=(), layout=()) != replace(other, sizes=(), layout=()):
        return False
    for (axis, size), (_, other_size) in zip(one.sizes, other.sizes, strict=True):
        if axis in bounds:
            low, high = bounds[axis]
            if other_size < bucket(int(low)) or (high < inf and other_size > bucket(int(high))):
                return False
        elif size != other_size:
            return False
    pairs = [zip(a.split(), b.split(), strict=True) for a, b in zip(one.layout, other.layout, strict=True)]
    return all(a == b or "-" in (a, b) for words in pairs for a, b in words)


def peer() -> str:
    """What a Region under compilation is compared with: ``"inductor"`` and those of its settings that make it faster."""
    config: Any = torch._inductor.config
    return " ".join(["inductor", *(name for name in _PEER_SETTINGS if getattr(config, name, False))])


# Devices and environments --------------------------------------------------------------------------------------------


def device_name(device: torch.device) -> str:
    """The GPU's or the processor's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()


@lru_cache(maxsize=1)
def _processor() -> str:
    from postlude.doctor import processor

    return processor()


def _isa() -> str:
    from postlude.targets.cpp import toolchain

    try:
        return str(toolchain.usable(toolchain.detect(), toolchain.compiler()))
    except PostludeError:
        return ""


def environment(device_type: str, region: Region) -> dict[str, str]:
    """What the times of a Region's kernels depend on beside the call itself.

    ``generator`` is a hash of the kernels' generated sources and of what they include; the driver counts by its branch.
    """
    prints = {name: target(name).fingerprint(region) for name in serving(device_type, region)}
    return {**_versions(device_type), "generator": digest(prints)}


@lru_cache
def _versions(device_type: str) -> dict[str, str]:
    versions = {"torch": torch.__version__.partition("+")[0]}
    if device_type == "cpu":
        return versions | {"compiler": _compiler()}
    versions |= {name: found for name in _GPU_PACKAGES if (found := _version(name))}
    versions["runtime"] = f"cuda {torch.version.cuda}" if torch.version.cuda else f"hip {torch.version.hip}"
    return versions | {"driver": driver().partition(".")[0]}


def _compiler() -> str:
    from postlude.targets.cpp import toolchain

    try:
        return toolchain.compiler().version
    except PostludeError:
        return ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@lru_cache(maxsize=1)
def driver() -> str:
    """Version of the GPU's driver, as the kernel module gives it; empty where that is not known."""
    for path in ("/sys/module/nvidia/version", "/sys/module/amdgpu/version"):
        try:
            with open(path) as file:
                return file.read().strip()
        except OSError:
            continue
    return ""


def versions(device_type: str) -> dict[str, str]:
    """Full versions, for a person who reads an entry."""
    import platform

    found = {"postlude": _version("postlude"), "torch": torch.__version__, "python": platform.python_version()}
    return {**_versions(device_type), **found, **({"driver": driver()} if device_type != "cpu" else {})}


def applies(call: Call, where: dict[str, str]) -> bool:
    """Whether an entry of this call and environment would be taken by this process, on one of its devices."""
    if call.threads:
        here = call.device == device_name(torch.device("cpu")) and (call.isa, call.threads) == (_isa(), torch.get_num_threads())
        return here and environment("cpu", region_of(call.region)) == where
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return call.device in gpus and environment("cuda", region_of(call.region)) == where
