"""Which kernel, in which tiles: tables per architecture, and the choice from them.

A table's rules are tried in order; the first whose limits hold for the call is taken. What the rule says is then fitted to the
call: k is split while each multiprocessor has at most one program, and stages of the pipeline are dropped that do not fit into
shared memory.
"""

from dataclasses import dataclass, replace
from math import inf
from typing import Any


@dataclass(frozen=True, slots=True)
class Config:
    """A form of kernel and its constants.

    Attributes:
        form: `gemv`, `gemm` or `attention` (see codegen.py).
        block_m: rows of a tile. For `gemv`: the rows that it computes, at least m.
        block_n: columns of a tile; for `attention` keys that are read at once.
        block_k: step along k; for `attention` all of it.
        warps: warps of a program.
        stages: steps along k that are loaded ahead.
        split_k: programs that share the sum over k of one tile, or the keys of one batch.
        group_m: tiles in a column of tiles that run one after another.
        swap: the tile is computed as its transpose, with the weight on the left.
        chained: programmatic dependent launch (NVIDIA, since Hopper): the kernel starts before the one ahead has ended.
        prefetch: bytes of each column of the weights that a chained kernel has brought to L2 before it waits for the one ahead.
        release: when a chained kernel lets the next one start: so many steps along k before its end; at 0 once it has waited
            itself, at -1 at its start.
        block_o: for `attention`: width of the values, or more.
        rows: for `attention`: rows of a tile that are there, or more.
    """

    form: str
    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    split_k: int = 1
    group_m: int = 8
    swap: bool = False
    chained: bool = False
    prefetch: int = 0
    release: int = 0
    block_o: int = 0
    rows: int = 0

    def __str__(self) -> str:
        parts = [self.form, f"{self.block_m}x{self.block_n}x{self.block_k}", f"warps {self.warps}", f"stages {self.stages}"]
        parts += [f"split {self.split_k}"] if self.split_k > 1 else []
        parts += [f"group {self.group_m}"] if self.group_m != 8 else []
        parts += ["swapped"] if self.swap else []
        parts += [f"chained {self.prefetch} {self.release}"] if self.chained else []
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Problem:
    """What a call multiplies.

    Attributes:
        m: rows.
        columns: columns of each group.
        k: size of the contracted axis (the smallest, if there are several).
        batch: products in the batch.
        element: bytes of an element of the operands, the wider of the two.
        along_k: the weights lie along k.
        contractions: most contractions of a group.
        whole_k: each program must read the whole contracted axis, since it computes a norm over it.
    """

    m: int
    columns: tuple[int, ...]
    k: int
    batch: int = 1
    element: int = 2
    along_k: bool = True
    contractions: int = 1
    whole_k: bool = False


@dataclass(frozen=True, slots=True)
class Device:
    """What is known of a device: `arch` is ``sm_90``, ``gfx942``, ...; shared memory in bytes."""

    arch: str
    multiprocessors: int
    shared: int


@dataclass(frozen=True, slots=True)
class Rule:
    """A configuration and the calls that it is for.

    Attributes:
        rows: most rows.
        config: the configuration.
        splits: most programs that may share the sum of a tile.
        along_k: which way the weights lie, if that matters.
        contractions: most contractions of a group.
        columns: most columns for each multiprocessor, with those of all groups and of the whole batch.
        k: largest k.
    """

    rows: float
    config: Config
    splits: int = 1
    along_k: bool | None = None
    contractions: float = inf
    columns: float = inf
    k: float = inf

    def holds(self, problem: Problem, device: Device) -> bool:
        """Whether it is for a call."""
        return (
            problem.m <= self.rows
            and self.along_k in (None, problem.along_k)
            and problem.contractions <= self.contractions
            and problem.batch * sum(problem.columns) <= self.columns * device.multiprocessors
            and problem.k <= self.k
        )


def _gemv(rows: int, block_n: int, block_k: int, warps: int, stages: int, **limits: Any) -> Rule:
    return Rule(rows, Config("gemv", rows, block_n, block_k, warps, stages), along_k=True, **limits)


def _gemm(
    rows: float, tile: tuple[int, int, int], warps: int, stages: int, splits: int = 1, *, swap: bool = False, **limits: Any
) -> Rule:
    return Rule(rows, Config("gemm", *tile, warps, stages, swap=swap), splits, **limits)


def _chained(rule: Rule, prefetch: int = 0, release: int = 0) -> Rule:
    return replace(rule, config=replace(rule.config, chained=True, prefetch=prefetch, release=release))


