"""Region -> Triton source.

`generate` writes one module: for each group of the Region an epilogue, and two kernels that call it.

    gemv    few rows, weights that lie along k: each program multiplies whole rows of the weight, without tensor cores
    gemm    anything: tiles with tl.dot, in either orientation, k split over several programs where there are few tiles

A program of a kernel works for one group, so q, k and v are one launch. Attention has a kernel of its own in place of the two
(attention.py). What all kernels share is in writer.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from postlude.errors import PostludeError
from postlude.ir import Apply, Contract, Group, Reduce, Region, to_text
from postlude.ir.region import ROW_AXES
from postlude.targets.triton import attention, prologue
from postlude.targets.triton.codegen_ops import FUNCTIONS
from postlude.targets.triton.prologue import prologue_of
from postlude.targets.triton.writer import TYPES, Stride, Writer, definition, indented, load, value

#: Constants that each kernel takes: tile sizes, what is known about the call, and for `gemm` the orientation of a tile.
CONSTANTS: dict[str, tuple[str, ...]] = {
    "gemv": ("BLOCK_N", "BLOCK_K", "STAGES", "EVEN_K", "INDEX"),
    "gemm": ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "SPLIT", "STAGES", "SWAP", "PRECISION", "EVEN_K", "INDEX"),
    "attention": ("BLOCK_M", "BLOCK_N", "BLOCK_K", "BLOCK_O", "ROWS", "PARTS", "SPLIT", "STAGES", "PRECISION", "INDEX"),
}

#: Integers that a kernel takes between workspace and sizes if it starts before the kernel ahead has ended: bytes of each column
#: that it has brought to L2 before it waits for that, and steps along k before its end at which it lets the next one start.
CHAINED: dict[str, tuple[str, ...]] = {"gemv": ("prefetch", "release"), "gemm": ("prefetch", "release"), "attention": ()}

#: What each kernel takes between the tensors and the sizes: workspace, and how many programs share a tile's sum.
WORKSPACE: dict[str, tuple[str, ...]] = {
    "gemv": (),
    "gemm": ("partials", "counters", "splits"),
    "attention": ("partials", "counters", "splits"),
}

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


class UnsupportedRegion(PostludeError):
    """The triton target has no kernel of this form; the Region runs on another target."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"The triton target can't generate this Region: {reason}. Use target 'aten' for it, or split the Region."
        )


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
    return _Module(region, rows, split, chained).source()


def obstacle(region: Region) -> str | None:
    """Why there is no kernel for the Region, or None."""
    if region.coded:
        return "its weights are codes"
    if attention.softmax_of(region) is not None:
        return None
    before = {c.left: prologue_of(region, c) for c in region.contractions if c.left not in region.operand_index}
    for contraction in region.contractions:
        if before.get(contraction.left, ...) is None:
            return f"%{contraction.name} contracts %{contraction.left}, which the Region computes"
    for statement in region.body:
        if isinstance(statement, Reduce) and not any(p and statement in p.sums for p in before.values()):
            return f"%{statement.name} reduces over whole rows, and a program has only a part of each row"
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
            types = {region.operands[i].dtype for name in contraction.inputs if (i := region.operand_index.get(name)) is not None}
            if torch.float64 in types and contraction.accumulate != torch.float64:
                return f"%{contraction.name} multiplies f64 and accumulates in f32"
    return None


