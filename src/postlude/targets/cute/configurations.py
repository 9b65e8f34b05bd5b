"""The tile configurations of a GEMM: which there are on each architecture, and which to take for a problem without measuring.

Cooperative: all warpgroups of a block share one tile. Pingpong: two warpgroups work on a tile each, so that the epilogue of one
hides behind the mainloop of the other.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import ceil


@dataclass(frozen=True)
class Configuration:
    """How a GEMM is cut into tiles.

    Attributes:
        tile_m: rows of a tile.
        tile_n: columns of a tile.
        cluster_m: blocks of a cluster that share columns.
        cluster_n: blocks of a cluster that share rows.
        pingpong: whether two warpgroups alternate.
        swapped: whether the transposed problem is computed, so that tile_m counts columns of the result.
        swizzle: tiles in a group of the rasterization.
        raster: ``m`` or ``n``: the direction in which tiles follow each other; empty leaves it to the shape.
        tile_k: depth of a tile; 0 is 128 bytes.
    """

    tile_m: int
    tile_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    pingpong: bool = False
    swapped: bool = False
    swizzle: int = 8
    raster: str = ""
    tile_k: int = 0

    def __str__(self) -> str:
        kind = "pingpong" if self.pingpong else "cooperative"
        depth = f"x{self.tile_k}" if self.tile_k else ""
        parts = [
            f"{self.tile_m}x{self.tile_n}{depth} {kind} cluster {self.cluster_m}x{self.cluster_n}",
            f"swizzle {self.swizzle}",
        ]
        parts += ["swapped"] if self.swapped else []
        parts += [f"raster {self.raster}"] if self.raster else []
        return " ".join(parts)

    @property
    def cluster_size(self) -> int:
        """Blocks of a cluster."""
        return self.cluster_m * self.cluster_n

    def block(self, major: int) -> tuple[int, int]:
        """Rows and columns that one block computes: on sm_100 two blocks of a cluster share a tile."""
        return (self.tile_m // 2 if major == 10 and self.cluster_m % 2 == 0 else self.tile_m), self.tile_n


@dataclass(frozen=True)
class Problem:
    """What a choice depends on: sizes (columns of a pair count twice), and whether accumulator columns are pairs.

    `crowded`: whether the epilogue needs registers beside those of the accumulator, for reductions or several tiles.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    paired: bool = False
    crowded: bool = False


@dataclass(frozen=True)
class _Tile:
    """A tile, and with which clusters it is tried."""

    m: int
    n: int
    pingpong: bool
    clusters: tuple[tuple[int, int], ...] = ((1, 2), (2, 1), (1, 1))


#: sm_90: the tiles that are chosen from. Nothing else beat the best of the first four by more than 3 % on an H200, wherever it
#: was measured (see `expected_time`). The narrow ones, for problems too small to give each processor a large tile, were not
#: measured in that role yet.
_TILES_90 = (
    _Tile(128, 128, True),
    _Tile(128, 192, True),
    _Tile(128, 160, True),
    _Tile(128, 224, False),
    _Tile(128, 64, True),
    _Tile(64, 64, True, ((1, 2), (2, 1))),
)

#: sm_90: what a sweep measures beside them.
_SWEPT_TILES_90 = (
    *(_Tile(m, n, False) for m, n in ((128, 128), (128, 256), (256, 128), (256, 160), (256, 192), (64, 128), (128, 64))),
    *(_Tile(m, n, True) for m, n in ((64, 256), (128, 208), (192, 128), (64, 128), (64, 32), (128, 32))),
)


def _sm90(paired: bool, swept: bool) -> Iterator[Configuration]:
    for tile in _TILES_90:
        for cluster in tile.clusters:
            yield Configuration(tile.m, tile.n, *cluster, tile.pingpong)
    if swept:
        for tile, cluster, swapped in product(_TILES_90 + _SWEPT_TILES_90, ((2, 1), (1, 2), (1, 1)), (False, True)):
            yield Configuration(tile.m, tile.n, *cluster, tile.pingpong, swapped)


def _sm100(paired: bool, swept: bool) -> Iterator[Configuration]:
    for n, (m, cluster) in product((256, 192, 128, 64), ((256, (2, 1)), (128, (1, 1)))):
        yield Configuration(m, n, *cluster)


def _sm120(paired: bool, swept: bool) -> Iterator[Configuration]:
    for (m, n), pingpong in product(((128, 128), (128, 64), (64, 128)), (True, False)):
        yield Configuration(m, n, pingpong=pingpong)


_BY_MAJOR = {9: _sm90, 10: _sm100, 12: _sm120}


@lru_cache
def configurations(major: int, paired: bool, swept: bool = False, crowded: bool = False) -> tuple[Configuration, ...]:
    """The configurations to choose from on a compute capability, in order of preference; with `swept`, all worth measuring."""
    found = dict.fromkeys(_BY_MAJOR[major](paired, swept))
    return tuple(c for c in found if (not paired or serves_pairs(c)) and (swept or not crowded or has_room(c)))


def has_room(configuration: Configuration) -> bool:
    """Whether a warpgroup's registers have room for more than its accumulator.

    With 128 x 192 numbers for one warpgroup, reductions and a second tile to read were moved to local memory (ptxas, sm_90a);
    with 128 x 160 nothing was.
    """
    return not configuration.pingpong or configuration.tile_m * configuration.tile_n <= 128 * 160


def serves_pairs(configuration: Configuration) -> bool:
    """Whether accumulator columns may be pairs.

    Pairs are neighbouring columns: their problem can't be transposed, and tiles have a multiple of 32 columns.
    """
    return not (configuration.swapped or configuration.tile_n % 32)


