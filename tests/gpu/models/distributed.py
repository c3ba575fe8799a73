"""Training on several GPUs: the scripts of tests/support/distributed run with RANKS_DEVICE=cuda (NCCL, bfloat16).

FSDP2 with codes and with values, bytes and reductions counted; compiled; tensor parallelism; a rank that is killed, and the run
that goes on. Times of steps are those of the experiment `fp8_training`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from tests.gpu.harness.subject import Asked, Check, Subject

ROOT = Path(__file__).resolve().parents[3]


def checks(asked: Asked) -> Iterator[Check]:
    """Scripts that end well, and one that is to be killed, whose run then goes on."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = "checkpoints.run"
        runs = (
            ("training.fsdp", [], True),
            ("training.fsdp", ["tensorwise", "rowwise", "mxfp8"], True),
            ("training_split.tensor_parallel", [], True),
            (checkpoints, [folder, "backward", "2"], False),
            (checkpoints, [folder], True),
        )
        for name, arguments, survives in runs:
            yield f"{name} {' '.join(arguments[1:])}", partial(wrong_script, name, arguments, survives)


def wrong_script(name: str, arguments: list[str], survives: bool) -> Iterator[str]:
    """The last lines of a script that did not end as it is to."""
    ranks = str(torch.cuda.device_count())
    command = [sys.executable, "-m", "tests.support.distributed.ranks", name, ranks, *arguments]
    env = {**os.environ, "RANKS_DEVICE": "cuda"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=240
    )
    if (done.returncode == 0) != survives:
        yield f"{done.stdout[-500:]}\n{done.stderr[-4000:]}"


SUBJECTS = (
    Subject(
        "distributed", "training on several GPUs: bits as on one, bytes counted, runs that go on", checks
    ),
)
