"""Region -> C++ source.

`generate` writes one file: a struct per group of the Region, with the epilogue of one row, and the Program that
include/postlude/run.h drives. The plan of the passes comes from `codegen_plan`, the expression of each op from `codegen_ops`.

The text is for people too (`explain` shows it): each line carries the statement of the Region that it stands for. Values keep
their names, with a `v` or `v_` before; `p_` is the pointer to a row of an operand, `r_` to a row of a result.
"""

import math
import re
import struct
from collections.abc import Iterable

import torch

from postlude.errors import PostludeError
from postlude.ir import Apply, Const, Contract, Extent, Group, Operand, Reduce, Region, Round, Statement, Yield, to_text
from postlude.ir.region import INT4, ROW_AXES, UINT4
from postlude.targets.cpp.codegen_ops import ACCUMULATORS, EXPRESSIONS, POWERS
from postlude.targets.cpp.codegen_plan import Pass, Plan, behind_totals, plan, split_factor

#: Storage types as include/postlude names them.
TYPES: dict[torch.dtype, str] = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.bool: "bool",
}

#: Types of codes, and of their scales, as include/postlude names them.
CODES: dict[torch.dtype, str] = {
    torch.int8: "i8",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2",
    torch.float4_e2m1fn_x2: "f4e2m1",
    INT4: "i4",
    UINT4: "u4",
}
SCALES: dict[torch.dtype, str] = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e8m0fnu: "e8m0",
}

#: Columns of a weight that may share a scale.
_BLOCKS = (16, 32, 64, 128, 256)

_MOST_TENSORS = 64  # Tensors::kMost
_MOST_SCRATCH_ROWS = 32  # Tensors::kMostScratchRows
_MOST_CONTRACTIONS = 8  # kMaxContractions
_MOST_GROUPS = 16  # kMaxGroups
_MOST_TOTALS = 16  # kMaxTotals
_COMMENT_COLUMN = 64
_ROWS_AT_ONCE = 8  # a pass is done for so many rows before the next


class UnsupportedRegion(PostludeError):
    """The cpp target has no kernel of this form; the Region runs on another target."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"The cpp target can't generate this Region: {reason}. Use target 'aten' for it, or split the Region.")


def generate(region: Region) -> str:
    """The C++ source of a Region.

    Args:
        region: a verified Region. For equal layers to share a kernel it should be in normal form.

    Raises:
        UnsupportedRegion: the Region is legal, but not of a form that this target has.
    """
    return _Source(region).text()


def supported(region: Region) -> str | None:
    """Why `generate` would refuse the Region, or None."""
    try:
        _check(region)
    except UnsupportedRegion as error:
        return str(error)
    return None


def _check(region: Region) -> None:
    if any(c.scale or c.shift for c in region.contractions) or region.coded:
        _check_codes(region)
    limits = (
        ("tensors", len(region.operands) + len(region.yields), _MOST_TENSORS),
        ("groups", len(region.groups), _MOST_GROUPS),
        ("contractions in one group", max(len(g.contractions) for g in region.groups), _MOST_CONTRACTIONS),
    )
    for what, number, most in limits:
        if number > most:
            raise UnsupportedRegion(f"it has {number} {what}, at most {most} are possible")
    stored = {index for group in region.groups for index, _ in group.yields}
    for index, result in enumerate(region.yields):
        if index not in stored:
            raise UnsupportedRegion(f"result %{result.value} belongs to no contraction's columns")
    operands = region.operand_index
    for number, group in enumerate(region.groups):
        for statement in group.statements:
            column = region.types[statement.name].column
            if isinstance(statement, Reduce) and statement.axis not in ROW_AXES:
                column = statement.axis
            if column not in (None, group.column):
                raise UnsupportedRegion(
                    f"%{statement.name} over the columns {column!r} is needed by results over {group.column!r}"
                )
        _check_totals(region, group, fed=any(c.left not in operands for c in group.contractions))
        previous = region.groups[number - 1].feeds if number else None
        if len({c.left in operands for c in group.contractions}) > 1 or any(
            c.left not in operands and c.left != previous for c in group.contractions
        ):
            raise UnsupportedRegion("a chain contracts exactly the one tile that the group before it computes")
        for side, names in (("left", {c.left for c in group.contractions}), ("right", {c.right for c in group.contractions})):
            types = {region.operands[operands[name]].dtype for name in names if name in operands}
            if len(types) > 1:
                raise UnsupportedRegion(f"contractions over the columns {group.column!r} have {side} operands of types {types}")
            if torch.float64 in types and group.contractions[0].accumulate != torch.float64:
                raise UnsupportedRegion("a contraction of f64 operands accumulates in f32")
        if group.contractions[0].accumulate == torch.float64:
            rights = {region.operands[operands[c.right]].dtype for c in group.contractions}
            lefts = {region.operands[operands[c.left]].dtype for c in group.contractions if c.left in operands}
            if rights | lefts != {torch.float64}:
                raise UnsupportedRegion("a contraction that accumulates in f64 has operands of another type")


def _check_totals(region: Region, group: Group, *, fed: bool) -> None:
    """Sums over the rows are added up in tiles, and what is computed from them needs nothing else but numbers."""
    late = behind_totals(group.statements)
    totals = [s for s in group.statements if isinstance(s, Reduce) and s.name in late]
    if not totals:
        return
    if region.batched or fed or group.feeds is not None:
        raise UnsupportedRegion("it reduces the rows of several products, or of a chain")
    if len(totals) > _MOST_TOTALS:
        raise UnsupportedRegion(f"it has {len(totals)} sums over rows, at most {_MOST_TOTALS} are possible")
    for total in totals:
        if total.kind != "sum" or total.input in late or region.types[total.input].column is None or total.axis != "m":
            raise UnsupportedRegion(f"%{total.name} is no plain sum over the rows of a tile")
    for statement in group.statements:
        if (
            statement.name in late
            and statement not in totals
            and any(n not in late and region.types[n].axes for n in statement.inputs)
        ):
            raise UnsupportedRegion(f"%{statement.name} joins a sum over rows with another value")


def coded(region: Region, group: Group) -> Operand | None:
    """The weight of a group's first contraction if it is kept as codes."""
    right = region.operands[region.operand_index[group.contractions[0].right]]
    return right if right.dtype in CODES else None


