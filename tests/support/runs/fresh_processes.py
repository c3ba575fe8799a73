"""Processes that begin with imports and nothing else, as those of "spawn" do, without importing torch anew for each.

By night the same tests start them by "spawn", as a run does (`CONTEXTS`).
"""

import multiprocessing
from multiprocessing.context import BaseContext

import pytest

#: What the processes import; nothing of it computes, and no thread is started.
MODULES = (
    "torch.distributed.fsdp",
    "ao_lab",
    "experiments.fp8_training.convergence",
    "experiments.models.train",
    "tests.experiments.harness.works",
)
FORKSERVER = "forkserver"
#: Parameters of a test: how processes are started.
CONTEXTS = [FORKSERVER, pytest.param("spawn", marks=pytest.mark.nightly)]


def context(method: str = FORKSERVER) -> BaseContext:
    """Of `multiprocessing`; what forks has imported MODULES, once for all tests of this process."""
    chosen = multiprocessing.get_context(method)
    if method == FORKSERVER:
        chosen.set_forkserver_preload(list(MODULES))
    return chosen
