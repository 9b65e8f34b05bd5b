"""Sums over the rows, which every task adds up for itself: right, and the same bits every time."""

import pytest
import torch
from torch import Tensor

from postlude.ir import parse
from postlude.op import allocate_results
from postlude.targets import aten, cpp

#: Results of tiles that never leave L1, of whole rows, and of two products that are added up.
PROGRAMS = {
    "tiles": """
        %x = operand [m, k] TYPE; %w = operand [n, k] TYPE; %t = operand [m, n] TYPE;
        %acc = contract %x, %w : ACC; %0 = mul %acc, %t; %1 = reduce sum m %0;
        yield [m, n] TYPE %0; yield [n] TYPE %1""",
    "rows": """
        %x = operand [m, k] TYPE; %w = operand [k, n] TYPE; %t = operand [m, n] TYPE;
        %acc = contract %x, %w : ACC; %0 = mul %acc, %t; %1 = reduce sum n %0; %2 = mul %1, %t; %3 = sub %acc, %2;
        %4 = reduce sum m %3; %5 = reduce sum m %acc; %6 = extent m; %7 = div %5, %6;
        yield [m, n] TYPE %3; yield [n] TYPE %4; yield [n] TYPE %7; yield [m] TYPE %1""",
    "totals alone": """
        %x = operand [k, m] TYPE; %w = operand [k, n] TYPE; %y = operand [m, k] TYPE; %v = operand [k, n] TYPE;
        %acc = contract %x, %w : ACC; %0 = contract %y, %v : ACC; %1 = add %acc, %0; %2 = reduce sum m %1;
        yield [n] TYPE %2""",
}
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f64": torch.float64}


def region(name: str, dtype: str) -> object:
    accumulate = "f64" if dtype == "f64" else "f32"
    text = " ".join(PROGRAMS[name].split()).replace("TYPE", dtype).replace("ACC", accumulate)
    return parse(f"region(m, n, k); {text}")


def results(name: str, dtype: str, m: int, n: int, k: int, threads: int) -> tuple[list[Tensor], list[Tensor]]:
    """Of the kernel, and of the interpreter in float64."""
    one = region(name, dtype)
    generator = torch.Generator().manual_seed(0)
    sizes = {"m": m, "n": n, "k": k}
    operands = [torch.randn([sizes[a] for a in o.axes], generator=generator).to(o.dtype) for o in one.operands]
    found = allocate_results(one, operands)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        cpp.load(one)(*operands, *found)
    finally:
        torch.set_num_threads(before)
    wide = region(name, "f64")
    exact = allocate_results(wide, [o.double() for o in operands])
    aten.run(wide, [o.double() for o in operands], exact)
    return found, exact


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_sums(name: str, dtype: str, threads: int) -> None:
    for m, n, k in ((1, 1, 1), (5, 7, 3), (200, 130, 64), (1000, 65, 33), (2500, 700, 24), (3, 5, 0), (0, 5, 3)):
        found, exact = results(name, dtype, m, n, k, threads)
        for ours, wanted in zip(found, exact, strict=True):
            room = 4 * torch.finfo(ours.dtype).eps * float(wanted.norm().nan_to_num()) + 1e-30
            torch.testing.assert_close(ours.isnan(), wanted.isnan(), msg=f"{m, n, k}")
            off = float((ours.double() - wanted).nan_to_num().norm())
            assert off <= room + 3e-7 * (m + k) ** 0.5 * (n * m) ** 0.5 * (dtype == "f32"), (m, n, k)


def test_sums_are_the_same_bits_every_time() -> None:
    first, _ = results("rows", "f32", 2048, 384, 48, 2)
    for _ in range(5):
        again, _ = results("rows", "f32", 2048, 384, 48, 2)
        assert all(map(torch.equal, first, again))


def test_long_sums_are_as_accurate_as_torch() -> None:
    found, exact = results("tiles", "f32", 100_000, 16, 4, 2)
    own, theirs = ((s.double() - exact[1]).norm() for s in (found[1], found[0].sum(0)))
    # Either result is rounded once at its end, by up to half a unit in the last place. (Contract: four units.)
    assert own <= 1.2 * theirs + torch.finfo(torch.float32).eps / 2 * exact[1].norm()


def test_one_column_does_not_reach_another() -> None:
    one = region("tiles", "f32")
    x, w, t = torch.randn(300, 8), torch.randn(70, 8), torch.ones(300, 70)
    t[5, 3], t[7, 64] = float("nan"), float("inf")
    found = allocate_results(one, [x, w, t])
    cpp.load(one)(x, w, t, *found)
    assert (~found[1].isfinite()).nonzero().flatten().tolist() == [3, 64]


def test_packed_weights() -> None:
    """Few enough panels for a task to take whole rows."""
    one = region("rows", "f32")
    x, w, t = torch.randn(3000, 32), torch.randn(32, 96), torch.randn(3000, 96)
    plain, packed = (allocate_results(one, [x, w, t]) for _ in range(2))
    cpp.load(one)(x, w, t, *plain)
    kernel = cpp.load(one, frozen=(1,))
    for _ in range(3):
        kernel(x, w, t, *packed)
    for a, b in zip(plain, packed, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-3)
