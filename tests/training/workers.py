"""What each process of a test of distributed training does, given its rank, the number of processes and a folder.

A run is compared with training of the whole model by one process on all batches: in eager, and in float64.
"""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import postlude
from tests.training.models import Block, as_accurate, batches, language

OPTIONS = {"fuse_all": True}
STEPS = 2


def run(rank: int, world: int, folder: str, work: str) -> None:
    """Set up a process group, and do what is asked for by name."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    try:
        WORK[work](rank, world, Path(folder))
    finally:
        dist.destroy_process_group()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[list[Tensor]]) -> None:
    """One step for each list of batches; the loss is their mean."""
    for step in data:
        optimizer.zero_grad()
        for batch in step:
            (model(batch) / len(step)).backward()
        optimizer.step()


def _whole(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters that lie in one piece."""
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in state.items()}


def _check(state: Mapping[str, Tensor], world: int) -> None:
    """Compare with one process."""
    data = [batches(STEPS * world)[step * world : (step + 1) * world] for step in range(STEPS)]
    found = []
    for dtype in (torch.float64, torch.float32):
        model = language().to(dtype)
        _train(model, _optimizer(model), data)
        found.append({name: p.detach() for name, p in model.named_parameters()})
    exact, eager = found
    whole = _whole(state)
    assert whole.keys() == exact.keys()
    as_accurate(whole, eager, exact)


def _own(rank: int, world: int) -> list[list[Tensor]]:
    """This process's batches: one in each step."""
    return [[batches(STEPS * world)[step * world + rank]] for step in range(STEPS)]


def _sharded(mesh: DeviceMesh) -> nn.Module:
    """Blocks are compiled one by one, then sharded, as training frameworks do it."""
    model = language()
    for block in model.blocks:
        block.compile(backend="postlude", options=OPTIONS)
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp(rank: int, world: int, folder: Path) -> None:
    """Train sharded; save, load into another model, and go on with both: they must not part."""
    mesh = init_device_mesh("cpu", (world,))
    model = _sharded(mesh)
    optimizer = _optimizer(model)
    _train(model, optimizer, _own(rank, world))
    assert any(isinstance(p, DTensor) for p in model.parameters())
    _check({name: p.detach() for name, p in model.named_parameters()}, world)

    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / "checkpoint")
    other = _sharded(mesh)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other_optimizer = _optimizer(other)
    weights, moments = get_state_dict(other, other_optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder / "checkpoint")
    set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=moments)
    for trained, state in ((model, optimizer), (other, other_optimizer)):
        _train(trained, state, _own(rank, world)[:1])
    ours, theirs = (_whole({n: p.detach() for n, p in m.named_parameters()}) for m in (model, other))
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name]), name
    # A checkpoint of the whole model loads into one that is not sharded.
    full, _ = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        assert full.keys() == ours.keys()
        language().load_state_dict(full)


def ddp(rank: int, world: int, folder: Path) -> None:
    """Train a model in copies; the graph is cut between the buckets of gradients."""
    # The first bucket is of a fixed size, which this model would fill alone.
    dist._DEFAULT_FIRST_BUCKET_BYTES = 4096
    model = language()
    call = torch.compile(DistributedDataParallel(model, bucket_cap_mb=1e-2), backend="postlude", options=OPTIONS)
    _train(call, _optimizer(model), _own(rank, world))
    _check({name: p.detach() for name, p in model.named_parameters()}, world)


def tensor_parallel(rank: int, world: int, folder: Path) -> None:
    """A gated MLP in pieces of columns and rows is one Region for each piece, forward, and right."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            block = Block()
            self.gate, self.up, self.down = block.gate, block.up, block.down

        def forward(self, x: Tensor) -> Tensor:
            return self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    torch.manual_seed(0)
    model = Gated()
    x = torch.randn(6, model.gate.in_features)
    mesh = init_device_mesh("cpu", (world,))
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallel = parallelize_module(copy.deepcopy(model), mesh, plan)

    def gradients(owner: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Tensor]:
        x = x.clone().requires_grad_()
        call(x).square().sum().backward()
        grads = {f"{name}.grad": p.grad for name, p in owner.named_parameters()}
        return {"parameter": x.detach()} | _whole(grads) | {"x.grad": x.grad}

    explanation = postlude.explain(parallel, x.clone().requires_grad_(), options=OPTIONS)
    assert explanation.fused_gemms == explanation.gemms > 0, str(explanation)
    wide = copy.deepcopy(model).double()
    exact = gradients(wide, wide, x.double())
    eager = gradients(model, model, x)
    parallel.zero_grad()
    ours = gradients(parallel, torch.compile(parallel, backend="postlude", options=OPTIONS), x)
    as_accurate(ours, eager, exact)


WORK: dict[str, Callable[[int, int, Path], None]] = {"fsdp": fsdp, "ddp": ddp, "tensor_parallel": tensor_parallel}
