"""Low precision: number formats, and models whose weights are kept in them.

elements.py   element types, and the one rule by which a number gets its code
formats.py    formats: an element type, scales, and the blocks that share one
blocks.py     quantise and dequantise: the reference
layout.py     two codes in a byte, and the order of scales that tensor cores read
"""

from postlude.quant.blocks import Quantized, dequantize, quantize
from postlude.quant.elements import ELEMENTS, Element, decode, encode
from postlude.quant.formats import FORMATS, Format, format_named
from postlude.quant.layout import pack_pairs, swizzle, unpack_pairs, unswizzle

__all__ = [
    "ELEMENTS",
    "FORMATS",
    "Element",
    "Format",
    "Quantized",
    "decode",
    "dequantize",
    "encode",
    "format_named",
    "pack_pairs",
    "quantize",
    "swizzle",
    "unpack_pairs",
    "unswizzle",
]
