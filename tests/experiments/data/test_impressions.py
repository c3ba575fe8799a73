"""Impressions: shapes and ids that contradict each other, batches, features of the past alone, the file of the cache."""

import numpy as np
import pytest

from experiments.data.impressions import Impressions, counts_before, last_before, numbered, stored


def small(count=20, **changes):
    generator = np.random.default_rng(0)
    parts = {
        "name": "small",
        "dense": generator.normal(size=(count, 2)).astype(np.float32),
        "ids": generator.integers(0, 4, (count, 3)).astype(np.int32),
        "labels": (np.arange(count) % 2).astype(np.float32),
        "tables": {"user": 4, "past": 5},
        "hots": (1, 2),
        "first_held_out": 15,
    }
    return Impressions(**(parts | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": np.zeros((20, 2), np.int32)}, r"ids of \(20, 2\); the latter are \(20, 3\)"),
        ({"hots": (3,)}, "bags for 1 of 2 tables"),
        ({"first_held_out": 20}, "held out from 20 on of 20"),
        ({"ids": np.full((20, 3), 4, np.int32)}, "impression 0 has id 4 in column 0, whose table has 4 rows"),
        ({"ids": np.full((20, 3), -1, np.int32)}, "has id -1 in column 0"),
    ],
)
def test_contradictions_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)


def test_batches_are_the_seeds_and_of_training_alone():
    data = small()
    first, again, other = ([one.dense for one in data.batches(4, seed, 6)] for seed in (1, 1, 2))
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))
    assert not all(a.equal(b) for a, b in zip(first, other, strict=True))
    held_out = {float(x) for x in data.dense[15:, 0]}
    assert not held_out & {float(x) for one in first for x in one[:, 0]}
    assert len({float(x) for one in first[:3] for x in one[:, 0]}) == 12
    assert sum(len(one.labels) for one in data.held_out(2)) == 5
    assert sum(len(one.labels) for one in data.held_out(2, most=3)) == 3


def test_the_past_is_strictly_before():
    """Against loops over all events."""
    generator = np.random.default_rng(3)
    keys, times, values = (generator.integers(1, top, 200) for top in (6, 30, 99))
    order = np.argsort(times, kind="stable")
    keys, times, values = keys[order], times[order], values[order]
    asked, at = generator.integers(1, 7, 50), generator.integers(0, 32, 50)
    before = [
        [v for k, t, v in zip(keys, times, values, strict=True) if k == a and t < b]
        for a, b in zip(asked, at, strict=True)
    ]
    assert counts_before(keys, times, asked, at).tolist() == [len(one) for one in before]
    last = last_before(keys, times, values, asked, at, 3)
    assert last.tolist() == [([*one[::-1], 0, 0, 0])[:3] for one in before]


def test_ids_are_numbered_from_one():
    ids, size = numbered(np.array(["b", "", "c", "b"]))
    assert ids.tolist() == [2, 1, 3, 2]
    assert size == 4


def test_what_was_stored_is_read_and_not_made_again(tmp_path):
    path, data = tmp_path / "impressions" / "one.npz", small(synthetic=True)
    made = stored(path, lambda: data)
    read = stored(path, lambda: pytest.fail("made again"))
    for one in (made, read):
        assert (one.ids == data.ids).all()
        assert (one.dense == data.dense).all()
        assert (one.labels == data.labels).all()
        assert (one.tables, one.hots, one.first_held_out, one.synthetic) == (data.tables, data.hots, 15, True)
    assert [file.name for file in path.parent.iterdir()] == ["one.npz"]
