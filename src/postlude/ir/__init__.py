"""The Region: what Postlude compiles, as plain data.

Here live the data classes (`region`), the table of epilogue ops (`ops`), the text form (`text`), the verifier
(`verify`), the normal form (`normal`), and where errors grow (`sensitive`). Nothing here knows FX graphs, devices, kernels or
tensors; the package imports only the standard library and torch's dtypes.
"""

from postlude.ir.normal import normalize
from postlude.ir.ops import OPS, Op
from postlude.ir.region import (
    Apply,
    Const,
    Contract,
    Extent,
    Group,
    Operand,
    Reduce,
    Region,
    Round,
    Statement,
    Type,
    Yield,
)
from postlude.ir.sensitive import sensitive
from postlude.ir.text import RegionSyntaxError, parse, to_text
from postlude.ir.verify import RegionError, verify

__all__ = [
    "OPS",
    "Apply",
    "Const",
    "Contract",
    "Extent",
    "Group",
    "Op",
    "Operand",
    "Reduce",
    "Region",
    "RegionError",
    "RegionSyntaxError",
    "Round",
    "Statement",
    "Type",
    "Yield",
    "normalize",
    "parse",
    "sensitive",
    "to_text",
    "verify",
]
