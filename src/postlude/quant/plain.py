"""State dicts as plain tensors, for files that know no others, and back.

tensors, metadata = flatten(model.state_dict())
safetensors.torch.save_file(tensors, path, metadata)

with safetensors.safe_open(path, "pt") as file:
    model.load_state_dict(unflatten({name: file.get_tensor(name) for name in file.keys()}, file.metadata()))
"""

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from postlude.errors import QuantizationError
from postlude.quant.schemes import Scheme
from postlude.quant.weight import PARTS, QuantizedTensor

#: The key of our entry in a file's metadata.
METADATA = "postlude.quantized"


def flatten(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Plain tensors, ``name.codes``, ``name.scale``, ... for each quantised one, and text that says what they are.

    Args:
        state: a state dict.

    Returns:
        The tensors, and metadata as safetensors stores it.

    Raises:
        QuantizationError: two tensors would have one name.
    """
    tensors: dict[str, Tensor] = {}
    described: dict[str, dict[str, str | None]] = {}
    for name, tensor in state.items():
        new = {name: tensor}
        if isinstance(tensor, QuantizedTensor):
            new = {f"{name}.{part}": value for part, value in tensor.parts.items()}
            dtype = str(tensor.dtype).removeprefix("torch.")
            described[name] = {"weight": tensor.scheme.weight, "activation": tensor.scheme.activation, "dtype": dtype}
        if taken := set(new) & set(tensors):
            raise QuantizationError(f"two tensors would be called {taken.pop()!r}", "names of their own", "Rename one")
        tensors |= new
    return tensors, {METADATA: json.dumps(described)}


def unflatten(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> dict[str, Tensor]:
    """The state dict that `flatten` took apart. Without an entry of ours in the metadata the tensors are returned as they are.

    Raises:
        QuantizationError: a part is missing, or the metadata is not `flatten`'s.
    """
    state = dict(tensors)
    try:
        described = json.loads((metadata or {}).get(METADATA, "{}"))
        for name, one in described.items():
            scheme, dtype = Scheme(one["weight"], one["activation"]), getattr(torch, one["dtype"])
            parts = {part: state.pop(f"{name}.{part}") for part in PARTS if f"{name}.{part}" in state}
            state[name] = QuantizedTensor(scheme, parts, dtype)
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise QuantizationError(
            f"the file's tensors and its entry {METADATA!r} do not fit together ({error!r})",
            "what flatten returned",
            "Save it anew",
        ) from error
    return state
