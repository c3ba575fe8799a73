"""Every rank tunes; all have the choices of the lowest that has such a layer, though each measures other times."""

import os

import torch
import torch.distributed as dist
from torch import nn

import ao_lab
from ao_lab.gemm.choices import choices_for, path_of
from tests.support.distributed.ranks import start_ranks


def work(folder):
    """A layer that all have, and one that is this rank's alone."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    os.environ["AO_LAB_CACHE"] = f"{folder}/{rank}"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32 * (rank + 1)))
    ao_lab.convert_for_training_(model, "rowwise")
    made = ao_lab.tune(model, torch.randn(16, 64))
    all_made = [None] * ranks
    dist.all_gather_object(all_made, made.choices)
    assert all(one == made.choices for one in all_made), "ranks differ"
    assert {c.problem.n for c in made.choices if c.problem.direction == "output"} == {64, 32}
    assert set(choices_for(torch.device("cpu"))) == set(made.choices)
    assert path_of(torch.device("cpu")).exists() == (rank == 0), "rank 0 alone writes"


if __name__ == "__main__":
    start_ranks(work)
