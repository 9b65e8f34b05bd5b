"""Checks the driver and the microkernels against float64: every program, element type, layout, stride and edge size.

Run `python benchmarks/cpu_kernels/check.py [rounds]`.
"""

from __future__ import annotations

import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from harness import Kernel
from torch import Tensor
from torch.nn import functional

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# a few units in the last place of the result type, times the growth of a random sum
TOLERANCE = {torch.float32: 4e-6, torch.float64: 1e-13, torch.bfloat16: 8e-3, torch.float16: 2e-3}
SIZES = (0, 1, 2, 3, 5, 6, 7, 12, 13, 15, 16, 17, 31, 33, 48, 49, 63, 64, 65, 96, 127, 128, 129, 200, 257)
DEPTHS = (0, 1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 64, 65, 127, 255, 256, 257, 511, 513, 1030)


def strided(shape: tuple[int, ...], dtype: torch.dtype, generator: random.Random, scale: float = 1.0) -> Tensor:
    """Random numbers behind random strides: dense, padded rows, permuted dimensions, every second column, an offset."""
    kind = generator.choice(("dense", "dense", "padded", "transposed", "stepped", "offset", "expanded"))
    if kind == "padded":
        return (torch.randn(*shape[:-1], shape[-1] + 3) * scale).to(dtype)[..., 1 : 1 + shape[-1]]
    if kind == "transposed":
        return (torch.randn(*shape[:-2], shape[-1], shape[-2]) * scale).to(dtype).transpose(-1, -2)
    if kind == "stepped":
        return (torch.randn(*shape[:-1], 2 * shape[-1]) * scale).to(dtype)[..., ::2]
    if kind == "offset":
        return (torch.randn(math.prod(shape) + 1) * scale).to(dtype)[1:].view(shape)
    if kind == "expanded":
        return (torch.randn(*shape[:-2], 1, shape[-1]) * scale).to(dtype).expand(shape)
    return (torch.randn(shape) * scale).to(dtype)


def compare(name: str, got: Tensor, want: Tensor, scale: Tensor | float, dtype: torch.dtype) -> None:
    if got.numel() == 0:
        return
    error = ((got.double() - want).abs() / (scale + want.abs() + 1e-30)).max().item()
    if not error <= TOLERANCE[dtype]:
        raise AssertionError(f"{name}: error {error:.3g}, allowed {TOLERANCE[dtype]:.3g}")


class Case:
    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.dtype, self.random = dtype, random.Random(seed)
        torch.manual_seed(seed)

    def size(self, *at_least: int) -> int:
        return max(self.random.choice(SIZES), *at_least, 0)

    def depth(self) -> int:
        return self.random.choice(DEPTHS)

    def tensor(self, *shape: int, scale: float = 1.0) -> Tensor:
        return strided(shape, self.dtype, self.random, scale)

    def dense(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self.dtype)

    def packed(self, kernel: Kernel, operands: list[Tensor], indices: tuple[int, ...]) -> dict[int, Tensor]:
        if self.random.random() < 0.6:
            return {}
        found = {i: kernel.pack(operands[i], i) for i in indices}
        return {i: p for i, p in found.items() if p is not None}

    def run(self, kernel: Kernel, operands: list[Tensor], results: list[Tensor], packable: tuple[int, ...] = ()) -> None:
        for result in results:
            result.fill_(math.nan)
        kernel.prepare([*operands, *results], self.packed(kernel, operands, packable), self.random.choice((1, 2, 2, 3)))()


def weight(case: Case, n: int, k: int, transposed: int) -> tuple[Tensor, Tensor]:
    w = case.tensor(n, k) if transposed else case.tensor(k, n)
    return w, (w if transposed else w.mT).double()


