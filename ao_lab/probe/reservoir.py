"""`Reservoir`: some tokens of a layer's inputs, with the gradients at their outputs, at random over all that was seen.

What a call costs depends on the size of the sample, not on the batch: keys of the tokens that can stay are drawn in their order
(`reference.probe.sampling.sampled`), their rows alone are read, transposed or not, and the host waits for no device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, prod
from typing import Any

import numpy as np
import torch

from reference.probe.sampling import sampled, smallest


@dataclass
class Chosen:
    """Tokens of one call that can stay: x (tokens, K), g (tokens, N) or None, keys, and of how many they were chosen."""

    x: torch.Tensor
    g: torch.Tensor | None
    keys: np.ndarray[Any, Any]
    count: int

    def check(self, name: str) -> None:
        """ValueError for NaN and infinity."""
        for what, value in (("inputs", self.x), ("gradients at the outputs", self.g)):
            if value is not None and not bool(value.isfinite().all()):
                raise ValueError(f"{name}: {what} are NaN or infinite in a batch; leave that batch out")


class Reservoir:
    """At most `size` tokens: x (tokens, K) in the inputs' dtype and place, g (tokens, N) or None, keys (tokens,) float64.

    The sample is that of `reference.probe.sampling` for this seed and stream.
    """

    def __init__(self, size: int, *, seed: int = 0, stream: int = 0, half_life: float = inf) -> None:
        self.size, self.seed, self.stream, self.half_life = size, seed, stream, half_life
        self.keys: np.ndarray[Any, Any] = np.zeros(0)
        self.x = torch.zeros(0, 0)
        self.g: torch.Tensor | None = None
        #: Tokens that were seen, and calls, each of which draws anew.
        self.count = 0
        self.draws = 0

    def choose(self, x: torch.Tensor, g: torch.Tensor | None = None, age: float = 0.0) -> Chosen:
        """Those of one call's tokens, x (..., K) and g (..., N), that can stay."""
        lead = tuple(x.shape[:-1]) or (1,)
        count = prod(lead)
        at, keys = sampled(
            count, self.size, seed=self.seed, stream=self.stream, draw=self.draws, age=age, half_life=self.half_life
        )  # fmt: skip
        self.draws += 1
        index = tuple(moved(np.stack(np.unravel_index(at, lead)), x.device))
        return Chosen(_rows(x, index), None if g is None else _rows(g, index), keys, count)

    def add(self, chosen: Chosen) -> None:
        """Take in tokens that were checked. Those without gradients beside others that have some are left."""
        if not chosen.count or (chosen.g is None and self.g is not None):
            return
        fresh = not len(self.keys) or (self.g is None) != (chosen.g is None)
        both = chosen.keys if fresh else np.concatenate([self.keys, chosen.keys])
        at = smallest(both, self.size)
        index = moved(at, chosen.x.device)
        self.x = _joined(None if fresh else self.x, chosen.x)[index]
        self.g = None if chosen.g is None else _joined(None if fresh else self.g, chosen.g)[index]
        self.keys, self.count = both[at], self.count + chosen.count


def all_finite(some: Iterable[Chosen]) -> bool:
    """Whether no token that was chosen holds NaN or infinity; the host waits once for each device."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for chosen in some:
        for value in (chosen.x, chosen.g):
            if value is not None:
                found.setdefault(value.device, []).append(value.isfinite().all())
    return all(bool(torch.stack(flags).all()) for flags in found.values())


def moved(places: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """int64 places on a device; a GPU gets them from pinned memory, so that the host does not wait for what runs there."""
    index = torch.from_numpy(np.ascontiguousarray(places, np.int64))
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index.to(device)


def _rows(x: torch.Tensor, index: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Some rows of x (..., K), as a matrix."""
    return (x[None] if x.dim() == 1 else x)[index]


def _joined(before: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return x if before is None else torch.cat([before.to(x.device, x.dtype), x])
