"""MovieLens out of a package of a few lines: labels, tables, sequences."""

import zipfile

import pytest

from experiments.data import movielens, packages

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
