"""Rows over a rewrite: only what was listed may differ, and nothing else that their measurement reaches."""

import json

import pytest

from experiments.harness.rows import Row, read, write
from experiments.ledger import rewritten
from experiments.source.closure import SourceTree

LOOKED_UP = "import pack.rules\n\ndef run(x):\n    return getattr(pack.rules, 'double')(x)\n"
NAMED = "import pack.rules\n\ndef run(x):\n    return pack.rules.double(x)\n"
RULES = "def double(x):\n    return 2 * x\n\ndef other(x):\n    return x\n"


def tree(folder, call, rules=RULES):
    (folder / "pack").mkdir(parents=True)
    for name, text in (("__init__", ""), ("call", call), ("rules", rules)):
        (folder / "pack" / f"{name}.py").write_text(text)
    return SourceTree(folder, ["pack"])


@pytest.fixture
def before_and_after(tmp_path):
    return tree(tmp_path / "before", LOOKED_UP), tree(tmp_path / "after", NAMED)


def test_a_row_of_what_was_rewritten_alone_is_carried(before_and_after, tmp_path):
    now = tree(tmp_path / "now", NAMED, RULES.replace("return x\n", "return -x\n"))
    hashes = rewritten.renamed(*before_and_after, now, [("pack.call.run",)])
    assert len(hashes) == 1
    assert all(old != new for old, new in hashes.items())


@pytest.mark.parametrize(
    ("call", "rules"), [(NAMED, RULES.replace("2 *", "3 *")), (NAMED.replace("(x)\n", "(x + 1)\n"), RULES)]
)
def test_a_row_whose_measurement_changed_is_not(before_and_after, tmp_path, call, rules):
    now = tree(tmp_path / "now", call, rules)
    assert rewritten.renamed(*before_and_after, now, [("pack.call.run",)]) == {}


def test_what_no_longer_exists_is_not(before_and_after):
    assert rewritten.renamed(*before_and_after, before_and_after[1], [("pack.call.gone",)]) == {}


def test_rows_and_records_get_the_hash(tmp_path):
    known = {
        "experiment": "speed",
        "table": "speed/quick",
        "setting": "s",
        "method": "m",
        "value": 1.0,
        "unit": "ms",
    }
    known |= {"device": "cpu", "seed": 0}
    row = Row(**known, metric="time", source_hash="aaaaaaaaaaaa")
    other = Row(**known, metric="size", source_hash="cccccccccccc")
    failed = Row(**known, metric="status: error: no", source_hash="aaaaaaaaaaaa")
    write(tmp_path / "speed.csv", [row, other, failed])
    for name in ("environment.json", "origins.json"):
        (tmp_path / name).write_text(json.dumps({"speed/aaaaaaaaaaaa": {"source_hash": "aaaaaaaaaaaa"}}))
    assert rewritten.carry(tmp_path, {"aaaaaaaaaaaa": "bbbbbbbbbbbb"}) == 1
    assert sorted(one.source_hash for one in read(tmp_path / "speed.csv")) == [
        "aaaaaaaaaaaa",
        "bbbbbbbbbbbb",
        "cccccccccccc",
    ]
    assert json.loads((tmp_path / "origins.json").read_text()) == {
        "speed/bbbbbbbbbbbb": {"source_hash": "bbbbbbbbbbbb"}
    }


def test_every_rewrite_says_why():
    assert all(one.why and one.files and len(one.revision) == 7 for one in rewritten.REWRITES)


def test_rows_of_experiments_that_a_rewrite_does_not_name_stay(tmp_path):
    """A hash may be that of several experiments."""
    known = {
        "table": "t/quick/d",
        "setting": "s",
        "method": "m",
        "metric": "time",
        "value": 1.0,
        "unit": "ms",
    }
    known |= {"device": "cpu", "seed": 0, "source_hash": "aaaaaaaaaaaa"}
    write(tmp_path / "both.csv", [Row(experiment=name, **known) for name in ("kernels", "decode")])
    records = {f"{name}/x": {"source_hash": "aaaaaaaaaaaa"} for name in ("kernels", "decode")}
    for name in ("environment.json", "origins.json"):
        (tmp_path / name).write_text(json.dumps(records))
    rewrite = rewritten.Rewrite("0", (), "", ("kernels",))
    assert rewritten.carry(tmp_path, {"aaaaaaaaaaaa": "bbbbbbbbbbbb"}, rewrite.concerns) == 1
    found = {row.experiment: row.source_hash for row in read(tmp_path / "both.csv")}
    assert found == {"kernels": "bbbbbbbbbbbb", "decode": "aaaaaaaaaaaa"}
    for name in ("environment.json", "origins.json"):
        made = json.loads((tmp_path / name).read_text())
        assert {key: one["source_hash"] for key, one in made.items()} == {
            "kernels/x": "bbbbbbbbbbbb",
            "decode/x": "aaaaaaaaaaaa",
        }


def test_kinds_of_tables_alone_are_carried():
    rewrite = rewritten.Rewrite("0", (), "", ("sparsity/vision", "kernels"))
    asked = [("sparsity", "vision"), ("sparsity", "products"), ("kernels", "casts"), ("decode", "decode")]
    assert [rewrite.concerns(*one) for one in asked] == [True, False, True, False]
    assert [rewrite.concerns(name) for name in ("sparsity", "kernels", "decode")] == [True, True, False]
