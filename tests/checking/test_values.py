"""Names of tensors in nested outputs."""

from collections import namedtuple

import pytest
import torch

from postlude.checking.values import named_tensors
from tests.checking.models import Found

Pair = namedtuple("Pair", ["first", "second"])


def test_names_are_the_paths_that_a_person_would_write() -> None:
    one = torch.ones(2)
    value = {"logits": one, "odd key": one, "parts": [one, (one, None)], "found": Found(one, {"a": [one]}), "pair": Pair(one, 3)}
    assert list(named_tensors(value)) == [
        "logits", "['odd key']", "parts[0]", "parts[1][0]", "found.hidden", "found.parts.a[0]", "pair.first", "pair.second",
    ]  # fmt: skip


def test_a_single_tensor_and_numbers() -> None:
    assert list(named_tensors(torch.ones(2))) == ["output"]
    assert named_tensors((1.5, True, "text", None))["[0]"].item() == 1.5
    assert named_tensors("text") == {}
    assert named_tensors(None) == {}


def test_an_object_that_holds_itself_ends() -> None:
    class Loop:
        def __init__(self) -> None:
            self.me = self
            self.tensor = torch.zeros(1)

    assert list(named_tensors(Loop())) == ["tensor"]


def test_outputs_and_caches_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    found = named_tensors(transformers.LlamaForCausalLM(config).eval()(input_ids=torch.ones(1, 3, dtype=torch.long)))
    assert found["logits"].shape == (1, 3, 32)
    # The cache's field has had several names.
    (keys,) = (tensor for name, tensor in found.items() if name.endswith(".layers[0].keys"))
    assert keys.shape == (1, 2, 3, 8)
