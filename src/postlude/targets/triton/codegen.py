"""Region -> Triton source.

`generate` writes one module: for each group of the Region an epilogue, and two kernels that call it.

    gemv    few rows, weights that lie along k: each program multiplies whole rows of the weight, without tensor cores
    gemm    anything: tiles with tl.dot, in either orientation, k split over several programs where there are few tiles

A program of a kernel works for one group, so q, k and v are one launch. The epilogue takes index tensors of rows and columns
that broadcast against each other, so it does not know which kernel calls it, nor which way a tile lies.

The text is for people too (`explain` shows it): each line of an epilogue carries the statement of the Region that it stands
for. `p_` is the pointer to an operand, `s_` its stride along an axis, `r0` the first result, `v` a value.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from postlude.errors import PostludeError
from postlude.ir import Apply, Const, Contract, Extent, Group, Reduce, Region, Round, Statement, sensitive, to_text
from postlude.ir.region import ROW_AXES
from postlude.targets.triton.codegen_ops import EXPRESSIONS, FUNCTIONS, POWERS, PRECISE

#: Storage types as Triton names them.
TYPES: dict[torch.dtype, str] = {
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
    torch.bool: "tl.int1",
}

#: Constants that each kernel takes: tile sizes, what is known about the call, and for `gemm` the orientation of a tile.
CONSTANTS: dict[str, tuple[str, ...]] = {
    "gemv": ("BLOCK_N", "BLOCK_K", "STAGES", "EVEN_K", "INDEX"),
    "gemm": ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "SPLIT", "STAGES", "SWAP", "PRECISION", "EVEN_K", "INDEX"),
}

#: Integers that kernels take between workspace and sizes if they start before the kernel ahead has ended: bytes of each column
#: that they have brought to L2 before they wait for it, and steps along k before their end at which they let the next one start.
CHAINED = ("prefetch", "release")

#: What each kernel takes between the tensors and the sizes: workspace, and how many programs share a tile's sum.
WORKSPACE: dict[str, tuple[str, ...]] = {"gemv": (), "gemm": ("partials", "counters", "splits")}

#: Brings weights to L2 before the kernel ahead has ended. Nothing is read, so the kernel ahead may still write them.
_PREFETCH = '''@triton.jit
def bring(first, stride, columns, span, most):
    """The first bytes of some columns, `stride` apart, to L2, each by one thread: `span` elements, or `most` bytes if less."""
    thread = tl.arange(0, num_threads())
    size = tl.where(thread < columns, min(span * (first.dtype.element_ty.primitive_bitwidth // 8), most), 0)
    tl.inline_asm_elementwise(
        "{ .reg .pred some; setp.gt.s32 some, $2, 0; @some cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }",
        "=r,l,r", [(first + thread * stride).to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1,
    )
'''

_COMMENT_COLUMN = 64
_AXIS_ORDER = "bmkn"


class UnsupportedRegion(PostludeError):
    """The triton target has no kernel of this form; the Region runs on another target."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"The triton target can't generate this Region: {reason}. Use target 'aten' for it, or split the Region."
        )


@dataclass(frozen=True)
class Stride:
    """An integer argument: how `tensor` (operands first, then results) moves in memory along `axis`.

    Where an axis stands for dimensions that no single stride describes, it has an `inner` size, and an `outer` stride for
    what goes beyond it, besides its `step`.
    """

    tensor: int
    axis: str
    part: str = "step"


@dataclass(frozen=True)
class Source:
    """A generated module, and what its kernels take: pointers, sizes of axes, strides; then constants by name."""

    text: str
    sizes: tuple[str, ...]
    strides: tuple[Stride, ...]


def generate(region: Region, rows: int = 1, split: frozenset[tuple[int, str]] = frozenset(), *, chained: bool = False) -> Source:
    """The Triton source of a Region.

    Args:
        region: a verified Region. For equal layers to share a kernel it should be in normal form.
        rows: rows that the `gemv` kernel computes.
        split: (tensor, axis) pairs of which the axis stands for dimensions that no single stride describes.
        chained: start before the kernel ahead in the stream has ended, and wait for it (programmatic dependent launch).

    Raises:
        UnsupportedRegion: the Region is legal, but not of a form that this target has.
    """
    reason = obstacle(region)
    if reason is not None:
        raise UnsupportedRegion(reason)
    return _Writer(region, rows, split, chained).source()


