"""Which tiles are chosen."""

import pytest

from postlude.targets.cute.configurations import Configuration, Problem, choose, configurations, expected_time, ranked, shortlist

WEIGHTS = [(4096, 4096), (14336, 4096), (4096, 14336), (6144, 4096), (1024, 4096), (768, 3072), (28672, 8192)]
PROCESSORS = {9: 132, 10: 148, 12: 188}


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(("n", "k"), WEIGHTS)
@pytest.mark.parametrize("major", PROCESSORS)
def test_a_weight_meets_few_kernels_and_loses_little_by_it(n: int, k: int, paired: bool, major: int) -> None:
    processors = PROCESSORS[major]
    few = shortlist(n, k, paired, major, processors)
    assert len(few) <= 6
    every = configurations(major, paired)
    lost = []
    for m in range(64, 8192, 72):
        problem = Problem(m, n, k, paired=paired)
        chosen = choose(problem, major, processors)
        assert chosen in few
        lost.append(expected_time(problem, chosen, processors) / min(expected_time(problem, c, processors) for c in every))
    assert sum(lost) / len(lost) < 1.02
    assert max(lost) < 1.3


def test_pairs_have_whole_pairs_in_a_subtile() -> None:
    for major in PROCESSORS:
        assert all(not c.swapped and c.tile_n % 32 == 0 for c in configurations(major, True, swept=True))


def test_tiles_fill_the_processors() -> None:
    """Two waves of 128 x 224 where 128 x 128 takes four, the last one nearly empty; 128 x 64 where 128 x 128 leaves half idle."""
    assert choose(Problem(512, 14336, 4096), 9, 132).tile_n == 224
    assert choose(Problem(256, 4096, 4096), 9, 132).tile_n == 64
    assert choose(Problem(2048, 4096, 4096), 9, 132) == Configuration(128, 128, 1, 2, pingpong=True)


def test_a_sweep_begins_with_what_is_expected_to_be_fastest() -> None:
    problem = Problem(2048, 4096, 4096)
    every = ranked(problem, 9, 132)
    times = [expected_time(problem, c, 132) for c in every]
    assert times == sorted(times)
    assert len(set(every)) == len(every)
    assert set(configurations(9, False)) <= set(every)