#: (architecture, bytes of an element) -> rules. Architectures are looked up by the longest prefix of their name.
TABLES: dict[tuple[str, int], tuple[Rule, ...]] = {
    # H200: the best, within two per cent, of what benchmarks/gpu_decode.py --sweep measured with 1, 4, 16 and 64 rows. A limit
    # of 32 columns stands for 4096 of them, 64 for 6144, none for 14336. Tiles for 32 rows are between their neighbours'.
    ("sm_90", 2): (
        _chained(_gemv(1, 8, 512, 4, 3, contractions=1, columns=32), 1024, 2),
        _chained(_gemv(1, 4, 1024, 4, 5, contractions=1), 2048, 0),
        _chained(_gemv(1, 4, 1024, 4, 5, columns=64, k=8192), 1024, 4),
        _chained(_gemv(1, 2, 1024, 4, 3), 0, 4),
        _chained(_gemm(16, (16, 64, 256), 4, 3, 8, swap=True, contractions=1, columns=32), 1024, 4),
        _chained(_gemm(16, (16, 64, 128), 4, 5, swap=True, contractions=1, columns=64)),
        _chained(_gemm(16, (16, 32, 128), 4, 5, 8, columns=32)),
        _chained(_gemm(16, (16, 64, 256), 4, 3, swap=True, columns=64), 0, 2),
        _chained(_gemm(16, (16, 64, 128), 4, 3, swap=True), 0, 2),
        _chained(_gemm(32, (32, 64, 128), 4, 5, 8, swap=True, contractions=1, columns=32)),
        _chained(_gemm(32, (32, 64, 128), 4, 5, swap=True, contractions=1, columns=64)),
        _chained(_gemm(32, (32, 64, 128), 4, 3, swap=True, contractions=1), 0, 2),
        _chained(_gemm(32, (32, 32, 128), 4, 5, 8, columns=32)),
        _chained(_gemm(32, (32, 64, 64), 4, 5, swap=True), 0, 2),
        _chained(_gemm(64, (64, 32, 128), 4, 5, 8, columns=32, k=8192), 0, 2),
        _chained(_gemm(64, (64, 64, 128), 4, 5, 8, swap=True, contractions=1, columns=32), 1024, 4),
        _chained(_gemm(64, (64, 64, 128), 4, 5, swap=True, contractions=1, columns=64), 0, 2),
        _chained(_gemm(64, (64, 64, 128), 4, 3, swap=True, contractions=1), 0, 2),
        _chained(_gemm(64, (64, 32, 128), 4, 5, 8, columns=32), 0, 2),
        _chained(_gemm(64, (64, 64, 64), 4, 5, swap=True, columns=64), 0, 2),
        _chained(_gemm(64, (64, 64, 64), 4, 8, swap=True), 0, 4),
        _gemm(128, (128, 64, 64), 4, 4, 4),
        _gemm(inf, (128, 256, 64), 8, 3),
    ),
    # Not measured from here on: reasoned from shared memory, registers and the size of a matrix instruction.
    ("sm_8", 2): (
        _gemv(1, 4, 1024, 4, 1),
        _gemm(16, (16, 32, 128), 4, 4, 8),
        _gemm(64, (64, 64, 64), 4, 3, 4),
        _gemm(inf, (128, 128, 32), 8, 3),
    ),
    ("gfx9", 2): (  # wavefronts of 64 lanes, 64 KB of shared memory, tiles of 16 x 16 or 32 x 32
        _gemv(1, 4, 1024, 4, 1),
        _gemm(16, (16, 32, 256), 2, 2, 8),
        _gemm(64, (64, 64, 64), 4, 2, 4),
        _gemm(inf, (128, 128, 64), 8, 2),
    ),
    ("gfx11", 2): (
        _gemv(1, 2, 1024, 4, 1),
        _gemm(16, (16, 32, 128), 2, 1, 8),
        _gemm(64, (64, 32, 64), 4, 1, 4),
        _gemm(inf, (128, 64, 32), 4, 1),
    ),
    ("xpu", 2): (
        _gemv(1, 4, 512, 4, 1),
        _gemm(16, (16, 32, 64), 4, 2, 8),
        _gemm(64, (64, 64, 32), 8, 2, 4),
        _gemm(inf, (128, 128, 32), 32, 2),
    ),
    ("", 2): (
        _gemv(1, 4, 512, 4, 1),
        _gemm(16, (16, 32, 64), 4, 2, 8),
        _gemm(inf, (64, 64, 32), 4, 2, 2),
    ),
    # float32 multiplies exactly, on the ordinary units, unless torch allows TF32.
    ("", 4): (
        _gemv(1, 4, 512, 4, 1),
        _gemm(16, (16, 32, 64), 4, 2, 8),
        _gemm(inf, (64, 64, 32), 4, 2, 2),
    ),
    ("", 8): (
        _gemv(1, 4, 256, 4, 1),
        _gemm(inf, (16, 32, 16), 4, 2, 8),
    ),
}


#: Programs that share the keys of one batch, where there are not many keys; and most. The last of them joins their parts.
_PARTS = 8
_MOST_PARTS = 32

#: Elements of parts that are joined at once.
_JOINED = 4096


def choose(device: Device, problem: Problem) -> Config:
    """The configuration of a call."""
    rule = next(rule for rule in rules(device.arch, problem.element) if rule.holds(problem, device))
    return fitted(replace(rule.config, split_k=_splits(rule, problem, device)), problem, device)


