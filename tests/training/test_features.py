"""What training code does around a model: checkpoints, tied weights, adapters, hooks, blocks compiled one by one."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from tests.training.models import Language, batches, check, language, trained


def once(owner: nn.Module, call: Callable[..., Tensor]) -> None:
    """One step."""
    call(batches(1)[0]).backward()
    torch.optim.SGD(owner.parameters(), lr=0.1).step()


class Checkpointed(Language):
    """Blocks whose activations are computed again in backward."""

    def __init__(self, p: float) -> None:
        super().__init__(1)
        self.p = p

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = checkpoint(self._dropped, block, x, use_reentrant=False)
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())

    def _dropped(self, block: nn.Module, x: Tensor) -> Tensor:
        return nn.functional.dropout(block(x), self.p, self.training)


def test_dropout_before_and_behind_a_checkpoint_draws_the_same_numbers() -> None:
    def seeded(owner: nn.Module, call: Callable[..., Tensor]) -> None:
        torch.manual_seed(5)
        once(owner, call)

    def compile(owner: nn.Module) -> Callable[..., Tensor]:
        options = {"fuse_all": True, "fallback_random": True}
        return torch.compile(owner, backend="postlude", options=options, fullgraph=True)

    torch.manual_seed(0)
    model = Checkpointed(0.4)
    eager, ours = trained(model, seeded, lambda owner: owner), trained(model, seeded, compile)
    for name, value in eager.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_tied_weights_have_one_gradient() -> None:
    model = language(tied=True)
    assert sum(p is model.embedding.weight for p in model.parameters()) == 1
    check(model, once)


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.down.T) @ self.up.T * 2.0


def adapted() -> Language:
    """A language model whose linear layers in blocks have adapters; nothing else is trained."""
    model = language().requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "out", "gate", "up", "down"):
            setattr(block, name, Adapted(getattr(block, name)))
    return model


def test_adapters_are_trained_beside_frozen_weights() -> None:
    def train(owner: nn.Module, call: Callable[..., Tensor]) -> None:
        once(owner, call)
        assert all((p.grad is None) == (not p.requires_grad) for p in owner.parameters())

    check(adapted(), train)


def test_adapters_are_swapped_with_one_compilation_more_at_most() -> None:
    model = adapted()
    counter = CompileCounterWithBackend(partial(torch._dynamo.lookup_backend("postlude"), options={"fuse_all": True}))
    call, batch = torch.compile(model, backend=counter, fullgraph=True), batches(1)[0]
    call(batch).backward()
    layers = [layer for layer in model.modules() if isinstance(layer, Adapted)]
    for scale in (0.5, 2.0, 3.0):
        for layer in layers:  # other Parameters, as a server with many adapters does it
            layer.down, layer.up = (nn.Parameter(p.detach() * scale) for p in (layer.down, layer.up))
        loss = call(batch)
        loss.backward()
        torch.testing.assert_close(loss, model(batch), rtol=1e-5, atol=1e-5)
        assert all(layer.down.grad is not None for layer in layers)
    assert counter.frame_count <= 2


def test_hooks_run_and_change_what_they_change_in_eager() -> None:
    def train(owner: nn.Module, call: Callable[..., Tensor]) -> None:
        block = owner.blocks[0]
        calls = []
        block.down.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1.5,))
        block.down.register_forward_hook(lambda module, inputs, output: output * 0.5)
        owner.norm.register_forward_hook(lambda module, inputs, output: output + 0.1)
        block.gate.weight.register_hook(lambda gradient: gradient * 2.0)
        owner.head.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.grad.norm()))
        once(owner, call)
        assert len(calls) == 1

    check(language(), train)


def test_a_backward_hook_of_a_module() -> None:
    seen: list[Tensor] = []

    def train(owner: nn.Module, call: Callable[..., Tensor]) -> None:
        owner.blocks[0].register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].double()))
        once(owner, call)

    def by_blocks(owner: nn.Module) -> Callable[..., Tensor]:
        owner.blocks[0].compile(backend="postlude", options={"fuse_all": True})
        return owner

    check(language(), train, compile=by_blocks)
    exact, eager, ours = seen
    assert float((ours - exact).norm()) <= 1.1 * float((eager - exact).norm()) + 1e-6 * float(exact.norm())


def test_equal_blocks_compiled_one_by_one_are_compiled_once() -> None:
    counter = CompileCounterWithBackend(partial(torch._dynamo.lookup_backend("postlude"), options={"fuse_all": True}))

    def by_blocks(owner: nn.Module) -> Callable[..., Tensor]:
        for block in owner.blocks:
            block.compile(backend=counter)
        return owner

    check(language(3), once, compile=by_blocks)
    assert counter.frame_count == 1
