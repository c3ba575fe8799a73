"""Four processes: layers split over two of them (tensor parallelism), shared by FSDP2 with the two others; and weights that two
share and the two others repeat (HSDP), gathered as codes.

    python tests/support/distributed/training/two_dimensions_ranks.py RANKS

Prints "equal" where outputs and gradients are those of one process; float32 holds all their sums, in any order.
"""

import copy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from ao_lab import (
    LowPrecisionColwiseParallel,
    LowPrecisionRowwiseParallel,
    convert_for_training_,
    precompute_float8_dynamic_scale_for_fsdp,
)
from tests.support.distributed.ranks import start_ranks
from tests.support.distributed.training.model import batch, blocks, content, loss_of, shard
from tests.support.distributed.training.tensor_parallel_ranks import POWERS_OF_TWO, Feed, random


def compare(recipe, mesh):
    one = Feed()
    convert_for_training_(one, recipe)
    many = copy.deepcopy(one)
    styles = {"up": LowPrecisionColwiseParallel(), "down": LowPrecisionRowwiseParallel()}
    parallelize_module(many, mesh["split"], styles)
    fully_shard(many, mesh=mesh["shared"])
    batches = [random(256, 256, seed=seed).sign() for seed in range(mesh["shared"].size())]
    expected = [one(x) for x in batches]
    for y in expected:
        y.sum().backward()
    mine = mesh["shared"].get_local_rank()
    found = many(batches[mine])
    found.sum().backward()
    assert torch.equal(found, expected[mine]), recipe
    for (name, a), b in zip(one.named_parameters(), many.parameters(), strict=True):
        assert torch.equal(b.grad.full_tensor(), a.grad / len(batches)), (recipe, name)


def compare_repeated(recipe, mesh):
    """The same batch everywhere, so that the mean of gradients is each of them."""
    one, many = (blocks() for _ in range(2))
    for net in (one, many):
        convert_for_training_(net, recipe, fsdp_float8_all_gather=True)
    shard(many, mesh=mesh)
    for step in range(2):
        loss_of(one, batch(0, step)).backward()
        loss_of(many, batch(0, step)).backward()
        for a, b in zip(one.parameters(), many.parameters(), strict=True):
            assert torch.equal(content(b.grad), a.grad), recipe
            with torch.no_grad():
                content(a).mul_(0.5)
                b.mul_(0.5)
        precompute_float8_dynamic_scale_for_fsdp(many)
        for net in (one, many):
            net.zero_grad()


def run():
    mesh = dist.device_mesh.init_device_mesh(
        "cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("shared", "split")
    )
    for recipe in POWERS_OF_TWO:
        compare(recipe, mesh)
    for recipe in ("tensorwise", "rowwise"):
        compare_repeated(recipe, mesh)


if __name__ == "__main__":
    start_ranks(run)
