"""Errors against float64 of eager, Inductor and Postlude, over the zoo, types and many seeds: is Postlude ever less accurate?

    python benchmarks/accuracy.py --seeds 20 --result accuracy

Each seed draws other weights (MiniLM keeps its own) and other inputs. One error is the relative Frobenius norm of the distance of
the output from the same model's in float64; for gradients that of all parameters together, for a random direction of the output.
One error is chance: what counts is the distribution over seeds of its ratio to eager's error on the same weights and inputs. Its
geometric mean has a 95 % confidence interval (Student's t of the logarithms); 'less accurate' is an interval that lies above 1.

`--generation` generates text by a small decoder with a cache instead: errors of the logits of every step, all sides fed the
tokens that float64 chooses, and how many of their own choices are the same as its.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from common import RESULTS, console, save, table
from postlude.twins import separate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SIDES: dict[str, dict[str, Any]] = {
    "inductor": {"backend": "inductor"},
    "postlude": {"backend": "postlude"},
    "postlude, rounding eager": {"backend": "postlude", "options": {"rounding": "eager"}},
}
#: What names a case, and the order in which tables show them.
CASE = {"dtype": DTYPES, "kind": ("outputs", "gradients"), "model": zoo.MODELS}
#: Quantiles of Student's t for a two-sided 95 % interval, by degrees of freedom; the next smaller one is taken.
_STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 7: 2.36, 9: 2.26, 14: 2.14, 19: 2.09, 29: 2.05, 59: 2.00, 99: 1.98}


def distance(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Relative distance of tensors, all together, in float64."""
    squares = sum(float((one.double() - other).square().sum()) for one, other in zip(found, exact, strict=True))
    return math.sqrt(squares / sum(float(other.square().sum()) for other in exact))


def summary(ratios: Sequence[float]) -> dict[str, float]:
    """Geometric mean with its interval, quantiles and the worst of ratios over seeds."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    freedom = len(logs) - 1
    student = _STUDENT[max(known for known in _STUDENT if known <= freedom)] if freedom else math.inf
    half = student * statistics.stdev(logs) / math.sqrt(len(logs)) if freedom else math.inf
    ordered = sorted(ratios)
    return {
        "mean": math.exp(mean),
        "low": math.exp(mean - half),
        "high": math.exp(mean + half),
        "q10": ordered[len(ordered) // 10],
        "median": statistics.median(ordered),
        "q90": ordered[-1 - len(ordered) // 10],
        "worst": ordered[-1],
    }


def cell(found: dict[str, float]) -> str:
    """A mean with its interval; the worst."""
    return f"{found['mean']:.3f} ({found['low']:.3f} to {found['high']:.3f}), {found['worst']:.2f}"


# Models --------------------------------------------------------------------------------------------------------------


def exact_twin(model: nn.Module) -> nn.Module:
    """The same model in float64."""
    twin = copy.deepcopy(model).double()
    if hasattr(getattr(twin, "config", None), "num_local_experts"):
        twin.set_experts_implementation("eager")  # the grouped GEMM of experts has no float64 kernel
    return twin


def measured(model: nn.Module, call: Callable[..., Any], inputs: dict[str, Tensor], training: bool) -> list[Tensor]:
    """The output, or all gradients for a random direction of it."""
    if not training:
        with torch.no_grad():
            return [zoo.output(call(**inputs))]
    found = zoo.output(call(**inputs))
    direction = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad((found.double() * direction).sum(), parameters, allow_unused=True)
    return [gradient for gradient in gradients if gradient is not None]


def model_errors(name: str, dtype: str, training: bool, seeds: int, size: str) -> dict[str, list[float]]:
    """Errors of each side by seed. Each side is compiled once; the weights of a seed are copied into the same model."""
    model, inputs = zoo.build(name, size, training=training, dtype=DTYPES[dtype])
    calls: dict[str, Callable[..., Any]] = {"eager": model}
    torch._dynamo.reset()
    for side, keywords in SIDES.items():
        if side.endswith("eager") and dtype == "float32":
            continue  # there is nothing to round
        calls[side] = torch.compile(separate(model), dynamic=False, **keywords)
    errors: dict[str, list[float]] = {side: [] for side in calls}
    for seed in range(seeds):
        drawn, inputs = zoo.build(name, size, seed=seed, training=training, dtype=DTYPES[dtype])
        model.load_state_dict(drawn.state_dict())
        wide = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
        twin = exact_twin(drawn)
        exact = [tensor.double() for tensor in measured(twin, twin, wide, training)]
        for side, call in calls.items():
            errors[side].append(distance(measured(model, call, inputs, training), exact))
    return errors


# Generation ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """RMSNorm, attention with a cache, RMSNorm, gated feed-forward part."""

    def __init__(self, width: int, heads: int, length: int, batch: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.register_buffer("keys", torch.zeros(batch, heads, length, width // heads))
        self.register_buffer("values", torch.zeros(batch, heads, length, width // heads))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        """One step for tokens at `position`."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        mask = torch.arange(self.keys.shape[2])[None, :] <= position[:, None]
        found = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
        x = x + self.out(found.transpose(1, 2).reshape(batch, tokens, width))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """A small language model with random weights."""

    def __init__(self, vocabulary: int = 211, width: int = 64, heads: int = 4, length: int = 48, batch: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, length, batch) for _ in range(2))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        """Logits of the last token."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, position)
        return self.head(self.norm(x))[:, -1]

    def forget(self) -> None:
        """Empty the caches."""
        for block in self.blocks:
            block.keys.zero_()
            block.values.zero_()


@torch.no_grad()
def generated(model: Decoder, call: Callable[..., Any], prompt: Tensor, steps: int, chosen: Tensor | None) -> Tensor:
    """Logits [step, batch, vocabulary] after a prompt. Tokens are `chosen` [step, batch, 1], or else the model's own."""
    model.forget()
    logits = [call(prompt, torch.arange(prompt.shape[1])).clone()]
    for step in range(steps - 1):
        token = logits[-1].argmax(-1, keepdim=True) if chosen is None else chosen[step]
        logits.append(call(token, torch.tensor([prompt.shape[1] + step])).clone())
    return torch.stack(logits)


