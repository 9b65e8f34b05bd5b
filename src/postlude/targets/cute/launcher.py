"""The callable of a Region: which compiled kernels serve tensors of these shapes and strides, and how to hand them over.

The compiled functions check every tensor again (type, sizes, strides, alignment) before they touch the GPU. What they are called
with is described once, when a call is planned; after that only pointers change (plans.c).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from postlude.errors import KernelBuildError
from postlude.ir import Region, to_text
from postlude.targets import plans
from postlude.targets.aten.interpreter import axis_sizes, batch_shape
from postlude.targets.cpp.launcher import DLPACK
from postlude.targets.cute import ahead, build, toolchain
from postlude.targets.cute.build import Compiled, Specialization, Target
from postlude.targets.cute.configurations import Configuration, Problem, choose, promising, shortlist
from postlude.targets.cute.form import Argument, Form, forms
from postlude.targets.planned import Launch, PlannedKernel

#: Sizes and strides in elements; None where a tensor goes to the kernel as it is.
View = tuple[tuple[int, ...], tuple[int, ...]] | None

#: Tensor maps hold strides of less than this many bytes.
_STRIDE_LIMIT = 1 << 40


class OperandsDoNotFit(ValueError):
    """A Region's kernels can't read tensors that lie so; another target can."""


class Kernel(PlannedKernel):
    """The kernels of one Region: callable ``(*operands, *results)`` on the current stream of the operands' device."""

    def __init__(self, region: Region, configuration: Configuration | None = None, *, trusted: bool = False) -> None:
        super().__init__()
        self.region = region
        self.configuration = configuration
        #: Whether the toolchain's self-test need not be asked: it is what runs.
        self.trusted = trusted

    def plan(self, tensors: Sequence[Tensor]) -> Launch | None:
        """The compiled kernels of each group, and the views that they take."""
        if not self.trusted and toolchain.refused(tensors[0].device) is not False:
            return None
        if all(tensor.numel() == 0 for tensor in tensors[len(self.region.operands) :]):
            return lambda pointers, tensors: None
        try:
            steps = [self._step(index, form, tensors) for index, form in enumerate(forms(self.region))]
        except OperandsDoNotFit:
            return None
        return _Launch(steps, tensors[0].get_device())

    def _step(self, index: int, form: Form, tensors: Sequence[Tensor]) -> "_Step":
        """The kernel of one group."""
        views = arrange(self.region, form, tensors)
        target = target_of(tensors[0].device)
        configuration = self.configuration or _choose(self.region, form, tensors, target)
        special = _specialization(self.region, index, views, configuration, target)
        given = [_Given(a, tensors[a.position], view) for a, (view, _) in zip(form.arguments, views, strict=True)]
        cells = workspace_cells(form, problem(self.region, form, tensors), configuration.block(target.major))
        step = _Step(special, given, _pair(self.region, form) if form.paired else None, cells)
        step.compiled(step.reversed([tensor.data_ptr() for tensor in tensors]))
        return step


def submit(region: Region, tensors: Sequence[Tensor], device: torch.device, *, rows_vary: bool) -> None:
    """Start compiling for tensors like these, which may be of the `meta` device. What doesn't fit is left to other targets.

    Args:
        region: the program.
        tensors: operands and results.
        device: the GPU.
        rows_vary: whether calls may have other numbers of rows: then kernels for those are compiled too, after the others.
    """
    target = target_of(device)
    for index, form in enumerate(forms(region)):
        try:
            views = arrange(region, form, tensors)
        except OperandsDoNotFit:
            return
        sizes = problem(region, form, tensors)
        first = choose(sizes, target.major, target.clusters[0])
        most = shortlist(sizes.n, sizes.k, sizes.paired, target.major, target.clusters[0], sizes.crowded)
        others = most if rows_vary else ()
        kernels = [_specialization(region, index, views, c, target) for c in (first, *(c for c in others if c != first))]
        ahead.submit(kernels[:1])
        # Which weight of a pair lies lower is seen at the first call: usually the first.
        turned = [replace(kernel, reverse=True) for kernel in kernels] if form.paired else []
        ahead.submit([*turned[:1], *kernels[1:], *turned[1:]], later=True)


