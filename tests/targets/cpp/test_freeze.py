"""No write to a frozen weight, of whatever kind, may give a stale result; and what is not written must stay packed."""

import contextlib
import copy
import ctypes
import gc
import io
import os
import pickle
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from postlude.targets.cpp import freeze, launcher
from tests.targets.cpp import toy

N, K = 6, 5


@pytest.fixture
def kernel() -> Iterator[launcher.Kernel]:
    freeze.release()
    yield freeze.freeze(toy.kernel(), (1,))
    freeze.release()


class Model(nn.Module):
    """One frozen weight, an optimizer's worth of gradients, and an input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(K, N, bias=False)
        self.x = torch.randn(3, K)

    @property
    def weight(self) -> nn.Parameter:
        return self.linear.weight

    def with_gradient(self) -> "Model":
        self.linear(self.x).square().sum().backward()
        return self


def pack(kernel: launcher.Kernel, model: Model) -> None:
    """Call until the weight is packed."""
    for _ in range(2):
        toy.check(kernel, model.x, model.weight)
    assert kernel.status(1, model.weight) == "packed"


def test_packed_form_is_what_runs(kernel: launcher.Kernel) -> None:
    model = Model()
    pack(kernel, model)
    packed = kernel.packed(1, launcher.extension().address(model.weight))
    before = packed.uses
    for _ in range(3):
        toy.check(kernel, model.x, model.weight)
    assert packed.uses == before + 3
    # A write that torch can't see leaves the packed form in use: so it is the packed form that makes the results.
    address = launcher.extension().address(model.weight)
    ctypes.memset(address, 0, N * K * 4)
    out = torch.empty(3, N)
    kernel(model.x, model.weight, out)
    assert torch.count_nonzero(model.weight) == 0
    assert torch.count_nonzero(out) > 0


# Every kind of write ---------------------------------------------------------------------------------------------------


def optimizer(make: Callable[..., torch.optim.Optimizer], **options: object) -> Callable[[Model], None]:
    def step(model: Model) -> None:
        make(model.parameters(), lr=0.1, **options).step()

    return step


def no_grad(write: Callable[[Tensor], object]) -> Callable[[Model], None]:
    def run(model: Model) -> None:
        with torch.no_grad():
            write(model.weight)

    return run


def inference(write: Callable[[Tensor], object]) -> Callable[[Model], None]:
    def run(model: Model) -> None:
        with torch.inference_mode():
            write(model.weight)

    return run


def set_(weight: Tensor, value: Tensor) -> None:
    weight.data = value


def assign(model: Model, value: Tensor) -> None:
    model.linear.weight = nn.Parameter(value)


def load(model: Model, **options: bool) -> None:
    model.load_state_dict({"linear.weight": torch.randn(N, K)}, **options)


def swap(model: Model) -> None:
    torch.utils.swap_tensors(model.linear.weight, nn.Parameter(torch.randn(N, K)))


def through_numpy(weight: Tensor) -> None:
    weight.detach().numpy()[2, 3] = 42


def through_dlpack(weight: Tensor) -> None:
    np.from_dlpack(weight.detach()).flags.writeable  # noqa: B018  takes the pointer
    torch.from_dlpack(weight.detach())[1, 1] = 42


def through_ctypes(weight: Tensor) -> None:
    ctypes.memset(weight.data_ptr(), 0, 8)


def through_pointer_of_storage(weight: Tensor) -> None:
    ctypes.memset(weight.untyped_storage().data_ptr(), 0, 8)


def compiled_write(model: Model) -> None:
    @torch.compile(backend="inductor")
    def update(weight: Tensor) -> None:
        weight.mul_(1.5).add_(0.25)

    with torch.no_grad():
        update(model.weight)


def compiled_optimizer(model: Model) -> None:
    adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.compile(adam.step)()


def vmapped(weight: Tensor) -> None:
    torch.func.vmap(lambda row: row.mul_(2))(weight)


def saved_and_loaded(model: Model) -> None:
    """What reads through a writable pointer must do no harm either."""
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer)
    state["linear.weight"].mul_(3)
    model.load_state_dict(state)


def custom_function(model: Model) -> None:
    class Write(torch.autograd.Function):
        @staticmethod
        def forward(context: object, weight: Tensor) -> Tensor:
            context.mark_dirty(weight)
            return weight.mul_(2)

    with torch.no_grad():
        Write.apply(model.weight)


WRITES: dict[str, Callable[[Model], None]] = {
    "add_": no_grad(lambda w: w.add_(1)),
    "mul_": no_grad(lambda w: w.mul_(2)),
    "copy_": no_grad(lambda w: w.copy_(torch.randn(N, K))),
    "copy_ converting": no_grad(lambda w: w.copy_(torch.randn(N, K, dtype=torch.float64))),
    "fill_": no_grad(lambda w: w.fill_(3)),
    "zero_": no_grad(lambda w: w.zero_()),
    "setitem": no_grad(lambda w: w.__setitem__((2, 3), 42)),
    "setitem slice": no_grad(lambda w: w.__setitem__((slice(None), 1), 42)),
    "setitem mask": no_grad(lambda w: w.__setitem__(w > 0, 42)),
    "masked_fill_": no_grad(lambda w: w.masked_fill_(w > 0, 42)),
    "masked_scatter_": no_grad(lambda w: w.masked_scatter_(w > 0, torch.randn(N * K))),
    "index_put_": no_grad(lambda w: w.index_put_((torch.tensor([1]), torch.tensor([2])), torch.tensor([42.0]))),
    "index_copy_": no_grad(lambda w: w.index_copy_(0, torch.tensor([1]), torch.randn(1, K))),
    "index_add_": no_grad(lambda w: w.index_add_(0, torch.tensor([1]), torch.randn(1, K))),
    "scatter_": no_grad(lambda w: w.scatter_(0, torch.tensor([[1]]), 42.0)),
    "lerp_": no_grad(lambda w: w.lerp_(torch.randn(N, K), 0.5)),
    "clamp_": no_grad(lambda w: w.clamp_(-0.01, 0.01)),
    "uniform_": no_grad(lambda w: w.uniform_()),
    "normal_": no_grad(lambda w: w.normal_()),
    "bernoulli_": no_grad(lambda w: w.bernoulli_(0.5)),
    "addmm_": no_grad(lambda w: w.addmm_(torch.randn(N, 4), torch.randn(4, K))),
    "out=": no_grad(lambda w: torch.mul(torch.randn(N, K), 2, out=w)),
    "matmul out=": no_grad(lambda w: torch.mm(torch.randn(N, 4), torch.randn(4, K), out=w)),
    "foreach": no_grad(lambda w: torch._foreach_mul_([w], 2)),
    "foreach copy": no_grad(lambda w: torch._foreach_copy_([w], [torch.randn(N, K)])),
    "vmap": no_grad(vmapped),
    "view": no_grad(lambda w: w.view(-1).mul_(2)),
    "transposed view": no_grad(lambda w: w.t().mul_(2)),
    "row of an unbind": no_grad(lambda w: w.detach().unbind(0)[2].zero_()),
    "as_strided": no_grad(lambda w: torch.as_strided(w, (2,), (1,), 3).fill_(42)),
    "detach": lambda m: m.weight.detach().mul_(2),
    "data.add_": lambda m: m.weight.data.add_(1),
    "data setitem": lambda m: m.weight.data.__setitem__((2, 3), 42),
    "data = ": lambda m: set_(m.weight, torch.randn(N, K)),
    "data = transposed": lambda m: set_(m.weight, torch.randn(K, N).t()),
    "data = flipped alias": lambda m: set_(m.weight, m.weight.data.view(K, N).t()),
    "data = alias at an offset": lambda m: set_(m.weight, torch.randn(N + 1, K)[1:]),
    "set_": no_grad(lambda w: w.set_(torch.randn(N, K))),
    "set_ storage": no_grad(lambda w: w.set_(torch.randn(N, K).untyped_storage(), 0, (N, K), (K, 1))),
    "storage setitem": lambda m: m.weight.untyped_storage().__setitem__(7, 99),
    "storage fill_": lambda m: m.weight.untyped_storage().fill_(1),
    "storage copy_": lambda m: m.weight.untyped_storage().copy_(torch.randn(N, K).untyped_storage()),
    "typed storage": lambda m: m.weight.data.storage().__setitem__(7, 99.0),
    "new parameter": lambda m: assign(m, torch.randn(N, K)),
    "load_state_dict": lambda m: load(m),
    "load_state_dict assign": lambda m: load(m, assign=True),
    "save, load, change": saved_and_loaded,
    "swap_tensors": swap,
    "requires_grad_ and write": lambda m: (m.requires_grad_(False), m.weight.add_(1)),
    "init": lambda m: nn.init.xavier_uniform_(m.weight),
    "init zeros": lambda m: nn.init.zeros_(m.weight),
    "init orthogonal": lambda m: nn.init.orthogonal_(m.weight),
    "reset_parameters": lambda m: m.linear.reset_parameters(),
    "SGD": optimizer(torch.optim.SGD, foreach=False),
    "SGD foreach": optimizer(torch.optim.SGD, foreach=True),
    "SGD fused": optimizer(torch.optim.SGD, fused=True),
    "SGD momentum": optimizer(torch.optim.SGD, momentum=0.9),
    "Adam": optimizer(torch.optim.Adam, foreach=False),
    "Adam fused": optimizer(torch.optim.Adam, fused=True),
    "AdamW": optimizer(torch.optim.AdamW, foreach=False),
    "AdamW foreach": optimizer(torch.optim.AdamW, foreach=True),
    "AdamW fused": optimizer(torch.optim.AdamW, fused=True),
    "Adagrad fused": optimizer(torch.optim.Adagrad, fused=True),
    "RMSprop": optimizer(torch.optim.RMSprop),
    "LBFGS": lambda m: torch.optim.LBFGS(m.parameters()).step(lambda: m.with_gradient().weight.sum()),
    "clip_grad and step": lambda m: (nn.utils.clip_grad_norm_(m.parameters(), 0.1), optimizer(torch.optim.SGD)(m)),
    "vector_to_parameters": lambda m: nn.utils.vector_to_parameters(torch.randn(N * K), m.parameters()),
    "swa update": lambda m: torch.optim.swa_utils.AveragedModel(m).update_parameters(m) or m.weight.data.mul_(0.5),
    "inference_mode": inference(lambda w: w.mul_(2)),
    "inference_mode copy_": inference(lambda w: w.copy_(torch.randn(N, K))),
    "numpy": lambda m: through_numpy(m.weight),
    "numpy array interface": lambda m: np.asarray(m.weight.detach()).__setitem__((2, 3), 42),
    "DLPack": lambda m: through_dlpack(m.weight),
    "data_ptr": lambda m: through_ctypes(m.weight),
    "data_ptr of the storage": lambda m: through_pointer_of_storage(m.weight),
    "share_memory": lambda m: (m.share_memory(), m.weight.data.mul_(2)),
    "to another dtype and back": lambda m: m.double().float().weight.data.mul_(2),
    "compiled write": compiled_write,
    "compiled optimizer": compiled_optimizer,
    "autograd function": custom_function,
    "weight norm": lambda m: (nn.utils.parametrizations.weight_norm(m.linear), assign_parametrized(m)),
    "prune": lambda m: prune.random_unstructured(m.linear, "weight", 0.5),
}


def assign_parametrized(model: Model) -> None:
    model.linear.parametrizations.weight.original0.data.mul_(2)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_write_is_seen(kernel: launcher.Kernel, write: Callable[[Model], None]) -> None:
    model = Model().with_gradient()
    pack(kernel, model)
    before = model.weight.detach().clone()
    write(model)
    assert not torch.equal(before, model.weight.detach()), "the write wrote nothing"
    for _ in range(4):  # naturally, then packed anew
        toy.check(kernel, model.x, model.weight)
    model.weight.data.mul_(0.5)
    toy.check(kernel, model.x, model.weight)


_SLOW = {"compiled write", "compiled optimizer", "LBFGS", "save, load, change", "share_memory"}
_KEEP_THE_MODULE = {"weight norm", "prune", "new parameter", "swap_tensors", "to another dtype and back"}


@pytest.mark.parametrize("seed", range(4))
def test_random_programs(kernel: launcher.Kernel, seed: int) -> None:
    """Calls, writes of all kinds, and aliases of all kinds that come, are written through, and go, in random order."""
    generator = random.Random(seed)
    torch.manual_seed(seed)
    writes = [write for name, write in WRITES.items() if name not in _SLOW | _KEEP_THE_MODULE]
    models = [Model().with_gradient() for _ in range(3)]
    aliases: list[object] = []
    packed = 0

    def make_alias(weight: Tensor) -> None:
        kinds = (
            lambda: weight.detach(),
            lambda: weight.detach().t(),
            lambda: weight.data[1:],
            lambda: weight.detach().numpy(),
            lambda: np.from_dlpack(weight.detach()),
            lambda: torch.from_dlpack(weight.detach()),
            lambda: torch._lazy_clone(weight.detach()),
        )
        aliases.append(generator.choice(kinds)())

    def write_alias() -> None:
        if aliases:
            alias = generator.choice(aliases)
            if not isinstance(alias, np.ndarray) or alias.flags.writeable:
                alias[...] = alias[...] * 0.5 + 0.25

    for _ in range(250):
        model = generator.choice(models)
        match generator.randrange(12):
            case 0:
                generator.choice(writes)(model)
            case 1:
                make_alias(model.weight)
            case 2:
                write_alias()
            case 3 if aliases:
                aliases.pop(generator.randrange(len(aliases)))
            case 4:
                aliases.clear()
            case 5:
                assign(model, generator.choice(models).weight.detach().clone())
                model.with_gradient()
            case 6:
                swap(model)
                model.with_gradient()
            case _:
                pass
        if model.weight.grad is None:
            model.with_gradient()
        for _ in range(generator.choice((1, 1, 2, 20))):
            toy.check(kernel, model.x, model.weight)
        packed += kernel.status(1, model.weight) == "packed"
        if (weight := model.weight.detach()).abs().max() > 1e3 or not weight.isfinite().all():
            model.weight.data = torch.randn(N, K)
    assert packed > 30


READS: dict[str, Callable[[Model], object]] = {
    "forward": lambda m: m.linear(m.x),
    "backward": lambda m: m.with_gradient(),
    "clone": lambda m: m.weight.clone(),
    "item": lambda m: m.weight[0, 0].item(),
    "repr": lambda m: repr(m.weight),
    "deepcopy": copy.deepcopy,
    "state_dict": lambda m: m.state_dict(),
    "to": lambda m: m.weight.to(torch.bfloat16),
    "equal": lambda m: torch.equal(m.weight, m.weight),
    "load into another": lambda m: Model().load_state_dict({k: v for k, v in m.state_dict().items() if "linear" in k}),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_read_keeps_it_packed(kernel: launcher.Kernel, read: Callable[[Model], object]) -> None:
    model = Model()
    pack(kernel, model)
    read(model)
    assert kernel.status(1, model.weight) == "packed"
    toy.check(kernel, model.x, model.weight)


def test_resized_storage(kernel: launcher.Kernel) -> None:
    """Torch itself can't write to a copy-on-write storage that has been resized: an error, but nothing stale."""
    model = Model()
    pack(kernel, model)
    model.weight.untyped_storage().resize_(N * K * 8)
    toy.check(kernel, model.x, model.weight)
    with contextlib.suppress(RuntimeError):
        model.weight.data.mul_(2)
    toy.check(kernel, model.x, model.weight)
    model = Model()
    pack(kernel, model)
    freeze.release()
    model.weight.untyped_storage().resize_(N * K * 8)
    model.weight.data.mul_(2)
    toy.check(kernel, model.x, model.weight)


