"""One step of fine-tuning MiniLM on a CPU: forward, backward and AdamW by eager, Inductor and Postlude, interleaved.

The model is the sentence encoder of `postlude demo` with a linear classifier on its embeddings, cross entropy as loss, and
torch's fused AdamW. Each mode trains its own copy from the same weights. Beside the time of a step: the peak memory of one, and
the error of the gradients of the first step against float64.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from common import DTYPES, arguments, console, measured, save, table
from postlude.checking import memory
from postlude.demo import minilm

if TYPE_CHECKING:
    from collections.abc import Callable

CLASSES = 5
#: How each mode compiles the module that computes the loss; None leaves it to eager.
MODES: dict[str, dict[str, Any] | None] = {"eager": None, "inductor": {}, "postlude": {"backend": "postlude"}}


class Classifier(nn.Module):
    """Loss of a classifier on sentence embeddings."""

    def __init__(self, encoder: nn.Module, width: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(width, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy over the batch."""
        return nn.functional.cross_entropy(self.head(self.encoder(input_ids, attention_mask)).float(), labels)


def build(dtype: torch.dtype, dropout: float | None) -> Classifier:
    """The model in training mode, with the dropout of its configuration unless another is given."""
    torch.manual_seed(0)
    encoder = minilm.load(dtype)
    model = Classifier(encoder, encoder.encoder.config.hidden_size).to(dtype)
    for module in model.modules() if dropout is not None else ():
        if isinstance(module, nn.Dropout):
            module.p = dropout
        if hasattr(module, "dropout_prob"):
            module.dropout_prob = dropout
    return model.train().requires_grad_(True)


class Training:
    """A model in training by one mode."""

    def __init__(self, model: Classifier, batch: tuple[Tensor, ...], keywords: dict[str, Any] | None) -> None:
        self.model = minilm.separate_copy(model)
        self.batch = batch
        self.run = self.model if keywords is None else torch.compile(self.model, fullgraph=True, dynamic=False, **keywords)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def gradients(self) -> dict[str, Tensor]:
        """Those of the weights as they are."""
        self.optimizer.zero_grad()
        self.run(*self.batch).backward()
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def step(self) -> None:
        """Forward, backward, and a step of the optimizer."""
        self.optimizer.zero_grad()
        self.run(*self.batch).backward()
        self.optimizer.step()


def error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Relative error of all gradients together, in the Frobenius norm."""
    off = sum(float((found[name].double() - value).square().sum()) for name, value in exact.items())
    return (off / sum(float(value.square().sum()) for value in exact.values())) ** 0.5


def measure(dtype: str, dropout: float | None, modes: list[str], options: Any) -> dict[str, Any]:
    """Measure all modes in one dtype."""
    torch._dynamo.reset()
    model = build(DTYPES[dtype], dropout)
    tokens = minilm.Tokenizer().filled(minilm.corpus(), options.batch, options.length)
    labels = torch.randint(CLASSES, (options.batch,), generator=torch.Generator().manual_seed(1))
    batch = (*tokens.arguments, labels)
    trainings = {name: Training(model, batch, MODES[name]) for name in modes}
    record: dict[str, Any] = {"dtype": dtype, "dropout": dropout, "errors": {}}
    if dropout == 0.0:  # else each mode draws other random numbers
        exact = Training(copy.deepcopy(model).double(), batch, None).gradients()
        record["errors"] = {name: error(training.gradients(), exact) for name, training in trainings.items()}
    calls: dict[str, Callable[[], None]] = {name: training.step for name, training in trainings.items()}
    for call in calls.values():
        call()
    timings = measured(calls, options)
    record["timings"] = {name: timing.record() for name, timing in timings.items()}
    record["speedup"] = {name: timings["postlude"].speedup_over(timings[name]) for name in modes if "postlude" in modes}
    # In turn, and the least of three: what an allocator keeps from one call to the next differs.
    peaks = [{name: memory.peak(call, torch.device("cpu")) for name, call in calls.items()} for _ in range(3)]
    record["peak_bytes"] = {name: min(peak[name] or 0 for peak in peaks) for name in modes}
    return record


def show(record: dict[str, Any]) -> None:
    """Print the table of one dtype."""
    rows = []
    for name, timing in record["timings"].items():
        found = record["errors"].get(name)
        rows.append(
            [
                name,
                f"{timing['median_ms']:.1f} ±{timing['spread']:.0%}",
                f"{record['speedup'].get(name, float('nan')):.2f}",
                f"{record['peak_bytes'][name] / 1e6:.0f}",
                f"{found:.1e}" if found is not None else "–",
            ]
        )
    title = (
        f"MiniLM training step, {record['dtype']}, dropout {'as configured' if record['dropout'] is None else record['dropout']}"
    )
    table(title, ["mode", "ms ± spread", "Postlude's speed-up", "peak MB", "gradients' error"], rows)


def main() -> None:
    """Run what the command line asks for."""
    options = arguments(
        __doc__,
        batch={"type": int, "default": 16},
        length={"type": int, "default": 128},
        dtypes={"nargs": "+", "choices": list(DTYPES), "default": ["float32"]},
        dropouts={"nargs": "+", "default": ["0", "model"], "help": "probabilities, or 'model' for the model's own"},
        modes={"nargs": "+", "choices": list(MODES), "default": list(MODES)},
    )
    records = []
    for dtype in options.dtypes:
        for dropout in options.dropouts:
            records.append(measure(dtype, None if dropout == "model" else float(dropout), options.modes, options))
            show(records[-1])
    save(options.result, {"batch": options.batch, "length": options.length, "steps": records})
    console.print(f"{options.batch} x {options.length} tokens, {options.threads} threads")


if __name__ == "__main__":
    main()
