"""The backend as a user meets it: no import, options, caches, threads, processes, copies, bad input."""

import copy
import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass

import postlude
from postlude.backend import JointPass, RegionPass
from postlude.errors import OptionError
from postlude.options import Options


class Block(nn.Module):
    """LayerNorm(x + up-down MLP)."""

    def __init__(self, width: int = 24, inner: int = 40) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.norm = nn.Linear(width, inner), nn.Linear(inner, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(F.gelu(self.up(x))))


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def _python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_backend_is_found_without_an_import(tmp_path: Path) -> None:
    code = (
        "import torch, sys; f = torch.compile(lambda x, w: torch.relu(x @ w), backend='postlude');"
        "before = 'postlude' in sys.modules; x = torch.randn(4, 4);"
        "torch.testing.assert_close(f(x, x), torch.relu(x @ x)); print(before, 'postlude' in sys.modules)"
    )
    assert _python(code, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)).split()[1] == "True"


CACHED = """
import torch, torch._dynamo.utils as u
from tests.test_backend import Block
model = Block(); x = torch.randn(5, 24, requires_grad={training})
f = torch.compile(model, backend="{backend}")
y = f(x); y.sum().backward() if {training} else None
torch.testing.assert_close(y, model(x))
c = u.counters["inductor"]; a = u.counters["aot_autograd"]
print(c["fxgraph_cache_hit"], c["fxgraph_cache_miss"], a["autograd_cache_hit"])
"""


@pytest.mark.parametrize("training", [False, True])
def test_compiled_graphs_are_found_again_in_another_process(training: bool, tmp_path: Path) -> None:
    root = str(Path(__file__).parent.parent)
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": root}
    cold = _python(CACHED.format(training=training, backend="postlude"), **environment).split()
    assert int(cold[1]) > 0
    warm = _python(CACHED.format(training=training, backend="postlude"), **environment).split()
    assert int(warm[1]) == 0
    assert int(warm[0]) + int(warm[2]) > 0
    # Plain Inductor must not be handed our graphs, nor we Inductor's.
    plain = _python(CACHED.format(training=training, backend="inductor"), **environment).split()
    assert int(plain[0]) == 0


def test_one_compile_serves_every_batch() -> None:
    model = Block()
    compiled = torch.compile(model, backend="postlude", dynamic=True, options={"fuse_all": True})
    counters.clear()
    for batch in (2, 7, 64, 3):
        x = torch.randn(batch, 5, 24)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(compiled(x[:1]), model(x[:1]), rtol=1e-5, atol=1e-5)


def test_training_step_updates_parameters_as_eager_does() -> None:
    model, twin = Block(), Block()
    compiled = torch.compile(model, backend="postlude", options={"fuse_all": True})
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, twin)]
    for step in range(4):
        x = torch.randn(6, 24, generator=torch.Generator().manual_seed(step))
        for run, optimizer in zip((compiled, twin), optimizers, strict=True):
            optimizer.zero_grad()
            (run(x) * x).sum().backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_autocast() -> None:
    model, x = Block(), torch.randn(6, 24)
    compiled = torch.compile(model, backend="postlude", options={"fuse_all": True})
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        ours, eager = compiled(x), model(x)
    exact = copy.deepcopy(model).double()(x.double())
    assert ours.dtype == eager.dtype
    assert float((ours - exact).norm()) <= 1.1 * float((eager - exact).norm())


def test_inference_mode() -> None:
    model, x = Block(), torch.randn(6, 24)
    compiled = torch.compile(model, backend="postlude", options={"fuse_all": True})
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)


def test_copies_and_pickles_of_a_compiled_module() -> None:
    model, x = Block(), torch.randn(6, 24)
    compiled = torch.compile(model, backend="postlude", options={"fuse_all": True})
    with torch.no_grad():
        expected = compiled(x)
        twin = copy.deepcopy(compiled)
        torch.testing.assert_close(twin(x), expected)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        torch.testing.assert_close(torch.load(buffer, weights_only=False)(x), expected, rtol=1e-5, atol=1e-5)


