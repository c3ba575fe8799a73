"""What each rank of tests/ao_lab/tensor/test_collectives.py does: collectives, DTensor and FSDP2 of 2:4 weights.

python tests/support/distributed/sparse_ranks.py RANKS
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from ao_lab import SparseQuantizedTensor
from tests.support.distributed.ranks import start_ranks
from tests.support.quantized_weights import pair


def check_gathered(scheme):
    t, _ = pair(scheme, 64, 128)
    piece = t.chunk(dist.get_world_size())[dist.get_rank()].clone()
    assert torch.equal(all_gather_tensor(piece, 0, dist.group.WORLD), t)


def check_in_place(scheme):
    t, _ = pair(scheme, 64, 128)
    mine = t.clone() if dist.get_rank() == 0 else pair(scheme, 64, 128, seed=1)[0]
    dist.broadcast(mine, 0)
    assert torch.equal(mine, t)


def check_placed(scheme):
    t, _ = pair(scheme, 64, 128)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    shard = distribute_tensor(t, mesh, [Shard(0)])
    assert isinstance(shard.to_local(), SparseQuantizedTensor)
    assert torch.equal(shard.full_tensor(), t)
    if scheme != "int8_rowwise":
        return
    assert torch.equal(shard.redistribute(mesh, [Replicate()]).to_local(), t)


def check_fully_sharded(scheme):
    t, dense = pair(scheme, 64, 128)
    layer = nn.Linear(128, 64, bias=False, dtype=torch.bfloat16)
    layer.weight = nn.Parameter(t, requires_grad=False)
    fully_shard(layer)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(layer(x), torch.nn.functional.linear(x, dense))


def run():
    for scheme in ("int8_rowwise", "int4_g32", "bfloat16"):
        check_in_place(scheme)
        check_gathered(scheme)
        check_placed(scheme)
        check_fully_sharded(scheme)


if __name__ == "__main__":
    start_ranks(run)
