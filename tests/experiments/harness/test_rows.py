"""Rows: nothing lost, nothing doubled, files whole."""

import ast
import importlib.metadata
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.harness import rows as tidy
from experiments.harness.paths import Places
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
    first = Journal(path, "now")
    first.add([row("a"), row("b")])
    again = Journal(path, "now")
    assert again.finished("quality/quick/x", "weights", "a")
    assert not again.finished("quality/quick/x", "weights", "c")
    again.add([row("b", 2.0), row("c")])
    assert [(kept.method, kept.value) for kept in read(path)] == [("a", 1.5), ("b", 2.0), ("c", 1.5)]


def test_rows_of_older_code_are_measured_again(tmp_path):
    path = tmp_path / "journal.csv"
    Journal(path, "then").add([row("a", source_hash="then")])
    assert not Journal(path, "now").finished("quality/quick/x", "weights", "a")
    assert Journal(path, "then").finished("quality/quick/x", "weights", "a")


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


def test_rows_of_methods_that_were_not_measured_stay(tmp_path):
    path = tmp_path / "rows.csv"
    other = row("a", table="quality/full/x")
    publish(path, [row("a"), row("a", metric="gone"), row("b"), other])
    made = with_others([row("a", 2.0, source_hash="later")], read(path))
    assert [(r.method, r.value, r.source_hash) for r in made] == [("a", 2.0, "later"), ("b", 1.5, "now")]
    assert other in publish(path, made)
    assert with_others([row("a")], []) == [row("a")]


def test_what_the_time_did_not_reach_keeps_its_rows():
    late = [row(name, metric="status: not run: the 9 s were over") for name in ("a", "b")]
    before = [row("a"), row("a", metric="status: ok"), row("c"), row("gone")]
    assert with_unreached([*late, row("c", 2.0)], before) == [late[1], row("c", 2.0), *before[:2]]


def test_pages_and_figures_make_no_row_older(monkeypatch):
    def changed(name):
        path = tidy.ROOT / name
        assert path.is_file()
        asked = []
        monkeypatch.setattr(tidy, "hash_files", lambda paths: asked.extend(paths) or "hash")
        tidy.source_hash.__wrapped__()
        return path in asked

    readers = ("pages.py", "decode_page.py", "kernels/page.py", "kernels/jax_page.py", "kernels/lines.py")
    assert not any(changed(f"experiments/{name}") for name in (*readers, "plots.py", "decode_bars.py"))
    for name in (
        "experiments/decode/run.py",
        "experiments/harness/timing.py",
        "fast/formats/pack.py",
        "ao_lab/cli/app.py",
    ):
        assert changed(name), name


def test_only_what_publishes_uses_what_reads_rows():
    """Inside functions, too: the next test sees what is imported at once."""
    readers = {path.stem for path in (tidy.ROOT / "experiments").rglob("*.py") if tidy.is_reader(path)}
    found = {}
    for path in (tidy.ROOT / "experiments").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {part for node in ast.walk(tree) for name in imported(node) for part in name.split(".")}
        if names & readers and not tidy.is_reader(path):
            found[path.relative_to(tidy.ROOT / "experiments").as_posix()] = names & readers
    assert found == {
        "kernels/bench.py": {"lines", "pages"},
        "ledger.py": {"lines"},
        "registry.py": {"pages"},
    }


def imported(node):
    """Modules, and names from modules of `experiments`, of an import anywhere."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("experiments"):
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def test_what_makes_rows_uses_nothing_that_reads_them():
    """Otherwise a change that makes other rows might not make those of before older."""
    modules = [experiment.measure for experiment in EXPERIMENTS.values()]
    script = f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
    script += "for module in list(sys.modules.values()): print(getattr(module, '__file__', ''))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tidy.ROOT
    )
    loaded = {Path(line) for line in done.stdout.splitlines() if line.startswith(str(tidy.ROOT))}
    assert tidy.ROOT / "experiments" / "decode.py" in loaded
    assert [path for path in loaded if tidy.is_reader(path)] == []


def test_the_source_hash_is_of_code_and_nothing_else(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.py").write_text("y = 1\n")
    files = [tmp_path / "b.py", tmp_path / "a.py"]
    first = tidy.hash_files(files, tmp_path)
    assert tidy.hash_files(reversed(files), tmp_path) == first
    (tmp_path / "a.py").write_bytes(b"x = 1\r\n")
    assert tidy.hash_files(files, tmp_path) == first
    (tmp_path / "a.py").write_text("x = 2\n")
    assert tidy.hash_files(files, tmp_path) != first
    assert all((tidy.ROOT / package).is_dir() for package in tidy.PACKAGES)
    assert isinstance(tidy.ROOT, Path)


def test_table_names_have_three_parts():
    assert tidy.table_parts(table_name("a", "b", "c")) == ("a", "b", "c")
    with pytest.raises(ValueError, match="slash"):
        table_name("a/b", "c", "d")
    with pytest.raises(ValueError, match="kind/scale/data"):
        replace(row(), table="a").place  # noqa: B018


def test_a_journal_is_of_one_version_of_the_libraries(tmp_path, monkeypatch):
    places = Places(tmp_path, tmp_path)
    before = places.journal("ptq", "quick", "cpu", "model")
    assert importlib.metadata.version("torch") in before.name
    assert importlib.metadata.version("numpy") in before.name
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0")
    assert places.journal("ptq", "quick", "cpu", "model") != before