def _check_codes(region: Region) -> None:
    """Weights in codes: [n, k], scales of short blocks of k, one type of codes in a Region, and no batch or chain."""
    operands = region.operand_index
    kinds = set()
    for group in region.groups:
        weight = coded(region, group)
        if weight is None:
            continue
        if region.batched or group.feeds or any(c.left not in operands for c in group.contractions):
            raise UnsupportedRegion("weights in codes are multiplied in plain products only")
        forms: set[tuple[torch.dtype, object, object]] = set()
        for contraction in group.contractions:
            right = region.operands[operands[contraction.right]]
            beside = [region.operands[operands[name]] if name else None for name in (contraction.scale, contraction.shift)]
            if right.axes[-1] != region.contraction_axes(contraction)[0]:
                raise UnsupportedRegion(f"the codes of %{right.name} do not lie along the contracted axis")
            scale, shift = beside
            forms.add((right.dtype, scale and (scale.dtype, scale.blocks), shift and (shift.dtype, shift.blocks)))
            for operand in beside:
                if operand is not None and (operand.blocks[0] != 1 or operand.blocks[1] not in _BLOCKS):
                    raise UnsupportedRegion(f"%{operand.name} has blocks of {operand.blocks}; 1 x one of {_BLOCKS} is possible")
            if (scale is not None and scale.dtype not in SCALES) or (scale is None and shift is not None):
                raise UnsupportedRegion("no kernel reads scales of such a type, or shifts without scales")
            if shift is not None and (shift.dtype, shift.blocks, right.dtype) != (torch.int8, scale and scale.blocks, UINT4):
                raise UnsupportedRegion(f"no kernel shifts %{right.name} by %{shift.name}")
        if len(forms) > 1:
            raise UnsupportedRegion(f"contractions over the columns {group.column!r} have weights in different formats")
        left = region.operands[operands[group.contractions[0].left]].dtype
        kinds.add((weight.dtype, left))
    others = {region.operands[operands[g.contractions[0].right]].dtype for g in region.groups if coded(region, g) is None}
    if len(kinds) > 1 or (kinds and others - {panel_type(left) for _, left in kinds}):
        raise UnsupportedRegion("its weights have different formats")


def panel_type(left: torch.dtype) -> torch.dtype:
    """What codes are decoded to for many rows of a type."""
    return torch.bfloat16 if left == torch.bfloat16 else torch.float32


