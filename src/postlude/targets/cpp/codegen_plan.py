"""The plan of an epilogue: how a group's program is cut into passes over the row.

A reduction is known only after a pass over the whole row, so what depends on it belongs to a later pass: a softmax needs three,
one for the maximum, one for the sum, one for the quotients. Everything that does not wait for a reduction shares a pass. A tile
value that a later pass needs again is either computed again or kept in a row of memory that stays in L1: in the row of an
accumulator that nobody needs any more, or in a scratch row. Values without a column axis are computed once per row, between the
passes. A sum over the rows is known at the very end, when all rows are done: a pass only adds to it.

Here are no C++ and no text; `codegen` writes the plan down.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from postlude.ir import Apply, Contract, Group, Operand, Reduce, Region, Round, Statement, Yield
from postlude.targets.cpp.codegen_ops import CHEAP

#: A value is kept in memory if computing it again costs more than this many loads and cheap operations.
RECOMPUTE_LIMIT = 3

#: What an op that is not cheap counts.
EXPENSIVE_COST = 8


@dataclass(frozen=True)
class Row:
    """A row of memory that holds a tile value between passes: accumulator `index`, or scratch row `index`."""

    accumulator: bool
    index: int


@dataclass
class Pass:
    """What happens between two reductions: `before` the loop over the columns, then in it.

    Attributes:
        before: statements without a column axis that this pass or a later one needs, in program order.
        yields_before: results without a column axis that are known now.
        accumulators: contractions whose accumulators are read.
        loads: values kept by an earlier pass.
        statements: computed in the loop, in program order.
        keeps: values to keep for later passes.
        yields: results with a column axis.
        feeds: whether the tile that the next group contracts is written.
        notes: whether the factor of that tile is noted for the next group.
        reductions: fed by this loop.
        totals: sums over the rows that this loop adds to.
    """

    before: list[Statement] = field(default_factory=list)
    yields_before: list[tuple[int, Yield]] = field(default_factory=list)
    accumulators: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    keeps: list[str] = field(default_factory=list)
    yields: list[tuple[int, Yield]] = field(default_factory=list)
    feeds: bool = False
    notes: bool = False
    reductions: list[Reduce] = field(default_factory=list)
    totals: list[Reduce] = field(default_factory=list)

    @property
    def has_loop(self) -> bool:
        """Whether anything is done per column."""
        return bool(self.yields or self.feeds or self.reductions or self.totals)


@dataclass(frozen=True)
class Plan:
    """The passes of a group's epilogue, and where kept values lie.

    `fed` is the tile that the next group contracts, `factor` what each row of its product must then be multiplied by (see
    `split_factor`), if anything. `after` is what is computed when all rows are done, from `totals`, the sums over them, and
    `yields_after` what is then stored.
    """

    passes: tuple[Pass, ...]
    rows: Mapping[str, Row]
    fed: str | None
    factor: str | None
    totals: tuple[Reduce, ...] = ()
    after: tuple[Statement, ...] = ()
    yields_after: tuple[tuple[int, Yield], ...] = ()

    @property
    def scratch_rows(self) -> int:
        """Number of scratch rows in use."""
        return 1 + max((row.index for row in self.rows.values() if not row.accumulator), default=-1)


def plan(region: Region, group: Group) -> Plan:
    """Cut a group's epilogue into passes."""
    return _Planner(region, group).plan()


def split_factor(region: Region, group: Group) -> tuple[str | None, str | None]:
    """The tile that a group feeds to the next, without a last multiplication of its rows by a reciprocal.

    The softmax of attention ends so. The factor passes through the contraction, whose rows are usually shorter; and what is
    fed no longer waits for the sum, which saves a pass over the row.
    """
    fed = next((s for s in group.statements if s.name == group.feeds), None)
    after = next((g for g in region.groups if any(c.left == group.feeds for c in g.contractions)), None)
    used = sum(s.inputs.count(group.feeds) for s in group.statements) + sum(y.value == group.feeds for y in region.yields)
    if not isinstance(fed, Apply) or fed.op != "mul" or after is None or after.feeds is not None or used:
        return group.feeds, None
    computed = {s.name: s for s in group.statements}
    for tile, factor in (fed.inputs, fed.inputs[::-1]):
        quotient = computed.get(factor)
        by_rows = region.types[factor].column is None and "m" in region.types[factor].axes
        if by_rows and isinstance(quotient, Apply) and quotient.op == "reciprocal" and tile in computed:
            return tile, factor
    return group.feeds, None


def behind_totals(statements: Iterable[Statement]) -> set[str]:
    """Those of the statements that are sums over the rows, or are computed from one."""
    found: set[str] = set()
    for statement in statements:
        if (isinstance(statement, Reduce) and statement.axis == "m") or not found.isdisjoint(statement.inputs):
            found.add(statement.name)
    return found