def submit_each(region: Region, tensors: Sequence[Tensor], configurations: Sequence[Configuration | None]) -> None:
    """Start compiling kernels that are to be measured on these tensors, in these configurations (None: the chosen one)."""
    target = target_of(tensors[0].device)
    for index, form in enumerate(forms(region)):
        try:
            views = arrange(region, form, tensors)
        except OperandsDoNotFit:
            return
        wanted = dict.fromkeys(c or _choose(region, form, tensors, target) for c in configurations)
        kernels = [_specialization(region, index, views, c, target) for c in wanted]
        # Copies of a pair's weights, which take turns, may lie in either order.
        ahead.submit([*kernels, *(replace(kernel, reverse=True) for kernel in kernels if form.paired)])


def worth_measuring(region: Region, tensors: Sequence[Tensor]) -> list[Configuration]:
    """Configurations to measure for these tensors, by the GEMM of the Region's first group."""
    form = forms(region)[0]
    target = target_of(tensors[0].device)
    return promising(problem(region, form, tensors), target.major, target.clusters[0])


def _choose(region: Region, form: Form, tensors: Sequence[Tensor], target: Target) -> Configuration:
    return choose(problem(region, form, tensors), target.major, target.clusters[0])


def _specialization(
    region: Region, index: int, views: "Sequence[tuple[View, tuple[int, int]]]", configuration: Configuration, target: Target
) -> Specialization:
    return Specialization(to_text(region), index, False, tuple(layout for _, layout in views), configuration, target)


def _load(special: Specialization) -> Compiled:
    """A compiled kernel.

    Raises:
        KernelBuildError: whatever the compiler raised, with the generated source.
    """
    try:
        return build.load(special)
    except Exception as error:
        where = build.source_path(special.region, special.reverse)
        command = f"cute.compile for {special.target.architecture}, {special.configuration}"
        raise KernelBuildError(str(where), command, f"{type(error).__name__}: {str(error)[:2000]}") from error


#: What a kernel reads truth values as.
_BYTES = {torch.bool: torch.uint8}


class _Given:
    """A tensor as a kernel takes it: whose memory, and sizes and strides."""

    def __init__(self, argument: Argument, tensor: Tensor, view: View) -> None:
        self.position = argument.position
        self.view = view
        self.dtype = _BYTES.get(argument.dtype)
        shape, strides = view or (tuple(tensor.shape), tensor.stride())
        self.native = (argument.position, DLPACK[self.dtype or argument.dtype], tuple(shape), tuple(strides))

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The view of one of these tensors."""
        tensor = tensors[self.position]
        if self.dtype is not None:
            tensor = tensor.view(self.dtype)
        return tensor if self.view is None else tensor.as_strided(*self.view)


class _Step:
    """One kernel's launch.

    A pair's kernel reads both weights as one tensor, from the one that lies lower: there are two kernels, by their order.
    """

    def __init__(self, special: Specialization, given: Sequence[_Given], pair: tuple[int, int] | None, cells: int) -> None:
        self.special = special
        self.given = given
        self.pair = pair
        #: Floats of workspace that it takes.
        self.cells = cells
        self._compiled: dict[bool, Compiled] = {}

    def compiled(self, reverse: bool) -> Compiled:
        """The kernel, compiled when it is first needed."""
        if reverse not in self._compiled:
            self._compiled[reverse] = _load(replace(self.special, reverse=reverse))
        return self._compiled[reverse]

    @property
    def native(self) -> tuple[object, ...]:
        """The kernel's arguments, for the extension."""
        workspace = ((plans.WORKSPACE, DLPACK[torch.float32], (self.cells,), (1,)),) if self.cells else ()
        return *(given.native for given in self.given), *workspace

    def reversed(self, pointers: Sequence[int]) -> bool:
        """Whether a pair's second weight lies below the first."""
        return self.pair is not None and pointers[self.pair[1]] < pointers[self.pair[0]]

    def in_reach(self, pointers: Sequence[int]) -> bool:
        """Whether a pair's weights are distinct, and near enough for one tensor map."""
        return self.pair is None or 0 < abs(pointers[self.pair[1]] - pointers[self.pair[0]]) < _STRIDE_LIMIT


