"""Marks of stale rows and names of figures, from rows by hand."""

import pytest

from experiments.harness.rows import Row
from experiments.report import pages
from experiments.report.content import STALE, Drawing, Section, Table
from experiments.report.results import Results, Where

OLDER = "older"


@pytest.fixture(autouse=True)
def by_hash(monkeypatch):
    monkeypatch.setattr("experiments.report.results.is_stale", lambda row: row.source_hash == OLDER)


def row(method, setting, source_hash=""):
    return Row(
        experiment="linear", table="weights/full/14336x4096", setting=setting, method=method, metric="time", value=1.0,
        unit="", device="NVIDIA H200", seed=0, source_hash=source_hash,
    )  # fmt: skip


def test_stale_is_a_method_at_a_setting():
    results = Results([row("int8", "1 row"), row("int8", "2 rows", OLDER), row("nf4", "1 row")])
    assert results.stale_lines == {("int8", "2 rows")}
    assert results.stale_methods == {"int8"}
    assert results.with_setting("1 row").stale_methods == frozenset()
    assert results.with_settings(("1 row", "3 rows")).stale_methods == frozenset()
    assert (results.mark("2 rows", "int8"), results.mark("1 row", "int8")) == (f" {STALE}", "")
    assert (results.mark("2 rows", "nf4"), results.mark("2 rows", "nf4", "int8")) == ("", f" {STALE}")
    assert (results.mark_any, results.with_setting("1 row").mark_any) == (f" {STALE}", "")


@pytest.mark.parametrize("stale", [frozenset({"int8"}), frozenset({("int8", "ours")})])
def test_lines_are_stale_by_name_or_by_their_first_two_cells(stale):
    table = Table("Speed", ["weights", "by", "us"], [["int8", "ours", "1"], ["int8", "torchao", "2"]], stale)
    assert [table.is_stale(line) for line in table.lines] == [True, "int8" in stale]
    section = Section("Speed", tables=[table])
    page = pages.Page("linear", "Linear", (), (), None, [section], (), (), 2, 1)
    text = pages.render("page.md.j2", page=page, stale=STALE)
    assert f"| int8 {STALE} | ours | 1 |" in text
    assert (f"| int8 {STALE} | torchao" in text) == ("int8" in stale)


def test_figures_of_two_gpus_have_two_names():
    names = {
        Where("full", device, "x").ending for device in ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "another")
    }
    assert names == {"full", "full-nvidia-h100-80gb-hbm3", "full-another"}
    assert Where("quick", "cpu", "x").ending == "quick"
    everywhere = [
        Where(scale, device, "x").ending
        for scale in ("quick", "full")
        for device in ("cpu", "NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA H100 PCIe")
    ]
    assert len({*everywhere}) == len(everywhere)


def test_two_figures_of_one_name_are_refused():
    one, other = (Drawing(name, name, None) for name in ("a", "b"))
    assert pages.named("linear", [one, other]) == {"a": one, "b": other}
    with pytest.raises(ValueError, match="page linear: two figures are named 'a'"):
        pages.named("linear", [one, other, Drawing("a", "of another GPU", None)])
