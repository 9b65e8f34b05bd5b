"""Models that checks are tried on."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from postlude.loading import Inputs


class Block(nn.Module):
    """LayerNorm, up, GELU, down, residual: two Regions."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks that share nothing, so that equal Regions stand in several places."""

    def __init__(self, depth: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.dropout(block(x))
        return x


@dataclass
class Found:
    """An output that is neither a tensor nor a container that PyTorch knows."""

    hidden: Tensor
    parts: dict[str, list[Tensor]]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> dict[str, object]:
        y = self.linear(x)
        return {"logits": y, "more": [y.relu(), (y.sum(),)], "index": y.argmax(-1), "scale": 2.0}


class Restless(nn.Module):
    """Everything that a call may change: a buffer, an attribute, a weight, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        with torch.no_grad():
            self.linear.bias.mul_(0.5)
        return self.dropout(self.norm(self.linear(x)))


def stack(training: bool = False) -> tuple[Stack, Inputs]:
    torch.manual_seed(0)
    return Stack().train(training), Inputs((torch.randn(6, 32),))


class Caching(nn.Module):
    """Writes a row of a cache with each call, which no call may do once it is full; keeps tensors in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("position", torch.zeros((), dtype=torch.long))
        self.layers = [[torch.zeros(4, 16)]]
        self.heard: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).relu()
        self.layers[0][0].index_copy_(0, self.position[None], y[:1])
        self.position += 1
        self.heard.append("called")
        return y + self.layers[0][0].sum() + len(self.heard)