class _Launch:
    """The kernels of a Region's groups, one after the other."""

    def __init__(self, steps: Sequence[_Step], device: int) -> None:
        self.steps = steps
        self.device = device
        #: Floats of workspace: one group's kernels have ended before the next group's begin.
        self.cells = max(step.cells for step in steps)

    def __call__(self, pointers: Sequence[int], tensors: Sequence[Tensor]) -> bool:
        if not all(step.in_reach(pointers) for step in self.steps):
            return False
        workspace = torch.empty(self.cells, dtype=torch.float32, device=tensors[0].device) if self.cells else None
        for step in self.steps:
            given = [given.of(tensors) for given in step.given]
            if workspace is not None and step.cells:
                given.append(workspace[: step.cells])
            step.compiled(step.reversed(pointers)).function(*given)
        return True

    def native(self, pointers: Sequence[int]) -> object | None:
        """The same for the extension, which holds while weights of a pair lie in this order."""
        pairs = [(step.pair, step.reversed(pointers)) for step in self.steps if step.pair is not None]
        if len(pairs) > 1 or not all(step.in_reach(pointers) for step in self.steps):
            return None
        compiled = [step.compiled(step.reversed(pointers)) for step in self.steps]
        order = {}
        for (first, second), reverse in pairs:
            order = {"lower": second if reverse else first, "upper": first if reverse else second, "reach": _STRIDE_LIMIT}
        steps = tuple((c.address, step.native) for c, step in zip(compiled, self.steps, strict=True))
        return plans.plan(steps, self.device, compiled, workspace=self.cells * torch.float32.itemsize, **order)


def fits(region: Region, operands: Sequence[Tensor]) -> str | None:
    """Why the kernels can't read these operands, or None."""
    try:
        for form in forms(region):
            arrange(region, form, operands)
    except OperandsDoNotFit as error:
        return str(error)
    return None


def problem(region: Region, form: Form, tensors: Sequence[Tensor]) -> Problem:
    """The sizes of a group's GEMM."""
    shapes = [tuple(t.shape) for t in tensors[: len(region.operands)]]
    sizes = axis_sizes(region, shapes)
    (contracted,) = set(form.of_kind("left")[0].axes) - {"b", "m"}
    columns = sizes[form.group.column] * (2 if form.paired else 1)
    return Problem(sizes["m"], columns, sizes[contracted], prod(batch_shape(region, shapes)), form.paired, form.crowded)


