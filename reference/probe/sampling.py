"""Which tokens a probe keeps: priority sampling, the same rows for the same seed on any device, and mergeable over processes.

Each token draws a key; those with the smallest keys stay. So the sample of a union is that of the samples' union, whatever the
order, and it is uniform over all tokens that were seen. With `half_life` a token that is so much older is half as likely
(Efraimidis and Spirakis, 2006: the weights of a sample without replacement): keys are log(-log u) - age log 2 / half_life.

Of many tokens only the smallest keys are drawn, in their order (`sampled`): -log u of n tokens are exponential, the i-th
smallest of n such is the sum of Z_j / (n - j) over j < i with Z exponential (Renyi, 1953), and which tokens have them is a
random order. So a sample takes time by its size, not by the tokens that it is of, and has the law of all keys sorted.
"""

from __future__ import annotations

from math import inf, log
from typing import Any, NamedTuple

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
    _check(count, stream, draw, half_life)
    words = np.asarray(random_bits((count,), seed=seed ^ (draw << 20), stream=stream), np.uint32)
    u = (words.astype(np.float64) + 0.5) / 2.0**32
    keys: F64 = np.log(-np.log(u)) - age * (log(2) / half_life)
    return keys


class Sampled(NamedTuple):
    """Places of tokens, int64, and their keys, float64, smallest first."""

    places: np.ndarray
    keys: F64


def sampled(
    count: int,
    size: int,
    *,
    seed: int = 0,
    stream: int = 0,
    draw: int = 0,
    age: float = 0.0,
    half_life: float = inf,
) -> Sampled:
    """Those of `count` tokens that have the `size` smallest keys; arguments as in `sampling_keys`.

    Of up to 2 size tokens these are `smallest` of `sampling_keys`, of more they are drawn in order. Words of 64 bits are
    NumPy's Philox under the key (seed, stream), from the counter draw * 2^192 on: `size` for Z, then one a place, of which the
    first ones that differ count. ValueError as in `sampling_keys` and `smallest`.
    """
    _check_size(size)
    if count <= 2 * size:
        keys = sampling_keys(count, seed=seed, stream=stream, draw=draw, age=age, half_life=half_life)
        at = smallest(keys, size)
        return Sampled(at, keys[at])
    _check(count, stream, draw, half_life)
    u = _uniform(3 * size, seed, stream, draw)
    spacings = -np.log(u[:size]) / np.arange(count, count - size, -1)
    wanted, places = 3 * size, _first_places(u[size:], count, size)
    while len(places) < size:
        wanted *= 2
        places = _first_places(_uniform(wanted, seed, stream, draw)[size:], count, size)
    return Sampled(places, np.log(np.cumsum(spacings)) - age * (log(2) / half_life))


def _uniform(count: int, seed: int, stream: int, draw: int) -> F64:
    """(w + 1/2) / 2^53 of the upper 53 bits of words; the first of many are those of few."""
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed is an integer from 0 to 2**64 - 1, got {seed!r}")
    key, counter = np.array([seed, stream], np.uint64), np.array([0, 0, 0, draw], np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(count)
    return np.asarray(((words >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53)


def _first_places(u: F64, count: int, size: int) -> np.ndarray:
    """The first `size` places below count that differ, in the order in which they come; fewer where there are no more."""
    places, first = np.unique(np.minimum((u * count).astype(np.int64), count - 1), return_index=True)
    return np.asarray(places[np.argsort(first)][:size])


def smallest(keys: Any, size: int) -> np.ndarray:
    """Places of the `size` smallest keys, in their order; of equal keys the first."""
    _check_size(size)
    return np.argsort(np.asarray(keys), kind="stable")[:size]


def _check(count: int, stream: int, draw: int, half_life: float) -> None:
    if not 0 <= stream < STREAMS or draw < 0 or count < 0 or not half_life > 0:
        raise ValueError(
            f"a sample takes a count and draw of 0 or more, a stream below {STREAMS} and a positive half_life, got "
            f"{count}, {draw}, {stream} and {half_life}"
        )


def _check_size(size: int) -> None:
    if size < 1:
        raise ValueError(f"a sample has one token at least, got size {size}")


__all__ = ["Sampled", "sampled", "sampling_keys", "smallest"]
