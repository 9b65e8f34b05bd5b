"""Which kernel a call goes to. Kernels are stood in for, so that no GPU is needed; `blas` is the real one."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from postlude.errors import KernelBuildError
from postlude.ir import Region, parse
from postlude.select import rows
from postlude.select.entry import Entry, Measured
from postlude.select.knowledge import knowledge
from postlude.select.rows import FEW_PLAIN_ROWS, FEW_ROWS, ByRows
from postlude.select.subject import call_of, environment
from postlude.select.variants import Variant
from postlude.targets import aten, cute
from postlude.targets.planned import Launch, PlannedKernel
from tests.select.entries import entry

_PROGRAM = (
    "region(m, n, n1, k); %x = operand [m, k] {0}; %w = operand [n, k] {0}; %w1 = operand [k, n1] {0};"
    " %acc = contract %x, %w : f32; %acc1 = contract %x, %w1 : f32; yield [m, n] {0} %acc; yield [m, n1] {0} %acc1"
)
PRODUCTS, HALF_PRODUCTS = (parse(_PROGRAM.format(dtype)) for dtype in ("f32", "bf16"))


class Recorded(PlannedKernel):
    """A kernel that notes its launches; it may refuse to plan, or to launch."""

    def __init__(self, name: str, calls: list[str], *, plans: bool = True, launches: bool = True) -> None:
        super().__init__()
        self.name, self.calls, self.plans, self.launches = name, calls, plans, launches

    def plan(self, tensors: Sequence[Tensor]) -> Launch | None:
        return self.launch if self.plans else None

    def launch(self, pointers: Sequence[int], tensors: Sequence[Tensor]) -> bool:
        if self.launches:
            self.calls.append(self.name)
        return self.launches


GELU = parse(
    "region(m, n, n1, k); %x = operand [m, k] f32; %w = operand [n, k] f32; %w1 = operand [k, n1] f32;"
    " %acc = contract %x, %w : f32; %acc1 = contract %x, %w1 : f32; %0 = tanh %acc; yield [m, n] f32 %0; yield [m, n1] f32 %acc1"
)


def tensors(m: int) -> list[Tensor]:
    return [torch.randn(m, 8), torch.randn(5, 8), torch.randn(8, 3), torch.empty(m, 5), torch.empty(m, 3)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    monkeypatch.setattr(rows, "_load", lambda name, region: Recorded(name, made))
    return made


@pytest.mark.parametrize(("region", "few"), [(GELU, FEW_ROWS), (PRODUCTS, FEW_PLAIN_ROWS)], ids=["epilogue", "plain"])
def test_rows_decide(region: Region, few: int, calls: list[str]) -> None:
    kernel = ByRows(region, ["cute", "triton"])
    for m in (1, few, few + 1, 4096):
        kernel(*tensors(m))
    assert calls == ["triton", "triton", "cute", "cute"]


def test_leading_dimensions_are_rows_too(calls: list[str]) -> None:
    kernel = ByRows(GELU, ["cute", "triton"])
    x, w, w1, *_ = tensors(1)
    for shape in ((8, 8), (8, 9)):
        kernel(x.expand(*shape, 8), w, w1, torch.empty(*shape, 5), torch.empty(*shape, 3))
    assert calls == ["triton", "cute"]


@pytest.mark.parametrize("refusal", ["plans", "launches"])
def test_the_next_takes_what_one_does_not(refusal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(rows, "_load", lambda name, region: Recorded(name, made, **{refusal: name != "cute"}))
    kernel = ByRows(PRODUCTS, ["cute", "triton"])
    for call in (kernel, kernel.fast):
        assert call(*tensors(100))
    assert made == ["triton", "triton"]


def test_a_call_plans_once(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = ByRows(HALF_PRODUCTS, ["triton"])
    plans = []
    plan = kernel.plan
    monkeypatch.setattr(kernel, "plan", lambda given: plans.append(given) or plan(given))
    call = kernel.fast
    given = tensors(3)
    odd = [torch.empty(25)[1:].view(3, 8), *given[1:]]
    for arguments in (given, given, odd, odd, given):
        assert call(*arguments)
    assert calls == ["triton"] * 5
    assert len(plans) == 2  # one for aligned pointers, one for the misaligned one


def test_a_kernel_that_can_not_be_built_is_told_once_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def load(name: str, region: object) -> Recorded:
        if name == "cute":
            raise KernelBuildError("kernel.py", "compile", "an error")
        return Recorded(name, made)

    monkeypatch.setattr(rows, "_load", load)
    kernel = ByRows(PRODUCTS, ["cute", "triton"])
    with pytest.warns(UserWarning, match="Another target takes its place"):
        kernel(*tensors(100))
    kernel(*tensors(100))
    assert made == ["triton", "triton"]


def test_no_fault_of_a_target_reaches_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older Triton lacks what generated code imports; PTXAS and passes of a compiler fail with errors of their own."""

    class Broken(Recorded):
        def plan(self, tensors: Sequence[Tensor]) -> Launch | None:
            raise ImportError("cannot import name 'gdc_wait'")

    monkeypatch.setattr(rows, "_load", lambda name, region: Broken(name, []))
    kernel, given = ByRows(PRODUCTS, ["triton"]), tensors(3)
    with pytest.warns(UserWarning, match="Target triton failed: ImportError.*gdc_wait"):
        assert kernel(*given)
    torch.testing.assert_close(given[3], given[0] @ given[1].t())


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("others", [True, False], ids=["another builds", "none builds"])
def test_a_kernel_that_a_launch_can_not_build_is_replaced(fast: bool, others: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair's kernel for the other order of its weights is compiled when they first lie so."""
    made: list[str] = []

    class Launching(Recorded):
        def launch(self, pointers: Sequence[int], tensors: Sequence[Tensor]) -> bool:
            if self.name == "cute" or not others:
                raise KernelBuildError("kernel.py", "compile", "an error")
            return super().launch(pointers, tensors)

    monkeypatch.setattr(rows, "_load", lambda name, region: Launching(name, made))
    kernel = ByRows(HALF_PRODUCTS, ["cute", "triton"])
    call = kernel.fast if fast else kernel
    given = [t.bfloat16() for t in tensors(100)]
    with pytest.warns(UserWarning, match="Another target takes its place"):
        assert call(*given)
    assert call(*given)
    if others:
        assert made == ["triton", "triton"]
    else:
        torch.testing.assert_close(given[3], given[0] @ given[1].t())


@pytest.mark.parametrize("m", [0, 1, 65, 200])
def test_blas_gives_what_the_interpreter_gives(m: int) -> None:
    kernel = ByRows(PRODUCTS, ["blas"])
    given = tensors(m)
    kernel(*given)
    for got, wanted in zip(given[3:], aten.evaluate(PRODUCTS, given[:3]), strict=True):
        torch.testing.assert_close(got, wanted)


def test_without_any_target_the_interpreter_runs() -> None:
    given = tensors(3)
    ByRows(PRODUCTS, [])(*given)
    torch.testing.assert_close(given[3], given[0] @ given[1].t())


# Tuned kernels -------------------------------------------------------------------------------------------------------

TILE = Variant("cute", cute.configuration({"tile_m": 128, "tile_n": 192, "cluster_m": 1, "cluster_n": 2, "pingpong": True}))


def tune(m: int, **seconds: float) -> Entry:
    """Put into the database what calls of `m` rows take: `tile` the configuration, others targets by name."""
    given = tensors(m)
    call = call_of(GELU, given[:3], device=given[0].device)
    times = {TILE if name == "tile" else Variant(name): value for name, value in seconds.items()}
    best = min(times, key=times.__getitem__).name
    found = tuple(Measured(variant, value, value, value) for variant, value in times.items())
    made = entry(call=call, environment=environment("cpu", GELU), candidates=found, winner=best, incumbent="unfused")
    knowledge().put(made)
    return made


@pytest.fixture
def tuned_calls(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(rows, "_load_tuned", lambda variant, region: Recorded(f"tuned {variant.name}", calls))
    return calls


def test_what_was_measured_goes_before_the_rules(tuned_calls: list[str]) -> None:
    tune(4, triton=2.0, tile=1.0, unfused=3.0)
    tune(100, triton=1.0, tile=2.0, unfused=0.5)  # the graph has the Region, so the fastest kernel is taken
    kernel = ByRows(GELU, ["cute", "triton"])
    for m in (3, 4, 100, 5, 1000):
        assert kernel(*tensors(m))
    assert tuned_calls == [f"tuned {TILE.name}"] * 2 + ["triton", "triton", "cute"]


def test_the_database_is_asked_once_for_each_bucket_of_rows(tuned_calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tune(100, triton=1.0, tile=2.0, unfused=3.0)
    asked = []
    find = knowledge().kernel
    monkeypatch.setattr(knowledge(), "kernel", lambda call, *rest: asked.append(dict(call.sizes)["m"]) or find(call, *rest))
    loaded = []
    monkeypatch.setattr(rows, "_load", lambda name, region: loaded.append(name) or Recorded(name, tuned_calls))
    kernel = ByRows(GELU, ["cute", "triton"])
    for m in range(1, 200):
        assert kernel(*tensors(m))
    assert asked == [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256]
    assert sorted(loaded) == ["cute", "triton"], "each kernel is made once"
    assert tuned_calls.count("cute") == 199 - 64 - 32, "65 to 96 and 129 to 199 by the rules, 97 to 128 as measured"


def test_a_tuned_kernel_of_a_target_that_is_not_here_is_passed_over(tuned_calls: list[str]) -> None:
    tune(100, triton=2.0, tile=1.0, unfused=3.0)
    assert ByRows(GELU, ["triton"])(*tensors(100))
    assert tuned_calls == ["triton"]


def test_a_tuned_kernel_that_does_not_take_a_call_gives_way(tuned_calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tune(100, tile=1.0, unfused=3.0)
    monkeypatch.setattr(rows, "_load_tuned", lambda variant, region: Recorded("tuned", tuned_calls, launches=False))
    assert ByRows(GELU, ["cute", "triton"])(*tensors(100))
    assert tuned_calls == ["cute"]


def test_a_tuned_kernel_that_can_not_be_built_is_marked_and_replaced(
    tuned_calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tune(100, tile=1.0, triton=2.0, unfused=3.0)

    def load(variant: Variant, region: Region) -> Recorded:
        if variant == TILE:
            raise KernelBuildError("kernel.py", "compile", "an error")
        return Recorded(f"tuned {variant.name}", tuned_calls)

    monkeypatch.setattr(rows, "_load_tuned", load)
    kernel = ByRows(GELU, ["cute", "triton"])
    with pytest.warns(UserWarning, match="Another target takes its place"):
        assert kernel(*tensors(100))
    assert tuned_calls == ["cute"]  # by the rules
    found = knowledge().database.get(made.key)
    assert found is not None
    assert "did not compile" in found.failed[TILE.name]
    assert ByRows(GELU, ["cute", "triton"])(*tensors(100))  # another process
    assert tuned_calls == ["cute", "triton"]
