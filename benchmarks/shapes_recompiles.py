"""Compilations of Llama, BERT and Whisper under random batches and lengths: default, dynamic=True, mark_dynamic, and a spec.

Hugging Face's own code with tiny random weights, inference. Every way gets the same pairs (batch, length), the size 1 of each
among them, in the same order. A call that Dynamo gives up (its limit of compilations is reached) runs uncompiled and is counted.
Every result is compared with eager's.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers

from common import console, save, table
from postlude.shapes import ShapeVar, TensorSpec, dynamic_spec, watch
from postlude.shapes.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

VOCABULARY = 96
WAYS = ("default", "dynamic=True", "mark_dynamic", "spec")
#: For each model the inputs that vary, with what their dimensions are.
DIMENSIONS = {
    "llama": {"input_ids": "bs", "attention_mask": "bs"},
    "bert": {"input_ids": "bs", "attention_mask": "bs"},
    "whisper": {"input_features": "b__", "decoder_input_ids": "bs"},
}


def model(name: str, attention: str = "sdpa") -> nn.Module:
    """A tiny model with random weights; `attention` is Hugging Face's name for the implementation."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
    if name == "llama":
        made = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
        )
    elif name == "bert":
        made = transformers.BertModel(transformers.BertConfig(**sizes, num_attention_heads=4))
    else:
        made = transformers.WhisperModel(
            transformers.WhisperConfig(
                vocab_size=VOCABULARY, d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                decoder_attention_heads=4, encoder_ffn_dim=80, decoder_ffn_dim=80, max_source_positions=16, num_mel_bins=8,
                use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
            )
        )  # fmt: skip
    made.set_attn_implementation(attention)
    return made.eval()


def inputs(name: str, batch: int, length: int) -> dict[str, Tensor]:
    """Inputs of one call; Whisper's length is that of the text, its audio has always the same."""
    tokens = torch.randint(3, VOCABULARY, (batch, length))
    if name == "whisper":
        return {"input_features": torch.randn(batch, 8, 32), "decoder_input_ids": tokens}
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[1:, length // 2 + 1 :] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def pairs(count: int, most: tuple[int, int], seed: int = 0) -> list[tuple[int, int]]:
    """Random batches and lengths; those of size 1 come after the first, together and apart, wherever chance puts them."""
    chance = random.Random(seed)
    found = [(chance.randint(1, most[0]), chance.randint(1, most[1])) for _ in range(max(0, count - 3))]
    for special in ((1, chance.randint(2, most[1])), (chance.randint(2, most[0]), 1), (1, 1))[:count]:
        found.insert(chance.randint(0, len(found)), special)
    return found


def declared(name: str, made: nn.Module) -> nn.Module:
    """The model with a spec."""
    variables = {"b": ShapeVar("batch"), "s": ShapeVar("length"), "_": None}
    return dynamic_spec({key: TensorSpec([variables[dim] for dim in dims]) for key, dims in DIMENSIONS[name].items()})(made)


def compilations(name: str, way: str, calls: Sequence[tuple[int, int]], backend: str, attention: str = "sdpa") -> Watch:
    """Make the calls, compiled in one way.

    Raises:
        AssertionError: a result differs from eager's.
    """
    torch._dynamo.reset()
    eager, made = model(name, attention), model(name, attention)
    if way == "spec":
        made = declared(name, made)
    watched = watch(torch.compile(made, backend=backend, dynamic=True if way == "dynamic=True" else None))
    with torch.no_grad():
        for batch, length in calls:
            given = inputs(name, batch, length)
            wanted = eager(**given)[0]
            if way == "mark_dynamic":
                for key, dims in DIMENSIONS[name].items():
                    for dim, kind in enumerate(dims):
                        if kind != "_" and given[key].shape[dim] > 1:  # marking a size of 1 is an error
                            torch._dynamo.mark_dynamic(given[key], dim)
            torch.testing.assert_close(watched(**given)[0], wanted, rtol=1e-3, atol=1e-4)
    return watched


def main() -> None:
    """Run all ways and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=200, help="pairs of batch and length (default 200)")
    parser.add_argument("--most", type=int, nargs=2, default=(8, 48), help="largest batch and length")
    parser.add_argument("--backend", default="postlude")
    parser.add_argument("--attention", choices=["sdpa", "eager"], default="sdpa", help="Hugging Face's implementation")
    parser.add_argument("--models", nargs="+", choices=list(DIMENSIONS), default=list(DIMENSIONS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--why", action="store_true", help="show every compilation with its cause")
    parser.add_argument("--result", help="name of the JSON file in benchmarks/results (default: not written)")
    options = parser.parse_args()
    calls = pairs(options.calls, tuple(options.most))
    rows, record = [], []
    for name in options.models:
        for way in options.ways:
            start = time.perf_counter()
            error = ""
            try:
                seen = compilations(name, way, calls, options.backend, options.attention)
            except Exception as raised:  # a way that does not get through is a result too
                error = f"{type(raised).__name__}: {str(raised).splitlines()[0][:80]}"
                rows.append([name, way, "–", "–", "–", error])
                record.append({"model": name, "way": way, "error": error})
                continue
            spent = sum(one.seconds for one in seen.compiles)
            kinds = ", ".join(dict.fromkeys(one.cause.kind for one in seen.recompiles if one.cause))
            rows.append([name, way, str(len(seen.compiles)), str(len(seen.given_up)), f"{spent:.1f}", kinds])
            record.append(
                {
                    "model": name,
                    "way": way,
                    "compilations": len(seen.compiles),
                    "given_up": len(seen.given_up),
                    "compile_seconds": spent,
                    "seconds": time.perf_counter() - start,
                    "causes": [one.cause.what for one in seen.recompiles if one.cause],
                }
            )
            if options.why:
                console.print(seen)
    sizes = f"batch 1 to {options.most[0]}, length 1 to {options.most[1]}"
    title = f"{len(calls)} calls, {sizes}, backend {options.backend}, attention {options.attention}"
    table(title, ["model", "way", "compilations", "given up", "seconds", "because of"], rows)
    save(options.result, {"calls": calls, "backend": options.backend, "attention": options.attention, "records": record})
    if any(one["way"] == "spec" and one.get("compilations") != 1 for one in record):
        sys.exit("A spec took more than one compilation, or failed.")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