def obstacle(region: Region) -> str | None:
    """Why there is no kernel for the Region, or None."""
    for statement in region.body:
        if isinstance(statement, Reduce):
            return f"%{statement.name} reduces over whole rows, and a program has only a part of each row"
        if isinstance(statement, Contract) and statement.left not in region.operand_index:
            return f"%{statement.name} contracts %{statement.left}, which the Region computes"
    stored = {index for group in region.groups for index, _ in group.yields}
    for index, result in enumerate(region.yields):
        if index not in stored:
            return f"result %{result.value} belongs to no contraction's columns"
    for group in region.groups:
        for statement in group.statements:
            if region.types[statement.name].column not in (None, group.column):
                return f"%{statement.name} is needed by results over the columns {group.column!r}, and has others"
        if len({c.accumulate for c in group.contractions}) > 1:
            return f"contractions over the columns {group.column!r} accumulate in different types"
        for contraction in group.contractions:
            types = {region.operands[region.operand_index[name]].dtype for name in contraction.inputs}
            if torch.float64 in types and contraction.accumulate != torch.float64:
                return f"%{contraction.name} multiplies f64 and accumulates in f32"
    return None


class _Writer:
    """Writes one module."""

    def __init__(self, region: Region, rows: int, split: frozenset[tuple[int, str]], chained: bool) -> None:
        self.region = region
        self.rows = rows
        self.split = split
        self.chained = chained
        self.constants = {s.name: s.value for s in region.body if isinstance(s, Const)}
        self.contracted = {name for c in region.contractions for name in c.inputs}
        texts = to_text(region, lines=True).splitlines()[1 + len(region.operands) :]
        self.comments = {s.name: text.strip() for s, text in zip(region.body, texts, strict=False)}

    # What the kernels take ------------------------------------------------------------------------------------------------

    @cached_property
    def pointers(self) -> tuple[str, ...]:
        """Names of the pointers: operands, then results."""
        return (*(f"p_{o.name}" for o in self.region.operands), *(f"r{i}" for i in range(len(self.region.yields))))

    @cached_property
    def sizes(self) -> tuple[str, ...]:
        """Axes whose sizes the kernels take. The batch stands among them as `b`."""
        return tuple(axis for axis in self.region.axes if axis != "b" or self.region.batched)

    def strides_of(self, tensor: int) -> Iterator[Stride]:
        """The strides of one tensor, by axes in a fixed order."""
        for axis in sorted(self.axes_of(tensor), key=lambda a: _AXIS_ORDER.index(a[0])):
            yield Stride(tensor, axis)
            if (tensor, axis) in self.split:
                yield from (Stride(tensor, axis, "inner"), Stride(tensor, axis, "outer"))

    def axes_of(self, tensor: int) -> tuple[str, ...]:
        """The axes of an operand or result."""
        count = len(self.region.operands)
        return self.region.operands[tensor].axes if tensor < count else self.region.yields[tensor - count].axes

    def name(self, stride: Stride) -> str:
        """The argument's name."""
        count = len(self.region.operands)
        of = f"s_{self.region.operands[stride.tensor].name}" if stride.tensor < count else f"r{stride.tensor - count}"
        return f"{of}_{stride.axis}{'' if stride.part == 'step' else '_' + stride.part}"

    def at(self, tensor: int, index: dict[str, str]) -> str:
        """The address of a tensor's element, or of many, for an index along each axis."""
        terms = [self.pointers[tensor]]
        for axis in sorted(self.axes_of(tensor), key=lambda a: _AXIS_ORDER.index(a[0])):
            step, at = self.name(Stride(tensor, axis)), index[axis]
            if (tensor, axis) in self.split:
                inner, outer = (self.name(Stride(tensor, axis, part)) for part in ("inner", "outer"))
                terms.append(f"{at} // {inner} * {outer} + {at} % {inner} * {step}")
            else:
                terms.append(f"{at} * {step}")
        return " + ".join(terms)

    # The module -----------------------------------------------------------------------------------------------------------

    def source(self) -> Source:
        """The whole module."""
        strides = tuple(s for t in range(len(self.pointers)) for s in self.strides_of(t))
        used = {s.op for s in self.region.body if isinstance(s, Apply)} & FUNCTIONS.keys()
        parts = [
            f'"""Generated by Postlude for\n\n{to_text(self.region, lines=True)}\n"""\n',
            "import triton\nimport triton.language as tl\n"
            + ("from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, num_threads\n" if self.chained else "")
            + "from triton.language.extra import libdevice\n",
            *([_PREFETCH] if self.chained else []),
            *(FUNCTIONS[name] for name in sorted(used)),
            *(self.epilogue(group) for group in self.region.groups),
            self.kernel("gemv"),
            self.kernel("gemm"),
        ]
        return Source("\n\n".join(parts), self.sizes, strides)

    def kernel(self, form: str) -> str:
        """One kernel: the part of each group, chosen by the program's number."""
        strides = [self.name(s) for t in range(len(self.pointers)) for s in self.strides_of(t)]
        constants = [f"{name}: tl.constexpr" for name in CONSTANTS[form]]
        chained = CHAINED if self.chained else ()
        counts = [axis for axis in self.sizes if axis in ROW_AXES] + [name for name in WORKSPACE[form] if name == "splits"]
        counts += chained
        names = ", ".join(f'"{name}"' for name in counts)
        lines = [f"@triton.jit(do_not_specialize=[{names}])"]
        lines += _definition(form, [*self.pointers, *WORKSPACE[form], *chained, *self.sizes, *strides, *constants])
        lines.append("    program = tl.program_id(0)")
        body = self.gemv if form == "gemv" else self.gemm
        last = len(self.region.groups) - 1
        for number, group in enumerate(self.region.groups):
            if not last:
                lines += _indented(body(group))
                continue
            programs = f"programs_{group.column}"
            if number < last:
                lines.append(f"    {programs} = {self.programs(form, group)}")
                lines.append(f"    if (program >= 0) & (program < {programs}):")
            else:
                lines.append("    if program >= 0:")
            lines += _indented(body(group), 2)
            if number < last:
                lines.append(f"    program -= {programs}")
        return "\n".join(lines) + "\n"

    def programs(self, form: str, group: Group) -> str:
        """How many programs work for a group."""
        factors = ["b"] if self.region.batched else []
        factors += ["tl.cdiv(m, BLOCK_M)"] if form == "gemm" else []
        factors.append(f"tl.cdiv({group.column}, BLOCK_N)")
        return " * ".join(factors + (["splits"] if form == "gemm" else []))

    def gemv(self, group: Group) -> Iterator[str]:
        """Whole rows of the weight, multiplied and added without tensor cores."""
        n, type = group.column, self.arithmetic(group)
        tile = "program"
        if self.region.batched:
            yield f"blocks = tl.cdiv({n}, BLOCK_N)"
            yield "batch = (program // blocks).to(INDEX)"
            tile = "program % blocks"
        yield f"columns = ({tile} * BLOCK_N + tl.arange(0, BLOCK_N)).to(INDEX)"
        yield "cols = columns[:, None]"
        yield "ks = tl.arange(0, BLOCK_K).to(INDEX)[None, :]"
        for row in range(self.rows):
            yield f"row{row} = tl.full([1, 1], {row}, INDEX)"
        yield from self.start(group, f"({tile} * BLOCK_N).to(INDEX)", split=False)
        yield from self.loads(group, "columns[None, :]")
        for contraction in group.contractions:
            for row in range(self.rows):
                yield f"{_value(contraction.name)}_{row} = tl.zeros([BLOCK_N, BLOCK_K], {type})"
        lefts = _by_left(group)
        for left, contractions in lefts:
            k = self.contracted_axis(contractions[0])
            yield from self.loop("0", k, last=left == lefts[-1][0])
            yield "    at = start + ks"
            for row in range(self.rows):
                mask = f"(at < {k}) & (row{row} < m)" if row else f"at < {k}"
                address = self.at(self.region.operand_index[left], {"b": "batch", "m": f"row{row}", k: "at"})
                yield f"    x{row} = {_load(address, mask)}.to({type})"
            for contraction in contractions:
                address = self.at(self.region.operand_index[contraction.right], {"b": "batch", n: "cols", k: "at"})
                yield f"    w = {_load(address, _mask(f'(cols < {n})', f'(at < {k})'))}.to({type})"
                for row in range(self.rows):
                    yield f"    {_value(contraction.name)}_{row} += w * x{row}"
        for row in range(self.rows):
            sums = [f"tl.sum({_value(c.name)}_{row}, axis=1)[None, :]" for c in group.contractions]
            call = self.call(group, f"row{row}", "columns[None, :]", sums)
            yield from call if row == 0 else _indented(call, before=[f"if {row} < m:"])

    def gemm(self, group: Group) -> Iterator[str]:
        """One tile with tl.dot, or a part of its sum over k."""
        n, type = group.column, self.arithmetic(group)
        yield "part = program % splits"
        yield "tile = program // splits"
        yield "blocks_m = tl.cdiv(m, BLOCK_M)"
        yield f"blocks_n = tl.cdiv({n}, BLOCK_N)"
        if self.region.batched:
            yield "batch = (tile // (blocks_m * blocks_n)).to(INDEX)"
            yield "tile = tile % (blocks_m * blocks_n)"
        yield "# Tiles are visited in bands of GROUP_M blocks of rows, so that programs that run together share operands in L2."
        yield "band = tile // (GROUP_M * blocks_n)"
        yield "height = min(blocks_m - band * GROUP_M, GROUP_M)"
        yield "block_m = band * GROUP_M + tile % (GROUP_M * blocks_n) % height"
        yield "block_n = tile % (GROUP_M * blocks_n) // height"
        yield "rows = (block_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(INDEX)"
        yield "cols = (block_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(INDEX)"
        yield "ks = tl.arange(0, BLOCK_K).to(INDEX)"
        yield "if SWAP:  # the weight has the rows of the tile"
        yield "    rows, cols, k_left, k_right = rows[None, :], cols[:, None], ks[:, None], ks[None, :]"
        yield "else:"
        yield "    rows, cols, k_left, k_right = rows[:, None], cols[None, :], ks[None, :], ks[:, None]"
        yield from self.start(group, "(block_n * BLOCK_N).to(INDEX)", split=True)
        yield from self.loads(group, "cols")
        for contraction in group.contractions:
            yield f"{_value(contraction.name)} = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], {type})"
        lefts = _by_left(group)
        for left, contractions in lefts:
            yield from self.product(left, contractions, n, type, last=left == lefts[-1][0])
        accumulators = [_value(c.name) for c in group.contractions]
        call = self.call(group, "rows", "cols", accumulators)
        yield "if not SPLIT:"
        yield from _indented(call)
        yield "else:"
        most = max(len(g.contractions) for g in self.region.groups)
        yield "    # Each program leaves its part; the last one of a tile to arrive adds the parts, always in the same order."
        yield "    inside = (rows - block_m * BLOCK_M) * BLOCK_N + cols - block_n * BLOCK_N"
        yield "    mine = tl.program_id(0).to(tl.int64)"
        for index, accumulator in enumerate(accumulators):
            yield f"    tl.store(partials + (mine * {most} + {index}) * (BLOCK_M * BLOCK_N) + inside, {accumulator})"
        yield "    tl.debug_barrier()"
        yield '    arrived = tl.atomic_add(counters + mine // splits, 1, sem="acq_rel")'
        yield "    if arrived == splits - 1:"
        yield "        tl.store(counters + mine // splits, 0)"
        for index, accumulator in enumerate(accumulators):
            yield f"        {accumulator} = tl.zeros_like({accumulator})"
            yield "        for other in range(splits):"
            place = f"((mine - part + other) * {most} + {index}) * (BLOCK_M * BLOCK_N)"
            yield f'            {accumulator} += tl.load(partials + {place} + inside, cache_modifier=".cg")'
        yield from _indented(call, 2)

    def product(self, left: str, contractions: list[Contract], n: str, type: str, *, last: bool) -> Iterator[str]:
        """The loop over k for contractions of one left operand, which is loaded once for all."""
        k = self.contracted_axis(contractions[0])
        operands = self.region.operand_index
        yield from _part_of(k)
        yield from self.loop("begin", "end", last=last)
        address = self.at(operands[left], {"b": "batch", "m": "rows", k: "(start + k_left)"})
        yield f"    x = {_load(address, _mask('(rows < m)', f'(start + k_left < {k})'))}"
        for contraction in contractions:
            address = self.at(operands[contraction.right], {"b": "batch", n: "cols", k: "(start + k_right)"})
            yield f"    w = {_load(address, _mask(f'(cols < {n})', f'(start + k_right < {k})'))}"
            dtypes = [self.region.operands[operands[name]].dtype for name in contraction.inputs]
            common = TYPES[torch.promote_types(*dtypes)] if contraction.accumulate != torch.float64 else "tl.float64"
            a, b = (name if TYPES[dtype] == common else f"{name}.to({common})" for name, dtype in zip("xw", dtypes, strict=True))
            accumulator = _value(contraction.name)
            options = f"input_precision=PRECISION, out_dtype={type}"
            yield "    if SWAP:"
            yield f"        {accumulator} = tl.dot({b}, {a}, {accumulator}, {options})"
            yield "    else:"
            yield f"        {accumulator} = tl.dot({a}, {b}, {accumulator}, {options})"

    def loop(self, begin: str, end: str, *, last: bool) -> Iterator[str]:
        """The head of a loop over k. The last loop of a chained kernel lets the next kernel start on its way."""
        chained = self.chained and last
        if chained:
            yield f"until_release = {begin} + max(tl.cdiv({end} - {begin}, BLOCK_K) - release, 0) * BLOCK_K"
        yield f"for start in tl.range({begin}, {end}, BLOCK_K, num_stages=STAGES):"
        if chained:
            yield "    if start == until_release:"
            yield "        gdc_launch_dependents()"

    def start(self, group: Group, column: str, *, split: bool) -> Iterator[str]:
        """Of a chained kernel: what it does before the kernel ahead has ended, and the wait for that."""
        if not self.chained:
            return
        n = group.column
        yield "if release < 0:"
        yield "    gdc_launch_dependents()"
        yield "if prefetch > 0:"
        for contraction in group.contractions:
            right, k = self.region.operand_index[contraction.right], self.contracted_axis(contraction)
            if split:
                yield from _indented(_part_of(k))
            address = self.at(right, {"b": "batch", n: column, k: "begin" if split else "0"})
            columns = f"min(BLOCK_N, {n} - {column})"
            span = "end - begin" if split else k
            yield f"    bring({address}, {self.name(Stride(right, n))}, {columns}, {span}, prefetch)"
        yield "gdc_wait()"
        yield "if release == 0:"
        yield "    gdc_launch_dependents()"

    # The epilogue ---------------------------------------------------------------------------------------------------------

    def read(self, group: Group) -> list[int]:
        """Operands that a group's epilogue reads, by their position."""
        used = {name for s in group.statements for name in s.inputs}
        return [i for i, o in enumerate(self.region.operands) if o.name in used and o.name not in self.contracted]

    def early(self, group: Group) -> list[int]:
        """Of these, the ones that are loaded before the sum is computed: few values, for which no program then waits."""
        return [t for t in self.read(group) if "m" not in self.region.operands[t].axes]

    def loads(self, group: Group, cols: str) -> Iterator[str]:
        """The early loads. They are converted later, where they are needed: that is where a GPU waits."""
        for tensor in self.early(group):
            yield f"early_{self.region.operands[tensor].name} = {self.load(tensor, {'b': 'batch', group.column: cols}, cols)}"

    def load(self, tensor: int, index: dict[str, str], cols: str) -> str:
        """The load of an operand that the epilogue reads."""
        masks = {"m": "(rows < m)", **{axis: f"({cols} < {axis})" for axis in index if axis[0] == "n"}}
        mask = " & ".join(masks[axis] for axis in self.region.operands[tensor].axes if axis in masks)
        # A scalar too is loaded as a tile, of one element, so that all values have two dimensions.
        at = self.at(tensor, index) + ("" if mask else " + tl.zeros([1, 1], tl.int32)")
        return f"tl.load({at}{mask and ', mask=' + mask})"

    def arguments(self, group: Group) -> list[str]:
        """What an epilogue takes besides its indices and accumulators, under the names that the kernels have too."""
        count = len(self.region.operands)
        early = self.early(group)
        tensors = [*(t for t in self.read(group) if t not in early), *(count + index for index, _ in group.yields)]
        extents = {s.axis for s in group.statements if isinstance(s, Extent)}
        sizes = [axis for axis in self.sizes if axis in extents | {"m", group.column}]
        values = [f"early_{self.region.operands[t].name}" for t in early]
        return [*values, *sizes, *(a for t in tensors for a in (self.pointers[t], *(self.name(s) for s in self.strides_of(t))))]

    def call(self, group: Group, rows: str, cols: str, accumulators: list[str]) -> list[str]:
        """A call of a group's epilogue."""
        batch = ["batch"] if self.region.batched else []
        return [f"epilogue_{group.column}({', '.join([*batch, rows, cols, *accumulators, *self.arguments(group)])})"]

    def epilogue(self, group: Group) -> str:
        """The epilogue of one group: loads what the program reads, computes, rounds once, stores."""
        n, type = group.column, self.arithmetic(group)
        batch = ["batch"] if self.region.batched else []
        accumulators = [_value(c.name) for c in group.contractions]
        lines = ["@triton.jit"]
        lines += _definition(f"epilogue_{n}", [*batch, "rows", "cols", *accumulators, *self.arguments(group)])
        index = {"b": "batch", "m": "rows", n: "cols"}
        masks = {"m": "(rows < m)", n: f"(cols < {n})"}
        for tensor in self.read(group):
            operand = self.region.operands[tensor]
            load = f"early_{operand.name}" if tensor in self.early(group) else self.load(tensor, index, "cols")
            lines.append(f"    {_value(operand.name)} = {load}{'' if operand.dtype == torch.bool else f'.to({type})'}")
        precise = sensitive(group) if type == "tl.float32" else ()
        for statement in group.statements:
            code = f"    {_value(statement.name)} = {self.expression(statement, type, precise=statement.name in precise)}"
            lines.append(f"{code:<{_COMMENT_COLUMN}}  # {self.comments[statement.name]}")
        for index_, result in group.yields:
            at = self.at(len(self.region.operands) + index_, index)
            value = f"{_value(result.value)}.to({TYPES[result.dtype]})"
            lines.append(f"    tl.store({at}, {value}, mask={masks['m']} & {masks[n]})")
        return "\n".join(lines) + "\n"

    def expression(self, statement: Statement, type: str, *, precise: bool) -> str:
        """The expression of one statement."""
        if isinstance(statement, Const):
            return f"tl.full([1, 1], {_literal(statement.value)}, {type})"
        if isinstance(statement, Extent):
            return f"tl.full([1, 1], {statement.axis}, {type})"
        if isinstance(statement, Round):
            return f"{_value(statement.input)}.to({TYPES[statement.dtype]}).to({type})"
        assert isinstance(statement, Apply)
        inputs = [_value(name) for name in statement.inputs]
        if statement.op == "pow" and (power := POWERS.get(self.constants.get(statement.inputs[1], math.nan))):
            return power.format(*inputs)
        expressions = EXPRESSIONS | PRECISE if precise else EXPRESSIONS
        return expressions[statement.op].format(*inputs, type=type)

    def arithmetic(self, group: Group) -> str:
        """Type of a group's arithmetic."""
        return TYPES[group.contractions[0].accumulate]

    def contracted_axis(self, contraction: Contract) -> str:
        """The axis that is summed over."""
        return self.region.contraction_axes(contraction)[0]


