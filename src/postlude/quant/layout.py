"""How codes and scales lie in memory: two 4-bit codes in a byte, and the blocks of scales that tensor cores read."""

import torch
from torch import Tensor

from postlude.errors import QuantizationError

#: Rows and columns of scales that lie together in the swizzled layout.
TILE = (128, 4)


def pack_pairs(codes: Tensor) -> Tensor:
    """4-bit codes [..., k], one a byte, as [..., k / 2]: the first of a pair in the lower half.

    Raises:
        QuantizationError: k is odd.
    """
    if codes.shape[-1] % 2:
        raise QuantizationError(
            f"a row of {codes.shape[-1]} 4-bit codes has no whole number of bytes", "an even number of columns", "Pad the rows"
        )
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_pairs(packed: Tensor) -> Tensor:
    """Bytes [..., k / 2] as 4-bit codes [..., k], one a byte."""
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def swizzle(scale: Tensor) -> Tensor:
    """Scales [rows, columns] of 8 bits in the order in which cuBLAS and Blackwell's tensor cores read block scales.

    Both sizes are filled up with zeros to whole tiles of 128 x 4, which lie row by row. In a tile, the scale of row r and column
    c is byte ``(r % 32) * 16 + (r // 32) * 4 + c`` (cuBLAS documentation, "1D block scaling factors layout").

    Returns:
        One dimension of ``ceil(rows / 128) * ceil(columns / 4) * 512`` scales.
    """
    rows, columns = scale.shape
    tiles = -(-rows // TILE[0]), -(-columns // TILE[1])
    padded = scale.new_zeros(tiles[0] * TILE[0], tiles[1] * TILE[1], dtype=torch.uint8)
    padded[:rows, :columns] = scale.view(torch.uint8)
    # [tile row, quarter, row of 32, tile column, column]
    return padded.view(tiles[0], 4, 32, tiles[1], 4).permute(0, 3, 2, 1, 4).reshape(-1).view(scale.dtype)


def unswizzle(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `swizzle`: scales [rows, columns].

    Raises:
        QuantizationError: the tensor has another size than `swizzle` gives for these.
    """
    tiles = -(-rows // TILE[0]), -(-columns // TILE[1])
    wanted = tiles[0] * tiles[1] * TILE[0] * TILE[1]
    if swizzled.numel() != wanted:
        raise QuantizationError(
            f"{swizzled.numel()} swizzled scales were given for [{rows}, {columns}]", f"{wanted}", "Give the sizes before padding"
        )
    tiled = swizzled.view(torch.uint8).reshape(tiles[0], tiles[1], 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiled.reshape(tiles[0] * TILE[0], tiles[1] * TILE[1])[:rows, :columns].contiguous().view(swizzled.dtype)
