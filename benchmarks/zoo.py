"""The models of tests/models/zoo.py at sizes where kernels matter: Hugging Face's own code, and MiniLM with its real weights.

`Size` scales all of them alike: "small" for statistics over many seeds, "base" with the layer sizes of published models (fewer
layers: equal layers share their kernels) for times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn

from postlude.demo import minilm

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY = 1024


@dataclass(frozen=True)
class Size:
    """Columns of a layer, those of its feed-forward part, heads, layers, batch and tokens."""

    hidden: int
    inner: int
    heads: int
    layers: int
    batch: int
    tokens: int


SIZES = {"small": Size(128, 352, 4, 2, 2, 29), "base": Size(768, 3072, 12, 2, 2, 128)}

Case = tuple[nn.Module, dict[str, Tensor]]


def _tokens(batch: int, tokens: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, tokens))


def _bert(size: Size) -> Case:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.inner,
    )
    mask = torch.ones(size.batch, size.tokens, dtype=torch.long)
    mask[1, size.tokens // 2 :] = 0
    return transformers.BertModel(config, add_pooling_layer=False), {
        "input_ids": _tokens(size.batch, size.tokens),
        "attention_mask": mask,
    }


def _llama(size: Size) -> Case:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config), {"input_ids": _tokens(size.batch, size.tokens)}


def _one_token(size: Size) -> Case:
    model, _ = _llama(size)
    return model, {"input_ids": _tokens(2 * size.batch, 1)}


def _gpt2(size: Size) -> Case:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=size.hidden, n_inner=size.inner, n_layer=size.layers, n_head=size.heads, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config), {"input_ids": _tokens(size.batch, size.tokens)}


def _t5(size: Size) -> Case:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=size.hidden,
        d_kv=size.hidden // size.heads,
        d_ff=size.inner,
        num_layers=size.layers,
        num_heads=size.heads,
        feed_forward_proj="gated-gelu",
        use_cache=False,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config), {
        "input_ids": _tokens(size.batch, size.tokens),
        "decoder_input_ids": _tokens(size.batch, size.tokens // 2),
    }


def _vit(size: Size) -> Case:
    side = 32 if size.tokens < 64 else 128
    config = transformers.ViTConfig(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.inner,
        image_size=side,
        patch_size=8,
    )
    return transformers.ViTModel(config, add_pooling_layer=False), {"pixel_values": torch.randn(1, 3, side, side)}


def _whisper(size: Size) -> Case:
    frames = 2 * size.tokens
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=size.hidden,
        encoder_layers=size.layers,
        decoder_layers=size.layers,
        encoder_attention_heads=size.heads,
        decoder_attention_heads=size.heads,
        encoder_ffn_dim=size.inner,
        decoder_ffn_dim=size.inner,
        max_source_positions=frames // 2,
        num_mel_bins=80,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return transformers.WhisperModel(config), {
        "input_features": torch.randn(size.batch, 80, frames),
        "decoder_input_ids": _tokens(size.batch, size.tokens // 4),
    }


def _mixtral(size: Size) -> Case:
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.inner // 2,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        use_cache=False,
    )
    return transformers.MixtralForCausalLM(config), {"input_ids": _tokens(size.batch, size.tokens)}


def _minilm(size: Size) -> Case:
    model = minilm.load()
    batch, tokens = (2, 29) if size.tokens < 64 else (8, 128)
    sentences = minilm.corpus()
    start = int(torch.randint(0, len(sentences), ()))
    filled = minilm.Tokenizer().filled(sentences[start:] + sentences[:start], batch, tokens)
    return model.requires_grad_(True), {"input_ids": filled.input_ids, "attention_mask": filled.attention_mask}


MODELS: dict[str, Callable[[Size], Case]] = {
    "bert": _bert,
    "llama": _llama,
    "llama, 1 token": _one_token,
    "gpt2": _gpt2,
    "t5": _t5,
    "vit": _vit,
    "whisper": _whisper,
    "mixtral": _mixtral,
    "minilm": _minilm,
}


def build(name: str, size: str, *, seed: int = 0, training: bool = False, dtype: torch.dtype = torch.float32) -> Case:
    """The model and its inputs by keyword, the same for the same seed; dropout is off in training too."""
    torch.manual_seed(seed)
    model, inputs = MODELS[name](SIZES[size])
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for attribute in ("dropout", "attention_dropout", "activation_dropout", "dropout_prob", "layerdrop"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    model.train(training)
    converted = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    return model.to(dtype), converted


def output(found: Any) -> Tensor:
    """The tensor that counts: logits, else the last hidden state, else the result itself."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(tensor := getattr(found, name, None), Tensor):
            return tensor
    assert isinstance(found, Tensor)
    return found