def attention(device: Device, rows: int, keys: int, width: int, width_out: int, batch: int, element: int) -> Config:
    """The configuration of an attention: queries and keys of a batch, the widths of keys and of values.

    As benchmarks/gpu_attention.py --sweep found it on an H200: a program for each multiprocessor, of few keys no more parts than
    are joined at once, and blocks of keys as large as a part.
    """
    there = 1 << (min(rows, 64) - 1).bit_length()
    block_m, block_k, block_o = (max(16, 1 << (size - 1).bit_length()) for size in (there, width, width_out))
    blocks = batch * -(-rows // block_m)
    parts = max(1, min(device.multiprocessors // blocks, max(_PARTS, keys // 512), _MOST_PARTS))
    if keys > 4096 * parts:
        parts *= 2
    block_n = max(32, min(128, 1 << (-(-keys // parts) - 1).bit_length()))
    while block_n > 32 and 2 * block_n * (block_k + block_o) * element > device.shared:
        block_n //= 2
    splits = max(1, min(parts, -(-keys // block_n)))
    stages = max(1, min(3, device.shared // (block_n * (block_k + block_o) * element)))
    chained = device.arch.startswith("sm_9")
    return Config("attention", block_m, block_n, block_k, 4, stages, splits, chained=chained, block_o=block_o, rows=there)


def parts_at_once(config: Config) -> int:
    """Parts that the last program of an attention joins at once."""
    return max(1, min(1 << (config.split_k - 1).bit_length(), _JOINED // (config.rows * config.block_o)))


#: Most configurations that are measured for a call beside that of the tables. Each takes a second or two to compile.
_MOST_MEASURED = 8


def neighbours(device: Device, problem: Problem) -> list[Config]:
    """Other configurations that may be faster than the one that the tables choose: of rules for as many rows, then for more.

    A rule's other limits say where it won on the device that it was measured on.
    """
    table = rules(device.arch, problem.element)
    steps = sorted({rule.rows for rule in table if rule.rows >= problem.m})[:2]
    likely = [
        fitted(replace(rule.config, split_k=_splits(rule, problem, device)), problem, device)
        for rows in steps
        for rule in table
        if rule.rows == rows and rule.along_k in (None, problem.along_k)
    ]
    own = choose(device, problem)
    return [config for config in dict.fromkeys(likely) if config != own][:_MOST_MEASURED]


#: Largest value of each constant. Blocks, warps and splits are powers of two.
_LIMITS = {"block_m": 512, "block_n": 512, "block_k": 8192, "warps": 32, "split_k": 64}
_OTHER_LIMITS = {"stages": (1, 16), "group_m": (1, 1024), "prefetch": (0, 1 << 16), "release": (-1, 1024)}


def check(config: Config) -> None:
    """Raise ValueError where no kernel has such constants."""
    if config.form not in ("gemv", "gemm"):
        raise ValueError(f"form is {config.form!r}: expected 'gemv' or 'gemm'")
    for name, most in _LIMITS.items():
        value = getattr(config, name)
        if not 0 < value <= most or value & (value - 1):
            raise ValueError(f"{name} is {value}: expected a power of two, {most} at most")
    for name, (least, most) in _OTHER_LIMITS.items():
        if not least <= getattr(config, name) <= most:
            raise ValueError(f"{name} is {getattr(config, name)}: expected {least} to {most}")


def rules(arch: str, element: int) -> tuple[Rule, ...]:
    """The table of an architecture."""
    names = [name for name, size in TABLES if size == element and arch.startswith(name)]
    return TABLES[max(names, key=len), element]


def _splits(rule: Rule, problem: Problem, device: Device) -> int:
    """How many programs share a tile's sum: more while multiprocessors would have nothing to do, and sums stay long."""
    config = rule.config
    if problem.whole_k:
        return 1
    columns = sum(-(-n // config.block_n) for n in problem.columns)
    programs = problem.batch * -(-problem.m // config.block_m) * columns
    splits = 1
    while (
        2 * splits <= rule.splits and 2 * splits * programs <= device.multiprocessors and problem.k >= 8 * splits * config.block_k
    ):
        splits *= 2
    return splits


def fitted(config: Config, problem: Problem, device: Device) -> Config:
    """With as many stages as fit into shared memory."""
    rows = config.block_m if config.form == "gemm" else 0
    stage = (rows + problem.contractions * config.block_n) * config.block_k * problem.element
    return replace(config, stages=max(1, min(config.stages, device.shared // stage)))


def smaller(config: Config) -> Config | None:
    """The next one to try where a kernel needs more than the device has, or None."""
    if config.stages > 1:
        return replace(config, stages=config.stages - 1)
    if config.form == "attention":
        return replace(config, block_n=config.block_n // 2) if config.block_n > 16 else None
    if config.block_k > 16:
        return replace(config, block_k=config.block_k // 2)
    if config.form == "gemm" and max(config.block_m, config.block_n) > 16:
        wide = config.block_n >= config.block_m
        return replace(config, block_n=config.block_n // 2) if wide else replace(config, block_m=config.block_m // 2)
    return None