class _Source:
    """Writes one file."""

    def __init__(self, region: Region) -> None:
        _check(region)
        self.region = region
        lines = to_text(region, lines=True).split("\n")
        self.header = [line.rstrip() for line in lines]
        texts = iter(line.strip() for line in lines[1:])
        self.comments: dict[str, str] = {o.name: next(texts) for o in region.operands}
        self.comments |= {s.name: next(texts) for s in region.body}
        self.yield_comments = list(texts)

    def text(self) -> str:
        region = self.region
        parts = ["// Generated by Postlude from the Region", "//"]
        parts += [f"//   {line}" for line in self.header]
        parts += ["#include <postlude/math.h>", "#include <postlude/run.h>", "", "namespace {", "using namespace postlude;", ""]
        for number in range(len(region.groups)):
            parts += [*_GroupWriter(self, number).lines(), ""]
        groups = ", ".join(f"Group{number}" for number in range(len(region.groups)))
        parts += [
            "struct Program {",
            f"  using Groups = std::tuple<{groups}>;",
            f"  static constexpr int operands = {len(region.operands)}, results = {len(region.yields)};",
            "};",
            "",
            "}  // namespace",
            "",
            f"const signed char postlude::Tensors::columns[] = {{{', '.join(self._columns())}}};",
            f"const int postlude::Tensors::operands = {len(region.operands)};",
            "",
            "POSTLUDE_EXPORT(Program)",
        ]
        return "\n".join(parts) + "\n"

    def _columns(self) -> Iterable[str]:
        """For each tensor where its columns are; see Tensors in include/postlude/tensor.h."""
        contracted = {name for c in self.region.contractions for name in c.inputs}
        for operand in self.region.operands:
            yield "kUnused" if operand.name in contracted else _column_of(operand.axes)
        for result in self.region.yields:
            yield _column_of(result.axes)


def _column_of(axes: tuple[str, ...]) -> str:
    for from_last, axis in enumerate(reversed(axes)):
        if axis not in ROW_AXES:
            return str(from_last)
    return "kNoColumn"


def _literal(value: float, single: bool) -> str:
    """A C++ literal of exactly this value, rounded to float where the arithmetic is in float."""
    if single:
        try:
            value = struct.unpack("f", struct.pack("f", value))[0]
        except OverflowError:
            value = math.copysign(math.inf, value)
    if math.isnan(value):
        return '__builtin_nan("")'
    if math.isinf(value):
        return f"{'-' if value < 0 else ''}__builtin_inf()"
    if not single:
        return repr(value)
    shortest = next(t for d in range(1, 10) if struct.unpack("f", struct.pack("f", float(t := f"{value:.{d}g}")))[0] == value)
    return (shortest if "." in shortest or "e" in shortest else shortest + ".0") + "f"


