"""The pass over one graph: each GEMM in turn is grown, judged, and put in as one op."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import torch
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node

from postlude.capture.codes import weight_of
from postlude.capture.gemm import RESHAPES, Gemm, NotAGemm, recognize
from postlude.capture.grow import Growth, Settings
from postlude.capture.heads import join_heads
from postlude.capture.names import name_of
from postlude.capture.norms import defer
from postlude.capture.rewrite import NotExpressible, Plan, Refused, check_sizes, plan, put_in, read_sizes_from_inputs
from postlude.capture.sizes import hint
from postlude.capture.trim import trim
from postlude.ir import Reduce, Region

if TYPE_CHECKING:
    from postlude.select.choice import Choice

#: Most GEMMs of one input that are joined side by side: q, k, v and one more.
MAX_SIBLINGS = 4


@dataclass
class Captured:
    """What became of one or more GEMMs of a graph.

    Attributes:
        gemms: names of the GEMMs: the modules that they come from, or the graph's own.
        absorbed: overload names of all absorbed nodes, in graph order.
        region: the Region, or None where the GEMM was left to Inductor.
        reason: why it was left alone.
        stops: what ended the growth: node name and reason.
        node: the op's node in the rewritten graph.
        device: type of the device that it is on.
        bytes_saved: bytes of GEMM results that are neither stored nor read again, for the example's sizes.
        choice: what the judge chose for it; None where nobody judged.
    """

    gemms: list[str]
    absorbed: list[str] = field(default_factory=list)
    region: Region | None = None
    reason: str = ""
    stops: dict[str, str] = field(default_factory=dict)
    node: Node | None = None
    device: str = ""
    bytes_saved: int = 0
    choice: "Choice | None" = None


#: Chooses how a Region is computed; None keeps it without a word.
Judge = Callable[[Plan, Growth], "Choice | None"]


def capture(graph: Graph, settings: Settings, judge: Judge = lambda plan, growth: None) -> list[Captured]:
    """Rewrite the graph in place.

    Args:
        graph: ATen graph after AOTAutograd, nodes with fake values in ``meta["val"]``.
        settings: the user's choices.
        judge: chooses how a Region is computed, or that it is not put in; called before the graph is touched.
    """
    read_sizes_from_inputs(graph)
    kept = _defer_norms(graph, settings, judge)
    captured: list[Captured] = []
    done: set[Node] = set()
    for node in list(graph.nodes):
        if node in done:
            continue
        try:
            chosen = _chosen(node, settings, frozenset(done), judge)
        except (NotAGemm, NotExpressible, Unwanted) as reason:
            captured.append(Captured([name_of(node)], reason=str(reason), choice=getattr(reason, "choice", None)))
            done.add(node)
            continue
        except Exception as error:
            if settings.strict:
                raise
            # The graph is as it was: the user's model must not fail for a fault of ours.
            warnings.warn(f"Postlude leaves {node.name} to Inductor: {error!r}. Please report this.", stacklevel=2)
            captured.append(Captured([name_of(node)], reason=f"a fault in Postlude: {error!r}"))
            done.add(node)
            continue
        if chosen is None:
            continue
        growth, region_plan, choice = chosen
        record = _record(region_plan, growth)
        record.stops |= {gemm.node.name: kept[gemm.node] for gemm in growth.gemms if gemm.node in kept}
        record.choice = choice
        record.node = put_in(graph, region_plan)
        done.update(region_plan.absorbed)
        captured.append(record)
        stable_topological_sort(graph)
    graph.eliminate_dead_code()
    graph.lint()
    return captured


def _defer_norms(graph: Graph, settings: Settings, judge: Judge) -> dict[Node, str]:
    """Defer the norms for which that pays; for products that read another norm, why it stays."""

    def trial(node: Node) -> Growth | None:
        try:
            chosen = _chosen(node, settings, frozenset(), judge)
        except (NotAGemm, NotExpressible, Unwanted):
            return None
        return chosen[0] if chosen else None

    if settings.eager_rounding:
        return {}
    try:
        return defer(graph, trial)
    except Exception as error:
        if settings.strict:
            raise
        warnings.warn(f"Postlude leaves norms to Inductor: {error!r}. Please report this.", stacklevel=2)
        return {}


def count_gemms(graph: Graph) -> int:
    """How many GEMMs a graph has."""

    def is_gemm(node: Node) -> bool:
        try:
            return recognize(node) is not None
        except NotAGemm:
            return True

    return sum(map(is_gemm, graph.nodes))


class Unwanted(Exception):
    """The judge has a reason against a Region."""

    def __init__(self, choice: "Choice") -> None:
        super().__init__(choice.reason)
        self.choice = choice


def _chosen(node: Node, settings: Settings, done: frozenset[Node], judge: Judge) -> "tuple[Growth, Plan, Choice | None] | None":
    """What is put in the place of a node and what follows it, or None for one that multiplies nothing.

    Raises:
        NotAGemm, NotExpressible, Unwanted: it is left alone.
    """
    with ExitStack() as after:
        if undo := join_heads(node):
            after.callback(undo)
        gemm = recognize(node)
        if gemm is None:
            return None
        chosen = _choose(gemm, settings, done, judge)
        check_sizes(node.graph, chosen[1])
        after.pop_all()
        return chosen


def _choose(gemm: Gemm, settings: Settings, done: frozenset[Node], judge: Judge) -> "tuple[Growth, Plan, Choice | None]":
    """The GEMM with others of the same input and with the norm before them, if that is possible and wanted; else with less.

    Raises:
        NotAGemm, NotExpressible, Unwanted: not alone either.
    """
    alone = _grown([gemm], settings, done)
    refusal: Choice | None = None
    siblings = [] if gemm.batched else _siblings(alone[0], done)
    for gemms in ([gemm, *siblings], [gemm]) if siblings else ([gemm],):
        try:
            plain = _grown(gemms, settings, done) if siblings and gemms[1:] else alone
        except (NotAGemm, NotExpressible):
            continue  # side by side they don't fit into one Region
        for growth, region_plan in _variants(gemms, settings, done, plain):
            choice = judge(region_plan, growth)
            if choice is None or not choice.unfused:
                return growth, region_plan, choice
            if growth is alone[0]:
                refusal = choice
    assert refusal is not None
    raise Unwanted(refusal)


def _variants(
    gemms: Sequence[Gemm], settings: Settings, done: frozenset[Node], plain: tuple[Growth, Plan]
) -> Iterator[tuple[Growth, Plan]]:
    """The same products with more and with less around them, what is wanted most first."""
    growth, region_plan = plain
    if not settings.eager_rounding and any(weight_of(gemm.right) for gemm in growth.gemms):
        with suppress(NotAGemm, NotExpressible):
            yield _grown(gemms, settings, done, coded=True)
    if (found := _with_norm(gemms, settings, done, growth)) is not None:
        yield found
    yield plain
    if not growth.reach.whole_rows and any(isinstance(statement, Reduce) for statement in region_plan.region.body):
        with suppress(NotAGemm, NotExpressible):
            yield _grown(gemms, settings, done, totals=False)
    if growth.tiles and not growth.reach.whole_rows:
        with suppress(NotAGemm, NotExpressible):
            yield _grown(gemms, settings, done, totals=False, inflow=False)


def _with_norm(gemms: Sequence[Gemm], settings: Settings, done: frozenset[Node], plain: Growth) -> tuple[Growth, Plan] | None:
    """A Region as it was grown, but with the norm before its products, or None if that can't be."""
    readers = frozenset(gemm.node for gemm in plain.gemms)
    if Growth(gemms, settings, norm_of=readers).prologue is None:
        return None  # which shows before anything has grown
    try:
        growth, region_plan = _grown(gemms, settings, done, readers)
    except (NotAGemm, NotExpressible):
        return None
    return (growth, region_plan) if {gemm.node for gemm in growth.gemms} == readers else None