# What is not packed ------------------------------------------------------------------------------------------------------


def call(kernel: launcher.Kernel, x: Tensor, weight: Tensor, times: int = 4) -> str:
    for _ in range(times):
        toy.check(kernel, x, weight)
    return kernel.status(1, weight)


X = torch.randn(3, K)


def test_foreign_memory_is_not_packed(kernel: launcher.Kernel, tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal((N, K)).astype(np.float32)
    mapped = np.memmap(tmp_path / "weights", dtype=np.float32, mode="w+", shape=(N, K))
    private = np.memmap(tmp_path / "weights", dtype=np.float32, mode="c", shape=(N, K))
    foreign = [
        torch.from_numpy(array),
        torch.from_numpy(mapped),
        torch.from_numpy(private),
        torch.frombuffer(bytearray(N * K * 4), dtype=torch.float32).view(N, K),
        torch.from_dlpack(array),
        torch.randn(N, K).share_memory_(),
        torch.from_file(str(tmp_path / "weights"), shared=True, size=N * K).view(N, K),
    ]
    for tensor in foreign:
        assert call(kernel, X, nn.Parameter(tensor)) == "natural"
    weight = nn.Parameter(foreign[0])
    array[2, 3] = 42
    toy.check(kernel, X, weight)


def test_constants_are_packed_at_once() -> None:
    constant = freeze.freeze(toy.kernel(), (1,), constant=True)
    freeze.release()
    array = np.random.default_rng(0).standard_normal((N, K)).astype(np.float32)
    foreign, held = torch.from_numpy(array), torch.randn(N, K)
    alias = held[1:]
    assert call(constant, X, foreign, 1) == "packed"
    assert call(constant, X, held, 1) == "packed"
    alias.mul_(2)  # what torch can see is seen all the same
    assert call(constant, X, held, 1) == "packed"
    assert freeze.packed_bytes() == 2 * N * K * 4
    del foreign, held, alias
    assert freeze.packed_bytes() == 0


def test_numpy_array_made_before(kernel: launcher.Kernel) -> None:
    weight = nn.Parameter(torch.randn(N, K))
    array = weight.detach().numpy()
    assert call(kernel, X, weight) == "natural"
    array[2, 3] = 42
    assert call(kernel, X, weight, 8) == "natural"
    del array
    assert call(kernel, X, weight, 100) == "packed"


def test_dlpack_consumer_made_before(kernel: launcher.Kernel) -> None:
    weight = nn.Parameter(torch.randn(N, K))
    consumer = np.from_dlpack(weight.detach())
    assert call(kernel, X, weight, 30) == "natural"
    assert consumer.shape == (N, K)


def test_alias_is_not_packed_while_it_lives(kernel: launcher.Kernel) -> None:
    model = Model()
    state = model.state_dict()
    assert call(kernel, X, model.weight) == "natural"
    state["linear.weight"].mul_(2)
    assert call(kernel, X, model.weight) == "natural"
    del state
    assert call(kernel, X, model.weight, 100) == "packed"


def test_scarce_memory(kernel: launcher.Kernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(freeze, "available_memory", lambda: N * K * 4)
    weight = torch.randn(N, K)
    assert call(kernel, X, weight, 20) == "natural"
    monkeypatch.undo()
    assert call(kernel, X, weight, 100) == "packed"
    assert 1 << 20 < freeze.available_memory() < 1 << 62
    assert freeze.available_memory(tmp_path / "missing") == 1 << 62


def test_subclass_is_not_packed(kernel: launcher.Kernel) -> None:
    class Marked(torch.Tensor):
        pass

    assert call(kernel, X, torch.randn(N, K).as_subclass(Marked)) == "natural"


def test_inference_tensor(kernel: launcher.Kernel) -> None:
    with torch.inference_mode():
        weight = torch.randn(N, K)
        assert call(kernel, X, weight) == "packed"
        weight.mul_(2)
        assert call(kernel, X, weight) == "packed"


def test_streamed_weights_are_not_packed(kernel: launcher.Kernel) -> None:
    weight = nn.Parameter(torch.randn(N, K))
    for _ in range(10):
        weight.data = torch.randn(N, K)
        toy.check(kernel, X, weight)
    assert freeze.packed_bytes() == 0


def test_a_weight_in_training_is_left_alone(kernel: launcher.Kernel) -> None:
    model = Model().with_gradient()
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2 * freeze.MOST_FAILURES + 4):
        sgd.step()
        call(kernel, X, model.weight, 3)
    assert kernel.status(1, model.weight) == "natural"
    address = launcher.extension().address(model.weight)
    sgd.step()
    assert launcher.extension().address(model.weight) == address, "an update of an unfrozen weight should be in place"
    # Long after training it is packed again.
    assert call(kernel, X, model.weight, freeze.LEFT_ALONE + 4) == "packed"


def test_rare_updates_are_packed_anew(kernel: launcher.Kernel) -> None:
    model = Model()
    for _ in range(10):
        assert call(kernel, X, model.weight, freeze.WORTHWHILE_USES + 4) == "packed"
        model.weight.data.mul_(1.5)


# Checkpoints -----------------------------------------------------------------------------------------------------------


def test_mapped_safetensors(kernel: launcher.Kernel, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"w": torch.randn(N, K)}, tmp_path / "model.safetensors")
    weight = nn.Parameter(safetensors.load_file(tmp_path / "model.safetensors")["w"])
    version = weight._version
    assert call(kernel, X, weight, 40) == "packed"
    assert weight._version == version
    assert freeze.packed_bytes() == N * K * 4
    weight.data[2, 3] = 42
    assert call(kernel, X, weight, 40) == "packed"
    del weight
    assert freeze.packed_bytes() == 0


