"""Training by several processes on one machine, over gloo."""

from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing

from tests.training import workers


@pytest.mark.parametrize(("work", "world"), [("fsdp", 2), ("fsdp", 4), ("ddp", 2), ("tensor_parallel", 2)])
@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")
def test_as_one_process(work: str, world: int, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(workers.run, (world, str(tmp_path), work), nprocs=world)
