"""What is timed: the nodes of a plan, on inputs that are in no cache, and results that are right."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule

from postlude.capture.grow import Growth
from postlude.capture.rewrite import Plan
from postlude.ir import parse
from postlude.select import clock, judge
from postlude.select.choice import Choice
from postlude.select.clock import cold_sets, cycle
from postlude.select.measure import NotACandidate, _again, _compare, _example, _operands, elsewhere, subgraph
from postlude.targets import aten
from postlude.targets.triton import configs


def plans_of(function: Callable[..., Any], *inputs: Tensor) -> list[tuple[Plan, Graph, bool]]:
    """The plans that a function's Regions are judged by, with the nodes that each would be compared with."""
    found: list[tuple[Plan, Graph, bool]] = []
    rule = judge.rule

    def looks(plan: Plan, growth: Growth) -> Choice:
        found.append((plan, *subgraph(plan)))
        return rule(plan, growth)

    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(force_disable_caches=True), torch.no_grad():
        patch.setattr(judge, "rule", looks)
        torch.compile(function, backend="postlude")(*inputs)
    return found


def results_agree(plan: Plan, graph: Graph) -> None:
    """The Region and the nodes that it stands for give the same on the inputs of a measurement."""
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    values = [_example(node.meta["val"], seed) for seed, node in enumerate(nodes)]
    wanted = GraphModule({}, graph)(*values)
    got = aten.evaluate(plan.region, _operands(plan, nodes, values))
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours.reshape(theirs.shape), theirs, rtol=1e-4, atol=1e-4)


def test_transposes_that_capture_looks_through_are_part_of_what_is_compared_with() -> None:
    w, b = torch.randn(24, 16), torch.randn(24)
    ((plan, graph, comparable),) = plans_of(lambda x: F.gelu(F.linear(x, w, b)), torch.randn(5, 16))
    assert comparable
    assert len(graph.find_nodes(op="placeholder")) == 3  # x, w, b: not the transposed weight beside the weight
    results_agree(plan, graph)


def test_copies_that_a_region_saves_are_part_of_what_is_compared_with() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q.transpose(1, 2) @ k.transpose(1, 2).transpose(2, 3), -1) @ v.transpose(1, 2)

    inputs = [torch.randn(2, 7, 3, 8) for _ in range(3)]
    for plan, graph, comparable in plans_of(attention, *inputs):
        assert comparable
        results_agree(plan, graph)


def test_examples_lie_as_the_models_tensors_do() -> None:
    like = torch.empty(6, 40, dtype=torch.bfloat16)[:, 3:35].t()
    made = _example(like, 1)
    assert (made.shape, made.stride(), made.dtype) == (like.shape, like.stride(), like.dtype)
    other = _again(made)
    assert torch.equal(other, made)
    assert other.stride() == made.stride()
    assert other.data_ptr() != made.data_ptr()
    assert torch.equal(_example(torch.empty(3, dtype=torch.bool), 0), torch.ones(3, dtype=torch.bool))
    assert _again(7) == 7
    assert _again(torch.empty(0, 4)).shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_only_grossly_other_results_are_wrong(dtype: torch.dtype) -> None:
    wanted = torch.randn(64, 64, dtype=torch.float64)
    wanted[0, 0], wanted[0, 1] = float("nan"), float("inf")
    near = wanted * (1 + torch.finfo(dtype).eps * torch.randn(64, 64))
    _compare([near.to(dtype)], [wanted.to(dtype)])
    _compare([near.to(dtype).reshape(8, 8, 64)], [wanted.to(dtype)])
    _compare([torch.empty(0)], [torch.empty(0)])
    for wrong in (wanted.roll(1, 0), torch.zeros(64, 64), torch.full((64, 64), float("nan"))):
        with pytest.raises(NotACandidate, match="result 0 differs"):
            _compare([wrong.to(dtype)], [wanted.to(dtype)])


