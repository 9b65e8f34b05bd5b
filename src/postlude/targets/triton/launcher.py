"""A Region's kernels, called with tensors.

A call of one shape, layout and alignment is planned once: which kernel and tiles (`configs`), how tensors lie (`layout`),
then compiled or found compiled. Later calls look the plan up and launch the compiled kernel with plain numbers, through the
CUDA driver or Triton's launcher: Triton's binder would cost more than a small kernel runs.
"""

import hashlib
import linecache
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from postlude.errors import KernelBuildError
from postlude.ir import Region
from postlude.targets.aten.interpreter import axis_sizes, batch_shape
from postlude.targets.planned import ALIGNMENT, Launch, PlannedKernel
from postlude.targets.triton import configs
from postlude.targets.triton.attention import Softmax, softmax_of
from postlude.targets.triton.codegen import CHAINED, CONSTANTS, Source, generate
from postlude.targets.triton.configs import Config, Device, Problem
from postlude.targets.triton.cuda_driver import DriverLaunch, cuda_launch
from postlude.targets.triton.layout import Extension, extensions, reach
from postlude.targets.triton.workspace import Workspace

#: Of this size on, offsets within a tensor are computed in 64 bits. Tiles reach a little beyond the tensor.
_WIDE = 2**31 - 2**20


class Kernel(PlannedKernel):
    """The kernels of one Region: callable with operands and results, for any shapes.

    `config` is taken for all calls instead of the tables' choice, for measurements and tests.
    """

    def __init__(self, region: Region, config: Config | None = None) -> None:
        super().__init__()
        self.region = region
        self.config = config
        self.softmax = softmax_of(region)
        self._is_float32 = any(region.operands[region.operand_index[c.right]].dtype == torch.float32 for c in region.contractions)

    def settings(self) -> str | None:
        """How float32 is multiplied."""
        return _precision() if self._is_float32 else None

    def plan(self, tensors: Sequence[Tensor]) -> Launch:
        """What to launch. Every tensor can be taken."""
        precision = self.settings() or "ieee"
        region = self.region
        sizes, layouts = _arranged(region, tensors)
        if sizes["b"] * sizes["m"] * sum(sizes[group.column] for group in region.groups) == 0:
            return lambda pointers, tensors: None
        if None in layouts:
            return _Copying(self, len(region.operands), [i for i, layout in enumerate(layouts) if layout is None])
        call = _Call(region, tensors, layouts, sizes, precision)  # type: ignore[arg-type]
        device = call.device()
        config = self.config or (call.attention(device, self.softmax) if self.softmax else configs.choose(device, call.problem()))
        if (reason := self._mismatch(config, sizes["m"])) is not None:
            raise self._refusal(device, config, reason)
        try:
            return _largest_that_fits(call, config)
        except (OutOfResources, CompilationError) as error:
            raise self._refusal(device, config, str(error)[:2000]) from error

    def _refusal(self, device: Device, config: Config, reason: str) -> KernelBuildError:
        return KernelBuildError(f"<{module_name(generate(self.region).text)}>", f"triton for {device.arch}, {config}", reason)

    def _mismatch(self, config: Config, m: int) -> str | None:
        """Why a configuration is not one of this Region, or None."""
        if (config.form == "attention") != (self.softmax is not None):
            return "the Region is of another form"
        if config.form == "gemv" and config.block_m < m:
            return f"it computes no more than {config.block_m} rows"
        if (
            config.split_k > 1
            and not self.softmax
            and any(c.left not in self.region.operand_index for c in self.region.contractions)
        ):
            return "a program with a part of a row can't compute its norm"
        return None


def _arranged(region: Region, tensors: Sequence[Tensor]) -> tuple[dict[str, int], list[dict[str, Extension] | None]]:
    """The sizes of all axes, and how each tensor lies; None for one that no kernel can take so."""
    shapes = [tuple(tensor.shape) for tensor in tensors]
    sizes = axis_sizes(region, shapes[: len(region.operands)])
    sizes["b"] = prod(batch_shape(region, shapes))
    axes = [*(o.axes for o in region.operands), *(y.axes for y in region.yields)]
    layouts = [
        extensions(names, tensor.shape, tensor.stride(), region.row_axes, sizes["m"])
        for names, tensor in zip(axes, tensors, strict=True)
    ]
    return sizes, layouts