def check_linear(case: Case) -> str:
    options = {"RIGHT_TRANSPOSED": case.random.randint(0, 1), "LEFT_TRANSPOSED": case.random.randint(0, 1),
               "BATCHED": case.random.randint(0, 1), "GELU": case.random.randint(0, 1)}  # fmt: skip
    m, n, k = case.size(), case.size(), case.depth()
    kernel = Kernel("Linear", case.dtype, **options)
    lead: tuple[int, ...] = ()
    if options["BATCHED"]:
        lead = case.random.choice(((2,), (3, 2), (1,), (0,)))
    elif not options["LEFT_TRANSPOSED"]:
        lead = case.random.choice(((), (2,), (3, 2)))
    x = case.tensor(*lead, k, m) if options["LEFT_TRANSPOSED"] else case.tensor(*lead, m, k)
    batch = lead if options["BATCHED"] and case.random.random() < 0.8 else ()
    w = case.tensor(*batch, n, k) if options["RIGHT_TRANSPOSED"] else case.tensor(*batch, k, n)
    bias = case.dense(n)
    out = torch.empty(*lead, m, n, dtype=case.dtype)
    case.run(kernel, [x, w, bias], [out], (1,))
    xd, wd = x.double(), w.double()
    xd, wd = (xd.mT if options["LEFT_TRANSPOSED"] else xd), (wd.mT if options["RIGHT_TRANSPOSED"] else wd)
    want = xd @ wd + bias.double()
    if options["GELU"]:
        want = torch.nn.functional.gelu(want)
    name = f"linear {case.dtype} {options} lead {lead} m {m} n {n} k {k} x {x.stride()} w {tuple(w.shape)} {w.stride()}"
    compare(name, out, want, xd.abs() @ wd.abs() / math.sqrt(max(k, 1)) + 1, case.dtype)
    return name


def check_norm(case: Case) -> str:
    transposed = case.random.randint(0, 1)
    m, n, k = case.size(), case.size(2), case.depth()
    kernel = Kernel("Norm", case.dtype, RIGHT_TRANSPOSED=transposed)
    x = case.tensor(m, k)
    w, wd = weight(case, n, k, transposed)
    bias, residual, gamma, beta = case.dense(n), case.dense(m, n), case.dense(n), case.dense(n)
    out = torch.empty(m, n, dtype=case.dtype)
    case.run(kernel, [x, w, bias, residual, gamma, beta], [out], (1,))
    pre = x.double() @ wd.mT + bias.double() + residual.double()
    want = torch.nn.functional.layer_norm(pre, (n,), gamma.double(), beta.double())
    name = f"norm {case.dtype} m {m} n {n} k {k} transposed {transposed} {w.stride()}"
    spread = pre.std(-1, correction=0, keepdim=True) if m else torch.zeros(0, 1)
    compare(name, out, want, 4 + 30 / (spread + 1e-3), case.dtype)
    return name


def check_swiglu(case: Case) -> str:
    m, n, k = case.size(), case.size(), case.depth()
    kernel = Kernel("Swiglu", case.dtype)
    scale = 1 / math.sqrt(max(k, 1))
    x, g, u = case.tensor(m, k), case.tensor(n, k, scale=scale), case.tensor(n, k, scale=scale)
    out = torch.empty(m, n, dtype=case.dtype)
    case.run(kernel, [x, g, u], [out], (1, 2))
    gate, up = x.double() @ g.double().mT, x.double() @ u.double().mT
    name = f"swiglu {case.dtype} m {m} n {n} k {k}"
    compare(name, out, torch.nn.functional.silu(gate) * up, 2 + gate.abs() + up.abs(), case.dtype)
    return name


def check_projections(case: Case) -> str:
    m, k = case.size(), case.depth()
    ns = [case.size() for _ in range(3)]
    options = {"RIGHT_TRANSPOSED": case.random.randint(0, 1), "LEFT_TRANSPOSED": case.random.randint(0, 1)}
    kernel = Kernel("Projections", case.dtype, **options)
    x = case.tensor(k, m) if options["LEFT_TRANSPOSED"] else case.tensor(m, k)
    xd = (x.mT if options["LEFT_TRANSPOSED"] else x).double()
    weights = [weight(case, n, k, options["RIGHT_TRANSPOSED"]) for n in ns]
    biases = [case.dense(n) for n in ns]
    outs = [torch.empty(m, n, dtype=case.dtype) for n in ns]
    case.run(kernel, [x, *[w for w, _ in weights], *biases], outs, (1, 2, 3))
    name = f"projections {case.dtype} {options} m {m} n {ns} k {k}"
    for out, (_, wd), bias in zip(outs, weights, biases, strict=True):
        want = xd @ wd.mT + bias.double()
        compare(name, out, want, xd.abs() @ wd.mT.abs() / math.sqrt(max(k, 1)) + 1, case.dtype)
    return name


