"""Trains a small GPT on real text from the same seeds by eager and by Postlude, and compares the curves of the loss.

The text is what documentation the standard library of this Python carries in its sources: all docstrings, in the order of the
files' names. A token is a byte. Curves of two runs part by roundings alone, whoever computes them; how far is seen from eager
runs whose first weights differ by one rounding. `--plot` draws the curves (needs matplotlib).
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import arguments, console, save, table

WIDTH, LAYERS, HEADS, LENGTH, BATCH = 64, 3, 2, 64, 16
#: A loss is compared as its mean over so many steps.
SMOOTH = 25


class Block(nn.Module):
    """Causal attention and an MLP, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] to the same."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A language model over bytes; its head shares the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross entropy of the next byte, of tokens [batch, length + 1]."""
        x = self.embedding(tokens[:, :-1]) + self.position.weight
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class Mode:
    """How one curve comes about. `rounding` seeds a change of the first weights by one rounding."""

    backend: str | None = None
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    rounding: int | None = None


MODES = {
    "eager float32": Mode(),
    **{f"eager float32, rounded {seed}": Mode(rounding=seed) for seed in (1, 2)},
    "Postlude float32": Mode("postlude"),
    "eager autocast": Mode(autocast=True),
    **{f"eager autocast, rounded {seed}": Mode(autocast=True, rounding=seed) for seed in (1, 2)},
    "Postlude autocast": Mode("postlude", autocast=True),
    "eager bfloat16": Mode(dtype=torch.bfloat16),
    **{f"eager bfloat16, rounded {seed}": Mode(dtype=torch.bfloat16, rounding=seed) for seed in (1, 2)},
    "Postlude bfloat16": Mode("postlude", torch.bfloat16),
}


def documentation() -> bytes:
    """All docstrings of the standard library's modules that are no tests."""
    root = Path(sysconfig.get_path("stdlib"))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts: list[str] = []
    for path in sorted(root.rglob("*.py")):
        folders = path.relative_to(root).parts[:-1]
        if {"site-packages", "dist-packages", "test", "tests", "idlelib"} & {*folders}:
            continue
        tree = ast.parse(path.read_bytes())
        texts += [text for node in ast.walk(tree) if isinstance(node, kinds) and (text := ast.get_docstring(node))]
    return "\n\n".join(texts).encode()


def batches(text: bytes, steps: int) -> Tensor:
    """Tokens [steps, batch, length + 1] from random places of the text, the same each time."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    starts = torch.randint(len(data) - LENGTH - 1, (steps, BATCH, 1), generator=torch.Generator().manual_seed(1))
    return data[starts + torch.arange(LENGTH + 1)]


def losses(mode: Mode, data: Tensor) -> tuple[list[float], float]:
    """The loss of each step, and seconds for all but the first."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GPT()
    if mode.rounding is not None:
        generator = torch.Generator().manual_seed(mode.rounding)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + torch.randint(-1, 2, parameter.shape, generator=generator) * torch.finfo(mode.dtype).eps)
    model.to(mode.dtype)
    run = torch.compile(model, backend=mode.backend, fullgraph=True) if mode.backend else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    found = []
    start = time.perf_counter()
    for number, tokens in enumerate(data):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (number + 1) / 50)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=mode.autocast):
            loss = run(tokens)
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
        if number == 0:
            start = time.perf_counter()
    return found, time.perf_counter() - start


def smooth(curve: list[float]) -> Tensor:
    """Means over SMOOTH steps."""
    return torch.tensor(curve, dtype=torch.float64).unfold(0, min(SMOOTH, len(curve)), 1).mean(1)


def plot(path: str, curves: dict[str, list[float]]) -> None:
    """Draw smoothed curves: eager's with the band of its rounded runs, and Postlude's."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    mpl.rcParams.update({"svg.hashsalt": "postlude", "font.size": 9})
    kinds = [name.removeprefix("Postlude ") for name in curves if name.startswith("Postlude")]
    figure, axes = plt.subplots(1, len(kinds), figsize=(3.4 * len(kinds), 3), sharey=True, layout="constrained")
    for axis, kind in zip(axes, kinds, strict=True):
        band = torch.stack([smooth(curve) for name, curve in curves.items() if name.startswith(f"eager {kind}")])
        steps = range(SMOOTH, SMOOTH + band.shape[1])
        axis.fill_between(steps, band.amin(0), band.amax(0), color="#c8c8c8", label="eager, first weights rounded")
        axis.plot(steps, smooth(curves[f"eager {kind}"]), color="#404040", lw=1.2, label="eager")
        axis.plot(steps, smooth(curves[f"Postlude {kind}"]), color="#d9480f", lw=1, ls="--", label="Postlude")
        axis.set(title=kind, xlabel="step", ylim=(2.5, 3.3))
    axes[0].set_ylabel(f"loss, mean of {SMOOTH} steps")
    axes[0].legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Run what the command line asks for."""
    options = arguments(
        __doc__,
        steps={"type": int, "default": 500},
        modes={"nargs": "+", "choices": list(MODES), "default": list(MODES)},
        plot={"metavar": "FILE", "help": "draw the curves, as an SVG file"},
    )
    text = documentation()
    console.print(f"{len(text):,} bytes of text, sha256 {hashlib.sha256(text).hexdigest()[:16]}")
    data = batches(text, options.steps)
    curves, seconds = {}, {}
    for name in options.modes:
        curves[name], seconds[name] = losses(MODES[name], data)
        console.print(f"  {name}: last loss {curves[name][-1]:.3f}, {seconds[name]:.0f} s")
    rows = []
    for name, curve in curves.items():
        own = f"eager {name.removeprefix('Postlude ').removeprefix('eager ').split(',')[0]}"
        apart = [float((smooth(curve) - smooth(curves[other])).abs().max()) if other in curves else float("nan")
                 for other in (own, "eager float32")]  # fmt: skip
        rows.append([name, f"{float(smooth(curve)[-1]):.4f}", *(f"{distance:.4f}" for distance in apart)])
    columns = ["mode", f"loss, last {SMOOTH} steps", "most apart from eager, same types", "from eager float32"]
    table(f"A GPT of {LAYERS} layers of {WIDTH}, {options.steps} steps of {BATCH} x {LENGTH} bytes", columns, rows)
    if options.plot:
        plot(options.plot, curves)
    record: dict[str, Any] = {"text_sha256": hashlib.sha256(text).hexdigest(), "text_bytes": len(text)}
    save(options.result, {**record, "losses": {k: [round(x, 5) for x in v] for k, v in curves.items()}, "seconds": seconds})


if __name__ == "__main__":
    main()
