"""The normal form: equal computations have equal text, so equal layers share one kernel."""

import hashlib
from dataclasses import replace

from postlude.ir.ops import OPS
from postlude.ir.region import Apply, Const, Contract, Extent, Operand, Reduce, Region, Round, Statement


def normalize(region: Region) -> tuple[Region, tuple[int, ...]]:
    """Bring a Region to its normal form.

    Dead statements and operands are dropped, equal statements merged, commutative inputs ordered, statements ordered as
    a depth-first walk from the results meets them, and all names given anew. Results keep their order.

    Returns:
        The new Region, and for each of its operands the index of that operand in `region`.
    """
    digests = _digests(region)
    walk = _Walk(region, digests)
    yields = tuple(replace(y, value=walk.visit(y.value)) for y in region.yields)
    axes = _rename_axes(walk.operands, walk.body)
    renamed = Region(
        tuple(axes[axis] for axis in region.axes if axis in axes),
        tuple(replace(o, axes=tuple(axes[a] for a in o.axes)) for o in walk.operands),
        tuple(_with_axes(s, axes) for s in walk.body),
        tuple(replace(y, axes=tuple(axes[a] for a in y.axes)) for y in yields),
    )
    renamed = replace(renamed, axes=tuple(sorted(renamed.axes, key=_axis_order)))
    return renamed, tuple(walk.origin)


def _axis_order(axis: str) -> tuple[int, str]:
    return ("bmnk".index(axis[0]), axis)


def _digests(region: Region) -> dict[str, str]:
    """A name-free digest of every value: what it computes from which kinds of operands."""
    digests: dict[str, str] = {}
    for operand in region.operands:
        digests[operand.name] = _hash("operand", str(operand.blocks), str(operand.dtype), *_kind(operand))
    for statement in region.body:
        inputs = [digests[name] for name in statement.inputs]
        if isinstance(statement, Apply) and OPS[statement.op].commutative:
            inputs.sort()
        digests[statement.name] = _hash(type(statement).__name__, _attributes(statement), *inputs)
    return digests


def _kind(operand: Operand) -> list[str]:
    return [axis if axis in ("b", "m") else axis[0] for axis in operand.axes]


def _attributes(statement: Statement) -> str:
    if isinstance(statement, Contract):
        return f"{statement.accumulate} {statement.scale is not None} {statement.shift is not None}"
    if isinstance(statement, Apply):
        return statement.op
    if isinstance(statement, Reduce):
        return f"{statement.kind} {statement.axis[0]}"
    if isinstance(statement, Round):
        return str(statement.dtype)
    if isinstance(statement, Const):
        return repr(statement.value)
    return statement.axis


def _hash(*parts: str) -> str:
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


class _Walk:
    """Depth-first walk that emits statements under new names, each computation once."""

    def __init__(self, region: Region, digests: dict[str, str]) -> None:
        self.digests = digests
        self.definitions: dict[str, Statement] = {s.name: s for s in region.body}
        self.sources = {o.name: (i, o) for i, o in enumerate(region.operands)}
        self.roles = _roles(region)
        self.names: dict[str, str] = {}
        self.emitted: dict[tuple[str, str, tuple[str, ...]], str] = {}
        self.counts: dict[str, int] = {}
        self.operands: list[Operand] = []
        self.origin: list[int] = []
        self.body: list[Statement] = []

    def visit(self, root: str) -> str:
        """Emit what `root` needs, then `root`; returns its new name. Iterative: programs can be long chains."""
        stack = [(root, False)]
        while stack:
            name, ready = stack.pop()
            if name in self.names:
                continue
            if name in self.sources:
                self._operand(name)
                continue
            statement = self._ordered(self.definitions[name])
            if not ready:
                stack.append((name, True))
                stack.extend((i, False) for i in reversed(statement.inputs))
                continue
            self._emit(statement)
        return self.names[root]

    def _operand(self, name: str) -> None:
        index, operand = self.sources[name]
        self.names[name] = self._fresh(self.roles[name])
        self.operands.append(replace(operand, name=self.names[name]))
        self.origin.append(index)

    def _emit(self, statement: Statement) -> None:
        renamed = _with_inputs(statement, [self.names[i] for i in statement.inputs])
        # Not the statement itself: constants compare by value, so 0.0 would stand for -0.0.
        key = (type(statement).__name__, _attributes(statement), renamed.inputs)
        if key not in self.emitted:
            fresh = self._fresh("acc" if isinstance(statement, Contract) else "")
            self.body.append(replace(renamed, name=fresh))
            self.emitted[key] = fresh
        self.names[statement.name] = self.emitted[key]

    def _ordered(self, statement: Statement) -> Statement:
        if isinstance(statement, Apply) and OPS[statement.op].commutative:
            return replace(statement, inputs=tuple(sorted(statement.inputs, key=self._rank)))
        return statement

    def _rank(self, name: str) -> tuple[bool, str]:
        # Computed values first: `add %acc, %bias` is how people write it.
        return name in self.sources, self.digests[name]

    def _fresh(self, role: str) -> str:
        count = self.counts.get(role, 0)
        self.counts[role] = count + 1
        return f"{role}{count}" if count or not role else role


def _roles(region: Region) -> dict[str, str]:
    """Readable names by what an operand is for."""
    roles = {}
    kinds = {(False, False): "scalar", (False, True): "row", (True, False): "col", (True, True): "tile"}
    for operand in region.operands:
        kind = region.types[operand.name]
        roles[operand.name] = kinds[kind.has_rows, kind.column is not None]
    for contraction in region.contractions:
        roles[contraction.right] = "w"
        roles |= {name: role for name, role in ((contraction.scale, "scale"), (contraction.shift, "shift")) if name}
        if contraction.left in roles:
            roles[contraction.left] = "x"
    return roles


def _with_inputs(statement: Statement, inputs: list[str]) -> Statement:
    if isinstance(statement, Contract):
        more = iter(inputs[2:])
        scale, shift = (next(more) if name is not None else None for name in (statement.scale, statement.shift))
        return replace(statement, left=inputs[0], right=inputs[1], scale=scale, shift=shift)
    if isinstance(statement, Apply):
        return replace(statement, inputs=tuple(inputs))
    if isinstance(statement, Reduce | Round):
        return replace(statement, input=inputs[0])
    return statement


def _with_axes(statement: Statement, axes: dict[str, str]) -> Statement:
    if isinstance(statement, Reduce | Extent):
        return replace(statement, axis=axes[statement.axis])
    return statement


def _rename_axes(operands: list[Operand], body: list[Statement]) -> dict[str, str]:
    """New axis names in order of meeting: b, m, then n, n1, ... for columns and k, k1, ... for contracted axes."""
    region = Region((), tuple(operands), tuple(body), ())
    renamed: dict[str, str] = {axis: axis for o in operands for axis in o.axes if axis in ("b", "m")}
    counts = {"n": 0, "k": 0}

    def add(axis: str, role: str) -> None:
        if axis not in renamed:
            renamed[axis] = f"{role}{counts[role] or ''}"
            counts[role] += 1

    columns = {region.contraction_axes(c)[1] for c in region.contractions}
    for contraction in region.contractions:
        contracted, column = region.contraction_axes(contraction)
        add(contracted, "n" if contracted in columns else "k")
        add(column, "n")
    return renamed
