"""`Reservoir`: some tokens of a layer's inputs, with the gradients at their outputs, at random over all that was seen.

What a call costs depends on the size of the sample, not on the batch: keys of the tokens that can stay are drawn in their order
(`reference.probe.sampling.sampled`), their rows alone are read, transposed or not, and the host waits for no device.

Layers of one step share what the host does (`Step`): reservoirs of one stream that have as many tokens draw the same places,
and those that kept the same keep the same. What is left of a layer is one kernel for each of x and g, and two where they are
joined with those of before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, prod
from typing import Any

import numpy as np
import torch
from torch.nn.utils import get_total_norm

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


class Step:
    """What the reservoirs of one step have in common, by what decides about it: drawn places, and which of two samples stay.

    Both are on the host, and once on each device that reads them.
    """

    def __init__(self) -> None:
        self._drawn: dict[tuple[Any, ...], tuple[tuple[torch.Tensor, ...], np.ndarray[Any, Any]]] = {}
        self._joined: dict[tuple[Any, ...], tuple[torch.Tensor, np.ndarray[Any, Any], Any]] = {}

    def drawn(
        self, lead: tuple[int, ...], device: torch.device, *law: Any
    ) -> tuple[tuple[torch.Tensor, ...], np.ndarray[Any, Any]]:
        """Places along the leading axes, on a device, and keys. law: size, seed, stream, draw, age and half_life."""
        key = (lead, device, *law)
        if key not in self._drawn:
            size, seed, stream, draw, age, half_life = law
            at, keys = sampled(
                prod(lead), size, seed=seed, stream=stream, draw=draw, age=age, half_life=half_life
            )
            places = np.stack(np.unravel_index(at, lead)) if len(lead) > 1 else at[None]
            self._drawn[key] = tuple(moved(places, device)), keys
        return self._drawn[key]

    def joined(
        self, before: np.ndarray[Any, Any], keys: np.ndarray[Any, Any], size: int, device: torch.device
    ) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
        """Which tokens stay of those of before and the new ones behind them, on a device, and their keys."""
        key = (
            id(before),
            id(keys),
            size,
            device,
        )  # both are held below, so that no other array gets their ids
        if key not in self._joined:
            both = np.concatenate([before, keys])
            at = smallest(both, size)
            self._joined[key] = moved(at, device), both[at], (before, keys)
        return self._joined[key][:2]


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

    def choose(
        self, x: torch.Tensor, g: torch.Tensor | None = None, age: float = 0.0, step: Step | None = None
    ) -> Chosen:
        """Those of one call's tokens, x (..., K) and g (..., N), that can stay. step: what other reservoirs share."""
        lead = tuple(x.shape[:-1]) or (1,)
        law = self.size, self.seed, self.stream, self.draws, age, self.half_life
        index, keys = (step or Step()).drawn(lead, x.device, *law)
        self.draws += 1
        return Chosen(_rows(x, index), None if g is None else _rows(g, index), keys, prod(lead))

    def add(self, chosen: Chosen, step: Step | None = None) -> None:
        """Take in tokens that were checked. Those without gradients beside others that have some are left."""
        if not chosen.count or (chosen.g is None and self.g is not None):
            return
        if not len(self.keys) or (self.g is None) != (chosen.g is None):
            self.x, self.g, self.keys = _first(chosen, self.size)
        else:
            index, keys = (step or Step()).joined(self.keys, chosen.keys, self.size, chosen.x.device)
            self.x = _joined(self.x, chosen.x, index)
            self.g = None if self.g is None or chosen.g is None else _joined(self.g, chosen.g, index)
            self.keys = keys
        self.count += chosen.count


def all_finite(some: Iterable[Chosen]) -> bool:
    """Whether no token that was chosen holds NaN or infinity: few kernels for all of them, and the host waits once."""
    found = [
        value for chosen in some for value in (chosen.x, chosen.g) if value is not None and value.numel()
    ]
    return bool(get_total_norm(found, norm_type=inf).isfinite())


def moved(places: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """int64 places on a device; a GPU gets them from pinned memory, so that the host does not wait for what runs there."""
    index = torch.from_numpy(np.ascontiguousarray(places, np.int64))
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index.to(device)


def _rows(x: torch.Tensor, index: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Some rows of x (..., K), as a matrix."""
    x = x[None] if x.dim() == 1 else x
    return x.index_select(0, index[0]) if len(index) == 1 else x[index]


def _first(chosen: Chosen, size: int) -> tuple[torch.Tensor, torch.Tensor | None, np.ndarray[Any, Any]]:
    """x, g and keys of a sample that begins: drawn keys are in their order already, those of files and of ranks may not be."""
    x, g, keys = chosen.x, chosen.g, chosen.keys
    at = smallest(keys, size)
    if len(at) == len(keys) and bool((at == np.arange(len(at))).all()):
        return x, g, keys
    index = moved(at, x.device)
    return x[index], None if g is None else g[index], keys[at]


def _joined(before: torch.Tensor, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The tokens that stay of both."""
    return torch.cat([before.to(x.device, x.dtype), x]).index_select(0, index)
