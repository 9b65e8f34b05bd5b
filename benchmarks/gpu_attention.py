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
from postlude.ir import parse
from postlude.targets import triton as target
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
    options.add_argument("--lengths", nargs="+", type=int, default=sorted({length for _, length in CASES}))
    arguments = options.parse_args()
    rows = []
    for batch, length in CASES:
        if length not in arguments.lengths:
            continue
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
            ordered = sorted((name for name in each if name not in modes), key=each.__getitem__)
            for name in ordered[:6] + [name for name in ordered[6:] if name.startswith("chosen")]:
                print(f"      {each[name]:8.2f} us  {name}", flush=True)
        common.save(arguments.out, {"heads": HEADS, "shared": SHARED, "width": WIDTH, "rows": rows})


REGION = """region(b, m, n, n1, k); %q = operand [b, m, k] bf16; %k = operand [b, n, k] bf16; %v = operand [b, n, n1] bf16;
%mask = operand [b, m, n] bool; %acc = contract %q, %k : f32; %0 = const 0.08838834764831845; %1 = mul %acc, %0;
%2 = const -inf; %3 = where %mask, %1, %2; %4 = reduce max n %3; %5 = eq %2, %4; %6 = const 0.0; %7 = where %5, %6, %4;
%8 = sub %3, %7; %9 = exp %8; %10 = const 1.0; %11 = reduce sum n %9; %12 = where %5, %10, %11; %13 = reciprocal %12;
%14 = mul %9, %13; %15 = contract %14, %v : f32; yield [b, m, n1] bf16 %15"""


def swept(batch: int, length: int, sets: list[tuple[Tensor, ...]]) -> dict[str, Callable[[], None]]:
    """The kernel alone, chosen and with other configurations."""
    region = parse(REGION)
    rows = HEADS // SHARED
    out = torch.empty(batch, SHARED, rows, WIDTH, device="cuda", dtype=torch.bfloat16)
    given = [(q.view(batch, SHARED, rows, WIDTH), k, v, m.expand(batch, SHARED, rows, length), out) for q, k, v, m in sets]
    properties = torch.cuda.get_device_properties(0)
    device = configs.Device("sm_90", properties.multi_processor_count, 227 << 10)
    chosen = configs.attention(device, rows, length, WIDTH, WIDTH, batch * SHARED, 2)
    sides = {}
    for block_n, warps, stages, splits in itertools.product((32, 64, 128), (4, 8), (1, 2, 3), (1, 2, 4, 8, 16, 32, 64)):
        programs, steps = splits * batch * SHARED, length // block_n
        if (warps == 8 and block_n < 128) or splits > steps or not 8 <= programs <= 1024 or steps // splits > 32:
            continue
        config = replace(chosen, block_n=block_n, warps=warps, stages=min(stages, steps), split_k=splits)
        sides[f"{block_n} keys, {warps} warps, {stages} stages, {splits} parts"] = walk(target.load(region, config), given)
    return sides | {f"chosen: {chosen}": walk(target.load(region), given)}


if __name__ == "__main__":
    main()
