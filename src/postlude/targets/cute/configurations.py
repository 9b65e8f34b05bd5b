"""The tile configurations of a GEMM: which there are on each architecture, and which to take for a problem without measuring.

Cooperative: all warpgroups of a block share one tile. Pingpong: two warpgroups work on a tile each, so that the epilogue of one
hides behind the mainloop of the other.
"""

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


@dataclass(frozen=True)
class Problem:
    """What a choice depends on: sizes (columns of a pair count twice), and whether accumulator columns are pairs."""

    m: int
    n: int
    k: int
    batch: int = 1
    paired: bool = False


_COOPERATIVE_90 = ((128, 128), (128, 160), (128, 192), (128, 224), (128, 256), (256, 128), (256, 160), (256, 192), (64, 256))
_PINGPONG_90 = ((64, 128), (64, 192), (64, 256), (128, 128), (128, 160), (128, 192), (128, 208), (192, 128))
_CLUSTERS_90 = ((2, 1), (1, 2), (1, 1))


@lru_cache
def _sm90(paired: bool) -> tuple[Configuration, ...]:
    tiles = [(tile, False) for tile in _COOPERATIVE_90] + [(tile, True) for tile in _PINGPONG_90]
    found = []
    for ((m, n), pingpong), (cluster_m, cluster_n), swapped in product(tiles, _CLUSTERS_90, (False, True)):
        if paired and (swapped or n % 32):
            continue  # pairs are neighbouring columns of the kernel's accumulator
        found.append(Configuration(m, n, cluster_m, cluster_n, pingpong, swapped))
    return tuple(found)


@lru_cache
def _sm100(paired: bool) -> tuple[Configuration, ...]:
    tiles = [(m, n, cluster) for n in (64, 128, 192, 256) for m, cluster in ((128, (1, 1)), (256, (2, 1)))]
    return tuple(Configuration(m, n, *cluster) for m, n, cluster in tiles)


@lru_cache
def _sm120(paired: bool) -> tuple[Configuration, ...]:
    tiles = ((128, 128), (128, 64), (64, 128))
    return tuple(Configuration(m, n, pingpong=pingpong) for (m, n), pingpong in product(tiles, (True, False)))


_BY_MAJOR = {9: _sm90, 10: _sm100, 12: _sm120}


def all_configurations(major: int, paired: bool) -> tuple[Configuration, ...]:
    """Every configuration worth trying on a compute capability."""
    return _BY_MAJOR[major](paired)


def ranked(problem: Problem, major: int, processors: int) -> list[Configuration]:
    """All configurations, the one that is expected to be fastest first."""
    return sorted(all_configurations(major, problem.paired), key=lambda c: expected_time(problem, c, processors))


#: Cycles of a tile that no other tile's work hides, per element: the epilogue of a cooperative kernel.
_EPILOGUE_CYCLES = 0.2

#: Cycles to fill the pipeline at the start of a kernel.
_START_CYCLES = 3000.0

#: Multiply-adds of 16-bit numbers that a processor does in a cycle, at best.
_RATE = 2048.0


def expected_time(problem: Problem, configuration: Configuration, processors: int) -> float:
    """Cycles that a problem takes: a model to rank configurations by, not to compare with anything else."""
    m, n = (problem.n, problem.m) if configuration.swapped else (problem.m, problem.n)
    tile_m, tile_n = configuration.tile_m, configuration.tile_n
    clusters = problem.batch * ceil(m / (tile_m * configuration.cluster_m)) * ceil(n / (tile_n * configuration.cluster_n))
    waves = ceil(clusters * configuration.cluster_size / processors)
    # Bytes read from shared memory per multiply-add fall with the tile; blocks of a cluster share what they load.
    traffic = 1 / (tile_m * configuration.cluster_n) + 1 / (tile_n * configuration.cluster_m)
    efficiency = 1 / (1 + 12 * traffic)
    mainloop = tile_m * tile_n * problem.k / (_RATE * efficiency)
    epilogue = tile_m * tile_n * _EPILOGUE_CYCLES
    if configuration.pingpong:
        # Two tiles in flight per processor: only the last epilogue shows, but a single wave leaves a warpgroup idle.
        return _START_CYCLES + waves * mainloop + epilogue
    return _START_CYCLES + waves * (mainloop + epilogue)
