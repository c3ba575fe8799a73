"""Which tokens stay: uniform, the same whatever the order, mergeable, and younger ones with a half-life."""

import numpy as np
import pytest

from reference.probe.sampling import sampled, sampling_keys, smallest


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


@pytest.mark.parametrize("count", [40, 200])
def test_drawn_in_order_every_token_stays_equally_often(count):
    """Places below and beyond a third of all tokens, and each once, 16 of them over 600 seeds: binomial, five deviations."""
    counts = np.zeros(count)
    for seed in range(600):
        places = sampled(count, 16, seed=seed).places
        assert len(set(places)) == 16
        counts[places] += 1
    share = 16 / count
    assert abs(counts - 600 * share).max() < 5 * (600 * share * (1 - share)) ** 0.5


def test_keys_drawn_in_order_have_the_law_of_all_keys_sorted():
    """exp(key) of the i-th smallest of n: mean sum 1 / (n - j), variance sum 1 / (n - j)^2 (Renyi); 400 seeds, five errors."""
    found = np.exp([sampled(100, 12, seed=seed).keys for seed in range(400)])
    terms = 1 / np.arange(100, 88, -1)
    assert (np.diff(found, axis=1) > 0).all()
    error = np.sqrt(np.cumsum(terms**2) / 400)
    assert (abs(found.mean(0) - np.cumsum(terms)) < 5 * error).all()


def test_of_few_tokens_those_with_the_smallest_of_all_keys():
    found, keys = sampled(32, 16, seed=5, stream=3, draw=2), sampling_keys(32, seed=5, stream=3, draw=2)
    assert (found.places == smallest(keys, 16)).all()
    assert (found.keys == keys[found.places]).all()


def test_a_union_of_few_and_of_many_tokens_is_uniform():
    """Of 20 and 180 tokens those of the first are a tenth of 16: 1.6 of a sample, over 500 seeds, deviation of a mean 0.052."""
    kept = []
    for seed in range(500):
        few, many = (sampled(count, 16, seed=seed, stream=at) for at, count in enumerate((20, 180)))
        kept.append((smallest(np.concatenate([few.keys, many.keys]), 16) < 16).sum())
    assert np.mean(kept) == pytest.approx(1.6, abs=5 * 0.052)


def test_a_sample_of_many_tokens_draws_no_key_for_each():
    """A million tokens, as layers along other axes have: by words that are counted."""
    assert len(sampled(1 << 40, 1024, age=3.0, half_life=1.0).places) == 1024
    small, large = (sampled(count, 8, seed=1, draw=4) for count in (1000, 2000))
    assert (large.places // 2 == small.places).all()
    older = sampled(1000, 8, seed=1, draw=4, age=3.0, half_life=1.0)
    assert older.keys == pytest.approx(small.keys - 3 * np.log(2))


def test_wrong_numbers():
    with pytest.raises(ValueError, match="size 0"):
        sampled(9, 0)
    with pytest.raises(ValueError, match="seed"):
        sampled(9, 2, seed=-1)
    with pytest.raises(ValueError, match="stream"):
        sampling_keys(3, stream=1 << 20)
    with pytest.raises(ValueError, match="size 0"):
        smallest([1.0], 0)