def worth_measuring(region: Region, tensors: Sequence[Tensor]) -> list[Config]:
    """Configurations to measure for these tensors, beside the one that the tables choose."""
    sizes, layouts = _arranged(region, tensors)
    if None in layouts or 0 in sizes.values() or softmax_of(region):
        return []
    call = _Call(region, tensors, layouts, sizes, "ieee")  # type: ignore[arg-type]
    return configs.neighbours(call.device(), call.problem())


def _largest_that_fits(call: "_Call", config: Config) -> Launch:
    """The plan with this configuration, or with smaller tiles where the device has not enough of something."""
    while True:
        try:
            return call.plan(config)
        except OutOfResources:
            less = configs.smaller(config)
            if less is None:
                raise
            config = less


@dataclass(frozen=True)
class _Copying:
    """Copies tensors that kernels can't read or write as they lie, and calls the kernel with the copies."""

    kernel: Kernel
    operands: int
    copied: list[int]

    def __call__(self, pointers: Sequence[int], tensors: Sequence[Tensor]) -> None:
        dense = list(tensors)
        for index in self.copied:
            given = tensors[index]
            if index < self.operands:
                dense[index] = given.contiguous()
            else:
                dense[index] = torch.empty_like(given, memory_format=torch.contiguous_format)
        self.kernel(*dense)
        for index in self.copied:
            if index >= self.operands:
                tensors[index].copy_(dense[index])


def constants_of(config: Config, *, even_k: bool, index: Any, precision: str) -> dict[str, Any]:
    """A kernel's constant arguments, in the order in which it takes them."""
    values = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "BLOCK_O": config.block_o,
        "ROWS": config.rows,
        "PARTS": configs.parts_at_once(config) if config.form == "attention" else 1,
        "GROUP_M": config.group_m,
        "SPLIT": config.split_k > 1,
        "STAGES": config.stages,
        "SWAP": config.swap,
        "PRECISION": precision,
        "EVEN_K": even_k,
        "INDEX": index,
    }
    return {name: values[name] for name in CONSTANTS[config.form]}