@lru_cache
def every_configuration() -> frozenset[Configuration]:
    """All configurations of all architectures."""
    return frozenset(c for major in _BY_MAJOR for c in configurations(major, paired=False, swept=True))


#: Configurations that one weight meets at most, whatever the rows: each costs a compile of seconds.
_MOST = 6

#: Rows that stand for all, 6 to an octave: where another configuration would help by less than this on average, none is added.
_ROWS = tuple(64 * ceil(2 ** (i / 6)) for i in range(49))
_WORTH = 0.0005

#: What is expected to be slower by less than this is as good: the first in order of preference is taken.
_AS_GOOD = 1.01


@lru_cache(maxsize=1024)
def shortlist(n: int, k: int, paired: bool, major: int, processors: int, crowded: bool = False) -> tuple[Configuration, ...]:
    """The few configurations that serve a weight at every number of rows, in order of preference.

    Found by adding the most useful one until none is.
    """
    every = configurations(major, paired, crowded=crowded)
    times = [[expected_time(Problem(m, n, k, paired=paired), c, processors) for c in every] for m in _ROWS]
    best = [min(row) for row in times]
    chosen: list[int] = []

    def loss(index: int) -> float:
        """Relative time that is lost on average with this one beside those chosen."""
        both = [*chosen, index]
        return sum(min(row[i] for i in both) / least for row, least in zip(times, best, strict=True)) / len(_ROWS) - 1

    while len(chosen) < min(_MOST, len(every)):
        chosen.append(min((i for i in range(len(every)) if i not in chosen), key=loss))
        if loss(chosen[-1]) < _WORTH:
            break
    return tuple(every[i] for i in sorted(chosen))


def choose(problem: Problem, major: int, processors: int) -> Configuration:
    """The configuration to use: of the weight's shortlist, the one that is expected to be fastest.

    A graph that serves every length so compiles at most six kernels for one weight, and all of them are known before the first
    call. With m from 64 to 16384 and common sizes of layers, the model loses a few tenths of a percent on average by this.
    """
    few = shortlist(problem.n, problem.k, problem.paired, major, processors, problem.crowded)
    times = [expected_time(problem, c, processors) for c in few]
    return next(c for c, time in zip(few, times, strict=True) if time <= min(times) * _AS_GOOD)


#: Most configurations that are measured for a call beside the chosen one, each a compile of seconds, and how much longer than
#: the fastest they may be expected to take: the standard deviation of the model (see `expected_time`).
_MOST_MEASURED = 6
_WORTH_MEASURING = 1.07


def promising(problem: Problem, major: int, processors: int) -> list[Configuration]:
    """Configurations that may be faster than the one that `choose` takes, the one that is expected to be fastest first."""
    own = choose(problem, major, processors)
    others = [c for c in ranked(problem, major, processors) if c != own]
    limit = _WORTH_MEASURING * expected_time(problem, own, processors)
    return [c for c in others if expected_time(problem, c, processors) <= limit][:_MOST_MEASURED]


def ranked(problem: Problem, major: int, processors: int) -> list[Configuration]:
    """All configurations worth measuring, the one that is expected to be fastest first."""
    every = configurations(major, problem.paired, swept=True)
    return sorted(every, key=lambda c: expected_time(problem, c, processors))


#: Multiply-adds of 16-bit numbers that a processor does in a cycle.
_RATE = 2048.0

#: Bytes that a processor gets from the L2 cache in a cycle while all of them ask, in the first wave, where they work on the same
#: columns of both operands at the same time, and where there are more.
_L2_BYTES = (64.0, 57.0)

#: Cycles to start a kernel and fill the pipeline, and what more it takes where blocks of a cluster wait for each other.
_START_CYCLES = 3400.0
_CLUSTER_CYCLES = 700.0

#: Cycles of the epilogue per element, where no other tile's mainloop hides it.
_EPILOGUE_CYCLES = 0.1


def expected_time(problem: Problem, configuration: Configuration, processors: int) -> float:
    """Cycles that a problem takes, by a model with few constants.

    Tiles are computed in waves, one tile per processor. A tile's mainloop takes as long as its multiply-adds, or as the bytes of
    both operands take to come from L2, where one read serves all blocks of a cluster that need it. Pingpong hides the epilogue.

    The constants were fitted to the times of 27 problems on an H200 (plain, bias + GELU and SwiGLU; m 512 to 8192, n and k of
    4096 and 14336; about 25 configurations each). There the model's times are off by 7 % (standard deviation), one cycle
    standing for 0.8 ns, and what `choose` takes is slower than the best that was measured by 0.9 % in the geometric mean, 3.0 %
    at most.
    """
    tile_m, tile_n = configuration.tile_m, configuration.tile_n
    cluster_m, cluster_n = configuration.cluster_m, configuration.cluster_n
    m, n = (problem.n, problem.m) if configuration.swapped else (problem.m, problem.n)
    clusters = problem.batch * ceil(m / (tile_m * cluster_m)) * ceil(n / (tile_n * cluster_n))
    waves = ceil(clusters * configuration.cluster_size / processors)
    arithmetic = tile_m * tile_n / _RATE
    loads = 2 * (tile_m / cluster_n + tile_n / cluster_m) / _L2_BYTES[waves > 1]
    tile = problem.k * max(arithmetic, loads)
    if not configuration.pingpong:
        tile += tile_m * tile_n * _EPILOGUE_CYCLES
    return _START_CYCLES + _CLUSTER_CYCLES * (configuration.cluster_size > 1) + waves * tile