def test_threads_compile_at_once() -> None:
    results: dict[int, Tensor] = {}
    widths = (16, 24, 32, 40)

    def work(width: int) -> None:
        model = Block(width)
        with torch.no_grad():
            x = torch.ones(3, width)
            ours = torch.compile(model, backend="postlude", options={"fuse_all": True})(x)
            results[width] = (ours - model(x)).abs().max()

    threads = [threading.Thread(target=work, args=(width,)) for width in widths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == sorted(widths)
    assert all(float(difference) < 1e-5 for difference in results.values())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_fork_after_compile() -> None:
    model, x = Block(), torch.randn(64, 24)
    compiled = torch.compile(model, backend="postlude", options={"fuse_all": True})
    with torch.no_grad():
        expected = compiled(x)
        child = os.fork()
        if child == 0:
            same = torch.allclose(compiled(x), expected)
            os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_control_flow_holds_regions() -> None:
    w = torch.randn(8, 8)

    def function(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: torch.relu(x @ w), lambda x: torch.tanh(x @ w), (x,))

    compiled = torch.compile(function, backend="postlude", options={"fuse_all": True})
    with torch.no_grad():
        for x in (torch.ones(4, 8), -torch.ones(4, 8)):
            torch.testing.assert_close(compiled(x), function(x))


def test_in_place_and_views_around_regions() -> None:
    def function(x: Tensor, w: Tensor, cache: Tensor) -> Tensor:
        y = torch.relu(x @ w)
        cache[1:3] = y[:2]
        y.add_(1)
        return y[:, ::2] + cache[:, ::2].sum()

    x, w = torch.randn(4, 8), torch.randn(8, 6)
    compiled = torch.compile(function, backend="postlude", options={"fuse_all": True})
    ours, theirs = torch.zeros(5, 6), torch.zeros(5, 6)
    torch.testing.assert_close(compiled(x, w, ours), function(x, w, theirs))
    torch.testing.assert_close(ours, theirs)


def test_cpp_wrapper() -> None:
    model, x = Block(), torch.randn(6, 24)
    compiled = torch.compile(model, backend="postlude", options={"fuse_all": True, "cpp_wrapper": True})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_pass_of_the_users_own_still_runs() -> None:
    seen = []

    class Own(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            seen.append(len(graph.nodes))

        def uuid(self) -> str:
            return "own"

    x = torch.randn(4, 4)
    for place in ("post_grad_custom_pre_pass", "joint_custom_pre_pass"):
        seen.clear()
        torch._dynamo.reset()
        with torch._inductor.config.patch({place: Own(), "force_disable_caches": True}):
            torch.compile(lambda x: torch.relu(x @ x), backend="postlude")(x)
        assert seen


def test_a_pass_that_can_not_be_cached_is_not() -> None:
    class Own(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            pass

        def uuid(self) -> None:
            return None

    regions = RegionPass(Options())
    assert regions.uuid() == RegionPass(Options()).uuid()
    assert regions.uuid() != RegionPass(Options(rounding="eager")).uuid()
    assert JointPass(regions).uuid() is not None
    assert RegionPass(Options(), Own()).uuid() is None
    assert JointPass(regions, Own()).uuid() is None
    assert JointPass(RegionPass(Options(), Own())).uuid() is None


def test_masks_are_looked_for_while_forward_and_backward_are_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[list[str]] = []
    monkeypatch.setattr("postlude.backend.drop_masks", lambda graph: names.append([node.name for node in graph.nodes]))
    x = torch.randn(4, 4, requires_grad=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        torch.compile(lambda x: torch.relu(x @ x), backend="postlude")(x).sum().backward()
    assert any({"primals_1", "tangents_1", "relu"} <= set(graph) for graph in names)


# Bad input.


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rounding": "never"}, OptionError, "'once' or 'eager'"),
        ({"freeze": 1}, OptionError, "True or False"),
        ({"frieze": True}, OptionError, "did you mean 'freeze'"),
        ({"frieze": True}, OptionError, r"\(compile_ahead, freeze, rounding, tune\)"),  # those that the README lists
        ({"max_autotune": "yes"}, RuntimeError, "Unexpected type"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(BackendCompilerFailed, match=message) as caught:
        torch.compile(lambda x: x @ x, backend="postlude", options=options)(torch.randn(2, 2))  # type: ignore[arg-type]
    assert isinstance(caught.value.inner_exception, error)


@pytest.mark.parametrize(
    "inputs",
    [
        (torch.randn(3, 4), torch.randn(5, 6)),
        (torch.randn(3, 4), torch.randn(4, 6).double()),
        (torch.randn(3), torch.randn(4, 6)),
    ],
    ids=["shapes", "types", "vector"],
)
def test_bad_input_raises_what_eager_raises(inputs: tuple[Tensor, Tensor]) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x @ w)

    # Dynamo finds the fault, in its own words, before any backend sees a graph.
    messages = []
    for backend in ("postlude", "inductor"):
        torch._dynamo.reset()
        with pytest.raises(RuntimeError) as raised:
            torch.compile(function, backend=backend)(*inputs)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    with pytest.raises(RuntimeError):
        function(*inputs)


def test_explain_counts_and_shows() -> None:
    model, x = Block(), torch.randn(6, 24)
    with torch.no_grad():
        explanation = postlude.explain(model, x)
    assert explanation.gemms == 2
    assert explanation.fused_gemms == 2
    assert "erf" in explanation.regions[0].program
    assert explanation.bytes_saved == 2 * 4 * 6 * (40 + 24)
    assert "reduce sum n" in explanation.regions[1].program
    text = str(explanation)
    assert "2 of 2 GEMMs" in text
    assert "up" in text
    assert explanation.regions[0].name == "up"


def test_explain_tells_of_layers_that_are_one_operator() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(2, 5, 16)
    with torch.no_grad():
        explanation = postlude.explain(model, x)
        assert (explanation.gemms, explanation.whole_layers) == (0, 2)
        assert "set_fastpath_enabled(False)" in str(explanation)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            explanation = postlude.explain(model, x)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        assert (explanation.gemms, explanation.whole_layers) == (12, 0)
        assert "set_fastpath_enabled" not in str(explanation)


def test_explain_says_what_was_chosen() -> None:
    with torch.no_grad():
        explanation = postlude.explain(Block(), torch.randn(6, 24))
    for region in explanation.regions:
        assert region.choice is not None
        assert (region.choice.winner, region.choice.origin) == ("cpp", "rule")
        assert [candidate.name for candidate in region.choice.candidates] == ["cpp", "unfused"]


def test_explain_names_modules_and_counts_equal_layers() -> None:
    model = nn.Sequential(Block(), Block(), nn.Linear(24, 24)).eval()
    with torch.no_grad():
        explanation = postlude.explain(model, torch.randn(6, 24))
    assert [region.name for region in explanation.regions] == ["0.up", "0.down", "1.up", "1.down", "2"]
    rows = [line for line in str(explanation).splitlines() if "│" in line]
    assert any("2 x" in row and "*.up" in row for row in rows)

    def train() -> None:
        model(torch.randn(6, 24)).sum().backward()

    names = [region.name for region in postlude.explain(train).regions]
    assert any(name.startswith("graph 1: backward of") for name in names)


def test_a_fault_before_capture_is_told_and_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(graph: torch.fx.Graph) -> int:
        raise ValueError("not enough values to unpack")

    monkeypatch.setattr("postlude.backend.share_heads", fault)
    x = torch.randn(3, 24)
    with torch._inductor.config.patch(force_disable_caches=True), torch.no_grad():
        with pytest.warns(UserWarning, match="leaves the graph around its products as it is"):
            result = torch.compile(Block(), backend="postlude")(x)
        torch.testing.assert_close(result, Block()(x), rtol=1e-5, atol=1e-5)