@dataclass(frozen=True)
class _Call:
    """One call to plan: the tensors, how each lies, the sizes of all axes."""

    region: Region
    tensors: Sequence[Tensor]
    layouts: list[dict[str, Extension]]
    sizes: dict[str, int]
    precision: str

    def device(self) -> Device:
        """Where the tensors are."""
        where = self.tensors[0].device
        with _guard(where):
            return _device(where.type, where.index)

    def problem(self) -> Problem:
        """What there is to multiply."""
        region = self.region
        first = region.contractions[0]
        multiplied = [
            region.operands[i] for c in region.contractions for n in c.inputs if (i := region.operand_index.get(n)) is not None
        ]
        contracted, column = region.contraction_axes(first)
        right = self.layouts[region.operand_index[first.right]]
        return Problem(
            m=self.sizes["m"],
            columns=tuple(self.sizes[group.column] for group in region.groups),
            k=min(self.sizes[region.contraction_axes(c)[0]] for c in region.contractions),
            batch=self.sizes["b"],
            element=max(operand.dtype.itemsize for operand in multiplied),
            along_k=right[contracted].step == 1 or right[column].step != 1,
            contractions=max(len(group.contractions) for group in region.groups),
            whole_k=any(c.left not in region.operand_index for c in region.contractions),
        )

    def attention(self, device: Device, softmax: Softmax) -> Config:
        """What there is to attend to, as a configuration."""
        (product,), (output,) = softmax.scores.contractions, softmax.output.contractions
        k, keys = self.region.contraction_axes(product)
        _, out = self.region.contraction_axes(output)
        element = self.tensors[self.region.operand_index[product.right]].element_size()
        m, n, width, width_out, b = (self.sizes[axis] for axis in ("m", keys, k, out, "b"))
        return configs.attention(device, m, n, width, width_out, b, element)

    def plan(self, config: Config) -> Launch:
        """Compile, or find compiled; what to launch."""
        split = frozenset((t, axis) for t, layout in enumerate(self.layouts) for axis, e in layout.items() if e.inner)
        rows = config.block_m if config.form == "gemv" else 1
        source, module = load_module(self.region, rows, split, config.chained)
        integers = self.integers(source, config)
        constants = self.constants(config)
        blocks = -(-self.sizes["m"] // config.block_m) * config.split_k if config.form != "gemv" else 1
        tiles = [-(-self.sizes[group.column] // config.block_n) for group in self.region.groups]
        grid = self.sizes["b"] * blocks * (1 if config.form == "attention" else sum(tiles))
        workspace = None
        if config.split_k > 1:
            accumulate = max((c.accumulate for c in self.region.contractions), key=lambda dtype: dtype.itemsize)
            part = config.block_o + 2 if config.form == "attention" else self.problem().contractions * config.block_n
            parts = grid * config.block_m * part
            workspace = Workspace(self.tensors[0].device, accumulate, parts, grid // config.split_k)
        options = {"num_warps": config.warps, "num_stages": config.stages}
        if config.chained:
            options["launch_pdl"] = True
        function = getattr(module, config.form)
        plain = _Plain(function, grid, workspace, config.form != "gemv", integers, constants, options)
        return direct(plain, self.tensors) or plain

    def integers(self, source: Source, config: Config) -> list[int]:
        """The integer arguments."""
        values = [config.split_k] if config.form != "gemv" else []
        if config.chained and CHAINED[config.form]:
            values += [config.prefetch if self.can_prefetch() else 0, config.release]
        values += [self.sizes[axis] for axis in source.sizes]
        return values + [getattr(self.layouts[s.tensor][s.axis], s.part) for s in source.strides]

    def constants(self, config: Config) -> dict[str, Any]:
        """The constant arguments, in the order in which the kernel takes them."""
        wide = any(reach(tensor.shape, tensor.stride()) >= _WIDE for tensor in self.tensors)
        even = all(self.sizes[self.region.contraction_axes(c)[0]] % config.block_k == 0 for c in self.region.contractions)
        return constants_of(config, even_k=even, index=tl.int64 if wide else tl.int32, precision=self.precision)

    def can_prefetch(self) -> bool:
        """Whether all weights lie along k, in whole units of 16 bytes."""
        region = self.region
        for contraction in region.contractions:
            index = region.operand_index[contraction.right]
            tensor, layout = self.tensors[index], self.layouts[index]
            k = region.contraction_axes(contraction)[0]
            moves = [tensor.data_ptr(), self.sizes[k] * tensor.element_size()]
            moves += [stride * tensor.element_size() for stride in tensor.stride() if stride != 1]
            if layout[k].step != 1 or any(move % ALIGNMENT for move in moves):
                return False
        return True


@dataclass(frozen=True)
class _Plain:
    """A launch through Triton's own binder: under its interpreter, and where a Triton has no launcher that we know."""

    function: Any
    grid: int
    workspace: Workspace | None
    takes_workspace: bool
    integers: list[int]
    constants: dict[str, Any]
    options: dict[str, Any]

    def __call__(self, pointers: Sequence[int], tensors: Sequence[Tensor]) -> None:
        with _guard(tensors[0].device):
            extra = self.workspace.tensors(_stream(tensors[0].device)) if self.workspace else self.nothing
            self.function[(self.grid,)](*tensors, *extra, *self.integers, **self.constants, **self.options)

    @property
    def nothing(self) -> tuple[None, ...]:
        """What stands in the place of a workspace where k is not split."""
        return (None, None) if self.takes_workspace and not self.workspace else ()


def direct(plain: _Plain, tensors: Sequence[Tensor]) -> Launch | None:
    """The launch of the compiled kernel itself, with pointers as numbers; None where that can't be had.

    Raises:
        OutOfResources: the kernel needs more shared memory or registers than the device has.
    """
    if not isinstance(plain.function, JITFunction):
        return None
    workspace = plain.workspace
    types = workspace.types if workspace else plain.nothing
    compiled: Any = plain.function.warmup(
        *tensors, *types, *plain.integers, grid=(plain.grid,), **plain.constants, **plain.options
    )
    try:
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        driver = triton.runtime.driver.active
        current_stream = driver.get_current_stream
        # Triton's own looks first whether torch has begun to use CUDA.
        current_device = getattr(torch._C, "_cuda_getDevice", driver.get_current_device)
    except AttributeError:
        return None
    rest = (*plain.nothing, *plain.integers, *plain.constants.values())
    pointers = len(tensors) + (2 if workspace else 0)
    cuda = driver.get_current_target().backend == "cuda"
    by_driver = cuda_launch(compiled, plain.grid, (*[0] * pointers, *rest)) if cuda else None

    def by_triton(stream: int, pointers: Sequence[int]) -> bool:
        run(plain.grid, 1, 1, stream, function, metadata, None, None, None, *pointers, *rest)
        return True

    return _Direct(tensors[0].get_device(), workspace, by_driver, by_triton, current_device, current_stream)


@dataclass(frozen=True)
class _Direct:
    """The launch of a compiled kernel with pointers as numbers: through the CUDA driver, or Triton's launcher."""

    device: int
    workspace: Workspace | None
    by_driver: DriverLaunch | None
    by_triton: Callable[[int, Sequence[int]], bool]
    current_device: Callable[[], int]
    current_stream: Callable[[int], int]

    def __call__(self, pointers: Sequence[int], tensors: Sequence[Tensor]) -> None:
        if self.current_device() != self.device:
            with _guard(tensors[0].device):
                return self(pointers, tensors)
        stream = self.current_stream(self.device)
        if self.workspace is not None:
            # The memory may go back to torch's allocator before the kernel has run: what takes it next runs after it.
            parts, counters = self.workspace.tensors(stream)
            pointers = [*pointers, parts.data_ptr(), counters.data_ptr()]
            if self.kernel is not None and not torch.cuda.is_current_stream_capturing():
                self.kernel.remember(stream, counters.data_ptr())
        if self.by_driver is None or not self.by_driver(stream, pointers):
            self.by_triton(stream, pointers)
        return None

    @cached_property
    def kernel(self) -> Any:
        """The same for plans.c, or None. Outside of captures it takes the counters that it was told to take on a stream."""
        if self.by_driver is None:
            return None
        return self.by_driver.native(self.device, self.workspace.bytes if self.workspace else 0)

    def native(self, pointers: Sequence[int]) -> Any:
        """What plans.c launches by itself; it asks here where it knows no counters."""
        return self.kernel


# Modules and devices ---------------------------------------------------------------------------------------------------------


def module_name(text: str) -> str:
    """Name of the module with this source."""
    return f"postlude_triton_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@lru_cache(maxsize=4096)
def load_module(
    region: Region, rows: int = 1, split: frozenset[tuple[int, str]] = frozenset(), chained: bool = False
) -> tuple[Source, ModuleType]:
    """The generated module, ready for Triton, which reads the source of its functions through `linecache`."""
    source = generate(region, rows, split, chained=chained)
    name = module_name(source.text)
    file = f"<{name}>"
    linecache.cache[file] = (len(source.text), None, source.text.splitlines(keepends=True), file)
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(source.text, file, "exec"), module.__dict__)
    return source, module


@lru_cache(maxsize=64)
def _device(type: str, index: int | None) -> Device:
    """What is known of the current device."""
    if type == "cpu":
        return Device("interpreter", 4, 64 << 10)
    driver = triton.runtime.driver.active
    target = driver.get_current_target()
    properties = driver.utils.get_device_properties(index)
    arch = f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch) if target.backend == "hip" else target.backend
    return Device(arch, properties["multiprocessor_count"], properties["max_shared_mem"])


def _stream(device: torch.device) -> int:
    return 0 if device.type == "cpu" else torch.cuda.current_stream(device).cuda_stream


def _guard(device: torch.device) -> Any:
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


def _precision() -> str:
    """How tl.dot multiplies float32, as torch's settings say."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" and torch.version.hip is None else "ieee"
