"""One rank of test_shards: FSDP2 over quantised layers, against the same model in one piece.

Arguments: rank, ranks, a file to meet at, scheme.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from postlude import quantize_
from postlude.errors import QuantizationError
from tests.quant.models import block

rank, ranks, path, scheme = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (ranks,))
model, whole = block(), block()
for one in (model, whole):
    quantize_(one, scheme)
for layer in (model.up, model.down, model.head):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
if 128 % ranks:
    try:
        model(x)
    except QuantizationError as error:
        print(error)
    sys.exit()
for _ in range(2):  # the second time from memory that was gathered before
    with torch.no_grad():
        assert torch.equal(model(x), whole(x)), "the sharded model computes something else"
shard = model.up.weight.to_local()
assert shard.shape[0] == 128 // ranks
assert shard.codes.shape[0] == shard.shape[0]
dist.destroy_process_group()
print("equal")
