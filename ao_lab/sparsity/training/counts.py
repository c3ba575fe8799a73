"""Counts of steps: a buffer of each layer, which checkpoints have, and the same number on the host, so that no step waits.

The host's number holds as long as the buffer is the same tensor, at the same address, that nothing else has written to: torch
counts writes in place (`Tensor._version`). After loading, copying or moving, and at first, the buffer is read, once. Writes
through `.data` or another tensor's memory are not seen; replays of a CUDA graph are: of a buffer that was counted in one the
host's number says nothing any more. Collectives write past torch's count, and ranks that disagreed would wait for each other
for ever: where there are process groups the buffer is read in every step.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary


class Known(NamedTuple):
    """A number, and the state of its buffer that it was that of. captured: whether a CUDA graph adds to the buffer."""

    number: int
    version: int
    address: int
    captured: bool


_known: MutableMapping[torch.Tensor, Known] = WeakTensorKeyDictionary()


def count(steps: Sequence[torch.Tensor]) -> list[int]:
    """Add one to every buffer, once where some are the same memory; their numbers.

    Raises RuntimeError in the capture of a CUDA graph where the host has no number: nothing may be read there.
    """
    groups: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
    for step in steps:
        groups.setdefault((step.device, step.data_ptr() or id(step)), []).append(step)
    capturing = is_capturing(steps)
    numbers = [_number(group, capturing) for group in groups.values()]
    if capturing and None in numbers:
        raise RuntimeError(
            "step_sparsity_: in the capture of a CUDA graph the number of steps cannot be read; call it once before, as it was "
            "loaded, copied or moved"
        )
    torch._foreach_add_([group[0] for group in groups.values()], 1)
    unknown = [group[0] for group, number in zip(groups.values(), numbers, strict=True) if number is None]
    read = iter(_read(unknown))
    counts: dict[int, int] = {}
    for group, number in zip(groups.values(), numbers, strict=True):
        now = next(read) if number is None else number + 1
        for step in group:
            _remember(step, now, capturing)
            counts[id(step)] = now
    return [counts[id(step)] for step in steps]


def is_capturing(steps: Sequence[torch.Tensor]) -> bool:
    """Whether a CUDA graph is captured from the current stream."""
    return steps[0].is_cuda and torch.cuda.is_current_stream_capturing()


def _number(group: Iterable[torch.Tensor], capturing: bool) -> int | None:
    """What the host knows of a buffer by all tensors that are its memory; None where that is nothing, or not the same."""
    found = {_of_tensor(step, capturing) for step in group}
    return found.pop() if len(found) == 1 else None


def _of_tensor(step: torch.Tensor, capturing: bool) -> int | None:
    known = _known.get(step)
    # A graph that is captured once more repeats one step, whose number is that of its first capture.
    if known is None or (known.captured and not capturing) or (_has_ranks() and not capturing):
        return None
    return known.number if (known.version, known.address) == (step._version, step.data_ptr()) else None


def _has_ranks() -> bool:
    """Whether another rank may write to a buffer."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def counted_in_graph(step: torch.Tensor) -> bool:
    """Whether a CUDA graph adds to a buffer, so that its replays count steps that the host does not see."""
    known = _known.get(step)
    return known is not None and known.captured


def _remember(step: torch.Tensor, number: int, capturing: bool) -> None:
    if step.is_inference():  # writes to it are not counted
        return
    before = _known.get(step)
    captured = capturing or (before is not None and before.captured)
    _known[step] = Known(number, step._version, step.data_ptr(), captured)


def _read(steps: Sequence[torch.Tensor]) -> list[int]:
    """Numbers of buffers, which the host waits for once."""
    if not steps:
        return []
    return [int(n) for n in torch.stack([step.to(steps[0].device) for step in steps]).tolist()]


__all__ = ["count", "counted_in_graph", "is_capturing"]