def _grown(
    gemms: Sequence[Gemm],
    settings: Settings,
    done: frozenset[Node],
    norm_of: frozenset[Node] = frozenset(),
    *,
    totals: bool = True,
    inflow: bool = True,
    coded: bool = False,
) -> tuple[Growth, Plan]:
    """Grow and plan, again without each node that is better computed outside or can't be stored in the form it is needed in."""
    refused: dict[Node, str] = {}
    while True:
        growth = Growth(gemms, settings, refused, done, norm_of, totals=totals, inflow=inflow, coded=coded)
        growth.run()
        if not growth.reach.whole_rows and (outside := trim(growth)):
            refused |= dict.fromkeys(outside, "the kernel that reads it computes it as well, from fewer bytes")
            continue
        try:
            return growth, plan(growth)
        except Refused as refusal:
            refused[refusal.node] = "its result has a form that a Region can't store"


def _siblings(growth: Growth, done: frozenset[Node]) -> list[Gemm]:
    """Other GEMMs of the same left side: k and v beside q. Those that depend on the Region are sorted out by the walk."""
    left = growth.first.left.node
    readers = [reader for user in left.users for reader in ((user, *user.users) if user.target in RESHAPES else (user,))]
    siblings: list[Gemm] = []
    for node in dict.fromkeys(readers):
        if node in done or node in growth.values or node in growth.tainted or not growth.first.node < node:
            continue
        try:
            gemm = recognize(node)
        except NotAGemm:
            continue
        if gemm and not gemm.batched and gemm.left == growth.first.left:
            siblings.append(gemm)
    return siblings[: MAX_SIBLINGS - 1]


def _record(region_plan: Plan, growth: Growth) -> Captured:
    inside = {g.node for g in growth.gemms}
    before = reversed(growth.prologue.nodes) if growth.prologue else ()
    return Captured(
        gemms=[name_of(g.node) for g in growth.gemms],
        absorbed=[str(n.target) for n in (*before, *region_plan.absorbed) if n not in inside],
        region=region_plan.region,
        stops={node.name: reason for node, reason in growth.stops.items()},
        device=growth.first.left.node.meta["val"].device.type,
        bytes_saved=_bytes_saved(region_plan, growth),
    )


def _bytes_saved(region_plan: Plan, growth: Growth) -> int:
    """A GEMM result that is not a result of the Region is neither written nor read again.

    Attention counts for nothing: its scores are not stored by other kernels either.
    """
    stored = {node for nodes in region_plan.results for node in nodes}
    inside = [g.node for g in growth.gemms if g.node not in stored and g.attention is None]
    return sum(2 * _bytes(node.meta["val"]) for node in inside)


def _bytes(value: torch.Tensor) -> int:
    return prod(map(hint, value.shape)) * value.dtype.itemsize