def check_attention(case: Case) -> str:
    lead = case.random.choice(((2,), (2, 3), (1, 5)))
    m, n = case.size(1), case.size(1)
    d, dv = case.random.choice((8, 16, 32, 64, 65, 128)), case.random.choice((16, 32, 64, 128, 33))
    kernel = Kernel("Attention", case.dtype)
    q, k, v = case.tensor(*lead, m, d), case.tensor(*lead, n, d), case.tensor(*lead, n, dv)
    if case.random.random() < 0.5 and d == dv:  # heads side by side, as a projection leaves them
        q, k, v = (case.dense(lead[0], rows, math.prod(lead[1:]), d).transpose(1, 2) for rows in (m, n, n))
        lead = (lead[0], math.prod(lead[1:]))
    mask = torch.where(torch.rand(n) < 0.2, -1e4, 0.0).to(case.dtype)
    out = torch.empty(*lead, m, dv, dtype=case.dtype)
    case.run(kernel, [q, k, v, mask], [out])
    probabilities = torch.softmax(q.double() @ k.double().mT / math.sqrt(d) + mask.double(), -1)
    name = f"attention {case.dtype} {lead} m {m} n {n} d {d} dv {dv}"
    compare(name, out, probabilities @ v.double(), 5.0, case.dtype)
    return name


def check_chain(case: Case) -> str:
    m, n, k, n1 = case.size(), case.size(), case.depth(), case.size()
    options = {"RIGHT_TRANSPOSED": case.random.randint(0, 1)}
    kernel = Kernel("Chain", case.dtype, **options)
    x = case.tensor(m, k, scale=1 / math.sqrt(max(k, 1)))
    a, ad = weight(case, n, k, options["RIGHT_TRANSPOSED"])
    b, bd = weight(case, n1, n, options["RIGHT_TRANSPOSED"])
    out = torch.empty(m, n1, dtype=case.dtype)
    case.run(kernel, [x, a, b], [out], (1, 2))
    hidden = torch.relu(x.double() @ ad.mT)
    name = f"chain {case.dtype} m {m} n {n} k {k} n1 {n1}"
    compare(name, out, hidden @ bd.mT, 1 + hidden @ bd.mT.abs() / math.sqrt(max(n, 1)) * 2, case.dtype)
    return name


CHECKS: tuple[Callable[[Case], str], ...] = (
    check_linear, check_norm, check_swiglu, check_projections, check_attention, check_chain,
)  # fmt: skip


def linear_call(threads: int) -> tuple[Callable[[], None], Callable[[], bool]]:
    """A linear that runs on several threads, and whether its result is right."""
    x, w, bias, out = torch.randn(96, 300), torch.randn(500, 300), torch.randn(500), torch.empty(96, 500)
    run = Kernel("Linear", torch.float32).prepare([x, w, bias, out], {}, threads)
    want = functional.linear(x.double(), w.double(), bias.double())
    return run, lambda: bool(torch.allclose(out.double(), want, rtol=0, atol=1e-3))


def check_threads() -> None:
    """Several Python threads call at once: each has its own buffers."""
    calls = [linear_call(2) for _ in range(4)]
    for _ in range(20):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda call: call[0](), calls))
        assert all(right() for _, right in calls), "wrong results under concurrent calls"


def check_fork() -> None:
    """A forked child has no pool of threads: the driver must not wait for it."""
    run, right = linear_call(2)
    run()
    child = os.fork()
    if child == 0:
        run()
        torch.set_num_threads(1)  # torch's own comparison would wait for the pool
        os._exit(0 if right() else 1)
    for _ in range(100):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise AssertionError("a forked child hangs")
    assert status == 0, "a forked child computes something else"


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    failures = 0
    for seed in range(rounds):
        for check in CHECKS:
            dtype = DTYPES[seed % len(DTYPES)]
            try:
                check(Case(dtype, seed))
            except AssertionError as error:
                failures += 1
                if failures <= 20:
                    print(f"seed {seed}: {error}")
    check_threads()
    check_fork()
    print(f"{rounds * len(CHECKS)} cases, {failures} failures")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
