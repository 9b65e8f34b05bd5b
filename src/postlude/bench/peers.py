"""The ways to run one case. A peer that is not installed, or can't take a case, says why."""

import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from postlude.bench.cases import Case
from postlude.twins import separate

Call = Callable[[], Tensor]
Inputs = tuple[Tensor, ...]


class NotTaken(Exception):
    """The peer does not run this case; the message says why."""


@dataclass(frozen=True)
class Peer:
    """One way to run a module.

    Attributes:
        name: as tables show it.
        make: gives the ready call for a module and its inputs, compiled and run once.
        ours: whether it is Postlude.
        package: what must be installed beside torch.
        devices: types of devices that it runs on.
        dtypes: element types that it takes; none listed: all.
    """

    name: str
    make: Callable[[nn.Module, Inputs, Case], Call]
    ours: bool = False
    package: str | None = None
    devices: Sequence[str] = ("cpu", "cuda")
    dtypes: Sequence[str] = ()

    def refusal(self, case: Case, device: str) -> str | None:
        """Why it does not run a case, or None."""
        if device not in self.devices:
            return f"not on {device}"
        if self.dtypes and case.dtype not in self.dtypes:
            return f"not in {case.dtype}"
        if self.package is not None and find_spec(self.package) is None:
            return f"the package {self.package} is not installed"
        return None


def _eager(module: nn.Module, inputs: Inputs, case: Case) -> Call:
    def call() -> Tensor:
        with torch.no_grad():
            return module(*inputs)  # type: ignore[no-any-return]

    return call


def _compiled(freezing: bool = False, **keywords: Any) -> Callable[[nn.Module, Inputs, Case], Call]:
    def make(module: nn.Module, inputs: Inputs, case: Case) -> Call:
        from torch._inductor import config, select_algorithm

        select_algorithm.PRINT_AUTOTUNE = False  # a table for every product, on stderr
        compiled: Any = torch.compile(separate(module), fullgraph=True, dynamic=False, **keywords)
        with torch.no_grad(), config.patch(freezing=freezing), redirect_stderr(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled(*inputs)
        return _eager(compiled, inputs, case)

    return make


def _onnxruntime(module: nn.Module, inputs: Inputs, case: Case) -> Call:
    if find_spec("onnx") is None:
        raise NotTaken("the package onnx is not installed")
    import onnxruntime

    names = [f"input{number}" for number in range(len(inputs))]
    with tempfile.NamedTemporaryFile(suffix=".onnx") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, inputs, file.name, input_names=names, opset_version=17, dynamo=False)
        graph = Path(file.name).read_bytes()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    feed = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
    return lambda: torch.from_numpy(session.run(None, feed)[0])


def _openvino(module: nn.Module, inputs: Inputs, case: Case) -> Call:
    import openvino

    # Its graph is converted in float32; bfloat16 is the precision of its arithmetic, which it chooses layer by layer.
    wide, values = module.float(), tuple(value.float() for value in inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converted = openvino.convert_model(wide, example_input=values, input=[list(value.shape) for value in values])
    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[case.dtype],
    }
    request = openvino.Core().compile_model(converted, "CPU", settings).create_infer_request()
    arrays = [value.numpy() for value in values]
    return lambda: torch.from_numpy(request.infer(arrays, share_inputs=True, share_outputs=True)[0])


#: All peers, in the order of the table's columns.
PEERS = (
    Peer("eager", _eager),
    Peer("inductor", _compiled()),
    Peer("inductor-auto", _compiled(freezing=True, mode="max-autotune-no-cudagraphs")),
    Peer("onnxruntime", _onnxruntime, package="onnxruntime", devices=("cpu",), dtypes=("float32",)),
    Peer("openvino", _openvino, package="openvino", devices=("cpu",), dtypes=("float32", "bfloat16")),
    Peer("postlude", _compiled(backend="postlude"), ours=True),
    Peer("postlude-freeze", _compiled(backend="postlude", options={"freeze": True}), ours=True, devices=("cpu",)),
)