class _GroupWriter:
    """Writes the struct of one group."""

    def __init__(self, source: _Source, number: int) -> None:
        self.source = source
        self.region = source.region
        self.number = number
        self.group: Group = self.region.groups[number]
        self.plan: Plan = plan(self.region, self.group)
        if self.plan.scratch_rows > _MOST_SCRATCH_ROWS:
            raise UnsupportedRegion(
                f"its epilogue keeps {self.plan.scratch_rows} rows, at most {_MOST_SCRATCH_ROWS} are possible"
            )
        #: The factor that the group before left to this one.
        self.factor = split_factor(self.region, self.region.groups[number - 1])[1] if number else None
        self.operands = {o.name: (i, o) for i, o in enumerate(self.region.operands)}
        self.single = self.group.contractions[0].accumulate != torch.float64
        self.compute = "float" if self.single else "double"
        self.constants: dict[str, float] = {s.name: s.value for s in self.group.statements if isinstance(s, Const)}
        self.whole_rows = len(self.plan.passes) > 1 or self.group.feeds is not None
        self.rows_at_once = _ROWS_AT_ONCE if len(self.plan.passes) > 1 else 0
        self.kept: set[str] = set()  # values without columns that a later pass reads

    # The struct -----------------------------------------------------------------------------------------------------------

    def lines(self) -> list[str]:
        group = self.group
        count = len(group.contractions)
        sources = [self._sources(c) for c in group.contractions]
        body = self._epilogue()
        parameters = [
            "const Tensors &t", "int64_t row", "int64_t rows", "int64_t c0", "int64_t nc", f"{self.compute} *const *acc",
            "int64_t acc_stride", "void *next", "int64_t next_stride",
        ]  # fmt: skip
        parameters = [_used_or_unnamed(parameter, "\n".join(body)) for parameter in parameters]
        lines = [f"// {self.source.comments[c.name]}" for c in group.contractions]
        lines += [
            f"struct Group{self.number} {{",
            f"  using Left = {self._left_type()};",
            f"  using Right = {TYPES[self._right_type()]};",
            f"  using Compute = {self.compute};",
            f"  using V = Vec<{self.compute}>;",
            f"  static constexpr int contractions = {count};",
            f"  static constexpr Source left[{count}] = {{{', '.join(left for left, _ in sources)}}};",
            f"  static constexpr Source right[{count}] = {{{', '.join(right for _, right in sources)}}};",
            *self._codes(),
            f"  static constexpr bool batched = {_bool(self.region.batched)};",
            f"  static constexpr bool whole_rows = {_bool(self.whole_rows)};",
            f"  static constexpr bool feeds_next = {_bool(group.feeds is not None)};",
            f"  static constexpr int rows_at_once = {self.rows_at_once};",
            *([f"  static constexpr int totals = {len(self.plan.totals)};"] if self.plan.totals else []),
            "",
            f"  static void epilogue({', '.join(parameters[:5])},",
            f"                       {', '.join(parameters[5:])}) {{",
            *(f"    {line}" if line else "" for line in body),
            "  }",
            *self._finish(),
            "};",
        ]
        return lines

    def _finish(self) -> list[str]:
        """What becomes of the sums over the rows."""
        plan = self.plan
        if not plan.totals:
            return []
        scalars = [s for s in plan.after if not self.region.types[s.name].axes]
        body = [self._define(s.name, self._expression(s)) for s in scalars]
        loop = [self._define(s.name, f"load<V>(sums[{i}] + c, Full{{}})") for i, s in enumerate(plan.totals)]
        loop += [self._define(s.name, self._expression(s)) for s in plan.after if s not in scalars]
        for index, result in plan.yields_after:
            tensor, dtype = len(self.region.operands) + index, TYPES[result.dtype]
            body.append(f"{dtype} *r_{index} = t.result<{dtype}>({tensor}, 0, 0);")
            store = f"store<V>(r_{index} + c, {_name(result.value)}, which);"
            loop.append(self._comment(store, self.source.yield_comments[index]))
        body.append("columns<V>(nc, [&](int64_t c, auto which) __attribute__((always_inline)) {")
        body += [*(f"  {line}" for line in loop), "});"]
        start = f"static void finish(const Tensors &t, int64_t nc, {self.compute} *const *sums) {{"
        return ["", f"  {start}", *(f"    {line}" for line in body), "  }"]

    def _operand(self, name: str) -> Operand:
        return self.operands[name][1]

    def _sources(self, contraction: Contract) -> tuple[str, str]:
        def source(name: str, transposed: bool) -> str:
            return f"{{{self.operands[name][0]}, {_bool(transposed)}}}"

        contracted, _ = self.region.contraction_axes(contraction)
        right = source(contraction.right, self._operand(contraction.right).axes[-1] == contracted)
        if contraction.left not in self.operands:
            return "{-1, false}", right
        return source(contraction.left, self._operand(contraction.left).axes[-1] != contracted), right

    def _right_type(self) -> torch.dtype:
        right = self._operand(self.group.contractions[0].right).dtype
        return panel_type(self._operand(self.group.contractions[0].left).dtype) if right in CODES else right

    def _codes(self) -> list[str]:
        """What the codes of a weight are, and where their scales."""
        weight, first = coded(self.region, self.group), self.group.contractions[0]
        if weight is None:
            return []
        scale = self._operand(first.scale) if first.scale else None
        pairs = [
            f"{{{self.operands[c.scale][0] if c.scale else -1}, {self.operands[c.shift][0] if c.shift else -1}}}"
            for c in self.group.contractions
        ]
        return [
            f"  static constexpr Codes codes = Codes::{CODES[weight.dtype]};",
            f"  static constexpr ScaleType scale_type = ScaleType::{SCALES[scale.dtype] if scale else 'none'};",
            f"  static constexpr int block = {scale.blocks[1] if scale else 0};",
            f"  static constexpr Scales scales[{len(pairs)}] = {{{', '.join(pairs)}}};",
        ]

    def _left_type(self) -> str:
        left = self.group.contractions[0].left
        if left in self.operands:
            return TYPES[self._operand(left).dtype]
        return _fed_type(self.region, left, self.single)

    # The epilogue ---------------------------------------------------------------------------------------------------------

    def _epilogue(self) -> list[str]:
        """For each pass a loop over the rows, then the lanes of their reductions.

        The last steps of a reduction are a long chain of dependent instructions; those of several rows overlap.
        """
        lines = [self._operand_row(i, o) for i, o in self._used(self.plan.passes) if not self._has_rows(o)]
        first = self.plan.passes[0].before
        shared = [s for s in first if not self.region.types[s.name].axes]
        lines += [self._define(s.name, self._expression(s)) for s in shared]
        if self.plan.scratch_rows:
            lines.append("const int64_t kept_stride = (nc + 15) / 16 * 16;")
        for index in range(self.plan.scratch_rows):
            lines.append(
                f"{self.compute} *const scratch{index} = Tensors::scratch_row<{self.compute}>({index}, rows * kept_stride);"
            )
        for index, total in enumerate(self.plan.totals):
            place = f"reinterpret_cast<{self.compute} *>(static_cast<char *>(next) + {index} * next_stride) + c0"
            lines.append(f"{self.compute} *const total_{total.name} = {place};")
        defined, used = self._column_values(shared)
        for name in sorted(self.kept, key=[*defined].index):
            lines.append(f"{self._type(name)} {_name(name)}_of[rows_at_once];")
        for number, this in enumerate(self.plan.passes):
            body = [
                f"const {self._type(name)} {_name(name)} = {_name(name)}_of[r];"
                for name in defined
                if name in used[number] and defined[name] < number
            ]
            body += self._pointers(this)
            for statement in this.before:
                if statement not in shared:
                    body.append(self._define(statement.name, self._expression(statement)))
                    if statement.name in self.kept:
                        body.append(f"{_name(statement.name)}_of[r] = {_name(statement.name)};")
            body += [line for index, result in this.yields_before for line in self._store_column(index, result)]
            if this.has_loop:
                body += self._loop(this)
            if this.notes and self.plan.factor is not None:
                note = f"note(next, next_stride, r, {_name(self.plan.factor)});"
                body.append(self._comment(note, self._factor_comment(self.group)))
            if body:
                if len(self.plan.passes) > 1:
                    lines += ["", f"// Pass {number + 1} over the rows"]
                lines += ["for (int64_t r = 0; r < rows; ++r) {", *(f"  {line}" for line in body), "}"]
            for r in this.reductions:
                if r.name in self.kept:
                    value = f"{_name(r.name)}_of[r]"
                    line = f"for (int64_t r = 0; r < rows; ++r) {value} = {ACCUMULATORS[r.kind]}<V>::reduce({value});"
                    lines.append(self._comment(line, self.source.comments[r.name]))
        return lines

    def _column_values(self, shared: list[Statement]) -> tuple[dict[str, int], list[set[str]]]:
        """In which pass each value without a column axis is computed, and which ones each pass reads; fills in `kept`."""
        defined: dict[str, int] = {}
        used: list[set[str]] = []
        for number, this in enumerate(self.plan.passes):
            defined |= {s.name: number for s in this.before if s not in shared}
            defined |= {r.name: number for r in this.reductions}
            names = {name for s in [*this.before, *this.statements, *this.reductions, *this.totals] for name in s.inputs}
            names |= {y.value for _, y in [*this.yields, *this.yields_before]}
            used.append(names)
            self.kept |= {name for name in names if defined.get(name, number) < number}
        return defined, used

    def _used(self, passes: Iterable[Pass]) -> list[tuple[int, Operand]]:
        names = {name for p in passes for s in [*p.before, *p.statements, *p.reductions, *p.totals] for name in s.inputs}
        names |= {y.value for p in passes for _, y in [*p.yields, *p.yields_before]}
        return [(i, o) for i, o in enumerate(self.region.operands) if o.name in names]

    @staticmethod
    def _has_rows(operand: Operand) -> bool:
        return bool({"b", "m"} & set(operand.axes))

    def _operand_row(self, index: int, operand: Operand) -> str:
        """A pointer to the columns of an operand, or its value where it has none."""
        row = "row + r" if "m" in operand.axes else "item" if "b" in operand.axes else "0"
        if self.region.types[operand.name].column is None:
            return self._define(operand.name, f"load_one<V>(t.element<{TYPES[operand.dtype]}>({index}, {row}))")
        value = f"t.row<{TYPES[operand.dtype]}>({index}, {row}, c0, nc)"
        return f"const {TYPES[operand.dtype]} *p_{operand.name} = {value};"

    def _pointers(self, this: Pass) -> list[str]:
        """Pointers to everything of one row that a pass reads and writes."""
        used = [(i, o) for i, o in self._used([this]) if self._has_rows(o)]
        lines = []
        if any("m" not in o.axes for _, o in used):
            lines.append(f"const int64_t item = (row + r) / {self._extent('m')};")
        lines += [self._operand_row(index, operand) for index, operand in used]
        contractions = [c.name for c in self.group.contractions]
        rows = {(True, contractions.index(name)) for name in this.accumulators}
        rows |= {(self.plan.rows[name].accumulator, self.plan.rows[name].index) for name in [*this.loads, *this.keeps]}
        for accumulator, index in sorted(rows, reverse=True):
            source = f"acc[{index}] + r * acc_stride" if accumulator else f"scratch{index} + r * kept_stride"
            lines.append(f"{self.compute} *const {'acc' if accumulator else 'kept'}{index} = {source};")
        if this.accumulators and self.factor is not None:
            before = self.region.groups[self.number - 1]
            factor = f"const V {_name(self.factor)} = noted<V>(next, next_stride, r);"
            lines.append(self._comment(factor, self._factor_comment(before)))
        for index, result in this.yields:
            tensor = len(self.region.operands) + index
            lines.append(f"{TYPES[result.dtype]} *r_{index} = t.result<{TYPES[result.dtype]}>({tensor}, row + r, c0);")
        if this.feeds and self.group.feeds is not None:
            left = _fed_type(self.region, self.group.feeds, self.single)
            lines.append(f"{left} *fed = reinterpret_cast<{left} *>(static_cast<char *>(next) + r * next_stride);")
        return lines

    def _loop(self, this: Pass) -> list[str]:
        lines = [f"{ACCUMULATORS[r.kind]}<V> {r.kind}_{r.name};" for r in this.reductions]
        lines.append("columns<V>(nc, [&](int64_t c, auto which) __attribute__((always_inline)) {")
        lines += [f"  {line}" for line in self._loop_body(this)]
        accumulators = "".join(f", {r.kind}_{r.name}" for r in this.reductions)
        lines.append(f"}}{accumulators});")
        lines += [f"{_name(r.name)}_of[r] = {r.kind}_{r.name}.lanes();" for r in this.reductions if r.name in self.kept]
        return lines

    def _loop_body(self, this: Pass) -> list[str]:
        lines = []
        for name in this.accumulators:
            index = [c.name for c in self.group.contractions].index(name)
            factor = f" * {_name(self.factor)}" if self.factor is not None else ""
            lines.append(self._define(name, f"load<V>(acc{index} + c, Full{{}}){factor}"))
        for name in this.loads:
            lines.append(f"const V {_name(name)} = load<V>({self._row(name)} + c, Full{{}});")
        used = {name for s in [*this.statements, *this.reductions, *this.totals] for name in s.inputs}
        for operand in self.region.operands:
            if operand.name in used and self.region.types[operand.name].column is not None:
                lines.append(self._define(operand.name, f"load<V>(p_{operand.name} + c, which)"))
        lines += [self._define(s.name, self._expression(s)) for s in this.statements]
        lines += [f"store<V>({self._row(name)} + c, {_name(name)}, Full{{}});" for name in this.keeps]
        for index, result in this.yields:
            comment = self.source.yield_comments[index]
            value = _name(result.value)
            if result.order and result.order[-1] != len(result.order) - 1:
                tensor = len(self.region.operands) + index
                stride = f"t.result_stride({tensor})"
                lines.append(self._comment(f"store<V>(r_{index} + c * {stride}, {stride}, {value}, which);", comment))
            else:
                lines.append(self._comment(f"store<V>(r_{index} + c, {value}, which);", comment))
        if this.feeds and self.plan.fed is not None:
            lines.append(self._comment(f"store<V>(fed + c, {_name(self.plan.fed)}, Full{{}});", "for the next group"))
        lines += [f"{r.kind}_{r.name}.add({_name(r.input)}, which);" for r in this.reductions]
        for total in this.totals:
            place = f"total_{total.name} + c"
            add = f"store<V>({place}, load<V>({place}, Full{{}}) + {_name(total.input)}, Full{{}});"
            lines.append(self._comment(add, self.source.comments[total.name]))
        return lines

    def _factor_comment(self, group: Group) -> str:
        return f"{self.source.comments[group.feeds]}, after the contraction" if group.feeds is not None else ""

    def _row(self, name: str) -> str:
        row = self.plan.rows[name]
        return f"{'acc' if row.accumulator else 'kept'}{row.index}"

    def _store_column(self, index: int, result: Yield) -> list[str]:
        tensor = len(self.region.operands) + index
        store = f"store_one<V>(t.result<{TYPES[result.dtype]}>({tensor}, row + r, 0), {_name(result.value)});"
        return [self._comment(store if self.whole_rows else f"if (c0 == 0) {store}", self.source.yield_comments[index])]

    # Expressions ----------------------------------------------------------------------------------------------------------

    def _expression(self, statement: Statement) -> str:
        if isinstance(statement, Const):
            return f"splat<V>({_literal(statement.value, self.single)})"
        if isinstance(statement, Extent):
            return f"splat<V>(static_cast<{self.compute}>({self._extent(statement.axis)}))"
        inputs = [_name(name) for name in statement.inputs]
        if isinstance(statement, Round):
            return f"round_to<{TYPES[statement.dtype]}>({inputs[0]})"
        assert isinstance(statement, Apply), f"{statement} is placed by the plan"
        if statement.op == "pow" and (exponent := self.constants.get(statement.inputs[1])) in POWERS:
            assert exponent is not None
            return POWERS[exponent].format(*inputs)
        return EXPRESSIONS[statement.op].format(*inputs)

    def _extent(self, axis: str) -> str:
        """The size of an axis, from an operand of a contraction that has it."""
        for contraction in self.region.contractions:
            for name in contraction.inputs:
                if name not in self.operands or axis not in self._operand(name).axes:
                    continue
                index, operand = self.operands[name]
                from_last = len(operand.axes) - 1 - operand.axes.index(axis)
                leads = operand.axes[0] == axis and axis in ROW_AXES and (axis == "b" or not self.region.batched)
                return f"t.leading({index}, {from_last})" if leads else f"t.size({index}, {from_last})"
        raise AssertionError(f"no contraction has the axis {axis!r}")

    # Lines ----------------------------------------------------------------------------------------------------------------

    def _define(self, name: str, expression: str) -> str:
        return self._comment(f"const {self._type(name)} {_name(name)} = {expression};", self.source.comments[name])

    def _type(self, name: str) -> str:
        return "Mask<V>" if self.region.types[name].value == "bool" else "V"

    def _comment(self, line: str, comment: str) -> str:
        return f"{line:<{_COMMENT_COLUMN}}  // {comment}" if comment else line


def _fed_type(region: Region, name: str, single: bool) -> str:
    """The type of the row that one group writes for the next: what the tile was rounded to, if it was.

    A tile that was not rounded but meets bfloat16, on the way to results in bfloat16, is rounded to that where bfloat16 can be
    multiplied as it is, twice as fast as float: so do PyTorch's own kernels with the probabilities of
    scaled_dot_product_attention.
    """
    statement = next(s for s in region.body if s.name == name)
    if not single:
        return "double"
    if isinstance(statement, Round) and statement.dtype != torch.float64:
        return TYPES[statement.dtype]
    rights = {c.right for c in region.contractions if c.left == name}
    types = {o.dtype for o in region.operands if o.name in rights} | {y.dtype for y in region.yields}
    if types == {torch.bfloat16}:
        return "std::conditional_t<kDotBf16, bfloat16, float>"
    return "float"


def _name(name: str) -> str:
    return f"v{name}" if name.isdigit() else f"v_{name}"


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _used_or_unnamed(parameter: str, body: str) -> str:
    """A function parameter, without its name if the body does not use it."""
    match = re.fullmatch(r"(.*?)(\w+)", parameter)
    assert match is not None
    return parameter if re.search(rf"\b{match[2]}\b", body) else match[1].rstrip()
