"""The judge of a planned Region: keeps it, or says why Inductor should have its nodes back."""

from collections.abc import Callable

import torch

from postlude import runtime
from postlude.capture.grow import Growth
from postlude.capture.rewrite import Plan
from postlude.ir import to_text
from postlude.options import Options
from postlude.select.measure import Timing, hint, measure
from postlude.targets import cpp

#: Device types that a compiled target serves.
DEVICES = ("cpu",)

Judge = Callable[[Plan, Growth], str | None]

_timings: dict[object, Timing] = {}


def judge_for(options: Options) -> Judge:
    """The judge that these options ask for: a function of a plan that returns a reason against it, or None."""

    def judge(plan: Plan, growth: Growth) -> str | None:
        device = growth.first.left.node.meta["val"].device.type
        if device not in DEVICES:
            return f"no target of this version compiles for {device}"
        if runtime.cpp_available() and (reason := cpp.unsupported(plan.region)):
            return reason
        if options.fuse_all:
            return None
        if not runtime.cpp_available():
            return "there is no C++ compiler"
        return _measured(plan, growth) if options.tune else None

    return judge


def _measured(plan: Plan, growth: Growth) -> str | None:
    key = (to_text(plan.region), torch.get_num_threads(), tuple(_description(source.node.meta["val"]) for source in plan.sources))
    if key not in _timings:
        _timings[key] = measure(plan, growth)
    timing = _timings[key]
    if timing.pays:
        return None
    return f"measured: {timing.fused * 1e6:.1f} µs fused, {timing.unfused * 1e6:.1f} µs in Inductor"


def _description(value: object) -> object:
    shape, strides = value.shape, value.stride()  # type: ignore[attr-defined]
    return tuple(map(hint, shape)), tuple(map(hint, strides))
