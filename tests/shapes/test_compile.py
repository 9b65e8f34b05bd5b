"""torch.compile of a function with a spec: how often it compiles, what it leaves behind, and which guards stay."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import innermost_fn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from postlude.shapes import IntVar, ShapesSpec, ShapeVar, ShapeViolation, TensorSpec, dynamic_spec, spec_of
from postlude.shapes.proof import implied
from tests.shapes.functions import Mlp


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def batch_of(*dims: Any, **options: Any) -> ShapesSpec:
    return ShapesSpec({"x": TensorSpec([ShapeVar("b", max=64), *dims])}, **options)


def shape_guards(function: Any) -> list[str]:
    """Guards on sizes of what was compiled for a function with a spec."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    entries = _debug_get_cache_entry_list(innermost_fn(function).__globals__["__own_code"])
    return [line for entry in entries for line in str(entry.guard_manager).splitlines() if "GUARD" in line and ".size()" in line]


@pytest.mark.parametrize("first", [1, 0, 5])
def test_0_and_1_are_sizes_like_others(first: int) -> None:
    counter = CompileCounter()
    compiled = torch.compile(dynamic_spec(batch_of(4))(lambda x: (x * 2).sum(1)), backend=counter, fullgraph=True)
    for size in (first, 1, 0, 2, 64, 1):
        x = torch.randn(size, 4)
        torch.testing.assert_close(compiled(x), (x * 2).sum(1))
        assert not vars(x)  # no marks stay on the user's tensor
    assert counter.frame_count == 1
    assert not shape_guards(compiled)


def test_a_violation_is_no_compilation() -> None:
    counter = CompileCounter()
    compiled = torch.compile(dynamic_spec(batch_of(4))(lambda x: x + 1), backend=counter)
    for wrong in (torch.randn(65, 4), torch.randn(3, 5), torch.randn(3)):
        with pytest.raises(ShapeViolation):
            compiled(wrong)
    assert counter.frame_count == 0
    compiled(torch.randn(3, 4))
    with pytest.raises(ShapeViolation):
        compiled(torch.randn(65, 4))
    assert counter.frame_count == 1


def test_another_dtype_is_another_compilation_that_knows_the_spec_too() -> None:
    counter = CompileCounter()
    compiled = torch.compile(dynamic_spec(batch_of(4))(lambda x: x + 1), backend=counter)
    for dtype in (torch.float32, torch.float64):
        for size in (1, 3, 7):
            compiled(torch.randn(size, 4, dtype=dtype))
    assert counter.frame_count == 2


def test_after_a_reset() -> None:
    counter = CompileCounter()
    compiled = torch.compile(dynamic_spec(batch_of(4))(lambda x: x + 1), backend=counter)
    for _ in range(2):
        for size in (1, 3, 7):
            compiled(torch.randn(size, 4))
        torch._dynamo.reset()
    assert counter.frame_count == 2


