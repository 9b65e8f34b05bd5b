"""What capture takes into a Region, what it leaves outside, and that the rewritten graph computes the same."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.capture import Settings
from tests.capture.graphs import captured

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_erf": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "relu6": F.relu6,
    "relu_squared": lambda x: F.relu(x).square(),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "elu": lambda x: F.elu(x, 0.7),
    "celu": lambda x: F.celu(x, 1.3),
    "selu": F.selu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": lambda x: F.softplus(x, beta=2.0, threshold=3.0),
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.25),
    "clamp": lambda x: x.clamp(-0.3, 0.4),
    "clamp_min": lambda x: x.clamp_min(0.1),
    "softsign": F.softsign,
    "logsigmoid": F.logsigmoid,
    "tanhshrink": F.tanhshrink,
    "hardshrink": lambda x: F.hardshrink(x, 0.4),
    "softshrink": lambda x: F.softshrink(x, 0.4),
    "threshold": lambda x: F.threshold(x, 0.1, 0.2),
    "exp_log": lambda x: torch.log(torch.exp(x) + 1.0),
    "pow": lambda x: (x.abs() + 0.1) ** 1.7,
    "where": lambda x: torch.where(x > 0.2, x, -x),
    "rsub": lambda x: 1.0 - x,
    "masked_fill": lambda x: x.masked_fill(x < 0, 0.5),
    "logical": lambda x: torch.where((x > 0) & ~(x > 1), x, 2 * x),
}

ROW_OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:], eps=1e-6),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-6),
    "mean": lambda x: x - x.mean(-1, keepdim=True),
    "amax": lambda x: x / x.abs().amax(-1, keepdim=True),
    "sum_squeezed": lambda x: x.square().sum(-1),
    "l2_normalize": lambda x: F.normalize(x, dim=-1),
    "var": lambda x: x / (x.var(-1, keepdim=True) + 1.0),
}


@pytest.fixture
def tensors() -> Callable[..., list[Tensor]]:
    def make(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]

    return make


def check(function: Callable[..., Tensor], inputs: list[Tensor], *, dynamic: bool = False) -> list[str]:
    """Capture, compare with the function in float64, and return the targets of the nodes that are left."""
    module, found = captured(function, *inputs, dynamic=dynamic)
    assert found, "no GEMM was found"
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    exact, eager, ours = function(*wide), function(*inputs), module(*inputs)
    flat = [(x,) if isinstance(x, Tensor) else x for x in (exact, eager, ours)]
    for e, t, o in zip(*flat, strict=True):
        assert o.dtype == t.dtype
        assert o.shape == t.shape
        assert o.stride() == t.stride()
        if t.dtype == torch.bool:
            assert torch.equal(o, t)
            continue
        eps = torch.finfo(t.dtype).eps
        own, theirs = (float((v.double() - e).norm()) for v in (o, t))
        assert own <= 1.5 * theirs + 4 * eps * float(e.norm())
    return [str(n.target) for n in module.graph.nodes if n.op == "call_function"]


ONLY_THE_OP = ["postlude.region.results1"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_is_absorbed_whole(name: str, dtype: torch.dtype, tensors: Callable[..., list[Tensor]]) -> None:
    activation = ACTIVATIONS[name]
    left = check(lambda x, w, b: activation(F.linear(x, w, b)), tensors((5, 7), (6, 7), (6,), dtype=dtype))
    assert left == ONLY_THE_OP


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ROW_OPS)
def test_row_reduction_is_absorbed_whole(name: str, dynamic: bool, tensors: Callable[..., list[Tensor]]) -> None:
    function = ROW_OPS[name]
    left = check(lambda x, w: function(F.linear(x, w)), tensors((2, 5, 7), (6, 7)), dynamic=dynamic)
    assert [op for op in left if op not in ("aten.sym_size.int", "aten.reshape.default", "<built-in function mul>")] == (
        ONLY_THE_OP
    )


@pytest.mark.parametrize("shape", [(6,), (1, 6), (5, 1), (5, 6), (), (1, 1)])
def test_bias_of_any_broadcast_form(shape: tuple[int, ...], tensors: Callable[..., list[Tensor]]) -> None:
    left = check(lambda x, w, b: torch.relu(x @ w + b), tensors((5, 7), (7, 6), shape))
    assert left[-1:] == ONLY_THE_OP
    assert "aten.add.Tensor" not in left


@pytest.mark.parametrize("shape", [(1, 5, 6), (3, 1, 6), (5, 6), (3, 5, 1), (1, 5, 1), (3, 1, 1)])
def test_operand_that_broadcasts_over_some_leading_dimensions(
    shape: tuple[int, ...], tensors: Callable[..., list[Tensor]]
) -> None:
    left = check(lambda x, w, b: F.linear(x, w) * b, tensors((3, 5, 7), (6, 7), shape))
    assert "aten.mul.Tensor" not in left


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b: torch.addmm(b, x, w),
        lambda x, w, b: torch.addmm(b, x, w, beta=0.5, alpha=2.0),
        lambda x, w, b: torch.mm(x, w).relu(),
        lambda x, w, b: torch.mm(w.t(), x.t()).relu(),
        lambda x, w, b: torch.bmm(x[None], w[None]) + b,
        lambda x, w, b: torch.baddbmm(b.expand(1, 5, 6), x[None], w[None], beta=0.5, alpha=2.0),
        lambda x, w, b: torch.einsum("ik,kj->ij", x, w).relu(),
    ],
)
def test_every_form_of_gemm(function: Callable[..., Tensor], tensors: Callable[..., list[Tensor]]) -> None:
    assert any("postlude" in op for op in check(function, tensors((5, 7), (7, 6), (6,))))


def test_beta_zero_ignores_nan(tensors: Callable[..., list[Tensor]]) -> None:
    x, w = tensors((5, 7), (7, 6))
    module, _ = captured(lambda b, x, w: torch.addmm(b, x, w, beta=0), torch.full((6,), float("nan")), x, w)
    torch.testing.assert_close(module(torch.full((6,), float("nan")), x, w), x @ w)


def test_swiglu_is_one_region(tensors: Callable[..., list[Tensor]]) -> None:
    left = check(
        lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u), tensors((4, 5, 7), (6, 7), (6, 7), dtype=torch.bfloat16)
    )
    assert left == ["postlude.region.results1", "aten.reshape.default"]


def test_gate_behind_a_sigmoid_is_one_region(tensors: Callable[..., list[Tensor]]) -> None:
    left = check(lambda x, h, g, b: F.linear(x, h) * torch.sigmoid(F.linear(x, g, b) + 1), tensors((5, 7), (6, 7), (6, 7), (6,)))
    assert left == ONLY_THE_OP


def test_gemm_is_not_joined_if_the_region_reads_what_comes_of_it(tensors: Callable[..., list[Tensor]]) -> None:
    def function(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        other = x @ b
        return (x @ a + other.cumsum(0)) * other

    assert "aten.cumsum.default" in check(function, tensors((5, 7), (7, 6), (7, 6)))


def test_users_of_a_joined_gemm_that_were_passed_stay_outside(tensors: Callable[..., list[Tensor]]) -> None:
    def function(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        first, other = x @ a, x @ b
        total = other.cumsum(0)
        return first * other + total

    assert "aten.add.Tensor" in check(function, tensors((5, 7), (7, 6), (7, 6)))


def test_projections_of_one_input_share_a_region(tensors: Callable[..., list[Tensor]]) -> None:
    def projections(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, q), F.linear(x, k).relu(), F.linear(x, v)

    _module, found = captured(projections, *tensors((4, 5, 7), (6, 7), (3, 7), (3, 7)))
    assert [len(f.gemms) for f in found] == [3]
    check(projections, tensors((4, 5, 7), (6, 7), (3, 7), (3, 7)))  # type: ignore[arg-type]


def test_value_with_several_users_becomes_a_result(tensors: Callable[..., list[Tensor]]) -> None:
    def function(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, ...]:
        hidden = F.linear(x, w) + r
        return hidden, F.layer_norm(hidden, hidden.shape[-1:]), hidden > 0

    assert "postlude.region.results3" in check(function, tensors((5, 7), (6, 7), (5, 6)))  # type: ignore[arg-type]


def test_attention_written_out_is_one_region(tensors: Callable[..., list[Tensor]]) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        weights = (q @ k.transpose(-1, -2) * 0.3 + mask).softmax(-1)
        return weights @ v

    shapes = (2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4), (2, 1, 1, 6)
    left = check(attention, tensors(*shapes))
    assert sum("postlude" in op for op in left) == 1
    assert not {"aten.bmm.default", "aten.exp.default", "aten.clone.default"} & set(left)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_heads_are_stored_beside_each_other(dynamic: bool, tensors: Callable[..., list[Tensor]]) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
        heads = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return F.linear(heads.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1), w)

    left = check(attention, tensors((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4), (7, 12)), dynamic=dynamic)
    assert sum("postlude" in op for op in left) == 2
    assert "aten.clone.default" not in left


def test_permuted_heads_without_a_copy_and_beside_one(tensors: Callable[..., list[Tensor]]) -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = torch.relu(x @ w)
        moved = y.transpose(1, 2)
        return y, moved * 2, moved.contiguous(), moved.cumsum(0)

    check(function, tensors((2, 3, 5, 4), (2, 3, 4, 6)))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [None, "float", "bool", "empty rows"])
def test_scaled_dot_product_attention(masked: str | None, dtype: torch.dtype, tensors: Callable[..., list[Tensor]]) -> None:
    q, k, v = tensors((2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 6, 4), dtype=dtype)
    mask = torch.randn(2, 1, 5, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    if masked == "bool":
        mask = mask > -0.5
    if masked == "empty rows":
        mask = torch.where(torch.arange(5)[:, None] == 2, -torch.inf, mask.double()).to(dtype)

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask if masked else None)

    module, found = captured(attention, q, k, v, mask)
    exact = attention(q.double(), k.double(), v.double(), mask if mask.dtype == torch.bool else mask.double())
    assert [f.region is not None for f in found] == [True]
    ours, eager = module(q, k, v, mask), attention(q, k, v, mask)
    own, theirs = (float((x.double() - exact).norm()) for x in (ours, eager))
    assert own <= 1.5 * theirs + 4 * torch.finfo(dtype).eps * float(exact.norm())


# What must stay outside.


def test_high_and_low_parts_keep_their_rounding(tensors: Callable[..., list[Tensor]]) -> None:
    def split(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        value = x @ w
        high = value.bfloat16()
        return high, (value - high.float()).bfloat16()

    x, w = tensors((5, 7), (7, 6))
    module, _ = captured(split, x, w)
    high, low = module(x, w)
    torch.testing.assert_close(high.float() + low.float(), x @ w, rtol=1e-4, atol=1e-5)
    assert low.abs().max() > 0


def test_no_region_reads_what_depends_on_it(tensors: Callable[..., list[Tensor]]) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return y.relu() + y.cumsum(0)  # cumsum stays outside and needs y

    assert "aten.add.Tensor" in check(function, tensors((5, 7), (7, 6)))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x, w: (x.long() @ w.long()).float(), "no kernel multiplies"),
        (lambda x, w: torch.view_as_real(torch.complex(x, x) @ torch.complex(w, w)), "complex"),
    ],
)
def test_unsupported_gemm_is_left_alone(
    function: Callable[..., Tensor], reason: str, tensors: Callable[..., list[Tensor]]
) -> None:
    module, found = captured(function, *tensors((5, 7), (7, 6)))
    assert [f.region for f in found] == [None]
    assert reason in found[0].reason
    inputs = tensors((5, 7), (7, 6))
    torch.testing.assert_close(module(*inputs), function(*inputs))


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y.reshape(-1),
        lambda y: y.t() + 1,
        lambda y: y.sum(0),
        lambda y: y.sum(),
        lambda y: y[1:] * 2,
        lambda y: torch.cat([y, y], -1) + 1,
        lambda y: y.cumsum(-1) + 1,
        lambda y: y.to(torch.int32) + 1,
        lambda y: y.double() * 2,
        lambda y: y[None] + torch.ones(3, 1, 1),
        lambda y: y.argmax(-1),
        lambda y: y.sort(-1).values * 2,
    ],
)
def test_what_is_not_legal_stays_outside(function: Callable[[Tensor], Tensor], tensors: Callable[..., list[Tensor]]) -> None:
    module, found = captured(lambda x, w: function(torch.relu(x @ w)), *tensors((5, 7), (7, 6)))
    inputs = tensors((5, 7), (7, 6))
    expected = function(torch.relu(inputs[0] @ inputs[1]))
    torch.testing.assert_close(module(*inputs), expected, rtol=1e-5, atol=1e-5)
    assert found[0].region is not None
    assert found[0].stops


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_dynamic_rows_take_one_graph(rows: int, tensors: Callable[..., list[Tensor]]) -> None:
    def block(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> Tensor:
        return F.layer_norm(F.gelu(F.linear(x, w, b)) + x.mean(-1, keepdim=True), (6,), g)

    module, _ = captured(block, *tensors((3, 5, 7), (6, 7), (6,), (6,)), dynamic=True)
    inputs = tensors((rows, 4, 7), (6, 7), (6,), (6,))
    torch.testing.assert_close(module(*inputs), block(*inputs), rtol=1e-5, atol=1e-5)


def test_eager_rounding_is_bit_for_bit(tensors: Callable[..., list[Tensor]]) -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.relu(x @ w + b) * 1.7

    inputs = tensors((5, 8), (8, 6), (6,), dtype=torch.bfloat16)
    module, _ = captured(function, *inputs, settings=Settings(eager_rounding=True))
    assert torch.equal(module(*inputs), function(*inputs))
