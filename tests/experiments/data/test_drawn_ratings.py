"""Drawn ratings: frequencies are Zipf's, users stay with their categories, everything is the seed's."""

import numpy as np
import pytest

from experiments.data.drawn_ratings import CATEGORIES, OWN, impressions, sequences, zipf


def test_zipf():
    """Frequencies of ranks against the integral of their density."""
    count, size = 200_000, 1000
    ranks = zipf(np.random.default_rng(0).random(count), size)
    assert ranks.min() == 0
    assert ranks.max() < size
    weights = np.diff((np.arange(size + 1) + 1.0) ** 0.05)
    share = weights[:10] / weights.sum()
    found = np.bincount(ranks, minlength=size)[:10] / count
    assert (abs(found - share) < 5 * np.sqrt(share / count)).all()
    with pytest.raises(ValueError, match="exponent 1"):
        zipf(np.zeros(1), 10, 1)


def test_users_stay_with_their_categories():
    one = sequences(50, 40, 1280, 0)
    assert one.items.shape == one.actions.shape == (50, 40)
    assert one.size == 1281
    assert one.synthetic
    categories = (one.items - 1) // 10
    assert max(len(set(line)) for line in categories.tolist()) <= OWN
    assert categories.max() < CATEGORIES
    assert set(one.actions.flat) <= {1, 2, 3, 4, 5}
    assert (one.items == sequences(50, 40, 1280, 0).items).all()
    with pytest.raises(ValueError, match="items for 128 categories"):
        sequences(2, 2, 100, 0)


def test_impressions_are_the_sequences_in_the_order_of_time():
    drawn, data = sequences(10, 12, 1280, 3), impressions(10, 12, 1280, 3)
    assert data.synthetic
    assert len(data.labels) == 120
    assert data.ids[:10, 2].tolist() == drawn.items[:, 0].tolist()
    assert (data.labels[:10] == (drawn.actions[:, 0] >= 4)).all()
    # The past of a user's third rating: the second, then the first.
    assert data.ids[20, 3:6].tolist() == [drawn.items[0, 1], drawn.items[0, 0], 0]
