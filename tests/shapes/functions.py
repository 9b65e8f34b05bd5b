"""Functions with specs, for every way in: what people compile, in small."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from postlude.shapes import STATIC, DictSpec, IntVar, ObjectSpec, SeqSpec, ShapesSpec, ShapeVar, TensorSpec


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    lengths: torch.Tensor


torch.export.register_dataclass(Batch, serialized_type_name="tests.shapes.Batch")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(F.relu(self.conv(x)), 2).mean((2, 3))


class Mixture(nn.Module):
    """Top-2 routing; every expert sees every token, weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.Parameter(torch.randn(4, 8, 8) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        routes = torch.zeros_like(x[:, :4]).scatter(1, chosen, weights)
        return torch.einsum("td,edf,te->tf", x, self.experts, routes)


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(20, 6, mode="sum")

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.bags(ids, offsets)


class Append(nn.Module):
    """A step of generation: keys and values are appended to what is cached, and attended to under a mask."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: list[torch.Tensor], mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        keys, values = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
        scores = (q @ keys.transpose(1, 2) / 4).masked_fill(mask, -1e9)
        return scores.softmax(-1) @ values, keys, values


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=None if mask is None else mask[:, None])


def keywords(x: torch.Tensor, *, scale: float = 2.0, **extra: torch.Tensor) -> torch.Tensor:
    return x * scale + extra["bias"]


def dataclass(batch: Batch) -> torch.Tensor:
    return (batch.ids * 2).sum(1) + batch.lengths


def containers(inputs: dict[str, Any], states: list[torch.Tensor]) -> torch.Tensor:
    return inputs["x"] @ states[0] + states[1]


def scalars(x: torch.Tensor, n: int, offset: int) -> torch.Tensor:
    return x * n + torch.arange(n * 2).sum() + offset


def ids(*shape: int, below: int = 20) -> torch.Tensor:
    return torch.randint(0, below, shape)


@dataclasses.dataclass
class Case:
    """A function, its spec, and calls by sizes."""

    name: str
    make: Callable[[], Any]
    spec: ShapesSpec
    call: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    sizes: Sequence[tuple[int, ...]]


def cases(guard_free: bool = False) -> list[Case]:
    """Fresh specs: nothing is shared between tests."""
    # PyTorch's own attention asks whether a size is 0, which an unbacked symbol does not answer.
    b, s, p = ShapeVar("b", optimization_hint=8), ShapeVar("s", min=int(guard_free), max=512), ShapeVar("p", min=int(guard_free))
    n, offset = IntVar("n", min=0), IntVar("offset")
    side = ShapeVar("side", min=4, multiple_of=4)

    def spec(params: dict[str, Any], **kwargs: Any) -> ShapesSpec:
        return ShapesSpec(params, guard_free=guard_free, **kwargs)

    heads = TensorSpec([b, 2, s, 16])
    q, kv = TensorSpec([b, s, 16]), TensorSpec([b, p, 16])
    pairs = [(1, 1), (3, 5), (2, 2), (1, 7), (4, 1), (0, 3)]
    randn = torch.randn
    return [
        Case("mlp", Mlp, spec({"x": TensorSpec([b, 8])}), lambda i: ((randn(i, 8),), {}), [(1,), (0,), (5,), (2,), (64,)]),
        Case(
            "attention",
            lambda: attention,
            spec({"q": heads, "k": heads, "v": heads, "mask": TensorSpec([b, s, s])}),
            lambda i, j: ((*(randn(i, 2, j, 16) for _ in range(3)),), {"mask": torch.ones(i, j, j, dtype=torch.bool).tril()}),
            [(1, 1), (3, 5), (2, 2), (1, 7), (4, 1)],
        ),
        Case(
            "append",
            Append,
            spec({"q": q, "k": q, "v": q, "cache": SeqSpec([kv, kv]), "mask": TensorSpec([b, s, p + s])}),
            lambda i, j, k: (
                (
                    *(randn(i, j, 16) for _ in range(3)),
                    [randn(i, k, 16), randn(i, k, 16)],
                    torch.zeros(i, j, k + j, dtype=torch.bool),
                ),
                {},
            ),
            [(1, 1, 1), (2, 3, 4), (1, 1, 9), (3, 1, 2), (2, 5, 1)],
        ),
        Case(
            "bags",
            Bags,
            spec({"ids": TensorSpec([s]), "offsets": TensorSpec([b])}),
            lambda i, j: ((ids(i), torch.zeros(j, dtype=torch.int64)), {}),
            [(5, 2), (1, 1), (9, 3), (4, 4)],
        ),
        Case(
            "conv",
            Conv,
            spec({"x": TensorSpec([b, 3, side, 2 * side])}),
            lambda i, j: ((randn(i, 3, j, 2 * j),), {}),
            [(1, 4), (2, 8), (3, 12), (1, 16)],
        ),
        Case("mixture", Mixture, spec({"x": TensorSpec([b, 8])}), lambda i: ((randn(i, 8),), {}), [(1,), (6,), (2,), (0,)]),
        Case(
            "keywords",
            lambda: keywords,
            spec({"x": TensorSpec([b, s]), "**kwargs": {"bias": TensorSpec([s])}}),
            lambda i, j: ((randn(i, j),), {"bias": randn(j)}),
            pairs,
        ),
        Case(
            "dataclass",
            lambda: dataclass,
            spec({"batch": ObjectSpec({"ids": TensorSpec([b, s]), "lengths": TensorSpec([b])})}),
            lambda i, j: ((Batch(ids(i, j), ids(i)),), {}),
            pairs,
        ),
        Case(
            "containers",
            lambda: containers,
            spec({"inputs": DictSpec({"x": TensorSpec([b, s])}), "states": SeqSpec([TensorSpec([s, 4]), TensorSpec([4])])}),
            lambda i, j: (({"x": randn(i, j)}, [randn(j, 4), randn(4)]), {}),
            pairs,
        ),
        Case(
            "scalars",
            lambda: scalars,
            spec({"x": TensorSpec([b, STATIC]), "n": n, "offset": offset}, assumptions=[n <= 2 * b + 4]),
            lambda i, j, k: ((randn(i, 3), j, k), {}),
            [(1, 1, 0), (3, 2, -4), (2, 0, 7), (5, 8, 1), (0, 1, 1)],
        ),
    ]


NAMES = [case.name for case in cases()]


def case(name: str, guard_free: bool = False) -> Case:
    return next(one for one in cases(guard_free) if one.name == name)
