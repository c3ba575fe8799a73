"""MovieLens 100k out of the package recbole: 100,000 ratings of 1,682 films by 943 people, as impressions and as sequences.

The data are GroupLens's, whose terms allow use but not redistribution: they are read from the package and stay in the cache.
The label of an impression is a rating of 4 or 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from experiments.data.impressions import Array, Impressions, last_before, numbered, shares_before
from experiments.data.item_sequences import ItemSequences, by_user
from experiments.data.packages import Part, opened

PACKAGE, VERSION = "recbole", "1.2.1"
LIKED = 4
#: Kinds of a film, and films of the past, in a bag.
KINDS, HISTORY = 4, 8
HELD_OUT = 0.15


def read(name: str, cache: Path) -> dict[str, Array]:
    """Columns of a table ("inter", "item", "user") as text, by name."""
    with opened(Part(PACKAGE, VERSION, f"recbole/dataset_example/ml-100k/ml-100k.{name}"), cache) as file:
        lines = file.read().decode("utf-8", "replace").splitlines()
    head, *body = (line.split("\t") for line in lines if line)
    columns = zip(*body, strict=True)
    return {title.split(":")[0]: np.array(values) for title, values in zip(head, columns, strict=True)}


def load(cache: Path) -> Impressions:
    """Ratings as impressions, the last 15 % in time held out; ValueError where the package cannot be had."""
    return impressions(*(read(name, cache) for name in ("inter", "item", "user")))


def impressions(
    ratings: Mapping[str, Array], items: Mapping[str, Array], users: Mapping[str, Array]
) -> Impressions:
    """Impressions of the three tables."""
    order = np.lexsort((ratings["item_id"], ratings["timestamp"].astype(np.int64)))
    columns = {name: values[order] for name, values in ratings.items()}
    time = np.unique(columns["timestamp"].astype(np.int64), return_inverse=True)[1].reshape(-1)
    user, item = (columns[f"{one}_id"].astype(np.int64) for one in ("user", "item"))
    liked = (columns["rating"].astype(np.float32) >= LIKED).astype(np.float32)
    ids: dict[str, tuple[Array, int]] = {
        "user": (user, int(user.max()) + 1),
        "item": (item, int(item.max()) + 1),
        **joined(users, "user_id", user, ("age", "gender", "occupation")),
        **joined(items, "item_id", item, ("release_year",)),
        "kind": kinds_of(items, item),
        "history": (last_before(user, time, item, user, time, HISTORY), int(item.max()) + 1),
    }
    parts = [values.reshape(len(user), -1).astype(np.int32) for values, _ in ids.values()]
    return Impressions(
        name="movielens_100k",
        dense=shares_before((user, item), time, liked),
        ids=np.concatenate(parts, 1),
        labels=liked,
        tables={name: size for name, (_, size) in ids.items()},
        hots=tuple(one.shape[1] for one in parts),
        first_held_out=int(len(user) * (1 - HELD_OUT)),
    )


def joined(
    table: Mapping[str, Array], key: str, asked: Array, names: tuple[str, ...]
) -> dict[str, tuple[Array, int]]:
    """Ids of a table's columns for the keys that are asked for, 0 for keys that it lacks; and rows of their tables."""
    keys = table[key].astype(np.int64)
    result = {}
    for name in names:
        ids, size = numbered(table[name])
        of_key = np.zeros(max(int(keys.max()), int(asked.max())) + 1, np.int32)
        of_key[keys] = ids
        result[name] = (of_key[asked], size)
    return result


def kinds_of(items: Mapping[str, Array], item: Array) -> tuple[Array, int]:
    """The first kinds of a film, (n, KINDS), 0 where it has fewer; and rows of their table."""
    lists = [text.split() for text in items["class"]]
    names = {name: at + 1 for at, name in enumerate(sorted({one for words in lists for one in words}))}
    of_item = np.zeros((int(item.max()) + 1, KINDS), np.int32)
    for key, words in zip(items["item_id"].astype(np.int64), lists, strict=True):
        if key < len(of_item):
            of_item[key, : len(words)] = [names[word] for word in words[:KINDS]]
    return of_item[item], len(names) + 1


def sequences(cache: Path, length: int = 200) -> ItemSequences:
    """What each person rated, in order, the last `length`; ValueError where the package cannot be had."""
    ratings = read("inter", cache)
    user, item = (ratings[f"{one}_id"].astype(np.int64) for one in ("user", "item"))
    order = np.argsort(ratings["timestamp"].astype(np.int64), kind="stable")
    actions = ratings["rating"].astype(np.float32).astype(np.int32)
    return by_user("movielens_100k", user[order], item[order], actions[order], length)


__all__ = ["load", "sequences"]
