"""The callable of a Region: which compiled kernels serve tensors of these shapes and strides, and how to hand them over.

The compiled functions check every tensor again (type, sizes, strides, alignment) before they touch the GPU.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from postlude.errors import KernelBuildError
from postlude.ir import Region
from postlude.targets.aten.interpreter import axis_sizes, batch_shape
from postlude.targets.cute import build, toolchain
from postlude.targets.cute.build import Target
from postlude.targets.cute.configurations import Configuration, Problem, choose
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
        if not self.trusted and toolchain.refused(tensors[0].device):
            return None
        if any(tensor.numel() == 0 for tensor in tensors[len(self.region.operands) :]):
            return lambda pointers, tensors: None
        try:
            launches = [self._launch(index, form, tensors) for index, form in enumerate(forms(self.region))]
        except OperandsDoNotFit:
            return None
        if len(launches) == 1:
            return launches[0]

        def launch(pointers: Sequence[int], tensors: Sequence[Tensor]) -> None:
            for one in launches:
                one(pointers, tensors)

        return launch

    def _launch(self, index: int, form: Form, tensors: Sequence[Tensor]) -> Launch:
        """The kernel of one group."""
        views = arrange(self.region, form, tensors)
        layout = tuple(unit for _, unit in views)
        target = target_of(tensors[0].device)
        configuration = self.configuration or choose(problem(self.region, form, tensors), target.major, target.clusters[0])
        load = partial(_load, self.region, index, layout=layout, configuration=configuration, target=target)
        arguments = [(a.position, view) for a, (view, _) in zip(form.arguments, views, strict=True)]
        if form.paired:
            return _paired_launch(load, arguments, *_pair(form), tensors)
        function = load(reverse=False)
        if all(view is None for _, view in arguments):
            positions = [position for position, _ in arguments]
            return lambda pointers, tensors: function(*[tensors[i] for i in positions])
        return lambda pointers, tensors: function(*_viewed(arguments, tensors))


def _load(region: Region, index: int, *, reverse: bool, **what: Any) -> Callable[..., None]:
    """A compiled kernel.

    Raises:
        KernelBuildError: whatever the compiler raised, with the generated source.
    """
    try:
        return build.load(region, index, reverse, **what)
    except Exception as error:
        where = build.source_path(region, reverse)
        command = f"cute.compile for {what['target'].architecture}, {what['configuration']}"
        raise KernelBuildError(str(where), command, f"{type(error).__name__}: {str(error)[:2000]}") from error


def _viewed(arguments: Sequence[tuple[int, View]], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensors[i] if view is None else tensors[i].as_strided(*view) for i, view in arguments]


def _paired_launch(
    load: Callable[..., Callable[..., None]],
    arguments: Sequence[tuple[int, View]],
    first: int,
    second: int,
    tensors: Sequence[Tensor],
) -> Launch:
    """A pair's kernel reads both weights as one tensor, from the one that lies lower: there are two, by their order."""
    functions: dict[bool, Callable[..., None]] = {}

    def function(reverse: bool) -> Callable[..., None]:
        if reverse not in functions:
            functions[reverse] = load(reverse=reverse)
        return functions[reverse]

    function(tensors[first].data_ptr() > tensors[second].data_ptr())

    def launch(pointers: Sequence[int], tensors: Sequence[Tensor]) -> bool:
        distance = pointers[second] - pointers[first]
        if distance == 0 or abs(distance) >= _STRIDE_LIMIT:
            return False
        function(distance < 0)(*_viewed(arguments, tensors))
        return True

    return launch


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
    return Problem(sizes["m"], columns, sizes[contracted], prod(batch_shape(region, shapes)), form.paired)


def arrange(region: Region, form: Form, tensors: Sequence[Tensor]) -> list[tuple[View, int | None]]:
    """For each argument of a kernel (those beyond `tensors` left out): its view, and the view's unit-stride dimension.

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
        _check_pair(form, tensors)
    return arranged


def _arrange_one(argument: Argument, tensor: Tensor, sizes: dict[str, int]) -> tuple[View, int | None]:
    where = f"%{argument.name}" if argument.kind != "result" else argument.name
    if tensor.device.type != "cuda":
        raise OperandsDoNotFit(f"{where} is on {tensor.device}")
    if tensor.dtype != argument.dtype:
        raise OperandsDoNotFit(f"{where} is {tensor.dtype}, expected {argument.dtype}")
    if argument.kind == "scalar":
        return (None if tensor.shape == (1,) else ((1,), (1,))), None
    shape = tuple(sizes[axis] for axis in argument.axes)
    try:
        view = tensor.view(shape)
    except RuntimeError:
        given = f"shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        raise OperandsDoNotFit(f"{where} of {given} is not {list(argument.axes)} without a copy") from None
    align, width = build.alignment(argument), tensor.element_size()
    unit, strides = _strides(shape, view.stride(), align // width)
    if unit is None or argument.axes[unit] == "b":
        raise OperandsDoNotFit(f"{where} has strides {view.stride()}; along one of its dimensions it must be 1")
    if tensor.data_ptr() % align:
        raise OperandsDoNotFit(f"{where} is not aligned to {align} bytes")
    for dim, stride in enumerate(strides):
        if dim != unit and (stride * width % align or stride * width >= _STRIDE_LIMIT or stride < 0):
            raise OperandsDoNotFit(f"{where} has a stride of {stride * width} bytes, which is no multiple of {align} below 2^40")
    same = view.shape == tensor.shape and strides == tensor.stride()
    return (None if same else (shape, strides)), unit


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


def _pair(form: Form) -> tuple[int, int]:
    """Positions of a pair's right operands in the order of its contractions."""
    by_axes = {a.name: a.position for a in form.of_kind("right")}
    first, second = by_axes.values()
    return first, second


def _check_pair(form: Form, tensors: Sequence[Tensor]) -> None:
    first, second = (tensors[position] for position in _pair(form))
    if first.stride() != second.stride():
        raise OperandsDoNotFit(f"the right operands of a pair have different strides, {first.stride()} and {second.stride()}")
    if not 0 < abs(first.data_ptr() - second.data_ptr()) < _STRIDE_LIMIT:
        raise OperandsDoNotFit("the right operands of a pair are the same memory, or too far from each other")


@lru_cache
def target_of(device: torch.device) -> Target:
    """What kernels are compiled for on a device."""
    import cutlass

    torch.cuda.synchronize(device)  # whoever comes first makes the context that the question about clusters needs
    major, minor = torch.cuda.get_device_capability(device)
    hardware = cutlass.utils.HardwareInfo(device.index or 0)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if major not in (9, 10):
        return Target(major, minor, (processors, 0, 0))
    pairs, fours = (hardware.get_max_active_clusters(size) for size in (2, 4))
    return Target(major, minor, (processors, pairs, fours))
