"""A norm in front of a product, computed while the product is: (x * r) * g times w is r * (x * g times w).

r, one number for each row, is known only when the whole row has been read. So the loop over k multiplies what does not depend
on it, x * g, adds up what r is computed from, and r multiplies the sums behind the loop.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from postlude.ir import Apply, Contract, Reduce, Region, Statement
from postlude.ir.region import behind
from postlude.targets.triton.writer import Writer, load, value


@dataclass(frozen=True)
class Prologue:
    """What is multiplied, taken apart.

    Attributes:
        axis: the contracted axis.
        inside: statements over the contracted axis, in program order.
        factors: values over that axis whose product the loop multiplies.
        sums: reductions over it.
        behind: statements that are computed from the reductions, in program order.
        scales: values that multiply the sums afterwards.
    """

    axis: str
    inside: tuple[Statement, ...]
    factors: tuple[str, ...]
    sums: tuple[Reduce, ...]
    behind: tuple[Statement, ...]
    scales: tuple[str, ...]


def prologue_of(region: Region, contraction: Contract) -> Prologue | None:
    """The prologue of a contraction; None where it multiplies an operand, or something that can't be taken apart."""
    by_name: dict[str, Statement] = {s.name: s for s in region.body}
    if contraction.left not in by_name:
        return None
    axis, _ = region.contraction_axes(contraction)
    needed = behind(region.body, [contraction.left])
    reduced: set[str] = set()  # depend on a reduction
    statements = [s for s in region.body if s.name in needed]
    for statement in statements:
        if isinstance(statement, Contract) or (
            isinstance(statement, Reduce) and (statement.axis, statement.kind) != (axis, "sum")
        ):
            return None
        if isinstance(statement, Reduce) and statement.input in reduced:
            return None  # a second pass over the row
        if isinstance(statement, Reduce) or not reduced.isdisjoint(statement.inputs):
            reduced.add(statement.name)

    factors: list[str] = []
    scales: list[str] = []

    def take(name: str) -> bool:
        if region.types[name].column is None:
            scales.append(name)
            return True
        if name not in reduced:
            factors.append(name)
            return True
        statement = by_name[name]
        return isinstance(statement, Apply) and statement.op == "mul" and all(map(take, statement.inputs))

    if not take(contraction.left):
        return None
    sums = tuple(s for s in statements if isinstance(s, Reduce))
    others = [s for s in statements if not isinstance(s, Reduce)]  # the walks back end at the reductions
    inner = behind(others, [*factors, *(s.input for s in sums)])
    outer = behind(others, scales)
    return Prologue(
        axis,
        tuple(s for s in others if s.name in inner),
        tuple(factors),
        sums,
        tuple(s for s in others if s.name in outer),
        tuple(scales),
    )


def started(prologue: Prologue, shape: str, type: str, suffix: str = "") -> Iterator[str]:
    """Before the loop: what is added up, as tiles of `shape`."""
    for total in prologue.sums:
        yield f"sum_{total.name}{suffix} = tl.zeros({shape}, {type})"


def in_loop(
    writer: Writer, prologue: Prologue, into: str, index: dict[str, str], mask: str, type: str, suffix: str = ""
) -> Iterator[str]:
    """In the loop: what is multiplied as `into`, and the sums. `index` says where along rows and the contracted axis."""
    inputs = [*prologue.factors, *(total.input for total in prologue.sums), *(n for s in prologue.inside for n in s.inputs)]
    for name in dict.fromkeys(inputs):
        if name in writer.region.operand_index:
            tensor = writer.region.operand_index[name]
            yield f"{value(name)} = {load(writer.at(tensor, index), mask)}.to({type})"
    yield from _statements(writer, prologue.inside, type)
    product = " * ".join(map(value, prologue.factors))
    # What stands beyond the axis was loaded as 0, of which a function need not be 0, nor finite.
    computed = not all(name in writer.region.operand_index for name in prologue.factors)
    yield f"{into} = {f'tl.where({mask}, {product}, 0.0)' if computed else product}"
    for total in prologue.sums:
        yield f"sum_{total.name}{suffix} += tl.where({mask}, {value(total.input)}, 0.0)"


def scale(writer: Writer, prologue: Prologue, into: str, axis: str, type: str, suffix: str = "") -> Iterator[str]:
    """Behind the loop: what multiplies the product, as `into`. `axis` is that of the tiles of which the sums are taken."""
    for total in prologue.sums:
        yield f"{value(total.name)} = tl.sum(sum_{total.name}{suffix}, axis={axis}, keep_dims=True)"
    yield from _statements(writer, prologue.behind, type)
    yield f"{into} = {' * '.join(map(value, prologue.scales)) or '1.0'}"


def _statements(writer: Writer, statements: Sequence[Statement], type: str) -> Iterator[str]:
    for statement in statements:
        code = f"{value(statement.name)} = {writer.expression(statement, type, precise=False)}"
        yield f"{code:<56}  # {writer.comments[statement.name]}"