def test_another_thread_has_the_configuration_of_this_one() -> None:
    def look() -> Callable[..., Any]:
        seen.append((threading.get_ident(), torch._inductor.config.max_autotune, torch.is_grad_enabled()))
        return print

    seen: list[tuple[int, bool, bool]] = []
    with torch._inductor.config.patch(max_autotune=True):
        elsewhere(look, lambda: None)
    assert seen[0][0] != threading.get_ident()
    assert seen[0][1:] == (True, False)

    def fails() -> Callable[..., Any]:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        elsewhere(fails, lambda: None)


def test_an_interrupt_does_not_wait_for_a_compiler() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    forever = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        elsewhere(lambda: forever.wait() and print, interrupt)  # type: ignore[return-value, arg-type]
    forever.set()


# Clocks --------------------------------------------------------------------------------------------------------------


def test_a_cycle_calls_with_each_set_in_turn() -> None:
    calls: list[int] = []
    timed = cycle(calls.append, [[1], [2], [3]])
    assert calls == [1]
    assert 0 < timed() < 0.1
    assert calls == [1, 1, 2, 3]


def test_sets_are_as_many_as_the_last_cache_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "last_cache", lambda device: 32 << 20)
    cpu = torch.device("cpu")
    assert cold_sets(cpu, 4 << 20) == 16
    assert cold_sets(cpu, 1 << 30) == 3
    assert cold_sets(cpu, 1 << 10) == 64
    assert cold_sets(cpu, 0) == 64


def test_the_last_cache_is_the_largest(tmp_path: Path) -> None:
    for index, text in enumerate(("48K", "32K", "2048K", "300M\n")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(text)
    assert clock._cpu_cache(str(tmp_path)) == 300 << 20
    assert clock._cpu_cache(str(tmp_path / "nothing")) > 0


# Candidates ----------------------------------------------------------------------------------------------------------


def test_neighbours_of_a_triton_configuration_serve_the_call() -> None:
    device = configs.Device("sm_90", 132, 232448)
    for m in (1, 3, 16, 40, 100):
        problem = configs.Problem(m, (4096,), 4096)
        others = configs.neighbours(device, problem)
        assert len(others) == len(set(others)) > (0 if m > 64 else 2)
        assert configs.choose(device, problem) not in others
        for config in others:
            configs.check(config)
            assert config.form != "gemv" or config.block_m >= m
            assert configs.Config(**{name: getattr(config, name) for name in config.__slots__}) == config
    assert len({str(config) for rules in configs.TABLES.values() for config in {rule.config for rule in rules}}) > 20


def test_promising_cute_configurations_are_near_the_best_that_is_expected() -> None:
    from postlude.targets.cute.configurations import Problem, choose, every_configuration, expected_time, promising

    for paired in (False, True):
        problem = Problem(2048, 8192, 4096, paired=paired)
        own, others = choose(problem, 9, 132), promising(problem, 9, 132)
        assert 0 < len(others) <= 6
        assert own not in others
        for one in others:
            assert one in every_configuration()
            assert expected_time(problem, one, 132) <= 1.07 * expected_time(problem, own, 132)


def test_a_cute_configuration_that_does_not_serve_pairs_is_refused() -> None:
    from postlude.targets import cute

    swiglu = parse(
        "region(m, n, k); %x = operand [m, k] bf16; %w = operand [n, k] bf16; %w1 = operand [n, k] bf16;"
        " %acc = contract %x, %w : f32; %acc1 = contract %x, %w1 : f32; %0 = mul %acc, %acc1; yield [m, n] bf16 %0"
    )
    tile = {"tile_m": 128, "tile_n": 192, "cluster_m": 1, "cluster_n": 2, "pingpong": True}
    cute.load(swiglu, cute.configuration(tile))
    with pytest.raises(ValueError, match="does not serve pairs"):
        cute.load(swiglu, cute.configuration({**tile, "swapped": True}))
