"""Notes under tables and names of figures, from rows by hand."""

import pytest

from experiments.harness.registry import EXPERIMENTS
from experiments.harness.rows import Row
from experiments.report import pages
from experiments.report.content import Drawing, Section, Table, note
from experiments.report.results import Where

NEW, OLD = "0832d6b6", "36c4f92b"


def row(method, commit=NEW, date="2026-11-26T10:00:00Z", experiment="linear"):
    return Row(
        experiment=experiment, table="weights/full/14336x4096", setting="1 row", method=method, metric="time", value=1.0,
        unit="", device="NVIDIA H200", seed=0, commit=commit, date=date,
    )  # fmt: skip


@pytest.fixture
def changed(monkeypatch):
    """How many files changed since a commit."""
    found = {NEW: 2, OLD: 14}
    monkeypatch.setattr("experiments.report.content.changed_files", lambda commit, folders: found.get(commit))


def test_a_note_names_day_commit_and_what_changed_since(changed):
    folders = "reference, fast, ao_lab, experiments"
    assert {*EXPERIMENTS["linear"].folders} > {"fast", "experiments/harness", "experiments/linear"}
    assert note([]) == ""
    assert note([row("a"), row("b")]) == (
        f"measured 2026-11-26 at {NEW}; since then 2 files under {folders} changed"
    )
    mixed = [row("a"), row("b", OLD, "2026-11-24T01:00:00Z")]
    assert note(mixed) == (
        f"measured 2026-11-24 at {OLD}; 2026-11-26 at {NEW}; since the oldest 14 files under {folders} changed"
    )
    unknown = note([row("a", commit="", date="")])
    assert unknown == "measured an unknown day at an unknown commit"
    several = note([row("a", f"{number}", f"2026-11-2{number}T") for number in range(5)])
    assert several == "measured 2026-11-20 to 2026-11-24 at 5 commits, the oldest 0"


def test_a_table_has_the_note_of_its_rows(changed):
    table = Table("Speed", ["weights", "us"], [["int8", "1"]], [row("int8", OLD)])
    long = Table("Long", ["weights"], [[str(number)] for number in range(pages.MOST_LINES + 1)], [row("x")])
    section = Section("Speed", tables=[table, long])
    page = pages.Page("linear", "Linear", (), (), None, [section], (), "linear.csv.gz", 2, "", "", ())
    text = pages.render("page.md.j2", page=page, brief=pages.brief_tables(page))
    assert f"Measured 2026-11-26 at {OLD}; since then 14 files" in text
    assert f"Long: {pages.MOST_LINES + 1} lines, in [linear.html](linear.html)" in text
    html = pages.render("page.html.j2", page=page)
    assert f"measured 2026-11-26 at {OLD}; since then 14 files" in html
    assert f"<td>{pages.MOST_LINES}</td>" in html


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
