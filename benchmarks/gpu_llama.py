"""Hugging Face's Llama with the layer shapes of its 8B model (4 layers, random bfloat16 weights): prefill and decode.

Each mode is `torch.compile` of the same unchanged model; its GPU work is captured as a CUDA graph, and graphs are replayed in
turn. Decode reads a cache of 128 tokens. The error is that of the logits against the same model in float64.

    python benchmarks/gpu_llama.py --out results/gpu_llama.json
"""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING, Any

import torch
import transformers

import gpu_common as common

if TYPE_CHECKING:
    from collections.abc import Callable

DEVICE = "cuda"
CACHED = 128
CASES = (("prefill", 1, 2048), ("prefill", 4, 2048), ("decode", 1, 1), ("decode", 16, 1))
#: Programmatic dependent launch between Inductor's own kernels is an option of Inductor, off unless asked for. Postlude makes it
#: safe beside Regions, and switches it on there unless it is forbidden.
PDL = "triton.enable_pdl"
MODES: dict[str, dict[str, Any]] = {
    "inductor": {"backend": "inductor"},
    "inductor, PDL": {"backend": "inductor", "options": {PDL: True}},
    "postlude": {"backend": "postlude"},
    "postlude, no PDL": {"backend": "postlude", "options": {PDL: False}},
}


def llama(layers: int) -> Any:
    """The model, in bfloat16 on the GPU."""
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


def step(model: Any, kind: str, batch: int, length: int, wrap: Callable[[Any], Any]) -> Callable[[], torch.Tensor]:
    """A function without arguments that runs one prefill or one decode step of `wrap(model)` and gives the last logits."""
    torch.manual_seed(1)
    tokens = torch.randint(0, 32000, (batch, length), device=DEVICE)
    run = wrap(model)
    if kind == "prefill":
        return lambda: run(input_ids=tokens, use_cache=False, logits_to_keep=1).logits
    cache = transformers.StaticCache(config=model.config, max_cache_len=2 * CACHED)
    prompt = torch.randint(0, 32000, (batch, CACHED), device=DEVICE)
    model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
    # A step writes its own key and value at one place of the cache, so steps can be repeated.
    position = torch.tensor([CACHED], device=DEVICE)
    positions = position.expand(batch, 1).contiguous()

    def decode() -> torch.Tensor:
        rewind(cache)
        logits: torch.Tensor = run(
            input_ids=tokens, past_key_values=cache, position_ids=positions, use_cache=True, logits_to_keep=1
        ).logits
        return logits

    return decode


def rewind(cache: Any) -> None:
    """Forget the step: newer versions of the cache count its tokens."""
    for layer in cache.layers:
        length = getattr(layer, "cumulative_length", None)
        if isinstance(length, torch.Tensor):
            length.fill_(CACHED)
        elif length is not None:
            layer.cumulative_length = CACHED


def call_time(run: Callable[[], torch.Tensor], calls: int = 30) -> float:
    """Microseconds of a call that is in no graph, the best of several rounds: of a decode step, what the host takes."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / calls * 1e6)
    return min(times)


@torch.no_grad()
def main() -> None:
    options = common.parser(__doc__)
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--modes", nargs="+", choices=list(MODES), default=["inductor", "postlude"])
    options.add_argument("--case", action="append", choices=[f"{k}-{b}" for k, b, _ in CASES])
    arguments = options.parse_args()
    model = llama(arguments.layers)
    rows = []
    for kind, batch, length in CASES:
        if arguments.case and f"{kind}-{batch}" not in arguments.case:
            continue
        torch._dynamo.reset()
        wide = copy.deepcopy(model).double() if batch == 1 or kind == "decode" else None
        reference = step(wide, kind, batch, length, lambda m: m)() if wide is not None else None
        del wide
        torch.cuda.empty_cache()
        sides, errors, calls, alive = {}, {}, {}, []  # a graph reads what its function holds
        for name in arguments.modes:
            run = step(model, kind, batch, length, lambda m, name=name: torch.compile(m, dynamic=False, **MODES[name]))
            logits = run().clone()
            errors[name] = common.relative_error(logits, reference) if reference is not None else float("nan")
            calls[name] = call_time(run, 30 if kind == "decode" else 3)
            sides[name] = common.graph_of(run)
            alive.append(run)
        times = common.interleave(sides, arguments.rounds, repeats=20 if kind == "decode" else 3)
        rows.append(
            {
                "case": f"{kind} {batch}x{length}",
                "times": {n: vars(t) for n, t in times.items()},
                "errors": errors,
                "calls": calls,
            }
        )
        ratio = times["inductor"].microseconds / times["postlude"].microseconds
        cells = "  ".join(
            f"{n} {t.microseconds:8.1f} us (spread {t.spread:.1%}, error {errors[n]:.2e}, without a graph {calls[n]:.0f} us)"
            for n, t in times.items()
        )
        print(f"{kind:8}{batch:3} x {length:<5} {cells}  {ratio:.3f}x", flush=True)
        common.save(arguments.out, {"layers": arguments.layers, "rows": rows})


if __name__ == "__main__":
    main()