def test_code_that_branches_on_a_size() -> None:
    """Backed symbols answer, by another compilation; unbacked ones can't, and say so where it is compiled."""

    def branching(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.shape[0] > 8 else x - 1

    counter = CompileCounter()
    compiled = torch.compile(dynamic_spec(batch_of(4))(branching), backend=counter, fullgraph=True)
    for size in (1, 3, 9, 64, 0):
        x = torch.randn(size, 4)
        torch.testing.assert_close(compiled(x), branching(x))
    assert counter.frame_count == 2
    assert shape_guards(compiled)
    for fullgraph in (True, False):
        free = torch.compile(dynamic_spec(batch_of(4), guard_free=True)(branching), backend=counter, fullgraph=fullgraph)
        with pytest.raises(torch._dynamo.exc.UserError, match="data-dependent"):
            free(torch.randn(3, 4))


def test_a_branch_on_0_or_1() -> None:
    def branching(x: torch.Tensor) -> torch.Tensor:
        return x - 1 if x.shape[0] == 1 else x + 1

    counter = CompileCounter()
    compiled = torch.compile(dynamic_spec(batch_of(4))(branching), backend=counter, fullgraph=True)
    for size in (1, 3, 9, 0, 1):
        x = torch.randn(size, 4)
        torch.testing.assert_close(compiled(x), branching(x))
    assert counter.frame_count == 2


def test_code_that_fixes_a_size_is_an_error() -> None:
    compiled = torch.compile(dynamic_spec(batch_of(4))(lambda x: x + torch.ones(3, 4)), backend="eager")
    with pytest.raises(ConstraintViolationError, match="specialized it to be a constant"):
        compiled(torch.randn(3, 4))


def test_what_was_compiled_for_a_spec_serves_no_other_function() -> None:
    """Its guards on sizes are left out, since its front checks them; the same function without a spec has its own."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x[: x.shape[0] // 2]

    spec = ShapesSpec({"x": TensorSpec([2 * ShapeVar("half", max=4), 4])})
    backend = CompileCounter()
    torch.compile(dynamic_spec(spec)(function), backend=backend)(torch.randn(4, 4))
    plain = torch.compile(function, backend=backend)
    assert plain(torch.randn(11, 4)).shape == (5, 4)
    assert backend.frame_count == 2


def test_scalars_vary_too() -> None:
    counter = CompileCounter()
    spec = ShapesSpec({"x": TensorSpec([ShapeVar("b")]), "n": IntVar("n")})
    compiled = torch.compile(dynamic_spec(spec)(lambda x, n: x * n), backend=counter)
    for n in (1, 0, -3, 5, 2):
        torch.testing.assert_close(compiled(torch.ones(3), n), torch.ones(3) * n)
    assert counter.frame_count == 1


@pytest.mark.parametrize("way", ["decorated inside", "method", "Module.compile", "class"])
def test_ways_to_apply_it(way: str) -> None:
    counter = CompileCounter()
    spec = batch_of(8)
    model = Mlp()
    if way == "decorated inside":
        call = dynamic_spec(spec)(torch.compile(model.forward, backend=counter))
    elif way == "method":
        call = torch.compile(dynamic_spec(spec)(model.forward), backend=counter)
    elif way == "Module.compile":
        call = dynamic_spec(spec)(model)
        call.compile(backend=counter)
    else:

        class Checked(Mlp):
            forward = dynamic_spec(spec)(Mlp.forward)

        call = torch.compile(Checked(), backend=counter)
    for size in (1, 3, 7, 2):
        assert call(torch.randn(size, 8)).shape == (size, 8)
    with pytest.raises(ShapeViolation):
        call(torch.randn(65, 8))
    assert counter.frame_count == 1


def test_a_copied_module_calls_its_own_weights() -> None:
    model = dynamic_spec(batch_of(8))(Mlp())
    assert isinstance(model, Mlp)
    assert spec_of(model) == batch_of(8)
    other = copy.deepcopy(model)
    nn.init.zeros_(other.down.weight)
    nn.init.ones_(other.down.bias)
    torch.testing.assert_close(other(torch.randn(3, 8)), torch.ones(3, 8))
    with pytest.raises(ShapeViolation):
        other(torch.randn(3, 7))
    assert list(model.state_dict()) == list(Mlp().state_dict())


def test_within_another_compiled_function() -> None:
    """The check is traced with the rest: its comparisons become guards there."""
    inner = dynamic_spec(batch_of(4))(lambda x: x * 2)
    counter = CompileCounter()
    outer = torch.compile(lambda x: inner(x) + 1, backend=counter, fullgraph=True, dynamic=True)
    for size in (3, 5, 7):
        torch.testing.assert_close(outer(torch.ones(size, 4)), torch.full((size, 4), 3.0))
    assert counter.frame_count == 1


def test_training() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    model = Mlp()
    compiled = torch.compile(dynamic_spec(batch_of(8))(model), backend=counter)
    reference = Mlp()
    reference.load_state_dict(model.state_dict())
    for size in (1, 4, 9):
        x = torch.randn(size, 8)
        for one in (compiled, reference):
            one.zero_grad()
            one(x).square().sum().backward()
        torch.testing.assert_close(model.up.weight.grad, reference.up.weight.grad)
    assert counter.frame_count == 1


@pytest.mark.parametrize("guard_free", [False, True], ids=["backed", "guard_free"])
@pytest.mark.parametrize("backend", ["inductor", "postlude"])
def test_backends(backend: str, guard_free: bool) -> None:
    counter = CompileCounterWithBackend(backend)
    model = Mlp()
    compiled = torch.compile(dynamic_spec(batch_of(8), guard_free=guard_free)(model), backend=counter)
    with torch.no_grad():
        for size in (1, 0, 5, 64, 2):
            x = torch.randn(size, 8)
            torch.testing.assert_close(compiled(x), model.down(nn.functional.gelu(model.up(x))), rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


n, m = ShapeVar("n", min=2, max=9), ShapeVar("m", multiple_of=4)
SIZES = {"L['x'].size()[0]": n, "L['x'].size()[1]": 2 * n, "L['y'].size()[0]": m, "L['k']": n + m}


@pytest.mark.parametrize(
    ("guard", "expected"),
    [
        ("0 <= L['x'].size()[0]", True),
        ("2 <= L['x'].size()[0]", True),
        ("3 <= L['x'].size()[0]", False),
        ("L['x'].size()[0] <= 9  # a comment", True),
        ("L['x'].size()[0] < 9", False),
        ("L['x'].size()[0] != 1", True),
        ("L['x'].size()[0] != 2", False),
        ("L['x'].size()[1] == 2*L['x'].size()[0]", True),
        ("L['x'].size()[1] == L['x'].size()[0]", False),
        ("4 <= L['x'].size()[1] <= 18", True),
        ("L['y'].size()[0] % 2 == 0", True),
        ("L['y'].size()[0] % 8 == 0", False),
        ("L['k'] == L['x'].size()[0] + L['y'].size()[0]", True),
        ("L['k'] - L['y'].size()[0] >= 2", True),
        ("L['x'].size()[0] == min(L['x'].size()[1], L['x'].size()[0])", True),
        ("L['x'].size()[0] == max(L['x'].size()[1], L['x'].size()[0])", False),
        ("L['x'].size()[0] >= 2 and L['y'].size()[0] >= 0", True),
        ("L['x'].size()[0] > 20 or L['y'].size()[0] >= 0", True),
        ("L['z'].size()[0] >= 0", False),
        ("L['x'].stride()[0] == L['x'].size()[1]", False),
        ("unknown(L['x'].size()[0])", False),
        ("not a guard", False),
    ],
)
def test_a_guard_is_left_out_only_where_the_spec_implies_it(guard: str, expected: bool) -> None:
    assert implied(guard, SIZES) is expected