class _Planner:
    def __init__(self, region: Region, group: Group) -> None:
        self.region = region
        self.group = group
        self.definitions: dict[str, Statement] = {s.name: s for s in group.statements}
        self.contractions: dict[str, Contract] = {c.name: c for c in group.contractions}
        self.operands: dict[str, Operand] = {o.name: o for o in region.operands}
        self.late = behind_totals(group.statements)
        self.stages = self._stages()
        self.fed, self.factor = split_factor(region, group)

    def looped(self, name: str) -> bool:
        return self.region.types[name].column is not None

    def _stages(self) -> dict[str, int]:
        """For each value the first pass in which it can be known."""
        stages: dict[str, int] = dict.fromkeys([*self.operands, *self.contractions], 0)
        for statement in self.group.statements:
            ready = max((stages[name] for name in statement.inputs), default=0)
            stages[statement.name] = ready + (isinstance(statement, Reduce) and statement.name not in self.late)
        return stages

    def plan(self) -> Plan:
        last = max(self.stages[name] for name in [*self.definitions, *self.contractions])
        passes = [Pass() for _ in range(last + 1)]
        totals = tuple(s for s in self.group.statements if isinstance(s, Reduce) and s.name in self.late)
        ends = [y.value for _, y in self.group.yields if y.value not in self.late] + [s.input for s in totals]
        early = self.group.behind([*ends, *([self.group.feeds] if self.group.feeds else [])])
        for statement in self.group.statements:
            if statement.name in self.late:
                if isinstance(statement, Reduce):
                    passes[self.stages[statement.input]].totals.append(statement)
            elif isinstance(statement, Reduce):
                passes[self.stages[statement.input]].reductions.append(statement)
            elif not self.looped(statement.name) and statement.name in early:
                passes[self.stages[statement.name]].before.append(statement)
        for index, result in self.group.yields:
            if result.value in self.late:
                continue
            this = passes[self.stages[result.value]]
            (this.yields if self.looped(result.value) else this.yields_before).append((index, result))
        if self.fed is not None:
            passes[self.stages[self.fed]].feeds = True
        if self.factor is not None:
            passes[self.stages[self.factor]].notes = True
        self._schedule(passes)
        late = [s for s in self.group.statements if s.name in self.late and s not in totals]
        numbers = self.group.behind(name for s in late for name in s.inputs if name not in self.late)
        after = tuple(s for s in self.group.statements if s in late or s.name in numbers)
        yields_after = tuple((index, result) for index, result in self.group.yields if result.value in self.late)
        return Plan(tuple(passes), self._allocate(passes), self.fed, self.factor, totals, after, yields_after)

    def _schedule(self, passes: list[Pass]) -> None:
        """Fill in what each loop computes, loads and keeps."""
        computed_in: dict[str, int] = {}  # the first pass that computes a value
        kept: dict[str, int] = {}
        for number, this in enumerate(passes):
            loads: set[str] = set()
            computes: set[str] = set()
            stack = [y.value for _, y in this.yields] + [r.input for r in (*this.reductions, *this.totals)]
            if this.feeds and self.fed is not None:
                stack.append(self.fed)
            while stack:
                name = stack.pop()
                if name not in self.definitions or not self.looped(name) or name in loads or name in computes:
                    if name in self.contractions and name not in this.accumulators:
                        this.accumulators.append(name)
                    continue
                if computed_in.get(name, number) < number and self._worth_keeping(name, kept):
                    kept.setdefault(name, computed_in[name])
                    loads.add(name)
                    continue
                computes.add(name)
                stack.extend(self.definitions[name].inputs)
            for name in computes:
                computed_in.setdefault(name, number)
            this.statements = self._in_order(computes)
            this.loads = [s.name for s in self._in_order(loads)]
            this.accumulators.sort(key=list(self.contractions).index)
        for statement in self._in_order(kept):
            passes[kept[statement.name]].keeps.append(statement.name)

    def _in_order(self, names: Iterable[str]) -> list[Statement]:
        chosen = set(names)
        return [s for s in self.group.statements if s.name in chosen]

    def _worth_keeping(self, name: str, kept: Mapping[str, int]) -> bool:
        if self.region.types[name].value == "bool":
            return False  # rows of memory hold numbers
        return name in kept or self._cost(name, kept) > RECOMPUTE_LIMIT

    def _cost(self, name: str, kept: Mapping[str, int]) -> int:
        """Loads and operations to compute a value again, given what is kept."""
        cost, seen, stack = 0, set[str](), [name]
        while stack:
            value = stack.pop()
            if value in seen or not self.looped(value):
                continue
            seen.add(value)
            if (value in kept and value != name) or value in self.contractions:
                cost += 1
            elif value in self.operands:
                cost += 1 + (self.operands[value].dtype not in (torch.float32, torch.float64))
            else:
                statement = self.definitions[value]
                cheap = isinstance(statement, Round) or (isinstance(statement, Apply) and statement.op in CHEAP)
                cost += 1 if cheap else EXPENSIVE_COST
                stack.extend(statement.inputs)
        return cost

    def _allocate(self, passes: list[Pass]) -> dict[str, Row]:
        """A row for each kept value: the row of an accumulator that is not read later, or else a scratch row."""
        free_from = {Row(True, i): 0 for i in range(len(self.contractions))}
        for number, this in enumerate(passes):
            for name in this.accumulators:
                free_from[Row(True, list(self.contractions).index(name))] = number
        rows: dict[str, Row] = {}
        scratch = 0
        for number, this in enumerate(passes):
            for name in this.keeps:
                # A loop reads all its rows before it writes, so a row is free in the pass that reads it last.
                row = next((row for row, first in free_from.items() if first <= number), None)
                if row is None:
                    row = Row(False, scratch)
                    scratch += 1
                rows[name] = row
                free_from[row] = max(p for p, other in enumerate(passes) if name in other.loads)
                if free_from[row] == number:  # pragma: no cover - a kept value is read in a later pass
                    raise AssertionError(f"%{name} is kept but not read")
        return rows
