"""Ratings that a program draws, at any scale, after the generator of MLPerf's DLRMv3 benchmark, with Zipf's frequencies.

128 categories, four of them a user's. A user's next rating is of category c with probability (alpha/4 + n_c) / (alpha + n),
where n_c of n ratings were of it: an urn, whose alpha (uniform in 1..500) says how evenly a user goes on. The item is
Zipf's (exponent 0.95) in the category's range, which grows with time: new items come at its end. A rating (1 to 5) is rounded
from what the user thinks of the category, what the item is worth, and noise. Rows of experiments on these data say that they
are synthetic.
"""

from __future__ import annotations

import numpy as np

from experiments.data.impressions import Array, Impressions, shares_before
from experiments.data.item_sequences import ItemSequences

CATEGORIES, OWN, ALPHA, ZIPF = 128, 4, 500, 0.95
#: The share of a category's items that is there at the beginning.
EARLY = 0.5
LIKED, HISTORY = 4, 8
HELD_OUT = 0.15


def zipf(uniform: Array, size: Array | int, exponent: float = ZIPF) -> Array:
    """Ranks 0..size-1 whose density falls as (rank + 1)**-exponent, from numbers uniform in [0, 1): the inverse of the
    continuous distribution, rounded down. int64; ValueError for the exponent 1, at which this inverse has no value."""
    if exponent == 1:
        raise ValueError("exponent 1 has another inverse; take 0.999 or 1.001")
    power = 1 - exponent
    top = np.power(np.asarray(size, np.float64) + 1, power) - 1
    ranks = np.power(uniform * top + 1, 1 / power) - 1
    return np.minimum(ranks.astype(np.int64), np.asarray(size) - 1)


def sequences(users: int, length: int, items: int, seed: int) -> ItemSequences:
    """Histories of users, all of one length; items: of all categories, CATEGORIES at least (else a ValueError)."""
    if items < CATEGORIES:
        raise ValueError(f"{items} items for {CATEGORIES} categories; each has at least one")
    generator = np.random.default_rng(seed)
    each = items // CATEGORIES
    own = np.argsort(generator.random((users, CATEGORIES)), 1)[:, :OWN]
    taste = generator.normal(size=(users, OWN))
    worth = generator.normal(size=CATEGORIES * each)
    alpha = generator.uniform(1, ALPHA, users)
    counts, lines = np.zeros((users, OWN)), np.arange(users)
    item, rating = np.zeros((users, length), np.int32), np.zeros((users, length), np.int32)
    for step in range(length):
        chance = (alpha[:, None] / OWN + counts) / (alpha + step)[:, None]
        which = (np.cumsum(chance, 1) < generator.random(users)[:, None]).sum(1).clip(max=OWN - 1)
        counts[lines, which] += 1
        there = max(1, int(each * (EARLY + (1 - EARLY) * step / length)))
        drawn = own[lines, which] * each + zipf(generator.random(users), there)
        liking = 3.2 + 0.9 * taste[lines, which] + 0.7 * worth[drawn] + 0.5 * generator.normal(size=users)
        item[:, step], rating[:, step] = drawn + 1, np.clip(np.rint(liking), 1, 5)
    return ItemSequences("drawn ratings", item, rating, CATEGORIES * each + 1, synthetic=True)


def impressions(users: int, length: int, items: int, seed: int) -> Impressions:
    """The same ratings as impressions, in the order of time; liked is a rating of 4 or 5."""
    drawn = sequences(users, length, items, seed)
    time = np.repeat(np.arange(length), users)
    user = np.tile(np.arange(users), length)
    item, rating = drawn.items.T.reshape(-1).astype(np.int64), drawn.actions.T.reshape(-1)
    category = (item - 1) // ((drawn.size - 1) // CATEGORIES)
    padded = np.concatenate([np.zeros((users, HISTORY), np.int32), drawn.items], 1)
    past = np.stack([padded[user, time + HISTORY - 1 - back] for back in range(HISTORY)], 1)
    liked = (rating >= LIKED).astype(np.float32)
    columns = (user[:, None], category[:, None], item[:, None], past)
    return Impressions(
        name="drawn ratings",
        dense=shares_before((user * CATEGORIES + category, item), time, liked),
        ids=np.concatenate(columns, 1).astype(np.int32),
        labels=liked,
        tables={"user": users, "category": CATEGORIES, "item": drawn.size, "history": drawn.size},
        hots=(1, 1, 1, HISTORY),
        first_held_out=int(len(liked) * (1 - HELD_OUT)),
        synthetic=True,
    )


__all__ = ["impressions", "sequences", "zipf"]
