"""Times the other kinds of programs against eager torch: whole rows (residual + LayerNorm), gate and up, q/k/v, attention.

Run `python benchmarks/cpu_kernels/bench_groups.py [--seconds 1] [--dtype float32,bfloat16] [name ...]`.

A cell is eager's time over ours, with packed and natural weights; GF/s counts the products.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from bench import interleave, product_run
from harness import Kernel
from torch import Tensor
from torch.nn import functional

Run = Callable[[], object]
Case = tuple[dict[str, Run], int]


def both(kernel: Kernel, tensors: list[Tensor], weights: tuple[int, ...], threads: int) -> dict[str, Run]:
    runs: dict[str, Run] = {"natural": kernel.prepare(tensors, {}, threads)}
    packed = {i: p for i in weights if (p := kernel.pack(tensors[i], i)) is not None}
    if packed:
        runs["packed"] = kernel.prepare(tensors, packed, threads)
    return runs


def norm(dtype: torch.dtype, threads: int, m: int, n: int, k: int) -> Case:
    x, w, residual = torch.randn(m, k).to(dtype), (torch.randn(n, k) / k**0.5).to(dtype), torch.randn(m, n).to(dtype)
    bias, gamma, beta, out = (torch.randn(s).to(dtype) for s in ((n,), (n,), (n,), (m, n)))
    runs = both(Kernel("Norm", dtype), [x, w, bias, residual, gamma, beta, out], (1,), threads)
    runs["eager"] = lambda: functional.layer_norm(functional.linear(x, w, bias) + residual, (n,), gamma, beta)
    return runs, 2 * m * n * k


def swiglu(dtype: torch.dtype, threads: int, m: int, n: int, k: int) -> Case:
    x, g, u = torch.randn(m, k).to(dtype), (torch.randn(n, k) / k**0.5).to(dtype), (torch.randn(n, k) / k**0.5).to(dtype)
    out = torch.empty(m, n, dtype=dtype)
    runs = both(Kernel("Swiglu", dtype), [x, g, u, out], (1, 2), threads)
    runs["eager"] = lambda: functional.silu(functional.linear(x, g)) * functional.linear(x, u)
    return runs, 4 * m * n * k


def projections(dtype: torch.dtype, threads: int, m: int, n: int, k: int) -> Case:
    x, ws = torch.randn(m, k).to(dtype), [(torch.randn(n, k) / k**0.5).to(dtype) for _ in range(3)]
    bs, outs = [torch.randn(n).to(dtype) for _ in range(3)], [torch.empty(m, n, dtype=dtype) for _ in range(3)]
    runs = both(Kernel("Projections", dtype), [x, *ws, *bs, *outs], (1, 2, 3), threads)
    runs["eager"] = lambda: [functional.linear(x, w, b) for w, b in zip(ws, bs, strict=True)]
    return runs, 6 * m * n * k


def attention(dtype: torch.dtype, threads: int, batch: int, heads: int, rows: int, d: int) -> Case:
    q, k, v = (torch.randn(batch, rows, heads, d).to(dtype).transpose(1, 2) for _ in range(3))
    mask, out = torch.zeros(rows, dtype=dtype), torch.empty(batch, heads, rows, d, dtype=dtype)
    runs = both(Kernel("Attention", dtype), [q, k, v, mask, out], (), threads)
    runs["eager"] = lambda: functional.scaled_dot_product_attention(q, k, v, attn_mask=mask.expand(rows, rows))
    return runs, 4 * batch * heads * rows * rows * d


def gradient(dtype: torch.dtype, threads: int, m: int, n: int, k: int) -> Case:
    x, w = torch.randn(k, m).to(dtype), torch.randn(k, n).to(dtype)
    bias, out = torch.randn(n).to(dtype), torch.empty(m, n, dtype=dtype)
    runs = both(Kernel("Linear", dtype, LEFT_TRANSPOSED=1, RIGHT_TRANSPOSED=0), [x, w, bias, out], (), threads)
    runs["eager"] = lambda: torch.addmm(bias, x.t(), w)
    return runs, 2 * m * n * k


def columns(dtype: torch.dtype, threads: int, m: int, n: int, k: int) -> Case:
    x, w = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    bias, out = torch.randn(n).to(dtype), torch.empty(m, n, dtype=dtype)
    runs = both(Kernel("Linear", dtype, RIGHT_TRANSPOSED=0), [x, w, bias, out], (1,), threads)
    runs["eager"] = lambda: torch.addmm(bias, x, w)
    return runs, 2 * m * n * k


CASES: dict[str, tuple[Callable[..., Case], list[tuple[int, ...]]]] = {
    "norm": (norm, [(1, 384, 1536), (16, 384, 384), (16, 384, 1536), (128, 384, 384), (128, 384, 1536), (1024, 384, 1536)]),
    "swiglu": (swiglu, [(1, 2816, 1024), (16, 2816, 1024), (128, 2816, 1024)]),
    "projections": (projections, [(16, 384, 384), (128, 384, 384), (1024, 384, 384)]),
    "attention": (
        attention,
        [(1, 12, 16, 32), (1, 12, 128, 32), (32, 12, 32, 32), (8, 12, 128, 32), (1, 12, 512, 64), (1, 8, 1024, 128)],
    ),
    "gradient": (gradient, [(384, 384, 1024), (1536, 384, 1024)]),
    "columns": (
        columns,
        [(1, 2304, 768), (4, 2304, 768), (16, 2304, 768), (16, 4096, 1024), (128, 2304, 768), (1024, 2304, 768)],
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--dtype", default="float32,bfloat16")
    parser.add_argument("names", nargs="*", default=[])
    arguments = parser.parse_args()
    threads = torch.get_num_threads()
    for text in arguments.dtype.split(","):
        dtype = getattr(torch, text)
        for name in arguments.names or CASES:
            build, shapes = CASES[name]
            for shape in shapes:
                with torch.inference_mode():
                    runs, products = build(dtype, threads, *shape)
                    limit, limit_products = product_run(dtype, threads)
                    best = interleave({**runs, "limit": limit}, arguments.seconds)
                peak = limit_products / best["limit"]
                cells = [f"{text:9}{name:12}{','.join(map(str, shape)):>15}  peak {peak / 1e9:5.0f}"]
                for own in ("packed", "natural"):
                    if own in best:
                        rate = products / best[own]
                        cells.append(
                            f"{own} {1e6 * best[own]:8.1f} us {100 * rate / peak:4.0f}%  eager {best['eager'] / best[own]:5.2f}"
                        )
                print(" | ".join(cells), flush=True)


if __name__ == "__main__":
    main()
