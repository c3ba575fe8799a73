"""`Reservoir`: some tokens of a layer's inputs, with the gradients at their outputs, at random over all that was seen."""

from __future__ import annotations

from math import inf

import numpy as np
import torch

from reference.probe.sampling import sampling_keys, smallest


class Reservoir:
    """At most `size` tokens: x (tokens, K) in the inputs' dtype and place, g (tokens, N) or None, keys (tokens,) float64.

    The sample is that of `reference.probe.sampling` for this seed and stream.
    """

    def __init__(self, size: int, *, seed: int = 0, stream: int = 0, half_life: float = inf) -> None:
        self.size, self.seed, self.stream, self.half_life = size, seed, stream, half_life
        self.keys = np.zeros(0)
        self.x = torch.zeros(0, 0)
        self.g: torch.Tensor | None = None
        #: Tokens that were seen, and calls of `keys_of`, each of which draws anew.
        self.count = 0
        self.draws = 0

    def keys_of(self, tokens: int) -> np.ndarray:
        """The keys of a call's tokens."""
        self.draws += 1
        return sampling_keys(
            tokens, seed=self.seed, stream=self.stream, step=self.draws - 1, half_life=self.half_life
        )

    def places(self, keys: np.ndarray) -> np.ndarray:
        """Which tokens of a call can stay."""
        return smallest(keys, self.size)

    def add(self, x: torch.Tensor, name: str = "", g: torch.Tensor | None = None) -> None:
        """Take in the tokens of one call, all or none; ValueError for NaN and infinity among those that would stay."""
        if not len(x):
            return
        keys = self.keys_of(len(x))
        at = self.places(keys)
        index = torch.from_numpy(at).to(x.device)
        self.join(x[index], keys[at], None if g is None else g[index], len(x), name)

    def join(
        self, x: torch.Tensor, keys: np.ndarray, g: torch.Tensor | None, count: int, name: str = ""
    ) -> None:
        """Take in tokens that were chosen of `count`."""
        for what, value in (("inputs", x), ("gradients at the outputs", g)):
            if value is not None and not bool(value.isfinite().all()):
                raise ValueError(f"{name}: {what} are NaN or infinite in a batch; leave that batch out")
        if g is None and self.g is not None:
            return  # a forward without a backward beside those with one
        fresh = not len(self.keys) or (self.g is None) != (g is None)
        both = keys if fresh else np.concatenate([self.keys, keys])
        at = smallest(both, self.size)
        index = torch.from_numpy(at).to(x.device)
        self.x = (x if fresh else torch.cat([self.x.to(x.device), x]))[index].clone()
        if g is not None:
            self.g = (g if fresh or self.g is None else torch.cat([self.g.to(g.device), g]))[index].clone()
        self.keys, self.count = both[at], self.count + count
