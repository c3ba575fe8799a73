"""How far a call is: told to the caller's own function, or shown on stderr where the call is one that takes long.

The lines and bars are the command line's (`ao_lab.progress`). A call of a few seconds shows none; of several processes the
first shows them; and a logger `ao_lab` that is set to ERROR or above, or progress=False, does without.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ao_lab.progress import track_progress
from ao_lab.transforms.plan import Progress

LOG = logging.getLogger("ao_lab")
#: Seconds of work before a bar is shown on a terminal; lines come every ten.
BEFORE_A_BAR = 3.0


@contextmanager
def telling(progress: Progress | bool | None, name: str, long: bool) -> Iterator[Progress | None]:
    """What is to be told inside of each step: progress where it is a function, else what shows it; None: nothing.

    progress: True shows, False does not, None does so where the call is a long one and the logger is not silenced. name: of
    the work. TypeError for anything else.
    """
    if callable(progress):
        yield progress
        return
    if progress is not None and not isinstance(progress, bool):
        raise TypeError(
            f"progress is a function of (name, done, total), True (shown on stderr), False or None, got {progress!r:.60}"
        )
    if not (long and LOG.isEnabledFor(logging.WARNING) and _is_first() if progress is None else progress):
        yield None
        return
    with track_progress(name, transient=True, after=BEFORE_A_BAR) as work:
        yield lambda word, done, total: work.at(done, word, total)


def _is_first() -> bool:
    """Whether this process is the one that speaks, of those that work together."""
    processes: Any = torch.distributed
    return not (processes.is_available() and processes.is_initialized()) or processes.get_rank() == 0


__all__ = ["telling"]
