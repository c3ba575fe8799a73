"""Histories as examples: what is trained on and what is held out, and that an HSTU learns from them."""

import numpy as np
import pytest

from experiments.data.item_sequences import ItemSequences, books
from experiments.models.click_training import ClickTraining
from experiments.models.hstu import HSTU
from experiments.models.sequence_training import NEXT, RATED, Examples, small, train, trained_quality


def histories(users=30, length=20, seed=0):
    """Users of 12 to 20 events; odd items are rated 5, even ones 1."""
    rng = np.random.default_rng(seed)
    items = rng.integers(1, 40, (users, length)).astype(np.int32)
    for user in range(users):
        items[user, : user % 9] = 0
    actions = np.where(items == 0, 0, np.where(items % 2, 5, 1)).astype(np.int32)
    return ItemSequences("drawn", items, actions, 40)


def test_rated_events_are_candidates_once_and_later_than_training():
    examples = Examples(histories(), RATED, history=6, candidates=3)
    first, until = examples.parted
    events = {(user, place) for user in range(30) for place in range(20) if place >= first[user]}
    shown = [(u, place) for u, end in examples.held_out_ends for place in range(end, min(end + 3, 20))]
    assert len(shown) == len(set(shown))
    assert set(shown) == {(u, place) for u, place in events if place >= until[u]}
    for user, end in examples.ends:
        assert first[user] < end <= until[user] - 3
    batch, labels = examples.batch(examples.ends[:5], np.random.default_rng(0))
    assert batch.candidates == (3,) * 5
    assert max(batch.lengths) <= 9
    last = np.cumsum(batch.lengths)
    for at, (user, end) in enumerate(examples.ends[:5]):
        own = examples.data.items[user, end : end + 3]
        assert batch.items[last[at] - 3 : last[at]].tolist() == own.tolist()
        assert labels[3 * at : 3 * at + 3, 0].tolist() == (own % 2).tolist()


def test_the_next_item_stands_beside_drawn_ones():
    examples = Examples(histories(), NEXT, history=6, candidates=4)
    assert examples.ends[:, 0].max() < 25 <= examples.held_out_ends[:, 0].min()
    batch, labels = examples.batch(examples.ends[:8], np.random.default_rng(0))
    shown = batch.items[np.concatenate([np.arange(end - 4, end) for end in np.cumsum(batch.lengths)])]
    for at, (user, end) in enumerate(examples.ends[:8]):
        own = int(examples.data.items[user, end])
        some = shown[4 * at : 4 * at + 4]
        assert some[0] == own
        assert labels[4 * at : 4 * at + 4, 0].tolist() == (some == own).float().tolist()
    first, second = (next(examples.held_out(16, None)) for _ in range(2))
    assert np.array_equal(first[0].items, second[0].items)


def test_an_hstu_learns_which_items_are_liked():
    examples = Examples(histories(80), RATED, history=6, candidates=3)
    plan = ClickTraining(steps=60, batch=64, rate=5e-3, table_rate=0.3)
    found = trained_quality(lambda: HSTU(small(examples, 16)), None, examples, plan, 0)
    assert found.auc > 0.8
    assert found.entropy < 0.9
    with pytest.raises(ValueError, match=r"in step \d+; a lower rate may help"):
        train(HSTU(small(examples, 16)), examples, ClickTraining(steps=20, batch=8, rate=1e30), 0)


def test_too_few_events():
    with pytest.raises(
        ValueError, match=r"drawn: no example of the training part; 30 candidates are too many"
    ):
        Examples(histories(), RATED, candidates=30)


def test_books_are_stored(tmp_path):
    with pytest.raises(ValueError, match="corpus-path"):
        books(tmp_path)
    (tmp_path / "sequences").mkdir()
    items = np.arange(1, 7, dtype=np.int32).reshape(2, 3)
    np.savez(tmp_path / "sequences" / "prose-128.npz", items=items, size=9, name="words of prose-1")
    found = books(tmp_path)
    assert (found.items.tolist(), found.actions.tolist(), found.size) == (items.tolist(), [[1] * 3] * 2, 9)
