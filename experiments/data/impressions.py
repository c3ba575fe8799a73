"""Impressions: what was shown to whom, and whether it was taken. The records that recommendation models train on.

An impression has dense features, and for every table a bag of ids of a fixed length (multi-hot): a table's bags are columns of
one matrix. Where fewer ids are known, the others are 0, a row of the table like any other (it learns what "nothing" means).
Later impressions are held out: a model is judged on a time that it has not seen.

`counts_before`, `shares_before` and `last_before` make features of the past of an impression, never of its own time or later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]
#: Bits of a time within a key of `counts_before`.
TIME_BITS = 24


@dataclass(frozen=True, eq=False)
class Impressions:
    """Impressions in the order of their time.

    dense: (N, d) float32. ids: (N, sum of hots) int32, the bag of table after table. labels: (N,) float32, 0 or 1.
    tables: ids of each table by name, so many its rows are. hots: ids of a bag of each. first_held_out: the first impression
    that is held out. synthetic: whether a program drew them. ValueError where shapes or ids contradict each other.
    """

    name: str
    dense: Array
    ids: Array
    labels: Array
    tables: Mapping[str, int]
    hots: tuple[int, ...]
    first_held_out: int
    synthetic: bool = False

    def __post_init__(self) -> None:
        count = len(self.labels)
        if self.dense.shape[:1] != (count,) or self.ids.shape != (count, sum(self.hots)):
            raise ValueError(
                f"{self.name}: {count} labels beside dense features of shape {self.dense.shape} and ids of "
                f"{self.ids.shape}; the latter are ({count}, {sum(self.hots)}) for bags of {self.hots}"
            )
        if len(self.hots) != len(self.tables) or not 0 < self.first_held_out < count:
            raise ValueError(
                f"{self.name}: bags for {len(self.hots)} of {len(self.tables)} tables, held out from "
                f"{self.first_held_out} on of {count}; every table has a bag, and both parts have impressions"
            )
        limits = np.repeat(np.array(list(self.tables.values())), self.hots)
        if (wrong := (self.ids < 0) | (self.ids >= limits)).any():
            line, column = np.argwhere(wrong)[0]
            raise ValueError(
                f"{self.name}: impression {line} has id {self.ids[line, column]} in column {column}, whose table has "
                f"{limits[column]} rows"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each table."""
        return tuple(self.tables.values())

    def part(self, held_out: bool) -> slice:
        """The impressions that are trained on, or those that are held out."""
        return slice(self.first_held_out, None) if held_out else slice(0, self.first_held_out)

    def batches(self, size: int, seed: int, steps: int, device: str = "cpu") -> Iterator[Batch]:
        """So many batches of training impressions, in an order drawn by the seed, epoch after epoch."""
        generator, left = np.random.default_rng(seed), np.empty(0, np.int64)
        for _ in range(steps):
            while len(left) < size:
                left = np.concatenate([left, generator.permutation(self.first_held_out)])
            yield self.batch(np.sort(left[:size]), device)
            left = left[size:]

    def held_out(self, size: int, most: int | None = None, device: str = "cpu") -> Iterator[Batch]:
        """Held-out impressions in batches, all or the first so many."""
        end = len(self.labels) if most is None else min(len(self.labels), self.first_held_out + most)
        for first in range(self.first_held_out, end, size):
            yield self.batch(np.arange(first, min(first + size, end)), device)

    def batch(self, lines: Array, device: str = "cpu") -> Batch:
        """Some impressions as tensors."""
        parts = (self.dense[lines], self.ids[lines], self.labels[lines])
        return Batch(*(torch.from_numpy(np.ascontiguousarray(part)).to(device) for part in parts))


@dataclass(frozen=True, eq=False)
class Batch:
    """dense: (B, d) float32; ids: (B, sum of hots) int32; labels: (B,) float32."""

    dense: torch.Tensor
    ids: torch.Tensor
    labels: torch.Tensor


def counts_before(keys: Array, times: Array, asked: Array, at: Array) -> Array:
    """How many events of a key happened before a time: int64 (n,) for asked keys at times `at`.

    keys, times: of the events, non-negative integers; times below 2**24. Events at the time itself do not count.
    """
    stamped = np.sort((keys.astype(np.int64) << TIME_BITS) | times)
    first = asked.astype(np.int64) << TIME_BITS
    result: Array = np.searchsorted(stamped, first | at) - np.searchsorted(stamped, first)
    return result


def shares_before(keys: tuple[Array, ...], times: Array, labels: Array) -> Array:
    """For each key of an event: the logarithm of its events before, and what share of them was labelled 1 (one of two where
    there are none). (N, 2 keys) float32."""
    columns = []
    for key in keys:
        seen = counts_before(key, times, key, times)
        good = counts_before(key[labels > 0], times[labels > 0], key, times)
        columns += [np.log1p(seen), (good + 1) / (seen + 2)]
    return np.stack(columns, 1).astype(np.float32)


def last_before(keys: Array, times: Array, values: Array, asked: Array, at: Array, count: int) -> Array:
    """The last `count` values of a key before a time, the latest first, 0 where there are fewer: (n, count)."""
    stamp = (keys.astype(np.int64) << TIME_BITS) | times
    order = np.argsort(stamp, kind="stable")
    stamp, first = stamp[order], asked.astype(np.int64) << TIME_BITS
    begin, end = np.searchsorted(stamp, first), np.searchsorted(stamp, first | at)
    places = end[:, None] - 1 - np.arange(count)[None, :]
    found = values[order][np.maximum(places, 0)]
    result: Array = np.where(places >= begin[:, None], found, 0)
    return result


def numbered(values: Array) -> tuple[Array, int]:
    """Ids from 1 on of values in their sorted order (0 stays free), and how many rows a table of them has."""
    names, ids = np.unique(values, return_inverse=True)
    return ids.reshape(-1).astype(np.int32) + 1, len(names) + 1


def stored(path: Path, make: Callable[[], Impressions]) -> Impressions:
    """Impressions out of a file of the cache; made and written, whole or not at all, where there is none."""
    if not path.is_file():
        impressions = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial.npz")
        np.savez_compressed(partial, **as_arrays(impressions))
        partial.replace(path)
    with np.load(path, allow_pickle=False) as file:
        return from_arrays({name: file[name] for name in file.files})


def as_arrays(one: Impressions) -> dict[str, Array]:
    """All of a record as arrays."""
    return {
        "name": np.array(one.name),
        "dense": one.dense,
        "ids": one.ids,
        "labels": one.labels,
        "tables": np.array(list(one.tables)),
        "sizes": np.array(one.sizes),
        "hots": np.array(one.hots),
        "first_held_out": np.array(one.first_held_out),
        "synthetic": np.array(one.synthetic),
    }


def from_arrays(arrays: Mapping[str, Array]) -> Impressions:
    """The record of `as_arrays`."""
    sizes = [int(size) for size in arrays["sizes"]]
    return Impressions(
        name=str(arrays["name"]),
        dense=arrays["dense"],
        ids=arrays["ids"],
        labels=arrays["labels"],
        tables=dict(zip(map(str, arrays["tables"]), sizes, strict=True)),
        hots=tuple(int(hot) for hot in arrays["hots"]),
        first_held_out=int(arrays["first_held_out"]),
        synthetic=bool(arrays["synthetic"]),
    )


__all__ = ["Batch", "Impressions", "counts_before", "last_before", "numbered", "shares_before", "stored"]
