"""Processes of one group on this machine: how a test runs a script of them, and how that script starts them.

    python tests/NAME_ranks.py RANKS ...

The script prints "equal" where nothing on any rank has raised. With RANKS_DEVICE=cuda each rank takes a GPU, and NCCL sends;
`DTYPE` is what models of the scripts that train are in there.
"""

import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support.runs import forks

RANKS = 2
EQUAL = "equal"
DEVICE = os.environ.get("RANKS_DEVICE", "cpu")
DTYPE = torch.float32 if DEVICE == "cpu" else torch.bfloat16


def check_on_ranks(script, *arguments, ranks=RANKS):
    """Run SCRIPT of this folder; AssertionError with its last lines where one has raised."""
    done = run_on_ranks(script, *arguments, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == EQUAL


def run_on_ranks(script, *arguments, ranks=RANKS):
    """Run SCRIPT of this folder in a process of its own, which starts the ranks."""
    return forks.python(Path(__file__).parent / script, ranks, *arguments)


def start_ranks(work):
    """`work` on as many ranks as the script's first argument says, with the arguments that follow it."""
    ranks, arguments = int(sys.argv[1]), sys.argv[2:]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Forks have imported what this process has, and it has computed nothing yet.
    method = "fork" if sys.platform == "linux" else "spawn"
    mp.start_processes(_in_group, (ranks, port, work, arguments), nprocs=ranks, start_method=method)
    print(EQUAL)


def _in_group(rank, ranks, port, work, arguments):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo" if DEVICE == "cpu" else "nccl", rank=rank, world_size=ranks)
    work(*arguments)
    dist.barrier()
    dist.destroy_process_group()
