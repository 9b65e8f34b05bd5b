"""What is measured: the product of x [m, k] with a weight [n, k], an epilogue, an element type."""

import csv
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from postlude.errors import CaseError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class Case:
    """One product: x [m, k] times weight [n, k] transposed, then the epilogue."""

    m: int
    n: int
    k: int
    epilogue: str = "bias"
    dtype: str = "float32"

    @property
    def flops(self) -> float:
        """Of the products (SwiGLU has two)."""
        return 2.0 * self.m * self.n * self.k * (2 if self.epilogue == "swiglu" else 1)

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k} {self.epilogue}, {self.dtype}"


class Layer(nn.Module):
    """A case as a module. `forward` takes x [m, k], and a residual [m, n] where the epilogue adds one."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.linear = nn.Linear(case.k, case.n, bias=case.epilogue not in ("none", "swiglu"))
        self.gate = nn.Linear(case.k, case.n, bias=False) if case.epilogue == "swiglu" else None
        self.epilogue = EPILOGUES[case.epilogue]

    def forward(self, x: Tensor, *residual: Tensor) -> Tensor:
        """The product and what follows."""
        product = self.linear(x)
        result: Tensor = F.silu(self.gate(x)) * product if self.gate is not None else self.epilogue(product, *residual)
        return result


#: Epilogues by name; each has the bias before it but `none` and `swiglu`.
EPILOGUES: dict[str, Callable[..., Tensor]] = {
    "none": lambda y: y,
    "bias": lambda y: y,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "silu": F.silu,
    "residual": torch.add,
    "swiglu": lambda y: y,
}


def built(case: Case, device: str, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The module with random weights, and its inputs; the same every time."""
    torch.manual_seed(seed)
    dtype = DTYPES[case.dtype]
    layer = Layer(case).to(device, dtype).eval().requires_grad_(False)
    shapes = [(case.m, case.k), (case.m, case.n)] if case.epilogue == "residual" else [(case.m, case.k)]
    return layer, tuple(torch.randn(shape, device=device, dtype=dtype) for shape in shapes)


def parsed(sizes: Iterable[str], epilogues: Iterable[str], dtypes: Iterable[str]) -> list[Case]:
    """Every size with every epilogue and type.

    Args:
        sizes: ``"MxNxK"`` each.
        epilogues: keys of `EPILOGUES`.
        dtypes: keys of `DTYPES`.

    Raises:
        CaseError: one of them says nothing that could be measured.
    """
    return [_case(*_size(size), epilogue, dtype) for size in sizes for dtype in dtypes for epilogue in epilogues]


def from_csv(path: Path, epilogues: Iterable[str], dtypes: Iterable[str]) -> list[Case]:
    """The cases of a CSV with a header: columns m, n, k, and epilogue and dtype, which may be left out.

    Raises:
        CaseError: the file can't be read, or a line of it says nothing that could be measured; the message names the line.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or ()]
            if missing := [name for name in ("m", "n", "k") if name not in reader.fieldnames]:
                raise CaseError(f"{path} has no column {', '.join(missing)}: a header m,n,k[,epilogue][,dtype] is expected.")
            if double := [name for name in reader.fieldnames if name and reader.fieldnames.count(name) > 1]:
                raise CaseError(f"{path} has the column {double[0]} twice.")
            cases: list[Case] = []
            for row in reader:
                try:
                    size = _size("x".join((row[name] or "").strip() for name in ("m", "n", "k")))
                    own_epilogue, own_dtype = (row.get("epilogue") or "").strip(), (row.get("dtype") or "").strip()
                    for dtype in [own_dtype] if own_dtype else dtypes:
                        for epilogue in [own_epilogue] if own_epilogue else epilogues:
                            cases.append(_case(*size, epilogue, dtype))
                except CaseError as error:
                    raise CaseError(f"{path}, line {reader.line_num}: {error}") from None
    except (OSError, UnicodeError, csv.Error) as error:
        raise CaseError(f"{path} can't be read: {error}") from error
    if not cases:
        raise CaseError(f"{path} has no lines below its header.")
    return cases


def _size(text: str) -> tuple[int, int, int]:
    found = re.fullmatch(r"(\d{1,9})[x×](\d{1,9})[x×](\d{1,9})", text.strip().lower())
    if not found or not all(int(number) for number in found.groups()):
        raise CaseError(
            f"{text!r} is no size: MxNxK with three positive numbers of nine digits at most is expected, such as 128x1536x384."
        )
    m, n, k = map(int, found.groups())
    return m, n, k


def _case(m: int, n: int, k: int, epilogue: str, dtype: str) -> Case:
    if epilogue not in EPILOGUES:
        raise CaseError(f"{epilogue!r} is no epilogue: {', '.join(EPILOGUES)} are.")
    if dtype not in DTYPES:
        raise CaseError(f"{dtype!r} is no element type: {', '.join(DTYPES)} are.")
    return Case(m, n, k, epilogue, dtype)