def test_mapped_torch_file(kernel: launcher.Kernel, tmp_path: Path) -> None:
    torch.save({"w": torch.randn(N, K)}, tmp_path / "model.pt")
    weight = nn.Parameter(torch.load(tmp_path / "model.pt", mmap=True)["w"])
    assert call(kernel, X, weight, 40) == "packed"
    weight.data[2, 3] = 42
    assert call(kernel, X, weight, 40) == "packed"


def test_mapped_bytes_with_another_view(kernel: launcher.Kernel, tmp_path: Path) -> None:
    """Two tensors with storages of their own over the same mapped bytes: moving one would part them."""
    safetensors = pytest.importorskip("safetensors")
    torch_part = pytest.importorskip("safetensors.torch")
    torch_part.save_file({"w": torch.randn(N, K)}, tmp_path / "model.safetensors")
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        weight, other = nn.Parameter(file.get_tensor("w")), file.get_tensor("w")
    if weight.data_ptr() != other.data_ptr():
        pytest.skip("this safetensors does not share the mapping")
    assert call(kernel, X, weight, 40) == "natural"
    other[2, 3] = 42
    assert call(kernel, X, weight, 40) == "natural"


def test_private_mapping() -> None:
    maps = (
        "7f00-7f10 rw-p 00000000 fe:00 123      /some/folder/a model.safetensors\n"
        "7f10-7f20 rw-s 00000000 fe:00 124      /some/shared\n"
        "7f20-7f30 rw-p 00000000 00:00 0 \n"
        "7f30-7f40 r--p 00000000 fe:00 125      /gone (deleted)\n"
        "7f40-7f50 rw-p 00000000 00:00 0        [heap]\n"
    )
    assert freeze.private_mapping(0x7F05, maps) == Path("/some/folder/a model.safetensors")
    for address in (0x7F10, 0x7F20, 0x7F30, 0x7F40, 0x9999):
        assert freeze.private_mapping(address, maps) is None


