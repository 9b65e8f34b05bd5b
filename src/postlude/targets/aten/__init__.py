"""Target `aten`: a Region interpreted with ATen calls. The oracle of the tests and the fallback of every machine."""

from postlude.targets.aten.interpreter import evaluate, result_shapes, run

__all__ = ["evaluate", "result_shapes", "run"]
