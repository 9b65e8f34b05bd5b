"""The judge of a planned Region: chooses how it is computed, or that Inductor has its nodes back.

In this order: what the user's database says (with the option `tune`, what is measured now), what the shipped one says, the rules.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from math import prod

import torch

from postlude.capture.grow import VIEWS, Growth
from postlude.capture.norms import DEFERRED
from postlude.capture.rewrite import Plan
from postlude.capture.sizes import hint
from postlude.errors import MeasurementFailed
from postlude.ir import Contract, Reduce, Region
from postlude.options import Options
from postlude.select.choice import UNFUSED, Candidate, Choice
from postlude.select.knowledge import knowledge
from postlude.select.measure import Packing, packing_of
from postlude.select.rows import VERY_MANY_ROWS, by_rows, few_rows, has_epilogue
from postlude.select.subject import environment, peer, planned_bounds, planned_call
from postlude.select.tune import tuned
from postlude.targets.base import TARGETS, available, serving, target

Judge = Callable[[Plan, Growth], Choice]


def judge_for(options: Options, is_inference: bool = False) -> Judge:
    """The judge that these options ask for, of a graph of inference or of training."""

    def judge(plan: Plan, growth: Growth) -> Choice:
        device = growth.first.left.node.meta["val"].device.type
        if options.fuse_all and not available(device):
            return Choice("aten", "rule", "fuse_all is set, and no target can compile here: it is interpreted")
        if (reason := _unserved(device, plan.region)) is not None:
            return Choice(UNFUSED, "rule", reason)
        if options.fuse_all:
            return _kept(plan, growth, "fuse_all is set")
        packing = packing_of(plan) if options.freeze and is_inference and device == "cpu" else Packing()
        ruled = rule(plan, growth)
        tunes = options.tune and not plan.region.coded
        choice = _tuned(plan, growth, ruled, packing) if tunes else _known(plan, growth, packing) or ruled
        return choice if choice.unfused else _loses(plan, growth, packing) or choice

    return judge


def _loses(plan: Plan, growth: Growth, packing: Packing) -> Choice | None:
    """Where sizes vary: that calls which the graph will serve were measured to be slower with the Region.

    Kernels are chosen for each call, the Region's being in the graph once for all. Inductor's code for the nodes, which a call
    could go to instead, would have to be in it a second time. So one bucket that loses decides: never slower comes first. Who
    needs the others' gain bounds the sizes (`max=` in a guard-free spec, or of `mark_dynamic`), or compiles a function for each.
    """
    if knowledge().empty or not (bounds := planned_bounds(plan)):
        return None
    device = growth.first.left.node.meta["val"].device.type
    call = planned_call(plan, packed=bool(packing.operands))
    names = _names(plan, growth)
    for entry in knowledge().of_graph(call, bounds, peer(), environment(device, plan.region)):
        choice = entry.choice("user database", lambda variant: variant.target in (*names, UNFUSED))
        if choice is not None and choice.unfused:
            sizes = ", ".join(f"{axis} = {size}" for axis, size in entry.call.sizes if axis in bounds)
            return replace(choice, reason=f"sizes vary, and for {sizes} {choice.reason}")
    return None


def _tuned(plan: Plan, growth: Growth, ruled: Choice, packing: Packing) -> Choice:
    names = _names(plan, growth)
    try:
        entry, now = tuned(plan, names, ruled.winner, packing)
    except MeasurementFailed as error:
        warnings.warn(f"Postlude could not measure a Region, {ruled.winner} is taken: {error}", stacklevel=2)
        return replace(ruled, reason=f"{ruled.reason}; {error}")
    return entry.choice("measured" if now else "user database", lambda variant: variant.target in (*names, UNFUSED)) or ruled


def _known(plan: Plan, growth: Growth, packing: Packing) -> Choice | None:
    if knowledge().empty:
        return None
    device = growth.first.left.node.meta["val"].device.type
    call = planned_call(plan, packed=bool(packing.operands))
    return knowledge().choice(call, peer(), environment(device, plan.region), _names(plan, growth))


def rule(plan: Plan, growth: Growth) -> Choice:
    """What is chosen where nothing was measured."""
    device = growth.first.left.node.meta["val"].device.type
    reason = _RULES[device](plan, growth) if device in _RULES else None
    return _kept(plan, growth, "by the rules for this device") if reason is None else Choice(UNFUSED, "rule", reason)


def _kept(plan: Plan, growth: Growth, reason: str) -> Choice:
    names = _names(plan, growth)
    return Choice(names[0], "rule", reason, tuple(Candidate(name) for name in (*names, UNFUSED)))


def _names(plan: Plan, growth: Growth) -> list[str]:
    """The targets that serve a Region, in the order in which they are asked for the example's rows."""
    device = growth.first.left.node.meta["val"].device.type
    names = serving(device, plan.region)
    return by_rows(plan.region, _rows(plan, growth), names) if device == "cuda" else names


