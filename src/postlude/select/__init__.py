"""Selection: which legal Regions pay. Capture says what may be fused; here it is decided what should be."""

from postlude.select.judge import judge_for

__all__ = ["judge_for"]
