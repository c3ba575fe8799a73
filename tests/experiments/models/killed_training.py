"""Trains a tiny model in a process of its own, with a checkpoint at every step, and kills itself after some steps."""

import os
import signal
from pathlib import Path

import torch

from experiments.models import train
from tests.experiments.harness import tiny

SETTINGS = tiny.replace(tiny.TRAIN, steps=12, warmup=3)


def main(folder, step):
    torch.set_num_threads(1)
    train.Checkpoint.__init__.__defaults__ = (None, 0.0)
    reached = train.Checkpoint.reached
    taken = []

    def counted(self, run):
        reached(self, run)
        taken.append(run)
        if len(taken) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    train.Checkpoint.reached = counted
    train.trained_model(SETTINGS, tiny.corpus(), "cpu", Path(folder))
