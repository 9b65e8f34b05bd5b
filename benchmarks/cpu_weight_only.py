"""Linear layers with weights in 8 and 4 bits on a CPU, in no cache: Postlude, Inductor, torch's own kernels, the read limit.

Each call walks layers of one size, more bytes than the last cache holds. `of the read limit` is the time of a plain loop over as
many bytes in the same rounds, over that of the layers. torch's own kernels are `_weight_int8pack_mm` and `_weight_int4pack_mm`
(groups of 32); they have no fp8 and no nvfp4, which are compared with the one of as many bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from common import arguments, console, measured, save, table
from postlude.quant import QuantizedTensor, scheme_named
from read_bandwidth import reader

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEMES = ("int8-weight", "fp8-weight", "nvfp4-weight", "int4-weight")
ROWS = (1, 2, 4, 16)


class Layers(nn.Module):
    """Independent layers without bias, all of the same weight, each in memory of its own."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        n, k = weights[0].shape
        self.linears = nn.ModuleList(nn.Linear(k, n, bias=False, device="meta") for _ in weights)
        for linear, weight in zip(self.linears, weights, strict=True):
            linear.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Each layer's product with x."""
        return tuple(linear(x) for linear in self.linears)


def quantized(weight: Tensor, scheme: str) -> QuantizedTensor:
    """One weight in a scheme's format."""
    return QuantizedTensor.quantize(weight, scheme_named(scheme))


def size_of(weight: Tensor) -> int:
    """Bytes that a product reads of a weight."""
    parts = weight.parts.values() if isinstance(weight, QuantizedTensor) else (weight,)
    return sum(part.numel() * part.itemsize for part in parts)


def compiled(weights: list[Tensor], backend: str, x: Tensor) -> Callable[[], object]:
    """The layers, compiled; one call walks all of them."""
    model = torch.compile(Layers(weights), backend=backend, fullgraph=True)

    def call() -> object:
        with torch.no_grad():
            return model(x)

    call()
    return call


def own_int8(weight: QuantizedTensor, count: int, x: Tensor) -> Callable[[], object]:
    """torch's kernel for int8 with a scale for each row."""
    parts = [(weight.codes.clone(), weight.scale.flatten().to(x.dtype)) for _ in range(count)]
    return lambda: [torch._weight_int8pack_mm(x, codes, scale) for codes, scale in parts]


def own_int4(weight: Tensor, count: int, x: Tensor) -> Callable[[], object]:
    """torch's kernel for 4 bits in groups of 32."""
    n, k = weight.shape
    codes = torch.randint(0, 16, (n, k), dtype=torch.int32)
    scales = torch.rand(k // 32, n, 2).to(x.dtype)
    packed = [torch._convert_weight_to_int4pack_for_cpu(codes, 1) for _ in range(count)]
    return lambda: [torch._weight_int4pack_mm_for_cpu(x, one, 32, scales) for one in packed]


def main() -> None:
    """Run."""
    options = arguments(
        __doc__,
        n={"type": int, "default": 16384},
        k={"type": int, "default": 4096},
        megabytes={"type": int, "default": 640, "help": "bytes of weights that one call walks (default 640 MB)"},
        rows={"type": int, "nargs": "*", "default": ROWS},
        schemes={"nargs": "*", "default": SCHEMES},
        peers={"nargs": "*", "default": ("own", "bfloat16")},
    )
    weight = torch.randn(options.n, options.k).to(torch.bfloat16)
    records: list[dict[str, Any]] = []
    for scheme in options.schemes:
        first = quantized(weight, scheme)
        count = max(2, -(-options.megabytes * 1_000_000 // size_of(first)))
        weights: list[Tensor] = [first.clone() for _ in range(count)]
        walked = torch.zeros(count * size_of(first), dtype=torch.uint8)
        few = max(2, -(-options.megabytes * 1_000_000 // size_of(weight)))
        for m in options.rows:
            x = torch.randn(m, options.k).to(torch.bfloat16)
            calls: dict[str, Callable[[], object]] = {
                "read": reader(walked, options.threads),
                "postlude": compiled(weights, "postlude", x),
            }
            sizes = dict.fromkeys(calls, count)
            if "own" in options.peers:
                eight = scheme in ("int8-weight", "fp8-weight")
                calls["torch"] = own_int8(quantized(weight, "int8-weight"), count, x) if eight else own_int4(weight, count, x)
                sizes["torch"] = count
            if "inductor" in options.peers:
                calls["inductor"] = compiled(weights, "inductor", x)
                sizes["inductor"] = count
            if "bfloat16" in options.peers:
                calls["bfloat16"] = compiled([weight.clone() for _ in range(few)], "postlude", x)
                sizes["bfloat16"] = few
            timings = measured(calls, options)
            torch._dynamo.reset()
            each = {name: timing.median / sizes[name] for name, timing in timings.items()}
            records.append(
                {
                    "scheme": scheme,
                    "m": m,
                    "layers": count,
                    "bytes": size_of(first),
                    "milliseconds": {name: 1e3 * value for name, value in each.items()},
                    "spread": {name: timing.spread for name, timing in timings.items()},
                    "of_the_read_limit": each["read"] / each["postlude"],
                    "speedup": {
                        name: value / each["postlude"] for name, value in each.items() if name not in ("read", "postlude")
                    },
                }
            )
            console.print(records[-1])
    names = list(dict.fromkeys(name for record in records for name in record["speedup"]))
    rows = [
        [
            f"{r['scheme']} {r['m']}",
            f"{r['milliseconds']['postlude']:.3f}",
            f"{r['bytes'] / r['milliseconds']['postlude'] / 1e6:.1f}",
            f"{r['of_the_read_limit']:.0%}",
            *(f"{r['speedup'][name]:.2f}" if name in r["speedup"] else "–" for name in names),
        ]
        for r in records
    ]
    columns = ["weights, rows", "ms", "GB/s", "of the read limit", *(f"over {name}" for name in names)]
    table(f"{options.n} x {options.k}, bfloat16 inputs, {options.threads} threads", columns, rows)
    save(options.result, {"n": options.n, "k": options.k, "records": records})


if __name__ == "__main__":
    main()
