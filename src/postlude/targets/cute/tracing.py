"""How tensors come to a GEMM while a kernel is traced: what generated `launch` functions call. Nothing here runs at launch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64
from quack.epilogue.ops import TileLoad, TileStore
from quack.tile_scheduler import RasterOrderOption, TileSchedulerOptions

from postlude.targets.cute.configurations import Configuration

_RASTER = {"m": RasterOrderOption.AlongM, "n": RasterOrderOption.AlongN, "": RasterOrderOption.Heuristic}


def run(gemm: Any, left: Any, right: Any, result: Any, stream: Any, /, **epilogue: Any) -> None:
    """Launch a GEMM: left [b?, m, k] times right [b?, n, k] into result [b?, m, n].

    The result is None where the epilogue stores all results.
    """
    configuration: Configuration = gemm.configuration
    if configuration.swapped:
        # The transposed problem: rows of the result are the kernel's columns.
        left, right, result = right, left, None if result is None else transpose(result)
        tiles = {op.name for op in gemm._epi_ops if isinstance(op, TileLoad | TileStore)}
        epilogue = {name: transpose(value) if name in tiles else value for name, value in epilogue.items()}
    schedule = TileSchedulerOptions(
        max_active_clusters=Int32(gemm.active_clusters),
        raster_order=_RASTER[configuration.raster],
        max_swizzle_size=Int32(configuration.swizzle),
    )
    gemm.get_scheduler_arguments = partial(_one_batch_counted, gemm.get_scheduler_arguments)
    gemm(left, right, result, None, gemm.EpilogueArguments(**epilogue), schedule, None, stream, None, None)


def _one_batch_counted(arguments: Callable[..., Any], *given: Any) -> Any:
    """What tells how many tiles there are, with a batch of several dimensions counted as one."""
    made = arguments(*given)
    rows, columns, batch = made.problem_shape_ntile_mnl
    made.problem_shape_ntile_mnl = (rows, columns, cute.size(batch))
    return made


def permute(tensor: Any, dims: tuple[int, ...]) -> Any:
    """A tensor with its dimensions in another order."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=list(dims)))


def transpose(tensor: Any) -> Any:
    """A tensor with its last two dimensions exchanged."""
    *batch, rows, columns = range(cute.rank(tensor))
    return permute(tensor, (*batch, columns, rows))


def one_batch(tensor: Any, inner: int) -> Any:
    """A tensor with all dimensions but the last `inner` as one, in row-major order."""
    outer = range(cute.rank(tensor) - inner)
    if len(outer) == 1:
        return tensor
    shape = (tuple(tensor.shape[dim] for dim in reversed(outer)), *tensor.shape[len(outer) :])
    stride = (tuple(tensor.stride[dim] for dim in reversed(outer)), *tensor.stride[len(outer) :])
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


def interleave(first: Any, second: Any) -> Any:
    """One right operand [2n, k] (or [b, 2n, k]) whose rows are taken from two of shape [n, k] in turn.

    Nothing is copied: the distance between the two tensors becomes a stride. It must be a positive multiple of 16 bytes below
    2^40, and the strides of the two must be equal, which `launcher.py` sees to.
    """
    width = first.element_type.width // 8
    distance = cute.assume((Int64(second.iterator.toint()) - Int64(first.iterator.toint())) // width, divby=16 // width)
    *batch, rows, depth = range(cute.rank(first))
    shape = (*(first.shape[b] for b in batch), (2, first.shape[rows]), first.shape[depth])
    stride = (*(first.stride[b] for b in batch), (distance, first.stride[rows]), first.stride[depth])
    return cute.make_tensor(first.iterator, cute.make_layout(shape, stride=stride))