class _Module(Writer):
    """Writes one module."""

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
            *self.kernels(),
        ]
        return Source("\n\n".join(parts), self.sizes, strides)

    def kernels(self) -> Iterator[str]:
        """The kernels, after the functions that they call."""
        softmax = attention.softmax_of(self.region)
        if softmax is None:
            for group in self.region.groups:
                yield self.function(f"epilogue_{group.column}", group)
            yield self.kernel("gemv", self.parts("gemv"))
            yield self.kernel("gemm", self.parts("gemm"))
        else:
            yield attention.scores_function(self, softmax)
            yield self.function(f"epilogue_{softmax.output.column}", softmax.output)
            yield self.kernel("attention", attention.body(self, softmax))

    def kernel(self, form: str, body: Iterator[str]) -> str:
        """One kernel with its head."""
        strides = [self.name(s) for t in range(len(self.pointers)) for s in self.strides_of(t)]
        constants = [f"{name}: tl.constexpr" for name in CONSTANTS[form]]
        chained = CHAINED[form] if self.chained else ()
        counts = [axis for axis in self.sizes if axis in ROW_AXES] + [name for name in WORKSPACE[form] if name == "splits"]
        counts += chained
        names = ", ".join(f'"{name}"' for name in counts)
        lines = [f"@triton.jit(do_not_specialize=[{names}])"]
        lines += definition(form, [*self.pointers, *WORKSPACE[form], *chained, *self.sizes, *strides, *constants])
        return "\n".join([*lines, "    program = tl.program_id(0)", *indented(body)]) + "\n"

    def parts(self, form: str) -> Iterator[str]:
        """The part of each group, chosen by the program's number."""
        body = self.gemv if form == "gemv" else self.gemm
        last = len(self.region.groups) - 1
        for number, group in enumerate(self.region.groups):
            if not last:
                yield from body(group)
                continue
            programs = f"programs_{group.column}"
            if number < last:
                yield f"{programs} = {self.programs(form, group)}"
                yield f"if (program >= 0) & (program < {programs}):"
            else:
                yield "if program >= 0:"
            yield from indented(body(group))
            if number < last:
                yield f"program -= {programs}"

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
                yield f"{value(contraction.name)}_{row} = tl.zeros([BLOCK_N, BLOCK_K], {type})"
        lefts = _by_left(group)
        for left, contractions in lefts:
            k = self.contracted_axis(contractions[0])
            before = prologue_of(self.region, contractions[0])
            if before:
                for row in range(self.rows):
                    yield from prologue.started(before, "[1, BLOCK_K]", type, f"_{row}")
            yield from self.loop("0", k, last=left == lefts[-1][0])
            yield "    at = start + ks"
            for row in range(self.rows):
                mask = f"(at < {k}) & (row{row} < m)" if row else f"at < {k}"
                if before:
                    index = {"m": f"row{row}", k: "at"}
                    yield from indented(prologue.in_loop(self, before, f"x{row}", index, mask, type, f"_{row}"))
                    continue
                address = self.at(self.region.operand_index[left], {"b": "batch", "m": f"row{row}", k: "at"})
                yield f"    x{row} = {load(address, mask)}.to({type})"
            for contraction in contractions:
                address = self.at(self.region.operand_index[contraction.right], {"b": "batch", n: "cols", k: "at"})
                yield f"    w = {load(address, _mask(f'(cols < {n})', f'(at < {k})'))}.to({type})"
                for row in range(self.rows):
                    yield f"    {value(contraction.name)}_{row} += w * x{row}"
            if before:
                for row in range(self.rows):
                    yield from prologue.scale(self, before, f"scale{row}", "1", type, f"_{row}")
        for row in range(self.rows):
            sums = [
                f"tl.sum({value(c.name)}_{row}, axis=1)[None, :]{f' * scale{row}' if self.is_computed(c.left) else ''}"
                for c in group.contractions
            ]
            call = self.call(f"epilogue_{n}", group, f"row{row}", "columns[None, :]", sums)
            yield from [call] if row == 0 else indented([call], before=[f"if {row} < m:"])

    def is_computed(self, left: str) -> bool:
        """Whether what is multiplied is no operand."""
        return left not in self.region.operand_index

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
            yield f"{value(contraction.name)} = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], {type})"
        lefts = _by_left(group)
        for left, contractions in lefts:
            yield from self.product(left, contractions, n, type, last=left == lefts[-1][0])
        accumulators = [value(c.name) for c in group.contractions]
        call = self.call(f"epilogue_{n}", group, "rows", "cols", accumulators)
        yield "if not SPLIT:"
        yield from indented([call])
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
        yield from indented([call], 2)

    def product(self, left: str, contractions: list[Contract], n: str, type: str, *, last: bool) -> Iterator[str]:
        """The loop over k for contractions of one left operand, which is loaded once for all."""
        k = self.contracted_axis(contractions[0])
        operands = self.region.operand_index
        before = prologue_of(self.region, contractions[0])
        yield from _part_of(k)
        if before:
            yield from prologue.started(before, "[BLOCK_K, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_K]", type)
        yield from self.loop("begin", "end", last=last)
        index = {"b": "batch", "m": "rows", k: "(start + k_left)"}
        if before:
            mask = f"(rows < m) & (start + k_left < {k})"
            yield from indented(prologue.in_loop(self, before, "x", index, mask, type))
        else:
            yield f"    x = {load(self.at(operands[left], index), _mask('(rows < m)', f'(start + k_left < {k})'))}"
        for contraction in contractions:
            address = self.at(operands[contraction.right], {"b": "batch", n: "cols", k: "(start + k_right)"})
            yield f"    w = {load(address, _mask(f'(cols < {n})', f'(start + k_right < {k})'))}"
            dtypes = [
                torch.float32 if name not in operands else self.region.operands[operands[name]].dtype
                for name in contraction.inputs
            ]
            if before and dtypes[1] == torch.bfloat16:
                dtypes[0] = (
                    torch.bfloat16
                )  # has the range of float32: what is multiplied may be rounded to it, as eager rounds it
                yield "    x = x.to(tl.bfloat16)"
            common = TYPES[torch.promote_types(*dtypes)] if contraction.accumulate != torch.float64 else "tl.float64"
            a, b = (name if TYPES[dtype] == common else f"{name}.to({common})" for name, dtype in zip("xw", dtypes, strict=True))
            accumulator = value(contraction.name)
            options = f"input_precision=PRECISION, out_dtype={type}"
            yield "    if SWAP:"
            yield f"        {accumulator} = tl.dot({b}, {a}, {accumulator}, {options})"
            yield "    else:"
            yield f"        {accumulator} = tl.dot({a}, {b}, {accumulator}, {options})"
        if before:
            yield from prologue.scale(self, before, "scale", "0 if SWAP else 1", type)
            yield from (f"{value(contraction.name)} *= scale" for contraction in contractions)

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
                yield from indented(_part_of(k))
            address = self.at(right, {"b": "batch", n: column, k: "begin" if split else "0"})
            columns = f"min(BLOCK_N, {n} - {column})"
            span = "end - begin" if split else k
            yield f"    bring({address}, {self.name(Stride(right, n))}, {columns}, {span}, prefetch)"
        yield "gdc_wait()"
        yield "if release == 0:"
        yield "    gdc_launch_dependents()"


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


def _mask(mask: str, of_k: str) -> str:
    return f"{mask} if EVEN_K else {mask} & {of_k}"
