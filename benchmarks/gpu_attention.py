"""Attention of one new token on one GPU: grouped heads against a cache, with the mask of a cache that is not full.

Each mode is `torch.compile` of the same function, or eager; its GPU work is a CUDA graph that walks through copies of the caches,
256 MB or more, so that every key comes from memory. Modes are interleaved in one process.

    python benchmarks/gpu_attention.py --out results/gpu_attention.json
    python benchmarks/gpu_attention.py --sweep      configurations of the kernel too
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

import gpu_common as common
from postlude.targets.triton import configs

if TYPE_CHECKING:
    from collections.abc import Callable

HEADS, SHARED, WIDTH = 32, 8, 128
COLD_BYTES = 256 << 20
CASES = tuple(itertools.product((1, 16), (256, 1024, 8192, 32768)))
MODES: dict[str, Callable[..., Any]] = {
    "eager": lambda function: function,
    "inductor": torch.compile,
    "postlude": partial(torch.compile, backend="postlude"),
}


def step(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """As models write it: shared heads repeated, then scaled dot-product attention."""
    batch, heads, length, width = key.shape
    groups = query.shape[1] // heads
    key, value = (x[:, :, None].expand(-1, -1, groups, -1, -1).reshape(batch, -1, length, width) for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=visible).transpose(1, 2).reshape(batch, 1, -1)


def inputs(batch: int, length: int) -> list[tuple[Tensor, ...]]:
    """Several sets of a query, a cache that is full but for 16 tokens, and its mask."""
    size = 2 * batch * SHARED * length * WIDTH * 2
    visible = (torch.arange(length, device="cuda") < length - 16)[None, None, None].expand(batch, 1, 1, -1)
    sets = []
    for _ in range(max(2, min(64, COLD_BYTES // size))):
        query = torch.randn(batch, 1, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        cache = (torch.randn(batch, SHARED, length, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        sets.append((query, *cache, visible))
    return sets


def walk(function: Callable[..., Any], sets: list[tuple[Tensor, ...]]) -> Callable[[], None]:
    """A CUDA graph of one call for each set."""
    return common.graph_of(lambda: [function(*one) for one in sets])


@torch.no_grad()
def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--sweep", action="store_true")
    arguments = options.parse_args()
    rows = []
    for batch, length in CASES:
        torch._dynamo.reset()
        sets = inputs(batch, length)
        exact = step(*(x.double() if x.is_floating_point() else x for x in sets[0]))
        modes = {name: make(step) for name, make in MODES.items()}
        errors = {name: common.relative_error(function(*sets[0]), exact) for name, function in modes.items()}
        sides = {name: walk(function, sets) for name, function in modes.items()}
        if arguments.sweep:
            sides |= swept(batch, length, sets)
        times = common.interleave(sides, arguments.rounds, repeats=3)
        each = {name: time.microseconds / len(sets) for name, time in times.items()}
        rate = 2 * batch * SHARED * length * WIDTH * 2 / each["postlude"] / 1e6
        rows.append({"batch": batch, "length": length, "times": {n: vars(t) for n, t in times.items()}, "errors": errors})
        best = min(each["eager"], each["inductor"])
        print(
            f"batch {batch:3} keys {length:6}  "
            + "  ".join(f"{name} {each[name]:8.2f} us (error {errors[name]:.2e})" for name in modes)
            + f"  {best / each['postlude']:.2f}x  {rate:.2f} TB/s",
            flush=True,
        )
        if arguments.sweep:
            for name in sorted((name for name in each if name not in modes), key=each.__getitem__)[:4]:
                print(f"      {each[name]:8.2f} us  {name}", flush=True)
        common.save(arguments.out, {"heads": HEADS, "shared": SHARED, "width": WIDTH, "rows": rows})


def swept(batch: int, length: int, sets: list[tuple[Tensor, ...]]) -> dict[str, Callable[[], None]]:
    """The same with other configurations than the chosen one."""
    chosen = configs.attention
    sides = {}
    for block_n, warps, stages, splits in itertools.product((32, 64, 128), (2, 4), (2, 3), (1, 2, 4, 8, 16, 32, 64)):
        if splits * block_n > max(length, block_n) or not 64 <= splits * batch * SHARED <= 2048:
            continue

        def forced(*given: Any, change: dict[str, int]) -> configs.Config:
            return replace(chosen(*given), **change)

        change = {"block_n": block_n, "warps": warps, "stages": stages, "split_k": splits}
        configs.attention = partial(forced, change=change)
        torch._dynamo.reset()
        try:
            sides[f"{block_n} keys, {warps} warps, {stages} stages, {splits} parts"] = walk(MODES["postlude"](step), sets)
        finally:
            configs.attention = chosen
    return sides


if __name__ == "__main__":
    main()
