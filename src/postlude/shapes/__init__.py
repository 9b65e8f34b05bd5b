"""Shapes declared once: what varies in the arguments of a function, for torch.compile, torch.export and make_fx alike.

    from postlude.shapes import ShapeVar, TensorSpec, dynamic_spec

    batch = ShapeVar("batch", max=64)

    @torch.compile
    @dynamic_spec({"x": TensorSpec([batch, 512]), "y": TensorSpec([2 * batch, 512])})
    def f(x, y): ...

compiles once, for every batch from 0 to 64; a call that breaks the spec raises `postlude.errors.ShapeViolation`.
"""

from postlude.errors import OutputSizesUnknown, RecompileLimitExceeded, ShapeViolation, SpecError
from postlude.shapes.bucketed import bucketed
from postlude.shapes.decorate import dynamic_spec, spec_of
from postlude.shapes.dims import from_dynamic_shapes, from_marks, mark, to_dynamic_shapes
from postlude.shapes.expressions import IntVar, ShapeVar
from postlude.shapes.foreign import from_torch
from postlude.shapes.infer import infer
from postlude.shapes.places import Place
from postlude.shapes.printing import code, dimension_line, line
from postlude.shapes.spec import (
    STATIC,
    DictSpec,
    IntermediateSpec,
    LeafIntSpec,
    LeafSpec,
    ObjectSpec,
    ParamsSpec,
    SeqSpec,
    ShapesSpec,
    TensorSpec,
)
from postlude.shapes.text import parse
from postlude.shapes.tracing import export, make_fx
from postlude.shapes.watch import watch

__all__ = [
    "STATIC",
    "DictSpec",
    "IntVar",
    "IntermediateSpec",
    "LeafIntSpec",
    "LeafSpec",
    "ObjectSpec",
    "OutputSizesUnknown",
    "ParamsSpec",
    "Place",
    "RecompileLimitExceeded",
    "SeqSpec",
    "ShapeVar",
    "ShapeViolation",
    "ShapesSpec",
    "SpecError",
    "TensorSpec",
    "bucketed",
    "code",
    "dimension_line",
    "dynamic_spec",
    "export",
    "from_dynamic_shapes",
    "from_marks",
    "from_torch",
    "infer",
    "line",
    "make_fx",
    "mark",
    "parse",
    "spec_of",
    "to_dynamic_shapes",
    "watch",
]
