"""Plants a fault, to prove that a check finds it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from postlude.capture import Captured
from postlude.capture.names import joined
from postlude.ir import Apply, Const, Region, normalize, to_text
from postlude.report.collection import listening


@contextmanager
def planted(name: str, factor: float = 1.01) -> Iterator[list[str]]:
    """While open, the Region whose name holds `name` computes its first result times `factor`, in every graph compiled.

    The fault is in the graph itself: compiled code and whatever else runs the graph have it, and no other Region. Caches of
    compiled graphs are off while it is there. Gives the names of the Regions that were changed.
    """
    changed: list[str] = []

    def alter(captured: list[Captured], is_inference: bool) -> None:
        for one in captured:
            if one.region is not None and one.node is not None and name in joined(one.gemms):
                one.node.args = (to_text(_scaled(one.region, factor)), *one.node.args[1:])
                changed.append(joined(one.gemms))

    with listening(alter), torch._inductor.config.patch(force_disable_caches=True):
        yield changed


def _scaled(region: Region, factor: float) -> Region:
    first, *others = region.yields
    constant, product = Const("fault", factor), Apply("scaled", "mul", (first.value, "fault"))
    body = (*region.body, constant, product)
    scaled, _ = normalize(replace(region, body=body, yields=(replace(first, value="scaled"), *others)))
    return scaled
