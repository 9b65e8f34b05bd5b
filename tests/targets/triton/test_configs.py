"""The choice of a configuration: tables that serve every call, and what is fitted to it."""

from dataclasses import replace

import pytest

from postlude.targets.triton.configs import TABLES, Config, Device, Problem, choose, fitted, rules, smaller

H200 = Device("sm_90", 132, 227 << 10)
DEVICES = (H200, Device("sm_80", 108, 163 << 10), Device("gfx942", 304, 64 << 10), Device("gfx1100", 96, 64 << 10))
DEVICES += (Device("sm_121", 48, 99 << 10), Device("interpreter", 4, 64 << 10))
ROWS = (1, 2, 3, 8, 16, 17, 32, 33, 64, 65, 128, 129, 5000)


def power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch)
@pytest.mark.parametrize("element", [2, 4, 8])
def test_every_call_has_a_configuration(device: Device, element: int) -> None:
    for m in ROWS:
        for n in (1, 1000, 4096, 14336, 200_000):
            for along_k in (True, False):
                for contractions in (1, 2, 3):
                    problem = Problem(m, (n,), 4096, element=element, along_k=along_k, contractions=contractions)
                    config = choose(device, problem)
                    assert config.form == "gemm" or (m <= config.block_m and along_k)
                    assert all(map(power_of_two, (config.block_m, config.block_n, config.block_k, config.warps)))
                    tile = (config.block_m if config.form == "gemm" else 0) + contractions * config.block_n
                    assert config.stages == 1 or tile * config.block_k * element * config.stages <= device.shared


def test_no_rule_stands_behind_one_that_always_holds_first() -> None:
    limits = ("rows", "along_k", "contractions", "columns", "k")
    for key, table in TABLES.items():
        for number, rule in enumerate(table):
            for earlier in table[:number]:
                wider = all(getattr(earlier, name) >= getattr(rule, name) for name in limits if name != "along_k")
                assert not (wider and earlier.along_k in (None, rule.along_k)), (key, rule)


@pytest.mark.parametrize(
    ("arch", "like"), [("sm_90", "sm_90"), ("sm_89", "sm_8"), ("gfx90a", "gfx9"), ("sm_121", ""), ("cpu", "")]
)
def test_a_table_is_found_by_the_longest_name(arch: str, like: str) -> None:
    assert rules(arch, 2) is TABLES[like, 2]


def test_more_columns_need_other_tiles() -> None:
    chosen = [choose(H200, Problem(16, (n,), 4096)) for n in (4096, 6144, 14336)]
    assert len(set(chosen)) == 3
    assert choose(H200, Problem(16, (2048, 1024, 1024), 4096)) == chosen[0]
    assert choose(H200, Problem(16, (1024,), 4096, batch=6)) == chosen[1]
    assert choose(H200, Problem(16, (4096,), 4096, contractions=2)) not in chosen


@pytest.mark.parametrize(
    ("n", "k", "splits"), [(8192, 8192, 1), (4096, 4096, 2), (1024, 4096, 4), (1024, 16384, 8), (64, 1024, 1)]
)
def test_k_is_split_while_multiprocessors_are_idle_and_sums_long(n: int, k: int, splits: int) -> None:
    assert choose(H200, Problem(16, (n,), k)).split_k == splits


def test_stages_that_do_not_fit_are_dropped() -> None:
    config = Config("gemm", 16, 64, 128, 4, 5)
    assert fitted(config, Problem(16, (64,), 512), H200).stages == 5
    assert fitted(config, Problem(16, (64,), 512), replace(H200, shared=64 << 10)).stages == 3
    assert fitted(config, Problem(16, (64,), 512, contractions=2), replace(H200, shared=64 << 10)).stages == 1
    assert fitted(config, Problem(16, (64,), 512), replace(H200, shared=1 << 10)).stages == 1


@pytest.mark.parametrize("config", [Config("gemm", 128, 64, 64, 4, 3), Config("gemv", 1, 8, 512, 4, 3)])
def test_ever_smaller_ends(config: Config) -> None:
    steps = 0
    while (less := smaller(config)) is not None:
        before = config.block_m * config.block_n * config.block_k * config.stages
        assert less.block_m * less.block_n * less.block_k * less.stages < before
        config, steps = less, steps + 1
    assert steps > 4
    assert (config.block_k, config.stages) == (16, 1)
