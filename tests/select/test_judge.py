"""What pays on a GPU without measuring, by rows."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from postlude.ir import parse
from postlude.select import judge
from tests.targets.triton.norms import region as norm_region

_PROGRAM = "region(m, n, k); %x = operand [m, k] bf16; %w = operand [n, k] bf16; %acc = contract %x, %w : f32; {}"
PLAIN = parse(_PROGRAM.format("yield [m, n] bf16 %acc"))
#: A node of an epilogue: more than a product and its bias.
EPILOGUE = torch.fx.Graph().create_node("call_function", torch.ops.aten.tanh.default)
TANH = parse(_PROGRAM.format("%0 = tanh %acc; yield [m, n] bf16 %0"))


def rows(size: int, *, vary: bool) -> Any:
    if not vary:
        return size
    environment = ShapeEnv()
    source = torch._dynamo.source.ConstantSource("rows")
    symbol = environment.create_symbol(size, source, dynamic_dim=DimDynamic.DYNAMIC)
    return environment.create_symintnode(symbol, hint=size, source=source)


@pytest.mark.parametrize(
    ("region", "size", "vary", "names", "kept"),
    [
        (TANH, 8, False, ["triton"], True),
        (TANH, 8, True, ["triton"], False),
        (TANH, 8, True, ["cute", "triton"], True),
        (TANH, 512, False, ["triton"], False),
        (TANH, 512, True, ["cute", "triton"], True),
        (PLAIN, 8, False, ["triton", "blas"], True),
        (PLAIN, 8, True, ["triton", "blas"], True),
        (PLAIN, 8, True, ["triton"], False),
        (PLAIN, 512, True, ["triton", "blas"], False),
    ],
)
def test_rows_decide(region: Any, size: int, vary: bool, names: list[str], kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "serving", lambda device, region: names)
    monkeypatch.setattr(judge, "_was_measured", lambda device: True)
    left = SimpleNamespace(node=SimpleNamespace(meta={"val": torch.empty(0, dtype=torch.bfloat16)}), transposed=False)
    growth: Any = SimpleNamespace(
        first=SimpleNamespace(left=left),
        program=SimpleNamespace(batched=False),
        rows=(rows(size, vary=vary),),
        prologue=None,
        gemms=[],
        values=[EPILOGUE],
    )
    plan: Any = SimpleNamespace(region=region)
    assert (judge._pays_on_a_gpu(plan, growth) is None) == kept


def test_nothing_is_kept_on_a_gpu_that_was_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_was_measured", lambda device: False)
    left = SimpleNamespace(node=SimpleNamespace(meta={"val": torch.empty(0, dtype=torch.bfloat16)}))
    growth: Any = SimpleNamespace(
        first=SimpleNamespace(left=left), program=SimpleNamespace(batched=False), rows=(8,), prologue=None
    )
    reason = judge._pays_on_a_gpu(SimpleNamespace(region=TANH), growth)  # type: ignore[arg-type]
    assert reason is not None
    assert "tune" in reason


@pytest.mark.parametrize(
    ("total", "m", "n", "k", "kept"),
    [
        ("reduce sum m %0; yield [m, n] bf16 %0; yield [n] bf16 %1", 2048, 4096, 4096, True),
        ("reduce sum n %0; yield [m, n] bf16 %0; yield [m] bf16 %1", 2048, 4096, 4096, False),
        ("reduce sum n %0; yield [m, n] bf16 %0; yield [m] bf16 %1", 8192, 4096, 4096, True),
        ("reduce sum m %0; yield [m, n] bf16 %0; yield [n] bf16 %1", 16384, 1024, 1024, False),
    ],
)
def test_sizes_decide_on_totals(total: str, m: int, n: int, k: int, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "serving", lambda device, region: ["cute"])
    monkeypatch.setattr(judge, "_was_measured", lambda device: True)
    value = torch.empty(m, k, dtype=torch.bfloat16, device="meta")
    left = SimpleNamespace(node=SimpleNamespace(meta={"val": value}), shape=value.shape, transposed=False)
    growth: Any = SimpleNamespace(
        first=SimpleNamespace(left=left), program=SimpleNamespace(batched=False), rows=(m,), prologue=None, widths={"n": n}
    )
    growth.gemms, growth.values = [], [EPILOGUE]
    plan: Any = SimpleNamespace(region=parse(_PROGRAM.format(f"%0 = tanh %acc; %1 = {total}")))
    assert (judge._pays_on_a_gpu(plan, growth) is None) == kept


def test_a_norm_before_a_pair_stays_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "serving", lambda device, region: ["triton"])
    monkeypatch.setattr(judge, "_was_measured", lambda device: True)
    left = SimpleNamespace(node=SimpleNamespace(meta={"val": torch.empty(0, dtype=torch.bfloat16)}))
    growth: Any = SimpleNamespace(
        first=SimpleNamespace(left=left), program=SimpleNamespace(batched=False), rows=(1,), prologue=object()
    )
    for name, kept in (("linear", True), ("q, k, v", True), ("swiglu", False)):
        plan: Any = SimpleNamespace(region=norm_region(name, "bf16"))
        assert (judge._pays_on_a_gpu(plan, growth) is None) == kept
