"""The formats: which element type, which scales, of which blocks. A table.

A matrix [n, k] is cut into blocks of rows x columns; all numbers of a block share a scale, and in formats with zero points a zero
point. Scales lie as [n / rows, k / columns], rounded up: the last block of a row or column may be smaller. Further dimensions
before [n, k] are matrices of their own.
"""

from dataclasses import dataclass

import torch

from postlude.errors import QuantizationError
from postlude.quant.elements import ELEMENTS, Element

#: In a block's size: as many as the matrix has.
ALL = 0


@dataclass(frozen=True)
class Format:
    """One number format.

    Attributes:
        name: as schemes name it.
        element: the type of the codes.
        block: (rows, columns) that share a scale.
        scale: type of the scales. e8m0 are powers of two, e4m3 are multiples of the matrix's own float32 scale.
        zero_points: whether a block has a zero point, an int8: value = (code - zero point) * scale.
    """

    name: str
    element: Element
    block: tuple[int, int]
    scale: torch.dtype = torch.float32
    zero_points: bool = False

    @property
    def matrix_scale(self) -> bool:
        """Whether the whole matrix has a scale of its own beside those of its blocks."""
        return self.scale == torch.float8_e4m3fn

    def block_of(self, rows: int, columns: int) -> tuple[int, int]:
        """The size of a block in a matrix of this size."""
        return self.block[0] or max(rows, 1), self.block[1] or max(columns, 1)

    def bits(self, rows: int, columns: int) -> float:
        """Bits that a number of a matrix takes, with its share of the scales."""
        block_rows, block_columns = self.block_of(rows, columns)
        shared = self.scale.itemsize * 8 + 8 * self.zero_points
        return self.element.bits + shared / (block_rows * block_columns)


_FLOAT8 = {"tensor": (ALL, ALL), "row": (1, ALL), "1x128": (1, 128), "128x128": (128, 128)}

_TABLE = (
    *(
        Format(f"fp8_{element}_{name}", ELEMENTS[element], block)
        for element in ("e4m3", "e5m2")
        for name, block in _FLOAT8.items()
    ),
    *(Format(f"mxfp8_{element}", ELEMENTS[element], (1, 32), torch.float8_e8m0fnu) for element in ("e4m3", "e5m2")),
    Format("nvfp4", ELEMENTS["e2m1"], (1, 16), torch.float8_e4m3fn),
    Format("int8_row", ELEMENTS["int8"], (1, ALL)),
    # 16-bit scales of 32 numbers take half a bit of each, and are a hundred times finer than the codes.
    *(Format(f"int4_{group}", ELEMENTS["int4"], (1, group), torch.bfloat16) for group in (32, 128)),
    *(Format(f"uint4_{group}", ELEMENTS["uint4"], (1, group), torch.bfloat16, zero_points=True) for group in (32, 128)),
)

#: Formats by name.
FORMATS: dict[str, Format] = {format.name: format for format in _TABLE}


def format_named(name: str) -> Format:
    """The format of this name.

    Raises:
        QuantizationError: there is none.
    """
    if name not in FORMATS:
        raise QuantizationError(f"there is no number format {name!r}", f"one of {', '.join(FORMATS)}", "Choose one of these")
    return FORMATS[name]
