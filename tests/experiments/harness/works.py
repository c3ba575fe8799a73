"""What test processes are given to do; a process started anew finds it by its name."""

import os
import time
from pathlib import Path

import torch

from experiments.harness.rows import Row


def row(value, method=""):
    return Row(
        experiment="e", table="k/s/d", setting="", method=method, metric="m", value=float(value), unit="", device="cpu", seed=0,
    )  # fmt: skip


def process():
    """The process that it runs in."""
    return [row(os.getpid())]


def threads():
    return [row(torch.get_num_threads())]


def die():
    os._exit(3)


def fail():
    raise ValueError("no such thing")


def slow(folder):
    """Says that it has begun, and takes longer than any test waits."""
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(600)
    return []
