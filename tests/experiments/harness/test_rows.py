"""Rows: nothing lost, nothing doubled, files whole."""

import importlib.metadata
import math
from dataclasses import replace

import pytest

from experiments.harness import provenance
from experiments.harness import rows as tidy
from experiments.harness.paths import Paths
from experiments.harness.registry import EXPERIMENTS
from experiments.harness.rows import (
    Journal,
    Row,
    publish,
    read,
    table_name,
    with_others,
    with_unreached,
    write,
)
from tests.experiments.harness import tiny


def row(method="a", value=1.5, table="quality/quick/x", **other):
    values = {
        "experiment": "ptq",
        "table": table,
        "setting": "weights",
        "method": method,
        "metric": "m",
        "value": value,
        "unit": "dB",
        "device": "cpu",
        "seed": 0,
        "source_hash": "now",
    }
    return Row(**{**values, **other})


def of(code):
    """Whether a row is of some code."""
    return lambda row: row.source_hash == code


def test_rows_survive_a_round_trip(tmp_path):
    made = [row("a,b", 1 / 3), row('quote"', math.inf, published=2.5), row("nan", math.nan)]
    write(tmp_path / "rows.csv", made)
    back = read(tmp_path / "rows.csv")
    assert back[0].method == "a,b"
    assert back[0].value == pytest.approx(1 / 3, rel=1e-8)
    assert back[1] == made[1]
    assert math.isnan(back[2].value)


def test_a_file_that_is_missing_has_no_rows(tmp_path):
    assert read(tmp_path / "none.csv") == []


def test_wrong_columns_are_named(tmp_path):
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="columns"):
        read(tmp_path / "rows.csv")


def test_a_journal_resumes_and_doubles_nothing(tmp_path):
    path = tmp_path / "journal.csv"
    first = Journal(path, of("now"))
    first.add([row("a"), row("b")])
    again = Journal(path, of("now"))
    assert again.finished("quality/quick/x", "weights", "a")
    assert not again.finished("quality/quick/x", "weights", "c")
    again.add([row("b", 2.0), row("c")])
    assert [(kept.method, kept.value) for kept in read(path)] == [("a", 1.5), ("b", 2.0), ("c", 1.5)]


def test_rows_of_older_code_are_measured_again(tmp_path):
    path = tmp_path / "journal.csv"
    Journal(path, of("then")).add([row("a", source_hash="then")])
    assert not Journal(path, of("now")).finished("quality/quick/x", "weights", "a")
    assert Journal(path, of("then")).finished("quality/quick/x", "weights", "a")


