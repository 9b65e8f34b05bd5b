"""Low precision: number formats, and models whose weights are kept in them.

elements.py   element types, and the one rule by which a number gets its code
formats.py    formats: an element type, scales, and the blocks that share one
blocks.py     quantise and dequantise: the reference
layout.py     two codes in a byte, and the order of scales that tensor cores read
schemes.py    what is done to a layer
weight.py     a quantised weight, as a tensor
op.py         its dequantisation, as one node of a graph
products.py   products of which both sides are quantised
model.py      quantize_
plain.py      state dicts for files that know plain tensors only
"""

from postlude.quant.blocks import Quantized, dequantize, quantize
from postlude.quant.elements import ELEMENTS, Element, decode, encode
from postlude.quant.formats import FORMATS, Format, format_named
from postlude.quant.layout import pack_pairs, swizzle, unpack_pairs, unswizzle
from postlude.quant.model import Layer, QuantizationReport, quantize_
from postlude.quant.plain import flatten, unflatten
from postlude.quant.schemes import SCHEMES, Scheme, scheme_named
from postlude.quant.weight import QuantizedTensor

__all__ = [
    "ELEMENTS",
    "FORMATS",
    "SCHEMES",
    "Element",
    "Format",
    "Layer",
    "QuantizationReport",
    "Quantized",
    "QuantizedTensor",
    "Scheme",
    "decode",
    "dequantize",
    "encode",
    "flatten",
    "format_named",
    "pack_pairs",
    "quantize",
    "quantize_",
    "scheme_named",
    "swizzle",
    "unflatten",
    "unpack_pairs",
    "unswizzle",
]
