"""Which of the measured candidates is chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

import torch

from ao_lab.gemm.problem import Candidate
from ao_lab.tuning.measure import LAUNCHES, Call, timings
from reference.arrays.errors import choice

#: A candidate replaces the default only where it is quicker by this share: less is noise.
MARGIN = 0.02
#: The same for what of a training layer is dense: its bar is the time of the dense layer, so little is left to noise.
TRAINING_MARGIN = 0.005


@dataclass(frozen=True)
class Limits:
    """What bounds a choice, see `tune`."""

    error: float | None = None
    time: float | None = None
    launches: str = "eager"

    def __post_init__(self) -> None:
        if self.error is not None and not (_is_number(self.error) and self.error > 0):
            raise ValueError(f"error_budget is a positive number or None, got {self.error!r}")
        if self.time is not None and not (_is_number(self.time) and self.time >= 1):
            raise ValueError(
                f"time_budget is a factor of the quickest time, 1 or more, or None; got {self.time!r}"
            )
        choice(self.launches, LAUNCHES, "launches")


def _is_number(value: object) -> bool:
    return isinstance(value, Real)


def measured(
    calls: Mapping[str, Call],
    errors: Callable[[str], float],
    refused: Mapping[str, str],
    device: torch.device,
    limits: Limits,
) -> tuple[Candidate, ...]:
    """A candidate of each call, the default first, then of each function that was refused, with its reason.

    errors: of the result of a call, by its name.
    """
    found = []
    times = timings(calls, device, limits.launches)
    for name in (*calls, *refused):
        if name in refused:
            found.append(Candidate(name, reason=refused[name]))
            continue
        taken = times[name]
        error = errors(name)
        if isinstance(taken, str):
            found.append(Candidate(name, error=error, reason=taken))
        else:
            found.append(Candidate(name, taken.seconds, taken.spread, error, host=taken.host, gpu=taken.gpu))
    return tuple(found)


def best(candidates: Sequence[Candidate], limits: Limits, margin: float = MARGIN) -> str | None:
    """The choice among candidates, the default first; None where none is within the error budget.

    Without a time budget the quickest, but the default where that is slower by no more than `margin`. With one, the smallest
    error among those that take at most `limits.time` times as long as the quickest.
    """
    able = _within(candidates, limits.error)
    if not able:
        return None
    quickest = min(seconds(c) for c in able)
    if limits.time is not None:
        affordable = [c for c in able if seconds(c) <= quickest * limits.time]
        return min(affordable, key=lambda c: (c.error or 0.0, seconds(c))).kernel
    if seconds(able[0]) <= quickest * (1 + margin):
        return able[0].kernel
    return min(able, key=seconds).kernel


def _within(candidates: Sequence[Candidate], error: float | None) -> list[Candidate]:
    return [c for c in candidates if c.seconds is not None and (error is None or (c.error or 0.0) <= error)]


def seconds(candidate: Candidate) -> float:
    """Its time; of one that was measured."""
    return candidate.seconds or 0.0


__all__ = ["MARGIN", "TRAINING_MARGIN", "Limits", "best", "measured"]