def _by_left(group: Group) -> list[tuple[str, list[Contract]]]:
    """The contractions of a group by their left operand and contracted axis."""
    found: dict[str, list[Contract]] = {}
    for contraction in group.contractions:
        found.setdefault(contraction.left, []).append(contraction)
    return list(found.items())


def _part_of(k: str) -> Iterator[str]:
    """The part of an axis that a program of `gemm` sums over."""
    yield f"length = tl.cdiv(tl.cdiv({k}, BLOCK_K), splits) * BLOCK_K"
    yield "begin = part * length"
    yield f"end = min(begin + length, {k})"


def _value(name: str) -> str:
    return f"v{name}" if name.isdigit() else f"v_{name}"


def _literal(value: float) -> str:
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def _mask(mask: str, of_k: str) -> str:
    return f"{mask} if EVEN_K else {mask} & {of_k}"


def _load(address: str, mask: str) -> str:
    return f"tl.load({address}, mask={mask}, other=0.0)"


def _indented(lines: Iterable[str], levels: int = 1, before: Iterable[str] = ()) -> list[str]:
    return [*before, *("    " * levels + line for line in lines)]


def _definition(name: str, arguments: list[str]) -> list[str]:
    """The head of a function, its arguments broken into lines."""
    lines = [f"def {name}("]
    line = "   "
    for argument in arguments:
        if len(line) + len(argument) > 118:
            lines.append(line)
            line = "   "
        line += f" {argument},"
    return [*lines, line, "):"]
