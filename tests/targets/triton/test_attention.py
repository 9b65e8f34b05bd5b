"""Attention's kernel, for any widths, masks, and numbers of parts that the keys are read in."""

import math

import pytest
import torch
from torch import Tensor

from postlude.ir import parse, to_text
from postlude.targets.triton import unsupported
from postlude.targets.triton.attention import softmax_of
from postlude.targets.triton.configs import Config, Device, attention
from tests.targets.triton.attention import MASKS, region
from tests.targets.triton.numerics import check, run


def operands(dtype: torch.dtype, mask: str, m: int, n: int, k: int, o: int, b: tuple[int, ...] = (2,)) -> list[Tensor]:
    torch.manual_seed(m + n + k)
    found = [torch.randn(*b, m, k), torch.randn(*b, n, k), torch.randn(*b, n, o)]
    found = [tensor.to(dtype) for tensor in found]
    if mask == "truth values":
        visible = torch.rand(*b, m, n) > 0.3
        visible[0, 0] = False  # a row that sees nothing gives 0
        found.append(visible)
    if mask == "a bias per key":
        found.append(torch.randn(n).to(dtype))
    return found


def config(splits: int, block_n: int = 16, block_k: int = 64, block_o: int = 64, rows: int = 16) -> Config:
    return Config("attention", 16, block_n, block_k, 4, 2, splits, block_o=block_o, rows=rows)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("splits", [1, 3])
def test_masks(mask: str, splits: int) -> None:
    check(region("f32", mask), operands(torch.float32, mask, 4, 70, 64, 64), config(splits))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(("m", "n", "k", "o"), [(1, 1, 1, 1), (4, 63, 40, 24), (17, 65, 64, 64), (3, 16, 33, 80)])
def test_sizes(dtype: str, m: int, n: int, k: int, o: int) -> None:
    types = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
    check(region(dtype), operands(types[dtype], "none", m, n, k, o), config(2, block_o=128))
    check(region(dtype), operands(types[dtype], "none", m, n, k, o))  # what would be chosen


def test_parts_are_joined_several_at_a_time() -> None:
    for splits, rows in ((19, 16), (32, 4), (3, 4)):
        check(region("f32"), operands(torch.float32, "none", 4, 300, 64, 64), config(splits, rows=rows))


def test_more_parts_than_keys() -> None:
    """Programs without keys leave parts that change nothing."""
    check(region("f32"), operands(torch.float32, "none", 2, 20, 16, 16), config(4))


@pytest.mark.parametrize("splits", [1, 2, None])
def test_no_keys(splits: int | None) -> None:
    """A row that sees nothing gives 0, whatever the result's memory held."""
    (result,) = run(region("f32"), operands(torch.float32, "none", 3, 0, 16, 24), splits and config(splits))
    assert torch.equal(result, torch.zeros(2, 3, 24))


@pytest.mark.parametrize("splits", [1, 3])
def test_heads_of_a_cache(splits: int) -> None:
    """Keys and values lie as a cache keeps them, queries as a projection leaves them."""
    query = torch.randn(3, 1, 2 * 4 * 32).view(3, 2, 4, 32)
    key = torch.randn(3, 90, 2, 32).transpose(1, 2)[:, :, :70]
    value = torch.randn(3, 2, 90, 48)[:, :, 5:75]
    mask = (torch.rand(3, 1, 1, 70) > 0.4).expand(3, 2, 4, 70)
    check(region("f32", "truth values"), [query, key, value, mask], config(splits, block_k=32))


def test_an_epilogue() -> None:
    epilogue = "%half = const 0.5; %y = mul %out, %half; %z = tanh %y; yield [b, m, o] {0} %y; yield [b, m, o] {0} %z"
    check(region("f32", "none", epilogue), operands(torch.float32, "none", 5, 33, 16, 24), config(2))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("splits", [1, 2])
def test_special_scores(value: float, splits: int) -> None:
    """In one row; the others are what they are without it."""
    mask = "a bias per key"
    given = operands(torch.float32, mask, 3, 40, 16, 16)
    given[0][1, 2, 0] = value
    given[1][1, 7, 0] = 1.0
    check(region("f32", mask), given, config(splits))


def test_what_is_no_attention() -> None:
    """The same two products with something else between them."""
    text = (
        "region(b, m, n, n1, k); %q = operand [b, m, k] f32; %k = operand [b, n, k] f32; %v = operand [b, n, n1] f32;"
        " %acc = contract %q, %k : f32; %0 = tanh %acc; %1 = contract %0, %v : f32; yield [b, m, n1] f32 %1"
    )
    assert softmax_of(parse(text)) is None
    assert "contracts %0" in str(unsupported(parse(text)))
    assert softmax_of(region("f32")) is not None
    # The logarithm of the sum, which training keeps, is no result that this kernel has.
    logsum = "%log = log %sum; yield [b, m] f32 %log; yield [b, m, o] f32 %out"
    assert softmax_of(region("f32", "none", logsum)) is None


@pytest.mark.parametrize(
    ("batch", "keys", "block_n", "parts"),
    [(8, 256, 32, 8), (8, 1024, 128, 8), (8, 8192, 128, 16), (128, 256, 128, 1), (128, 1024, 128, 1), (128, 8192, 128, 2)],
)
def test_parts_fill_the_device(batch: int, keys: int, block_n: int, parts: int) -> None:
    """What was the best on an H200, or within two per cent of it for short caches of many."""
    config = attention(Device("sm_90", 132, 232448), 4, keys, 128, 128, batch, 2)
    assert (config.block_n, config.split_k, config.stages) == (block_n, parts, 3)


@pytest.mark.parametrize("width", [64, 128, 256, 512])
def test_blocks_fit_into_shared_memory(width: int) -> None:
    for element in (2, 4):
        config = attention(Device("sm_80", 108, 163 << 10), 4, 100_000, width, width, 8, element)
        assert config.stages * config.block_n * 2 * width * element <= 163 << 10 or config.block_n == 32


def test_a_softmax_over_the_queries_is_no_attention() -> None:
    assert softmax_of(parse(to_text(region("f32")).replace("reduce max n", "reduce max m"))) is None
