"""Sums over rows and columns that lie in several tiles.

Each tile leaves its part, in float32, in a workspace of the call (`RowTotals`, `ColumnTotals`, in the epilogue). A second kernel,
launched right behind the first, adds the parts in a fixed order, computes what the Region makes of the sums, and stores it
(`finish`): the same bits every time.

What lies beyond the result's edges takes no part: an epilogue computes something there too, from whatever it reads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from quack.epilogue.ops import ColVecReduce, RowVecReduce, VecReduce, colvec_reduce_accumulate, rowvec_reduce_accumulate

#: Threads that share an element's parts in the second kernel, and elements of a block.
_SHARE, _ELEMENTS = 8, 32


def _greater(x: Any, y: Any) -> Any:
    return cute.math.max(x, y, propagate_nan=True)


def _combine(maximum: bool, x: Any, y: Any) -> Any:
    return _greater(x, y) if maximum else x + y


class _Totals(VecReduce):
    """QuACK's reduction of a tile, without what lies beyond the edges; `combine` is ``add``, or ``max``, which keeps NaN."""

    def _mask_oob_active(self) -> bool:
        return True  # edges are to be known

    @cute.jit
    def fn_sink_flush(self, gemm, state, frag, scale=None):  # type: ignore[no-untyped-def]
        totals, coordinates, limit = state
        axis = const_expr(self._reduce_dim())
        if limit < gemm.cta_tile_shape_mnk[axis]:
            for i in cutlass.range_constexpr(cute.size(frag)):
                identity = Float32(-inf if const_expr(self.combine == "max") else 0.0)
                frag[i] = cutlass.select_(coordinates[i][axis] < limit, frag[i], identity)
        if const_expr(self.combine == "max"):
            for i in cutlass.range_constexpr(cute.size(frag)):
                totals[i] = _greater(totals[i], frag[i])
        elif const_expr(self.dim == 0):
            colvec_reduce_accumulate(gemm, totals, frag)
        else:
            rowvec_reduce_accumulate(gemm, totals, frag)


class RowTotals(_Totals, ColVecReduce):
    """One value per row: a part for each tile of columns."""

    @cute.jit
    def _merge(self, vals, others):  # type: ignore[no-untyped-def]
        return (_combine(const_expr(self.combine == "max"), vals[0], others[0]),)


class ColumnTotals(_Totals, RowVecReduce):
    """One sum per column: a part for each tile of rows."""


def parts_of(gemm: Any, workspace: Any, left: Any, right: Any) -> dict[str, Any]:
    """Where a GEMM's reductions leave their parts, in the form that QuACK writes them: by name, in the order of its ops.

    `cells` says how much workspace this takes.
    """
    batch = cute.size(left, mode=[0]) if cute.rank(left) == 3 else 1
    sizes = (cute.size(left, mode=[cute.rank(left) - 2]), cute.size(right, mode=[cute.rank(right) - 2]))
    found: dict[str, Any] = {}
    first: Any = Int64(0)
    for op in (op for op in type(gemm)._epi_ops if isinstance(op, _Totals)):
        kept, over = Int64(sizes[op.dim]), sizes[1 - op.dim]
        tiles = Int64(cute.ceil_div(over, gemm.block_tile[1 - op.dim]))
        # The elements lie behind each other, tile after tile.
        layout = ((batch, sizes[0], Int32(tiles)), (tiles * kept, 1, kept)) if op.dim == 0 else (
            (batch, Int32(tiles), sizes[1]), (tiles * kept, kept, 1)
        )  # fmt: skip
        found[op.name] = cute.make_tensor(workspace.iterator + first, cute.make_layout(layout[0], stride=layout[1]))
        first = first + tiles * kept * batch
    return found


@dataclass(frozen=True)
class _Finish:
    """What the second kernel does: names of its tensors and numbers, and the function of the totals."""

    function: Callable[..., dict[str, Any]]
    totals: tuple[str, ...]
    maxima: tuple[bool, ...]
    by_row: bool
    step: int
    vectors: tuple[str, ...]
    scalars: tuple[str, ...]
    extents: tuple[str, ...]
    results: tuple[str, ...]