def test_is_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(bytes(1000))
    assert not freeze.is_checkpoint(tmp_path / "raw")
    assert not freeze.is_checkpoint(tmp_path / "missing")
    torch.save({}, tmp_path / "zip")
    assert freeze.is_checkpoint(tmp_path / "zip")


# Life and death --------------------------------------------------------------------------------------------------------


def test_memory_is_freed_with_the_weight(kernel: launcher.Kernel) -> None:
    model = Model()
    pack(kernel, model)
    assert freeze.packed_bytes() == N * K * 4
    dead = weakref.ref(model.weight)
    del model
    gc.collect()
    assert dead() is None
    assert freeze.packed_bytes() == 0
    assert not freeze._weights


def test_memory_is_freed_when_data_is_replaced(kernel: launcher.Kernel) -> None:
    model = Model()
    pack(kernel, model)
    model.double()
    gc.collect()
    assert freeze.packed_bytes() == 0


def test_release(kernel: launcher.Kernel) -> None:
    model = Model()
    pack(kernel, model)
    assert freeze.release() == 1
    assert freeze.packed_bytes() == 0
    pack(kernel, model)


def test_many_weights_share_a_kernel(kernel: launcher.Kernel) -> None:
    models = [Model() for _ in range(100)]
    for _ in range(3):
        for model in models:
            toy.check(kernel, model.x, model.weight)
    assert all(kernel.status(1, model.weight) == "packed" for model in models)
    for model in models[::3]:
        model.weight.data.mul_(2)
    for _ in range(2):
        for model in models:
            toy.check(kernel, model.x, model.weight)
    del models[::2], model
    gc.collect()
    assert len(freeze._weights) == len(models)
    for model in models:
        toy.check(kernel, model.x, model.weight)


