"""The judge of a planned Region: keeps it, or says why Inductor should have its nodes back."""

from collections.abc import Callable

from postlude import runtime
from postlude.capture.grow import Growth
from postlude.capture.rewrite import Plan
from postlude.options import Options

#: Device types that a compiled target serves.
DEVICES = ("cpu",)


def judge_for(options: Options) -> Callable[[Plan, Growth], str | None]:
    """The judge that these options ask for: a function of a plan that returns a reason against it, or None."""

    def judge(plan: Plan, growth: Growth) -> str | None:
        device = growth.first.left.node.meta["val"].device.type
        if device not in DEVICES:
            return f"no target of this version compiles for {device}"
        if not runtime.cpp_available() and not options.fuse_all:
            return "there is no C++ compiler"
        return None

    return judge
