"""Hypothesis strategies: Regions that mean something, and tensors for their operands."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from postlude.ir import OPS, Apply, Const, Contract, Extent, Operand, Reduce, Region, Round, Statement, Type, Yield, verify

#: Ops whose float32 and float64 values differ by more than rounding near a jump, or that are undefined for most inputs.
JUMPY = {"floor", "ceil", "trunc", "round", "fmod", "remainder", "sign", "asin", "acos", "pow", "tan", "isnan", "isinf"}
SMOOTH = sorted(name for name, op in OPS.items() if name not in JUMPY and op.result == "float" and set(op.inputs) == {"float"})
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass
class Draft:
    """Values that a growing program may still use."""

    types: dict[str, Type]
    body: list[Statement]

    def add(self, statement: Statement, type: Type) -> None:
        """Append a statement."""
        self.body.append(statement)
        self.types[statement.name] = type


@st.composite
def regions(
    draw: st.DrawFn, ops: list[str] | None = None, dtypes: tuple[torch.dtype, ...] = DTYPES, tiled: bool = False
) -> Region:
    """A verified Region: one or two contractions of one index space, up to eight epilogue ops, one to three results.

    `tiled` adds what only kernels that own tiles have: sums over rows; and truth values as operands.
    """
    dtype = draw(st.sampled_from(dtypes))
    batched = draw(st.booleans())
    batch = ("b",) if batched else ()
    rows = (*batch, "m")
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32

    def orders(*axes: str) -> st.SearchStrategy[tuple[str, ...]]:
        return st.permutations(axes).map(lambda order: (*batch, *order))

    operands = [Operand("x", draw(orders("m", "k")), dtype)]
    draft = Draft({}, [])
    for index in range(draw(st.integers(1, 2))):
        operands.append(Operand(f"w{index}", draw(orders("n", "k")), dtype))
        draft.add(Contract(f"acc{index}", "x", f"w{index}", accumulate), Type((*rows, "n"), "float"))
    kinds: list[tuple[str, ...]] = [(), ("n",), rows, (*rows, "n")]
    for index in range(draw(st.integers(0, 3))):
        stored = (dtype, torch.float32, torch.bool) if tiled else (dtype, torch.float32)
        operand = Operand(f"e{index}", draw(st.sampled_from(kinds)), draw(st.sampled_from(stored)))
        operands.append(operand)
        draft.types[operand.name] = Type(operand.axes, "bool" if operand.dtype == torch.bool else "float")
    names = st.sampled_from(ops or SMOOTH)
    for index in range(draw(st.integers(0, 8))):
        _statement(draw, draft, f"s{index}", names, rows, accumulate, tiled)
    reached: set[str] = set()
    for statement in draft.body:
        if isinstance(statement, Contract) or reached.intersection(statement.inputs):
            reached.add(statement.name)
    results = [s.name for s in draft.body if s.name in reached]
    chosen = draw(st.lists(st.sampled_from(results), min_size=1, max_size=3, unique=True))
    yields = tuple(Yield(draft.types[name].axes, _result_type(draw, draft, name, dtype), name) for name in chosen)
    used = {name for statement in draft.body for name in statement.inputs}
    region = Region((*rows, "n", "k"), tuple(o for o in operands if o.name in used), tuple(draft.body), yields)
    verify(region)
    return region


def _result_type(draw: st.DrawFn, draft: Draft, name: str, dtype: torch.dtype) -> torch.dtype:
    if draft.types[name].value == "bool":
        return torch.bool
    return draw(st.sampled_from((dtype, torch.float32))) if dtype != torch.float64 else dtype


def _statement(
    draw: st.DrawFn,
    draft: Draft,
    name: str,
    names: st.SearchStrategy[str],
    rows: tuple[str, ...],
    accumulate: torch.dtype,
    tiled: bool,
) -> None:
    floats = [v for v, t in draft.types.items() if t.value == "float"]
    bools = [v for v, t in draft.types.items() if t.value == "bool"]
    tiles = [v for v in floats if draft.types[v].column and draft.types[v].has_rows]
    kind = draw(st.sampled_from(("op", "op", "op", "compare", "where", "reduce", "const", "extent", "round")))
    if kind == "const":
        draft.add(Const(name, draw(st.floats(-3, 3))), Type((), "float"))
    elif kind == "extent":
        draft.add(Extent(name, "n"), Type((), "float"))
    elif kind == "reduce":
        value = draw(st.sampled_from(tiles))
        axis = draw(st.sampled_from(("n", "m"))) if tiled else "n"
        kind = draw(st.sampled_from(("sum", "max", "min"))) if axis == "n" else "sum"
        draft.add(Reduce(name, kind, axis, value), Type(tuple(a for a in draft.types[value].axes if a != axis), "float"))
    elif kind == "round" and accumulate == torch.float32:
        value = draw(st.sampled_from(floats))
        draft.add(Round(name, torch.bfloat16, value), draft.types[value])
    else:
        if kind == "compare":
            op, inputs = draw(st.sampled_from(("lt", "ge", "eq"))), [draw(st.sampled_from(floats)) for _ in range(2)]
        elif kind == "where" and bools:
            op, inputs = "where", [draw(st.sampled_from(bools)), *(draw(st.sampled_from(floats)) for _ in range(2))]
        else:
            op = draw(names)
            inputs = [draw(st.sampled_from(floats)) for _ in range(OPS[op].arity)]
        axes = {axis for value in inputs for axis in draft.types[value].axes}
        ordered = tuple(axis for axis in ("b", "m", "n") if axis in axes)
        draft.add(Apply(name, op, tuple(inputs)), Type(ordered, OPS[op].result))


def tensors(region: Region, sizes: dict[str, int], generator: torch.Generator, batch: tuple[int, ...] = (2,)) -> list[Tensor]:
    """Random operands of these sizes, some of them with gaps between rows or an offset in memory."""
    made = []
    for index, operand in enumerate(region.operands):
        shape = [size for axis in operand.axes for size in (batch if axis == "b" else (sizes[axis],))]
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
        value = value.to(operand.dtype) if operand.dtype != torch.bool else value > 0
        if index % 3 == 1 and value.ndim:
            wide = value.new_zeros([*shape[:-1], shape[-1] + 3])
            wide[..., 2 : shape[-1] + 2] = value
            value = wide[..., 2 : shape[-1] + 2]
        made.append(value)
    return made
