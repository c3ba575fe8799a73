"""Processes of one group on this machine that each run a function of a module of this folder.

    python -m tests.support.distributed.ranks MODULE.FUNCTION RANKS [ARGUMENT ...]

It prints "equal" where nothing on any rank has raised. On CPUs operands of training products are those that a GPU takes. With
RANKS_DEVICE=cuda each rank takes a GPU, and NCCL sends; `DTYPE` is what models that train are in there.
"""

import importlib
import os
import socket
import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support import cublaslt
from tests.support.runs import forks

RANKS = 2
EQUAL = "equal"
DEVICE = os.environ.get("RANKS_DEVICE", "cpu")
DTYPE = torch.float32 if DEVICE == "cpu" else torch.bfloat16


def check_on_ranks(name, *arguments, ranks=RANKS):
    """Run MODULE.FUNCTION; AssertionError with its last lines where one has raised."""
    done = run_on_ranks(name, *arguments, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == EQUAL


def run_on_ranks(name, *arguments, ranks=RANKS):
    """Run MODULE.FUNCTION in a process of its own, which starts the ranks."""
    return forks.python("-m", __name__, name, ranks, *arguments)


def start_ranks(name, ranks, *arguments):
    """MODULE.FUNCTION on so many ranks, with these arguments."""
    module, function = name.split(".")
    work = getattr(importlib.import_module(f"tests.support.distributed.{module}"), function)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Forks have imported what this process has, and it has computed nothing yet.
    method = "fork" if sys.platform == "linux" else "spawn"
    mp.start_processes(_in_group, (int(ranks), port, work, arguments), nprocs=int(ranks), start_method=method)
    print(EQUAL)


def _in_group(rank, ranks, port, work, arguments):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo" if DEVICE == "cpu" else "nccl", rank=rank, world_size=ranks)
    with pytest.MonkeyPatch.context() as patched:
        if DEVICE == "cpu":
            cublaslt.watch(patched)
        work(*arguments)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    start_ranks(*sys.argv[1:])
