"""Histories: the last events of each user in order, words of a corpus by frequency."""

import numpy as np
import pytest

from experiments.data.corpus import Corpus, Document
from experiments.data.item_sequences import by_user, words


def test_the_last_events_of_each_user():
    users, items = np.array([7, 3, 7, 7, 3]), np.array([1, 2, 3, 4, 5])
    one = by_user("x", users, items, items * 10, 2)
    assert one.items.tolist() == [[2, 5], [3, 4]]
    assert one.actions.tolist() == [[20, 50], [30, 40]]
    assert by_user("x", users, items, items, 4).items[0].tolist() == [0, 0, 2, 5]


def corpus(text):
    path = next(f"{n}.py" for n in range(99) if not Document(f"{n}.py", b"").held_out)
    return Corpus("tiny", "1", (Document(path, text),))


def test_words_by_frequency():
    one = words(corpus(b"a b A c a b d e"), 4, vocabulary=4)
    assert one.items.tolist() == [[1, 2, 1, 3], [1, 2, 3, 3]]
    assert one.size == 4
    assert (one.actions == 1).all()


def test_a_text_that_is_too_short():
    with pytest.raises(ValueError, match="has 2 words, a sequence takes 4"):
        words(corpus(b"a b"), 4)
