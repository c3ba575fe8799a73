"""Whether what is measured as compiled runs compiled: torch.compile runs what it does not follow without a word."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.autograd.profiler_legacy import profile

from experiments.harness.outcome import Wrong

#: What torch's profiler calls a run of a compiled program, with the program's number behind it.
REGION = "Torch-Compiled Region"


@contextmanager
def compiled_runs(wanted: bool = True) -> Iterator[None]:
    """Wrong where no compiled program runs inside and one is wanted: its rows would call compiled what ran operation by
    operation. What runs inside has been compiled before; the program may be one that another model has left.

    By torch's older profiler: after the newer one, on a GPU, every launch of the process takes the host longer.
    """
    if not wanted:
        yield
        return
    with profile() as seen:
        yield
    if not any(event.name.startswith(REGION) for event in seen.function_events or ()):
        raise Wrong("nothing was compiled: it ran operation by operation, and is no row of what is compiled")


__all__ = ["compiled_runs"]
