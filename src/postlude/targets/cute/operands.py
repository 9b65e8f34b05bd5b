"""Epilogue operands that QuACK has no op for.

`ScalarLoad` reads a tensor of one element of any type. Where a GEMM's accumulator holds n pairs of columns, `PairedRowLoad` reads
a row [n], and `PairedTileLoad` a tile [m, n].
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from quack.epilogue.ops import EpiOp, EpiSmemBytes, RowVecLoad


class _Given(EpiOp):
    """A tensor that kernels take as it is given."""

    def param_fields(self) -> list[tuple[str, Any, Any]]:
        return [(self.name, object, None)]

    def to_params(self, gemm: Any, args: Any) -> dict[str, Any]:
        return {self.name: getattr(args, self.name)}


class ScalarLoad(_Given):
    """A tensor of one element, read once per tile as float32."""

    fn_port = "scalar"

    @cute.jit
    def begin(self, gemm, param, smem_tensor, ctx):  # type: ignore[no-untyped-def]
        return param[0].to(Float32)


class PairedRowLoad(RowVecLoad):
    """A row [n] where the accumulator's columns are pairs: both columns of a pair see one element."""

    fn_port = "value"

    def _tile_size(self, cta_tile_shape_mnk: Any) -> int:
        return cta_tile_shape_mnk[1] // 2  # type: ignore[no-any-return]

    def smem_bytes(self, arg_tensor: Any, cta_tile_shape_mnk: Any, epi_tile: Any, warp_shape_mnk: Any = None) -> EpiSmemBytes:
        return EpiSmemBytes(unstaged=self._tile_size(cta_tile_shape_mnk) * (arg_tensor.element_type.width // 8))

    @cute.jit
    def begin(self, gemm, param, smem_tensor, ctx):  # type: ignore[no-untyped-def]
        pairs = ctx.tile_N // 2
        row = self._get_gmem_vec(param, ctx)
        first = ctx.tile_coord_mnkl[1] * pairs
        limit = min(cute.size(row, mode=[0]) - first, pairs)
        for step in cutlass.range_constexpr((pairs + ctx.num_epi_threads - 1) // ctx.num_epi_threads):
            column = ctx.tidx + step * ctx.num_epi_threads
            if column < limit:
                smem_tensor[column] = row[first + column]
        twice = cute.make_layout((ctx.tile_M, (2, pairs)), stride=(0, (0, 1)))
        in_tile = ctx.partition_for_epilogue_fn(cute.make_tensor(smem_tensor.iterator, twice))
        if cutlass.const_expr(ctx.tiled_copy_t2r is not None):
            in_tile = ctx.tiled_copy_r2s.retile(in_tile)
        one_subtile = cute.group_modes(in_tile, 3, cute.rank(in_tile))[None, None, None, 0]
        return [in_tile, cute.make_rmem_tensor(one_subtile.shape, gemm.acc_dtype)]

    @cute.jit
    def begin_loop(self, gemm, state, epi_coord):  # type: ignore[no-untyped-def]
        in_tile, values = state[0], state[1]
        here = cute.group_modes(in_tile, 3, cute.rank(in_tile))[None, None, None, epi_coord]
        for i in cutlass.range_constexpr(cute.size(values)):
            values[i] = here[i].to(gemm.acc_dtype)
        return values


class PairedTileLoad(_Given):
    """A tile [m, n] or [b, m, n] where the accumulator's columns are pairs: both columns of a pair see one element.

    Elements come straight from global memory: four threads read neighbours, and a thread's next elements lie in the same sector
    of 32 bytes. A staged copy as of whole tiles would have to know how registers hold half of a subtile.
    """

    fn_port = "value"

    @cute.jit
    def begin(self, gemm, param, smem_tensor, ctx):  # type: ignore[no-untyped-def]
        batched = cutlass.const_expr(cute.rank(param) == 3)
        tile = param[ctx.batch_idx, None, None] if batched else param
        first = (ctx.tile_coord_mnkl[0] * ctx.tile_M, ctx.tile_coord_mnkl[1] * (ctx.tile_N // 2))
        coordinates = ctx.partition_for_epilogue_fn(cute.make_identity_tensor((ctx.tile_M, ctx.tile_N)))
        if cutlass.const_expr(ctx.tiled_copy_t2r is not None):
            coordinates = ctx.tiled_copy_r2s.retile(coordinates)
        one_subtile = cute.group_modes(coordinates, 3, cute.rank(coordinates))[None, None, None, 0]
        return [tile, first, coordinates, cute.make_rmem_tensor(one_subtile.shape, gemm.acc_dtype)]

    @cute.jit
    def begin_loop(self, gemm, state, epi_coord):  # type: ignore[no-untyped-def]
        tile, first, coordinates, values = state[0], state[1], state[2], state[3]
        here = cute.group_modes(coordinates, 3, cute.rank(coordinates))[None, None, None, epi_coord]
        for i in cutlass.range_constexpr(0, cute.size(values), 2):
            # Beyond the edge the last element stands for what nobody stores.
            row = cutlass.min(first[0] + here[i][0], tile.shape[0] - 1)
            column = cutlass.min(first[1] + here[i][1] // 2, tile.shape[1] - 1)
            values[i] = tile[row, column].to(gemm.acc_dtype)
            values[i + 1] = values[i]
        return values