def _rows(plan: Plan, growth: Growth) -> int:
    """Rows of one product, for the example's sizes."""
    return prod(map(hint, growth.rows[-1:] if growth.program.batched else growth.rows))


def _unserved(device: str, region: Region) -> str | None:
    """Why no target has a kernel for the Region on a device type, or None."""
    if device not in TARGETS:
        return f"no target of this version compiles for {device}"
    if serving(device, region):
        return None
    reasons = {name: target(name).unavailable() or target(name).unsupported(region) for name in TARGETS[device]}
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) if len(reasons) > 1 else str(*reasons.values())


def _pays_on_a_gpu(plan: Plan, growth: Growth) -> str | None:
    """Few rows: reading the weights is what takes time. Many: an epilogue is what there is to gain, where CuTe computes it.

    Rows that vary may be few and many: then cuBLAS or CuTe must be there for the many.
    """
    left = growth.first.left.node.meta["val"]
    if not _was_measured(left.device):
        return "kernels for this GPU were not measured; with options={'tune': True} they are, here"
    dtype = left.dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return f"cuBLAS is as fast for {dtype}"
    if growth.prologue and any(len(group.contractions) > 1 for group in plan.region.groups):
        return "a norm before a pair of products costs as much as its own kernel"
    if (reason := _totals(plan, growth)) is not None:
        return reason
    sizes = growth.rows[-1:] if growth.program.batched else growth.rows
    few = _rows(plan, growth) <= few_rows(plan.region)
    names = serving("cuda", plan.region)
    if few and "triton" not in names:
        return "no Triton kernel of this form, for few rows"
    if few and all(isinstance(size, int) for size in sizes):
        return None
    if not few and "cute" in names and _is_large(plan, growth):
        return None
    if not has_epilogue(plan.region):
        return None if few and "blas" in names else "cuBLAS is as fast for many rows without an epilogue"
    if not few and _is_one_call(growth):
        return "cuBLAS adds a bias as well"
    return None if "cute" in names else "no CuTe kernel of this form"


def _is_large(plan: Plan, growth: Growth) -> bool:
    """Whether CuTe's products are faster than cuBLAS's: very many rows that lie along k, and large weights."""
    left = growth.first.left
    known = all(isinstance(size, int) for size in growth.rows)
    if not known or growth.program.batched or left.transposed or _rows(plan, growth) < VERY_MANY_ROWS:
        return False
    return min(map(hint, growth.widths.values())) * hint(left.shape[-1]) >= _LARGE_WEIGHT


#: Elements of the weights that were measured for that.
_LARGE_WEIGHT = 4096 * 14336


def _is_one_call(growth: Growth) -> bool:
    """Whether all that a Region computes is one `addmm`."""
    gemms = {gemm.node for gemm in growth.gemms}
    return growth.prologue is None and all(node in gemms or node.target in VIEWS for node in growth.values)


def _totals(plan: Plan, growth: Growth) -> str | None:
    """Reductions as results: the product must be long enough for its kernel to hide them, the result for it to be worth it.

    Of bias + dsilu with sums on an H200 (bfloat16; added time, and that of a kernel for it): 2048 x 4096 x 4096 sum of rows 9.4
    and 14.8 µs, sum of columns 10.2 and 7.4; 8192 x 4096 x 4096 24 and 39, 21 and 26; 4096 x 14336 x 4096 29 and 49, 31 and
    52; 16384 x 1024 x 1024 66 and 33, 60 and 37.
    """
    totals = {s.axis for s in plan.region.body if isinstance(s, Reduce)} - {_k(plan, c) for c in plan.region.contractions}
    if not totals:
        return None
    left = growth.first.left
    elements = prod(map(hint, growth.rows)) * max(map(hint, growth.widths.values()))
    if any(DEFERRED in node.meta for node in growth.values):
        return None if elements >= _LEAST_FOR_NORMS else "a norm of so few elements costs less in a kernel of its own"
    least = _LEAST_FOR_ROWS if totals - {"m"} else _LEAST_FOR_COLUMNS
    if hint(left.shape[-2 if left.transposed else -1]) < _LONG or elements < least:
        return "a reduction costs less in a kernel of its own"
    return None


#: Sizes from which reductions pay as results: of the contracted axis, and of the tile that is reduced to rows and to columns.
_LONG = 4096
_LEAST_FOR_ROWS, _LEAST_FOR_COLUMNS = 8192 * 4096, 2048 * 4096

#: Elements of a stream from which its norm is deferred.
_LEAST_FOR_NORMS = 2048 * 4096


def _k(plan: Plan, contraction: Contract) -> str:
    return plan.region.contraction_axes(contraction)[0]


#: Compute capabilities of the GPUs that the rules were measured on.
_MEASURED = ((9, 0),)


def _was_measured(device: torch.device) -> bool:
    """Whether the rules hold for a GPU."""
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) in _MEASURED


#: By device type: what pays without measuring. On a CPU every legal Region does.
_RULES: dict[str, Callable[[Plan, Growth], str | None]] = {"cuda": _pays_on_a_gpu}
