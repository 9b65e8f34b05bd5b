"""Small models to train, and what a run of training is compared by."""

import copy
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: An error may be eager's own, and this many units in the last place.
ULPS = 4

WIDTH, TOKENS, VOCABULARY = 32, 10, 40


class Block(nn.Module):
    """Attention and a gated MLP with their norms. No gradient of it is zero but for rounding: there are no biases of keys."""

    def __init__(self, width: int = WIDTH, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Language(nn.Module):
    """A language model of some blocks; `tied` shares the embedding with the head."""

    def __init__(self, blocks: int = 2, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross entropy of the next token."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens[:, 1:].flatten())


def language(blocks: int = 1, *, tied: bool = False) -> Language:
    """The same weights each time, norms that are no identity included."""
    torch.manual_seed(0)
    model = Language(blocks, tied=tied)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def batches(count: int, size: int = 3) -> list[Tensor]:
    """Batches of tokens."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (size, TOKENS + 1), generator=generator) for _ in range(count)]


Step = Callable[[nn.Module, Callable[..., Tensor]], None]


def trained(model: nn.Module, train: Step, compile: Callable[[nn.Module], Callable[..., Tensor]]) -> dict[str, Tensor]:
    """Parameters, and gradients where there are any, of a copy of the model after training."""
    owner = copy.deepcopy(model)
    train(owner, compile(owner))
    found = {name: p.detach() for name, p in owner.named_parameters()}
    return found | {f"{name}.grad": p.grad for name, p in owner.named_parameters() if p.grad is not None}


def compiled(model: nn.Module) -> Callable[..., Tensor]:
    """By Postlude, with every Region that is legal."""
    return torch.compile(model, backend="postlude", options={"fuse_all": True}, fullgraph=True)


def check(
    model: nn.Module, train: Step, exactly: Step | None = None, compile: Callable[[nn.Module], Callable[..., Tensor]] = compiled
) -> None:
    """Training by Postlude is as near to training in float64 as eager is.

    `train` trains a module in place by its (compiled) call; `exactly` does so in float64 where that differs.
    """
    exact = trained(copy.deepcopy(model).double(), exactly or train, lambda owner: owner)
    eager = trained(model, train, lambda owner: owner)
    ours = trained(model, train, compile)
    assert exact.keys() == eager.keys() == ours.keys()
    assert any(name.endswith(".grad") for name in ours)
    for name in ours:
        assert ours[name].dtype == eager[name].dtype, name
        assert ours[name].stride() == eager[name].stride(), name
    as_accurate(ours, eager, exact)


def as_accurate(ours: dict[str, Tensor], eager: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """All gradients together, and all parameters, have errors of at most eager's."""
    gradients = {name for name in exact if name.endswith(".grad")}
    for names in filter(None, (gradients, exact.keys() - gradients)):
        eps = max(torch.finfo(eager[name].dtype).eps for name in names)
        size = _norm(exact[name] for name in names)
        own, theirs = (_norm(found[name].double() - exact[name] for name in names) for found in (ours, eager))
        assert own <= 1.1 * theirs + ULPS * eps * size, f"{own:.2e}, eager {theirs:.2e}, size {size:.2e}"


def _norm(tensors: Iterable[Tensor]) -> float:
    return float(sum(float(t.double().square().sum()) for t in tensors)) ** 0.5
