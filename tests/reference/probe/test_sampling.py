"""Which tokens stay: uniform, the same whatever the order, mergeable, and younger ones with a half-life."""

import numpy as np
import pytest

from reference.probe.sampling import sampling_keys, smallest


def test_every_token_stays_equally_often():
    """Of 64 tokens 16, over 400 seeds: 100 times each, binomial deviation 8.7; five of them are 43."""
    counts = np.zeros(64)
    for seed in range(400):
        counts[smallest(sampling_keys(64, seed=seed), 16)] += 1
    assert abs(counts - 100).max() < 43


def test_the_sample_of_a_union_is_that_of_the_samples():
    parts = [sampling_keys(50, stream=rank, draw=step) for rank in range(2) for step in range(3)]
    whole = np.sort(np.concatenate(parts))[:20]
    halves = [np.concatenate(parts[:3]), np.concatenate(parts[3:])]
    kept = np.concatenate([half[smallest(half, 20)] for half in halves])
    assert (kept[smallest(kept, 20)] == whole).all()
    assert len({one.tobytes() for one in parts}) == 6


def test_a_half_life():
    """Of as many tokens ten half-lives apart hardly an old one stays; of one half-life a third."""
    old = sampling_keys(4000, half_life=10)
    for step, share in ((10, 1 / 3), (100, 0.001)):
        keys = np.concatenate([old, sampling_keys(4000, draw=1, age=step, half_life=10)])
        stay = smallest(keys, 600)
        assert (stay < 4000).mean() == pytest.approx(share, abs=0.08)


def test_wrong_numbers():
    with pytest.raises(ValueError, match="stream"):
        sampling_keys(3, stream=1 << 20)
    with pytest.raises(ValueError, match="size 0"):
        smallest([1.0], 0)
