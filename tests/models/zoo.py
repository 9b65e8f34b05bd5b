"""Tiny models of Hugging Face's own code with random weights: name -> (module, keyword inputs), float32, CPU."""

from collections.abc import Callable

import torch
import transformers
from torch import Tensor, nn

Case = tuple[nn.Module, dict[str, Tensor]]

_VOCABULARY = 96


def _tokens(batch: int, length: int) -> Tensor:
    return torch.randint(3, _VOCABULARY, (batch, length))


def bert() -> Case:
    config = transformers.BertConfig(
        vocab_size=_VOCABULARY, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80
    )
    mask = torch.ones(3, 11, dtype=torch.long)
    mask[1, 7:] = 0
    return transformers.BertModel(config), {"input_ids": _tokens(3, 11), "attention_mask": mask}


def llama() -> Case:
    config = transformers.LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config), {"input_ids": _tokens(2, 13)}


def gpt2() -> Case:
    config = transformers.GPT2Config(vocab_size=_VOCABULARY, n_embd=48, n_layer=2, n_head=4, use_cache=False)
    return transformers.GPT2LMHeadModel(config), {"input_ids": _tokens(2, 13)}


def t5() -> Case:
    config = transformers.T5Config(
        vocab_size=_VOCABULARY, d_model=48, d_kv=12, d_ff=80, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu",
        use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), {
        "input_ids": _tokens(2, 9),
        "decoder_input_ids": _tokens(2, 7),
    }


def vit() -> Case:
    config = transformers.ViTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80, image_size=32, patch_size=8
    )
    return transformers.ViTModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


def whisper() -> Case:
    config = transformers.WhisperConfig(
        vocab_size=_VOCABULARY, d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=80, decoder_ffn_dim=80, max_source_positions=16, num_mel_bins=8,
        use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return transformers.WhisperModel(config), {
        "input_features": torch.randn(2, 8, 32),
        "decoder_input_ids": _tokens(2, 7),
    }


def mixtral() -> Case:
    config = transformers.MixtralConfig(
        vocab_size=_VOCABULARY, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config), {"input_ids": _tokens(2, 13)}


MODELS: dict[str, Callable[[], Case]] = {
    "bert": bert,
    "llama": llama,
    "gpt2": gpt2,
    "t5": t5,
    "vit": vit,
    "whisper": whisper,
    "mixtral": mixtral,
}


def build(name: str, *, training: bool = False, dtype: torch.dtype = torch.float32) -> Case:
    """The model and its inputs, the same each time; dropout is off in training too, so that runs can be compared."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for module in model.modules():
        for attribute in ("dropout", "attention_dropout", "activation_dropout", "dropout_prob", "layerdrop"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    model.train(training)
    return model.to(dtype), {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}


def first_output(outputs: object) -> Tensor:
    """The tensor that the comparison looks at."""
    logits = getattr(outputs, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    hidden = outputs.last_hidden_state  # type: ignore[attr-defined]
    assert isinstance(hidden, Tensor)
    return hidden
