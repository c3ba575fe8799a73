"""Cases of which some fail: what a run of `experiments.distributed` says of each, and that the others go on."""

import os
import signal
import time

import torch
import torch.distributed as dist

from experiments.distributed.cases import Case


def right(rank, tally):
    """A sum over ranks."""
    mine = torch.ones(3) * (rank.rank + 1)
    dist.all_reduce(mine)
    tally.bits("the sum", mine, torch.full((3,), 3.0))


def different(rank, tally):
    """One bit of one rank is another."""
    right(rank, tally)
    found = torch.ones(4)
    found[2] += rank.rank * torch.finfo(torch.float32).eps
    tally.bits("a value", found, torch.ones(4))


def raises(rank, tally):
    """One rank has an error, the other waits for it in a collective."""
    if rank.rank == 1:
        raise ValueError("no such thing")
    right(rank, tally)


def hangs(rank, tally):
    """One rank never comes."""
    if rank.rank == 1:
        time.sleep(600)
    right(rank, tally)


def dies(rank, tally):
    """The first rank, which writes rows, is killed."""
    if rank.first:
        os.kill(os.getpid(), signal.SIGKILL)
    right(rank, tally)


def nothing(rank, tally):
    """Nothing is compared, which proves nothing."""


CASES = (
    Case("first", right),
    Case("different", different),
    Case("raises", raises),
    Case("between", right),
    Case("hangs", hangs, limit=1.0),
    Case("dies", dies),
    Case("nothing", nothing),
    Case("gpus", right, gpus="so it is"),
    Case("last", right),
)
