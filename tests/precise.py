"""Programs whose terms cancel, or that saturate: each result's error is at most eager's own and a few units in the last place."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from postlude.ir import Region, parse
from postlude.targets.aten import evaluate

Run = Callable[[Region, Sequence[Tensor]], list[Tensor]]

#: Programs of one value %0, with the result %r. Where terms cancel, the fast functions would show.
PROGRAMS = {
    "exp - 1": "%1 = exp %0; %r = sub %1, %one",
    "log(exp)": "%1 = exp %0; %r = log %1",
    "softplus by hand": "%1 = exp %0; %2 = add %1, %one; %r = log %2",
    "softplus": "%1 = exp %0; %r = log1p %1",
    "mish": "%1 = exp %0; %2 = log1p %1; %3 = tanh %2; %r = mul %0, %3",
    "log": "%1 = abs %0; %r = log %1",
    "log2 of a quotient": "%1 = abs %0; %2 = add %1, %one; %3 = div %1, %2; %r = log2 %3",
    "tanh": "%r = tanh %0",
    "tanh by exp": "%1 = add %0, %0; %2 = exp %1; %3 = sub %2, %one; %4 = add %2, %one; %r = div %3, %4",
    "expm1": "%r = expm1 %0",
    "elu": "%1 = gt %0, %zero; %2 = expm1 %0; %r = where %1, %0, %2",
    "sigmoid": "%r = sigmoid %0",
    "1 - sigmoid": "%1 = sigmoid %0; %r = sub %one, %1",
    "sigmoid by hand": "%1 = neg %0; %2 = exp %1; %3 = add %2, %one; %r = div %one, %3",
    "silu": "%1 = sigmoid %0; %r = mul %0, %1",
    "silu by hand": "%1 = neg %0; %2 = exp %1; %3 = add %2, %one; %r = div %0, %3",
    "silu + x": "%1 = sigmoid %0; %2 = mul %0, %1; %r = add %2, %0",
    "dsilu": "%1 = sigmoid %0; %2 = sub %one, %1; %3 = mul %0, %2; %4 = add %3, %one; %r = mul %1, %4",
    "gelu": "%1 = mul %0, %half; %2 = mul %0, %root; %3 = erf %2; %4 = add %3, %one; %r = mul %1, %4",
    "gelu tanh": "%1 = mul %0, %half; %2 = tanh %0; %3 = add %2, %one; %r = mul %1, %3",
    "dgelu": "%1 = mul %0, %root; %2 = erf %1; %3 = add %2, %one; %4 = mul %3, %half; %5 = mul %0, %0; %6 = mul %5, %half;"
    " %7 = neg %6; %8 = exp %7; %9 = mul %0, %8; %10 = mul %9, %third; %r = add %4, %10",
    "reciprocal - 1": "%1 = reciprocal %0; %r = sub %1, %one",
    "x / 3 - floor": "%1 = div %0, %three; %2 = floor %1; %r = sub %1, %2",
    "sin of a quotient": "%1 = div %0, %three; %r = sin %1",
    "power": "%1 = abs %0; %2 = div %1, %three; %r = pow %2, %three",
    "rsqrt": "%1 = mul %0, %0; %r = rsqrt %1",
}
#: The same where the chain cancels even in double precision.
_ORACLES = {
    "gelu": "%1 = mul %0, %half; %2 = mul %0, %root; %3 = neg %2; %4 = erfc %3; %r = mul %1, %4",
    "gelu tanh": "%1 = add %0, %0; %2 = sigmoid %1; %r = mul %0, %2",
}
_CONSTANTS = {"zero": 0.0, "one": 1.0, "half": 0.5, "root": 0.5**0.5, "third": 0.3989422804014327, "three": 3.0}


def _inputs() -> Tensor:
    """Numbers of every size up to where functions saturate, and near the points where something cancels."""
    sizes = torch.logspace(-20, 1.94, 400, dtype=torch.float64)
    around = [point * (1 + sign * 2.0 ** -torch.arange(1, 24)) for point in (1.0, 3.0, 1.2784645) for sign in (1, -1)]
    positive = torch.cat([sizes, *around])
    values = torch.cat([positive, -positive, torch.tensor([0.0, 1.0, 3.0])]).float()
    return torch.nn.functional.pad(values, (0, -len(values) % 8)).reshape(-1, 8)


def check(name: str, short: str, run: Run, device: str = "cpu") -> None:
    """The chain in float32, rounded once, is the strictest eager: with 16-bit tensors it rounds after each op.

    Functions of float32 are not the same everywhere: eager's are those of the device.
    """
    region, oracle = _of_one_value(PROGRAMS[name], short), _of_one_value(_ORACLES.get(name, PROGRAMS[name]), short)
    tile = _inputs()
    zeros = [torch.zeros(size, 8, dtype=torch.bfloat16) for size in (tile.shape[0], 8)]
    (ours,) = run(region, [*zeros, tile])
    eager = evaluate(region, [operand.to(device) for operand in (*zeros, tile)])[0].cpu()
    (exact,) = evaluate(oracle, [*zeros, tile], arithmetic=torch.float64, rounded=False)
    assert torch.equal(ours.isnan(), eager.isnan())
    assert torch.equal(ours.isinf(), eager.isinf())
    finite = eager.isfinite()
    error, allowed = ((value.double() - exact).abs()[finite] for value in (ours, eager))
    unit = torch.finfo(ours.dtype)
    # What is smaller than any normal number may be 0: the fast functions flush it.
    tolerance = 4 * unit.eps * exact.abs()[finite] + torch.finfo(torch.float32).tiny + unit.smallest_normal * unit.eps
    excess = error - 2 * allowed - tolerance
    worst = int(excess.argmax())
    assert excess[worst] <= 0, f"{name} of {tile[finite][worst]!r}: {ours[finite][worst]!r}, eager {eager[finite][worst]!r}"


def _of_one_value(program: str, short: str) -> Region:
    constants = "; ".join(f"%{key} = const {value!r}" for key, value in _CONSTANTS.items())
    return parse(
        "region(m, n, k); %x = operand [m, k] bf16; %w = operand [n, k] bf16; %tile = operand [m, n] f32;"
        f" %acc = contract %x, %w : f32; {constants}; %0 = add %acc, %tile; {program}; yield [m, n] {short} %r"
    )