def test_published_rows_need_not_be_measured_again(tmp_path):
    """Those of this code; what the journal has of its own comes first."""
    path = tmp_path / "journal.csv"
    Journal(path, of("now")).add([row("a", 2.0)])
    made = Journal(path, of("now"), [row("a"), row("b"), row("c", source_hash="then")])
    assert [(one.method, one.value) for one in made.rows] == [("a", 2.0), ("b", 1.5)]


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "rows.csv"
    write(path, [row("a")])

    def broken(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(tidy.os, "replace", broken)
    with pytest.raises(KeyboardInterrupt):
        write(path, [row("b")])
    assert [kept.method for kept in read(path)] == ["a"]
    assert list(tmp_path.iterdir()) == [path]


def test_publishing_replaces_a_run_as_a_whole(tmp_path):
    path = tmp_path / "rows.csv"
    gpu = row("a", device="GPU")
    full = row("a", table="quality/full/x")
    publish(path, [row("a"), row("gone"), gpu, full])
    publish(path, [row("a", 2.0, table="quality/quick/y")])
    kept = read(path)
    assert sorted((r.table, r.method, r.device, r.value) for r in kept) == [
        ("quality/full/x", "a", "cpu", 1.5),
        ("quality/quick/x", "a", "GPU", 1.5),
        ("quality/quick/y", "a", "cpu", 2.0),
    ]


def test_a_run_on_another_corpus_replaces_only_that_corpus(tmp_path):
    """Versions of one corpus replace each other; `row.key` and the names of tables are as ever."""
    path = tmp_path / "rows.csv"
    old, new, prose = (
        row("a", table=f"quality/quick/{name}")
        for name in ("sympy-1.13.0-aaaaaaaa", "sympy-1.14.0-bbbbbbbb", "prose-1-cccccccc")
    )
    for one in (old, prose, new):
        publish(path, [one])
    assert {one.table for one in read(path)} == {new.table, prose.table}
    names = ("prose-1-cccccccc", "llama-3.2-3b-random", "synthetic")
    assert [tidy.corpus_source(name) for name in names] == ["prose", "", ""]


def test_rows_of_methods_that_were_not_measured_stay(tmp_path):
    path = tmp_path / "rows.csv"
    other = row("a", table="quality/full/x")
    publish(path, [row("a"), row("a", metric="gone"), row("b"), other])
    made = with_others([row("a", 2.0, source_hash="later")], read(path))
    assert [(r.method, r.value, r.source_hash) for r in made] == [("a", 2.0, "later"), ("b", 1.5, "now")]
    assert other in publish(path, made)
    assert with_others([row("a")], []) == [row("a")]
    assert with_others([row("a", seed=1)], [row("a"), row("a", seed=1, value=2.0)]) == [
        row("a", seed=1),
        row("a"),
    ]


def test_what_the_time_did_not_reach_keeps_its_rows():
    late = [row(name, metric="status: not run: the 9 s were over") for name in ("a", "b")]
    before = [row("a"), row("a", metric="status: ok"), row("c"), row("gone")]
    assert with_unreached([*late, row("c", 2.0)], before) == [late[1], row("c", 2.0), *before[:2]]


def test_pages_and_figures_make_no_row_older():
    """What reads rows, writes files or speaks to a terminal is not in the closure of any experiment; what measures is."""
    read_only = ("experiments.report", "experiments.commands", "experiments.ledger", "ao_lab.cli")
    for name in EXPERIMENTS:
        modules = provenance.closure(provenance.experiment_roots(name)).modules
        assert f"experiments.{name}.run" in modules
        assert [module for module in modules if module.startswith(read_only) or module.endswith("page")] == []
    kernels = provenance.closure(provenance.experiment_roots("kernels")).modules
    assert {"experiments.harness.timing", "fast.quantize.quantize", "fast.matmul.linear"} <= set(kernels)
    assert (
        "ao_lab.tensor.quantized_tensor" in provenance.closure(provenance.experiment_roots("decode")).modules
    )


def test_every_published_row_says_whether_it_is_current():
    """Rows of no experiment, of a case or of a baseline that does not exist are stale."""
    kernels = {"experiment": "kernels", "table": "kernels/full/random-normal", "setting": "16384x4096"}
    known = row("quantize.mxfp4", **kernels)
    right = replace(
        known, source_hash=provenance.row_hash("kernels", "kernels", "16384x4096", "quantize.mxfp4")
    )
    baseline = provenance.row_hash("kernels", "baselines", "quantize.mxfp4, 16384x4096", "torchao")
    assert len({right.source_hash, baseline, provenance.experiment_hash("kernels")}) == 3
    assert [provenance.is_current(one) for one in (known, right)] == [False, True]
    assert provenance.row_hash("kernels", "kernels", "16384x4096", "quantize.gone") == ""
    assert provenance.row_hash("kernels", "baselines", "quantize.mxfp4, 16384x4096", "nobody") == ""
    assert provenance.row_hash("gone", "kernels", "16384x4096", "quantize.mxfp4") == ""


def test_a_row_has_the_hash_of_its_own_code(tmp_path):
    """Of two kernels, each has that of its own; a scheme of `formats` that of the experiment."""
    settings = tiny.settings(tmp_path)
    cases = ("encode.float8_e4m3fn", "linear.int8_rowwise")
    made = [settings.row("kernels", "kernels", "x", "16384x4096", name, "time", 1.0, "us") for name in cases]
    assert len({one.source_hash for one in made}) == 2
    one = settings.row("formats", "synthetic", "x", "normal", "mxfp4", "m", 1.0, "dB")
    assert one.source_hash == provenance.experiment_hash("formats")
    assert provenance.is_current(one)


def test_files_are_hashed_by_name_and_text(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.py").write_text("y = 1\n")
    files = [tmp_path / "b.py", tmp_path / "a.py"]
    first = tidy.hash_files(files, tmp_path)
    assert tidy.hash_files(reversed(files), tmp_path) == first
    (tmp_path / "a.py").write_bytes(b"x = 1\r\n")
    assert tidy.hash_files(files, tmp_path) == first
    (tmp_path / "a.py").write_text("x = 2\n")
    assert tidy.hash_files(files, tmp_path) != first
    assert all((tidy.ROOT / package).is_dir() for package in provenance.PACKAGES)


def test_table_names_have_three_parts():
    assert tidy.table_parts(table_name("a", "b", "c")) == ("a", "b", "c")
    with pytest.raises(ValueError, match="slash"):
        table_name("a/b", "c", "d")
    with pytest.raises(ValueError, match="kind/scale/data"):
        replace(row(), table="a").place  # noqa: B018


def test_a_journal_is_of_one_version_of_the_libraries(tmp_path, monkeypatch):
    places = Paths(tmp_path, tmp_path)
    before = places.journal("ptq", "quick", "cpu", "model")
    assert importlib.metadata.version("torch") in before.name
    assert importlib.metadata.version("numpy") in before.name
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0")
    assert places.journal("ptq", "quick", "cpu", "model") != before
