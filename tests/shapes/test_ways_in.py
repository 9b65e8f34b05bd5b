"""One spec drives torch.compile, torch.export and make_fx, for the same functions."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from postlude.shapes import dynamic_spec, export, make_fx
from tests.shapes.functions import NAMES, case

#: In torch 2.11, PyTorch's own code for these asks whether sizes are 1, or odd: it compiles again, and takes no unbacked symbols.
ASK_IN_2_11 = {"attention", "append", "conv"} if torch.__version__ < "2.12" else set()


@pytest.fixture(autouse=True)
def supported(request: pytest.FixtureRequest) -> None:
    if request.node.callspec.params["name"] in ASK_IN_2_11:
        pytest.skip("torch 2.11 asks for sizes in its own code")


def compare(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def compiles_once(name: str, backend: str, guard_free: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    one = case(name, guard_free)
    target = one.make()
    plain = one.make() if isinstance(target, torch.nn.Module) else target
    if plain is not target:
        plain.load_state_dict(target.state_dict())
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(dynamic_spec(one.spec)(target), backend=counter, fullgraph=True)
    with torch.no_grad():
        for sizes in one.sizes:
            args, kwargs = one.call(*sizes)
            compare(compiled(*args, **kwargs), plain(*args, **kwargs))
    assert counter.frame_count == 1


@pytest.mark.parametrize("guard_free", [False, True], ids=["backed", "guard_free"])
@pytest.mark.parametrize("name", NAMES)
def test_compiles_once(name: str, guard_free: bool) -> None:
    compiles_once(name, "aot_eager", guard_free)


@pytest.mark.parametrize("name", NAMES)
def test_export(name: str) -> None:
    one = case(name)
    torch.manual_seed(0)
    target = one.make()
    function = dynamic_spec(one.spec)(target)
    generic = max(one.sizes, key=min)
    args, kwargs = one.call(*generic)
    program = export(function, args, kwargs).module()
    with torch.no_grad():
        for sizes in one.sizes:
            args, kwargs = one.call(*sizes)
            compare(program(*args, **kwargs), function(*args, **kwargs))


@pytest.mark.parametrize("guard_free", [False, True], ids=["backed", "guard_free"])
@pytest.mark.parametrize("name", NAMES)
def test_make_fx(name: str, guard_free: bool) -> None:
    one = case(name, guard_free)
    torch.manual_seed(0)
    function = dynamic_spec(one.spec)(one.make())
    args, kwargs = one.call(*max(one.sizes, key=min))
    graph = make_fx(function)(*args, **kwargs)
    with torch.no_grad():
        for sizes in one.sizes:
            args, kwargs = one.call(*sizes)
            compare(graph(*args, *kwargs.values()), function(*args, **kwargs))