def test_alias_of_a_packed_weight_uses_the_packed_form(kernel: launcher.Kernel) -> None:
    model = Model()
    pack(kernel, model)
    assert kernel.status(1, model.weight.detach()) == "packed"
    toy.check(kernel, model.x, model.weight.detach())
    assert kernel.status(1, model.weight.detach()[1:]) == "unknown"
    toy.check(kernel, model.x, model.weight.detach()[1:])
    toy.check(kernel, model.x, model.weight.detach()[:2])


def test_packed_where_the_result_is_the_weight(kernel: launcher.Kernel) -> None:
    """A result in the weight's own memory moves the weight: its packed form must not be used."""
    weight = torch.randn(N, N)
    x = torch.randn(N, N)
    call(kernel, x, weight)
    kernel(x, weight, weight)
    toy.check(kernel, x, weight)


def test_deepcopy_and_pickle(kernel: launcher.Kernel) -> None:
    model = Model()
    pack(kernel, model)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)]
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    twins.append(torch.load(buffer, weights_only=False))
    for twin in twins:
        assert torch.equal(twin.weight, model.weight)
        toy.check(kernel, twin.x, twin.weight)
    before = model.weight.detach().clone()
    for twin in (*twins[:2], twins[3]):
        twin.weight.data.mul_(2)
        assert torch.equal(model.weight, before), "a copy shares memory with the original"
        toy.check(kernel, twin.x, twin.weight)
    model.weight.data.mul_(3)
    for twin in twins:
        toy.check(kernel, twin.x, twin.weight)
    toy.check(kernel, model.x, model.weight)


