"""Which tokens a probe keeps: priority sampling, the same rows for the same seed on any device, and mergeable over processes.

Each token draws a key; those with the smallest keys stay. So the sample of a union is that of the samples' union, whatever the
order, and it is uniform over all tokens that were seen. With `half_life` a token that is so much older is half as likely
(Efraimidis and Spirakis, 2006: the weights of a sample without replacement): keys are log(-log u) - age log 2 / half_life.
"""

from __future__ import annotations

from math import inf, log
from typing import Any

import numpy as np

from reference.formats.encode import random_bits
from reference.probe.estimates import F64

#: How many sites times processes draw by one seed.
STREAMS = 1 << 20


def sampling_keys(
    count: int, *, seed: int = 0, stream: int = 0, draw: int = 0, age: float = 0.0, half_life: float = inf
) -> F64:
    """The keys of `count` tokens, float64.

    stream: a number below 2^20 of the site and process; draw: of the call, each with words of its own. age: the step, in
    the unit of `half_life`. u_i = (w_i + 1/2) / 2^32 of words w of `reference.random_bits` with this stream, seed XOR draw *
    2^20.
    """
    if not 0 <= stream < STREAMS or draw < 0 or count < 0 or not half_life > 0:
        raise ValueError(
            f"sampling_keys takes a count and draw of 0 or more, a stream below {STREAMS} and a positive half_life, got "
            f"{count}, {draw}, {stream} and {half_life}"
        )
    words = np.asarray(random_bits((count,), seed=seed ^ (draw << 20), stream=stream), np.uint32)
    u = (words.astype(np.float64) + 0.5) / 2.0**32
    keys: F64 = np.log(-np.log(u)) - age * (log(2) / half_life)
    return keys


def smallest(keys: Any, size: int) -> np.ndarray:
    """Places of the `size` smallest keys, in their order; of equal keys the first."""
    if size < 1:
        raise ValueError(f"a sample has one token at least, got size {size}")
    return np.argsort(np.asarray(keys), kind="stable")[:size]


__all__ = ["sampling_keys", "smallest"]