def finish(
    gemm: Any,
    function: Callable[..., dict[str, Any]],
    parts: Mapping[str, Any],
    stream: Any,
    /,
    *,
    results: Mapping[str, Any],
    vectors: Mapping[str, Any] | None = None,
    scalars: Mapping[str, Any] | None = None,
    extents: Mapping[str, Any] | None = None,
) -> None:
    """Launch the kernel that makes results of the parts.

    Args:
        gemm: the GEMM that left them.
        function: of the totals, the vectors' elements, the scalars and the extents by name; gives the results by name.
        parts: all parts of the GEMM; those that the function takes are added.
        stream: where to launch.
        results: tensors [count] or [b, count].
        vectors: operands of the same shape.
        scalars: operands of one element.
        extents: numbers.
    """
    vectors, scalars, extents = dict(vectors or {}), dict(scalars or {}), dict(extents or {})
    taken = function.__code__.co_varnames[: function.__code__.co_argcount]
    ops = {op.name: op for op in type(gemm)._epi_ops if op.name in taken and op.name in parts}
    by_row = all(op.dim == 0 for op in ops.values())
    what = _Finish(
        function,
        tuple(ops),
        tuple(op.combine == "max" for op in ops.values()),
        by_row,
        # Of a pair's columns only the first has a share.
        1 if by_row else gemm._epi_mod_group_n,
        tuple(vectors),
        tuple(scalars),
        tuple(extents),
        tuple(results),
    )
    first = parts[what.totals[0]]
    blocks = cute.ceil_div(_count(first, what), _ELEMENTS) * first.shape[0]
    _finish(
        tuple(parts[name] for name in what.totals),
        tuple(vectors.values()),
        tuple(scalars.values()),
        tuple(extents.values()),
        tuple(results.values()),
        what,
    ).launch(grid=[blocks, 1, 1], block=[_SHARE * _ELEMENTS, 1, 1], stream=stream)


def _count(parts: Any, what: _Finish) -> Any:
    """Elements of a result, for one product."""
    return parts.shape[1] if what.by_row else parts.shape[2] // what.step


@cute.kernel  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    parts, vectors, scalars, extents, results, what: cutlass.Constexpr
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    count = _count(parts[0], what)
    blocks = cute.ceil_div(count, _ELEMENTS)
    batch, element = block // blocks, block % blocks * _ELEMENTS + thread % _ELEMENTS
    share = thread // _ELEMENTS
    at = cutlass.min(element, count - 1)
    allocator = cutlass.utils.SmemAllocator()
    shared = allocator.allocate_tensor(Float32, cute.make_layout((_ELEMENTS, _SHARE, len(what.totals))), 16)
    for index in cutlass.range_constexpr(len(what.totals)):
        maximum = const_expr(what.maxima[index])
        total = Float32(-inf if const_expr(maximum) else 0.0)
        tiles = parts[index].shape[2 if const_expr(what.by_row) else 1]
        for tile in cutlass.range(share, tiles, _SHARE, unroll=4):
            where = (batch, at, tile) if const_expr(what.by_row) else (batch, tile, at * what.step)
            total = _combine(maximum, total, parts[index][where])
        shared[thread % _ELEMENTS, share, index] = total
    cute.arch.sync_threads()
    if thread < _ELEMENTS and element < count:
        _store(shared, thread, batch, element, vectors, scalars, extents, results, what)


@cute.jit  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def]
    shared, thread, batch, element, vectors, scalars, extents, results, what: cutlass.Constexpr
):
    """What one thread makes of the sums of an element."""
    given = dict(zip(what.extents, extents, strict=True))
    for index in cutlass.range_constexpr(len(what.totals)):
        total = shared[thread, 0, index]
        for other in cutlass.range_constexpr(1, _SHARE):
            total = _combine(const_expr(what.maxima[index]), total, shared[thread, other, index])
        given[what.totals[index]] = total
    for name, vector in zip(what.vectors, vectors, strict=True):
        given[name] = vector[_place(vector, batch, element)].to(Float32)
    for name, scalar in zip(what.scalars, scalars, strict=True):
        given[name] = scalar[0].to(Float32)
    values = what.function(**given)
    for name, result in zip(what.results, results, strict=True):
        result[_place(result, batch, element)] = values[name].to(result.element_type)


def _place(tensor: Any, batch: Any, element: Any) -> tuple[Any, ...]:
    return (element,) if cute.rank(tensor) == 1 else (batch, element)