def test_threads(kernel: launcher.Kernel) -> None:
    """Readers and a writer that takes turns with them; the packed forms come and go all the time."""
    models = [Model() for _ in range(4)]
    locks = [threading.Lock() for _ in models]
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            for step in range(300):
                number = int(torch.randint(len(models), (1,), generator=generator))
                with locks[number]:
                    if step % 40 == seed:
                        models[number].weight.data.mul_(1.01)
                    toy.check(kernel, models[number].x, models[number].weight)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_large_weights_release_the_gil_while_they_are_replaced(kernel: launcher.Kernel) -> None:
    """Another thread packs anew while a call with the old packed form is under way."""
    x, weight = torch.randn(8, 256), nn.Parameter(torch.randn(256, 256))
    stop = threading.Event()

    def read() -> None:
        out = torch.empty(8, 256)
        while not stop.is_set():
            kernel(x, weight, out)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(20):
            weight.data = torch.randn(256, 256)
            for _ in range(3):
                kernel(x, weight, torch.empty(8, 256))
    finally:
        stop.set()
        reader.join()
    toy.check(kernel, x, weight)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork(kernel: launcher.Kernel) -> None:
    model = Model()
    pack(kernel, model)
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            toy.check(kernel, model.x, model.weight)
            model.weight.data.mul_(2)
            for _ in range(3):
                toy.check(kernel, model.x, model.weight)
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert kernel.status(1, model.weight) == "packed"
    toy.check(kernel, model.x, model.weight)


def test_without_the_functions_nothing_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "can_freeze", lambda: False)
    plain = toy.kernel()
    assert freeze.freeze(plain, (1,)) is plain


def test_a_default_device_changes_nothing(kernel: launcher.Kernel) -> None:
    with torch.device("meta"):
        model = Model()
    model = model.to_empty(device="cpu")
    model.x = torch.randn(3, K)
    model.weight.data.normal_()
    with torch.device("meta"):
        for _ in range(3):
            kernel(model.x, model.weight, torch.empty(3, N, device="cpu"))
    assert kernel.status(1, model.weight) == "packed"