def generation(dtype: str, seeds: int, steps: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """By side and seed: error of all logits, and the fraction of choices that are float64's."""
    torch._dynamo.reset()
    model = Decoder().to(DTYPES[dtype]).eval()
    calls: dict[str, Callable[..., Any]] = {"eager": model}
    calls |= {side: torch.compile(separate(model), dynamic=False, **keywords) for side, keywords in SIDES.items()}
    errors: dict[str, list[float]] = {side: [] for side in calls}
    alike: dict[str, list[float]] = {side: [] for side in calls}
    for seed in range(seeds):
        torch.manual_seed(seed)
        drawn = Decoder().to(DTYPES[dtype]).eval()
        model.load_state_dict(drawn.state_dict())
        prompt = torch.randint(0, 211, (2, 7))
        twin = drawn.double()
        exact = generated(twin, twin, prompt, steps, None)
        chosen = exact.argmax(-1, keepdim=True)
        for side, call in calls.items():
            logits = generated(model, call, prompt, steps, chosen)
            errors[side].append(distance([logits], [exact]))
            alike[side].append(float((logits.argmax(-1, keepdim=True) == chosen).double().mean()))
    return errors, alike


# The command ---------------------------------------------------------------------------------------------------------


def ratios(errors: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Summaries of each side's errors over eager's."""
    return {
        side: summary([own / eager for own, eager in zip(values, errors["eager"], strict=True)])
        for side, values in errors.items()
        if side != "eager"
    }


def row(label: str, errors: dict[str, list[float]]) -> list[str]:
    """A row of the table."""
    found = ratios(errors)
    return [label, f"{statistics.median(errors['eager']):.2e}", *(cell(found[side]) if side in found else "–" for side in SIDES)]


def overall(records: Sequence[dict[str, Any]], label: str) -> list[str]:
    """All cases of a kind together, every case with the same weight."""
    cells = []
    for side in SIDES:
        means = [record["ratios"][side]["mean"] for record in records if side in record["ratios"]]
        worst = max((record["ratios"][side]["worst"] for record in records if side in record["ratios"]), default=0.0)
        cells.append(f"{math.exp(statistics.fmean(map(math.log, means))):.3f}, {worst:.2f}" if means else "–")
    return [label, "", *cells]


def main() -> int:
    """The command; exit code 1 where Postlude's interval lies above 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--models", nargs="+", choices=list(zoo.MODELS), default=list(zoo.MODELS))
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--kinds", nargs="+", choices=("outputs", "gradients"), default=("outputs", "gradients"))
    parser.add_argument("--size", choices=list(zoo.SIZES), default="small")
    parser.add_argument("--generation", action="store_true", help="generate text instead")
    parser.add_argument("--steps", type=int, default=24, help="tokens of a generation")
    parser.add_argument("--result", help="name of the JSON file in benchmarks/results (default: not written)")
    parser.add_argument("--add", action="store_true", help="keep the other cases that the file has, and show them too")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    records: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    if arguments.add and (file := RESULTS / f"{arguments.result}.json").exists():
        records = json.loads(file.read_text())["cases"]
    if arguments.generation:
        for dtype in arguments.dtypes:
            errors, alike = generation(dtype, arguments.seeds, arguments.steps)
            records.append({"case": f"generation {dtype}", "errors": errors, "ratios": ratios(errors), "choices": alike})
            rows.append(row(f"generation, {dtype}", errors))
            same = "  ".join(f"{side} {statistics.fmean(values):.2%}" for side, values in alike.items())
            console.print(f"{dtype}: tokens that float64 chooses too: {same}")
    else:
        for name in arguments.models:
            for dtype in arguments.dtypes:
                for kind in arguments.kinds:
                    errors = model_errors(name, dtype, kind == "gradients", arguments.seeds, arguments.size)
                    record = {"model": name, "dtype": dtype, "kind": kind, "errors": errors, "ratios": ratios(errors)}
                    records = [*(r for r in records if any(r[key] != record[key] for key in CASE)), record]
                    console.print("  ".join(row(f"{name}, {dtype}, {kind}", errors)))
                    save(arguments.result, {"cases": records})
        records.sort(key=lambda r: [list(one).index(r[key]) for key, one in CASE.items()])
        for dtype, kind in dict.fromkeys((r["dtype"], r["kind"]) for r in records):
            of_kind = [r for r in records if (r["dtype"], r["kind"]) == (dtype, kind)]
            rows += [row(f"{r['model']}, {dtype}, {kind}", r["errors"]) for r in of_kind]
            rows.append(overall(of_kind, f"all, {dtype}, {kind}"))
    title = "error over eager's: geometric mean over seeds (95 % interval), worst"
    table(title, ["", "eager's error", *SIDES], rows)
    save(arguments.result, {"cases": records})
    worse = [r for r in records if any(r["ratios"][side]["low"] > 1 for side in r["ratios"] if side.startswith("postlude"))]
    for record in worse:
        sides = {side: cell(found) for side, found in record["ratios"].items()}
        console.print(
            f"less accurate than eager: {record.get('case') or (record['model'], record['dtype'], record['kind'])}: {sides}"
        )
    return bool(worse)


if __name__ == "__main__":
    sys.exit(main())
