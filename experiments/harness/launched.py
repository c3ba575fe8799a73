"""Which kernels a call launches on a GPU, by the profiler: what the column `kernel` of its rows says."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

#: Distinct kernels that are named; of more, those that take the longest, and how many others there are.
NAMED = 3
#: Characters of a name: libraries write whole types into theirs.
LENGTH = 60
#: What the driver does by itself.
NO_KERNEL = ("Memcpy", "Memset", "Context Sync", "Activity Buffer")


def launched(call: Callable[[], object]) -> str:
    """Names of the kernels of a call, the longest running first, joined by " + "; nothing without a GPU.

    The call runs twice: compilation is not profiled.
    """
    if not torch.cuda.is_available():
        return ""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in seen.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(NO_KERNEL):
            name = short(event.name)
            times[name] = times.get(name, 0.0) + event.device_time
    return joined(sorted(times, key=lambda name: -times[name]))


def joined(names: list[str]) -> str:
    """As one cell."""
    more = [f"{len(names) - NAMED} more"] if len(names) > NAMED else []
    return " + ".join([*names[:NAMED], *more])


def short(name: str) -> str:
    """A kernel's name without return type, arguments and the arguments of templates."""
    name = re.sub(r"\(anonymous namespace\)::|^void ", "", name).partition("(")[0]
    while re.search(r"<[^<>]*>", name):
        name = re.sub(r"<[^<>]*>", "", name)
    return name.strip()[:LENGTH]


__all__ = ["joined", "launched", "short"]