def workspace_cells(form: Form, problem: Problem, block: tuple[int, int]) -> int:
    """Floats that a kernel leaves between itself and the one that adds them; `reductions.parts_of` lays them out."""
    parts = {"m": -(-problem.m // block[0]) * problem.n, form.group.column: -(-problem.n // block[1]) * problem.m}
    return problem.batch * sum(parts[reduction.axis] for reduction in form.reductions)


def arrange(region: Region, form: Form, tensors: Sequence[Tensor]) -> list[tuple[View, tuple[int, int]]]:
    """For each argument of a kernel (those beyond `tensors` left out): its view, and the view's layout as `build.Layout` has it.

    Raises:
        OperandsDoNotFit: a tensor can't be read; the message says which and why.
    """
    shapes = [tuple(t.shape) for t in tensors[: len(region.operands)]]
    sizes = axis_sizes(region, shapes)
    sizes["b"] = prod(batch_shape(region, shapes))
    for axis in {axis for argument in form.arguments for axis in argument.axes}:
        if not 0 < sizes[axis] < 1 << 31:
            raise OperandsDoNotFit(f"axis {axis} has size {sizes[axis]}; kernels take 1 to 2^31 - 1")
    arranged = [_arrange_one(a, tensors[a.position], sizes) for a in form.arguments if a.position < len(tensors)]
    if form.paired:
        _check_pair(*(tensors[position] for position in _pair(region, form)))
    return arranged


def _arrange_one(argument: Argument, tensor: Tensor, sizes: dict[str, int]) -> tuple[View, tuple[int, int]]:
    where = f"%{argument.name}" if argument.kind not in ("result", "total") else argument.name
    if tensor.device.type not in ("cuda", "meta"):
        raise OperandsDoNotFit(f"{where} is on {tensor.device}")
    if tensor.dtype != argument.dtype:
        raise OperandsDoNotFit(f"{where} is {tensor.dtype}, expected {argument.dtype}")
    if argument.kind == "scalar":
        return (None if tensor.shape == (1,) else ((1,), (1,))), (1, -1)
    shape, given = _viewed(argument, tensor, sizes)
    align, width = build.alignment(argument), tensor.element_size()
    unit, strides = _strides(shape, given, align // width)
    if unit is None or (argument.axes[0] == "b" and unit <= len(shape) - len(argument.axes)):
        raise OperandsDoNotFit(f"{where} has strides {given}; along one of its dimensions it must be 1")
    if tensor.data_ptr() % align:
        raise OperandsDoNotFit(f"{where} is not aligned to {align} bytes")
    for dim, stride in enumerate(strides):
        if dim != unit and (stride * width % align or stride * width >= _STRIDE_LIMIT or stride < 0):
            raise OperandsDoNotFit(f"{where} has a stride of {stride * width} bytes, which is no multiple of {align} below 2^40")
    same = shape == tuple(tensor.shape) and strides == tensor.stride()
    return (None if same else (shape, strides)), (len(shape), unit)


def _viewed(argument: Argument, tensor: Tensor, sizes: dict[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of a tensor by its axes. The batch of a tile may be two dimensions: heads that lie beside each other."""
    shape = tuple(sizes[axis] for axis in argument.axes)
    try:
        return shape, tensor.view(shape).stride()
    except RuntimeError:
        inner = shape[1:]
        if argument.axes[0] == "b" and len(inner) == 2 and tuple(tensor.shape[-2:]) == inner:
            batch = [(size, stride) for size, stride in zip(tensor.shape[:-2], tensor.stride()[:-2], strict=True) if size > 1]
            for position in range(len(batch) - 1, 0, -1):
                (outer, step), (size, stride) = batch[position - 1 : position + 1]
                if step == size * stride:
                    batch[position - 1 : position + 1] = [(outer * size, stride)]
            if len(batch) == 2:
                return (batch[0][0], batch[1][0], *inner), (batch[0][1], batch[1][1], *tensor.stride()[-2:])
        axes = list(argument.axes)
        raise OperandsDoNotFit(
            f"%{argument.name} of shape {tuple(tensor.shape)} with strides {tensor.stride()} is not {axes} without a copy"
        ) from None


def _strides(shape: tuple[int, ...], strides: tuple[int, ...], step: int) -> tuple[int | None, tuple[int, ...]]:
    """The unit-stride dimension, and strides in which dimensions of size 1 have one that a kernel accepts."""
    units = [dim for dim in range(len(shape)) if strides[dim] == 1]
    # Of several, one that is longer than 1; of several such (all of size 1), the last.
    unit = max(units, key=lambda dim: (shape[dim] > 1, dim), default=None)
    if unit is None and shape[-1] == 1:
        unit = len(shape) - 1
    cleaned = tuple(
        1 if dim == unit else step * max(shape) if size == 1 and stride % step else stride
        for dim, (size, stride) in enumerate(zip(shape, strides, strict=True))
    )
    return unit, cleaned


def _pair(region: Region, form: Form) -> tuple[int, int]:
    """Positions of a pair's right operands in the order of its contractions, which is that of the generated code."""
    first, second = (region.operand_index[contraction.right] for contraction in form.group.contractions)
    return first, second


def _check_pair(first: Tensor, second: Tensor) -> None:
    if first.stride() != second.stride():
        raise OperandsDoNotFit(f"the right operands of a pair have different strides, {first.stride()} and {second.stride()}")
    if not first.is_meta and not 0 < abs(first.data_ptr() - second.data_ptr()) < _STRIDE_LIMIT:
        raise OperandsDoNotFit("the right operands of a pair are the same memory, or too far from each other")


@lru_cache
def target_of(device: torch.device) -> Target:
    """What kernels are compiled for on a device."""
    import cutlass

    major, minor = torch.cuda.get_device_capability(device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if major not in (9, 10):
        return Target(major, minor, (processors, 0, 0))
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # whoever comes first makes the context that the question about clusters needs
        hardware = cutlass.utils.HardwareInfo(device.index or 0)
        pairs, fours = (hardware.get_max_active_clusters(size) for size in (2, 4))
    return Target(major, minor, (processors, pairs, fours))
