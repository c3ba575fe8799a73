"""Sequences of items, as models of a user's history read them: what each user took, in order, and what was done with it.

Real ones are MovieLens's ratings (`experiments.data.movielens`), and words of a text corpus, whose frequencies are Zipf's as
those of items are: a stretch of text is the history of one reader. `drawn_ratings` draws synthetic ones.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.data import corpora
from experiments.data.corpus import Corpus
from experiments.data.impressions import Array


@dataclass(frozen=True, eq=False)
class ItemSequences:
    """items: (users, length) int32, ids from 1 on, 0 before the first where a history is shorter. actions: the same shape,
    int32, what was done (a rating; 1 where there is none, 0 beside no item). size: rows of the items' table."""

    name: str
    items: Array
    actions: Array
    size: int
    synthetic: bool = False


def by_user(name: str, users: Array, items: Array, actions: Array, length: int) -> ItemSequences:
    """The last `length` events of each user, of events in the order of time."""
    number = np.unique(users, return_inverse=True)[1].reshape(-1)
    order = np.argsort(number, kind="stable")
    count = np.bincount(number)
    end = np.cumsum(count)
    place = end[number[order]] - 1 - np.arange(len(order))
    inside = place < length
    lines, columns = number[order][inside], length - 1 - place[inside]
    sequences = [np.zeros((len(count), length), np.int32) for _ in range(2)]
    for sequence, values in zip(sequences, (items, actions), strict=True):
        sequence[lines, columns] = values[order][inside]
    return ItemSequences(name, *sequences, int(items.max()) + 1)


def words(corpus: Corpus, length: int, vocabulary: int = 65536, most: int = 1 << 24) -> ItemSequences:
    """Stretches of `length` words of a corpus's training text (its first `most` bytes) as histories.

    Ids are places by frequency from 1 on, the last one for all rarer words. ValueError where the text is too short.
    """
    text = b" ".join(document.data for document in corpus.train)[:most].lower().split()
    if len(text) < length:
        raise ValueError(f"corpus {corpus.name} has {len(text)} words, a sequence takes {length}")
    common = [word for word, _ in Counter(text).most_common(vocabulary - 2)]
    numbers = {word: at + 1 for at, word in enumerate(common)}
    rare = len(common) + 1
    ids = np.fromiter((numbers.get(word, rare) for word in text), np.int32, len(text))
    items = ids[: len(ids) // length * length].reshape(-1, length)
    return ItemSequences(f"words of {corpus.name}", items, np.ones_like(items), rare + 1)


def books(cache: Path, length: int = 128) -> ItemSequences:
    """`words` of the corpus prose, 85 books, whose folder lies in the cache as `prose`; stored beside it: where the file
    is no books are needed. ValueError where there is neither."""
    path = cache / "sequences" / f"prose-{length}.npz"
    if not path.is_file():
        made = words(corpora.load("prose", cache / "prose"), length)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial.npz")
        np.savez_compressed(partial, items=made.items, size=made.size, name=made.name)
        partial.replace(path)
    with np.load(path, allow_pickle=False) as file:
        items = file["items"]
        return ItemSequences(str(file["name"]), items, np.ones_like(items), int(file["size"]))


__all__ = ["ItemSequences", "books", "by_user", "words"]
