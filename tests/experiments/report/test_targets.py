"""Targets: reached or not, and what a page says of them."""

import csv
from dataclasses import replace

import pytest

from experiments.harness.paths import Paths
from experiments.harness.registry import EXPERIMENTS
from experiments.harness.rows import ROOT, Row, read
from experiments.report import pages
from experiments.report.content import Drawing, Section, Table, note
from experiments.report.results import Where
from experiments.report.targets import (
    COLUMNS,
    FILE,
    RunTargets,
    Target,
    counted,
    counts,
    limit_of,
    limits,
    missed,
    missed_tables,
    percent_over,
    verdict_of,
)

# Notes under tables and names of figures, from rows by hand.

NEW, OLD = "0832d6b6", "36c4f92b"


def row(method, commit=NEW, date="2026-11-26T10:00:00Z", experiment="linear"):
    return Row(
        experiment=experiment, table="weights/full/14336x4096", setting="1 row", method=method, metric="time", value=1.0,
        unit="", device="NVIDIA H200", seed=0, commit=commit, date=date,
    )  # fmt: skip


def test_a_note_names_day_and_commit():
    assert note([]) == ""
    assert note([row("a"), row("b")]) == f"measured 2026-11-26 at {NEW}"
    mixed = [row("a"), row("b", OLD, "2026-11-24T01:00:00Z")]
    assert note(mixed) == f"measured 2026-11-24 at {OLD}; 2026-11-26 at {NEW}"
    unknown = note([row("a", commit="", date="")])
    assert unknown == "measured an unknown day at no known commit (an installed package)"
    several = note([row("a", f"{number}", f"2026-11-2{number}T") for number in range(5)])
    assert several == "measured 2026-11-20 to 2026-11-24 at 5 commits, the oldest 0"


def test_a_note_says_whether_kernels_are_those_of_today():
    at = f"measured 2026-11-26 at {NEW}"
    same, other = (
        replace(row("int4 g128"), kernel=f"fused: {name}") for name in ("linear_skinny", "mixed_mm")
    )
    assert note([same]) == f"{at}; by the kernels that are chosen today"
    slow = replace(other, method="int8")
    assert note([same, slow]) == f"{at}; 1 of 2 lines with another kernel than is chosen today"
    assert (
        note([replace(same, kernel="fused")])
        == f"{at}; 1 of 1 lines do not say by which kernel; today's may be another"
    )


def test_a_table_has_the_note_of_its_rows():
    table = Table("Speed", ["weights", "us"], [["int8", "1"]], [row("int8", OLD)])
    long = Table("Long", ["weights"], [[str(number)] for number in range(pages.MOST_LINES + 1)], [row("x")])
    section = Section("Speed", tables=[table, long])
    page = pages.Page("linear", "Linear", (), (), None, [section], (), "linear.csv.gz", section.rows, "", ())
    text = pages.render("page.md.j2", page=page, brief=pages.brief_tables(page))
    assert f"Measured 2026-11-26 at {OLD}." in text
    assert f"Long: {pages.MOST_LINES + 1} lines, in [linear.html](linear.html)" in text
    html = pages.render("page.html.j2", page=page)
    assert f"Measured 2026-11-26 at {OLD}." in html
    assert f"<td>{pages.MOST_LINES}\n" in html


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


# What misses its target, by hand-made targets; and that the committed page is of the committed rows.

REPORTS = ROOT / "reports"
#: All with targets but `linear`, whose rows take long to read.
SMALL = ("decode", "fp8_training", "generate", "kernels", "qat", "qat_overhead", "sparsity", "speed")


def run(*targets, device="GPU", **names):
    return RunTargets(Where("full", device, "4096x4096"), targets, **names)


def test_rows_of_a_method_with_one_limit_share_a_line():
    found = run(
        Target("int4, 1 token", 10.5, 10.0, False, "us", ".1f", day="2026-11-28"),
        Target("int4, 2 tokens", 9.0, 10.0, False, "us", ".1f", day="2026-11-28"),
        Target("int4, 4 tokens", 12.0, 10.0, False, "us", ".1f", day="2026-11-28"),
        Target("int4, 64 tokens", 0.9, 1.0, value_format=".2f", day="2026-11-27"),
        Target("int8, 64 tokens", None, 1.0),
        about="weights",
        unit="times bfloat16",
    )
    (table,) = missed_tables([found])
    assert (table.caption, tuple(table.columns)) == ("GPU: 1 of 4 reached, 1 more not measured", COLUMNS)
    about = "weights, 4096x4096"
    assert table.lines == [
        ["int4, 1, 4 tokens", about, "10.5, 12.0 us", "at most 10", "5.0 to 20.0%", "2026-11-28"],
        ["int4, 64 tokens", about, "0.90 times bfloat16", "at least 1", "10.0%", "2026-11-27"],
    ]
    assert counted([found]) == "targets reached on GPU 1 of 4, 1 more not measured"


def test_a_number_of_the_first_page_says_its_target_and_whether_it_is_met():
    runs = [
        run(Target("int4", 11.3, 10.4, False, "us", ".1f"), Target("int8", None, 2.0), device="NVIDIA H200"),
        run(Target("int4", 2.0, 1.9, unit="x"), device="another"),
    ]
    runs = [replace(one, where=replace(one.where, data="14336x4096")) for one in runs]
    assert verdict_of(runs, row("int4"), "int4") == "target at most 10.4 us: missed"
    assert verdict_of(runs, row("int4"), "int8") == "target at least 2: not measured"
    assert verdict_of(runs, replace(row("int4"), device="another"), "int4") == "target at least 1.9 x: met"
    assert verdict_of(runs, row("int4"), "nf4") == "no target"


@pytest.mark.parametrize(("unit", "limit"), [("%", 0.5), ("", 0.0)])
def test_percents_and_limits_of_zero_have_no_percentage(unit, limit):
    (table,) = missed_tables([run(Target("gap", 2.0, limit, False, unit))])
    assert table.lines[0][4] == ""


def test_devices_have_tables_of_their_own_and_what_is_reached_has_none():
    reached, late = Target("speed", 2.0, 1.0), Target("speed", 0.5, 1.0)
    tables = missed_tables([run(reached, device="A"), run(late, device="B"), run(Target("speed", None, 1.0))])
    assert [table.caption for table in tables] == ["B: 0 of 1 reached"]
    assert counted([]) == ""
    assert counted([run(Target("a", None, 1.0))]) == "targets reached on GPU none of 1 measured"


@pytest.mark.parametrize("name", SMALL)
def test_the_committed_page_is_of_the_committed_rows(name):
    page, module = (REPORTS / "limits.md").read_text(), EXPERIMENTS[name].page_module()
    runs = module.targets_by_run(read(Paths.default(REPORTS).rows(name)))
    assert f"| [{module.TITLE}]({name}.md) | {counted(runs)} |" in page
    lines = [line for table in missed_tables(runs) for line in table.lines]
    assert [line for line in lines if f"| {' | '.join(line)} |" not in page] == []


@pytest.mark.parametrize("name", [*EXPERIMENTS])
def test_an_experiment_without_rows_has_nothing_to_say(name):
    module = EXPERIMENTS[name].page_module()
    assert module.QUESTION.endswith("?")
    for function in ("headlines", "main_finding", "targets_by_run"):
        assert not list(pages.optional(module, function, []))


@pytest.mark.parametrize(
    ("value", "at_least", "reached", "verdict"),
    [
        (2.0, True, True, "yes"),
        (1.9, True, False, "no"),
        (2.0, False, True, "yes"),
        (2.1, False, False, "no"),
    ],
)
def test_a_target_is_reached_on_its_side_of_the_limit(value, at_least, reached, verdict):
    target = Target("speed", value, 2.0, at_least)
    assert (target.reached, target.verdict) == (reached, verdict)
    assert missed([target]) == ([] if reached else [target])


def test_what_was_not_measured_misses_no_target():
    target = Target("speed", None, 2.0)
    assert (target.reached, target.verdict, str(target)) == (None, "", "speed not measured of 2")
    assert missed([target]) == []


def test_text_has_value_limit_and_unit():
    assert str(Target("time", 8.04, 8.0, at_least=False, unit="%", value_format=".1f")) == "time 8.04 of 8 %"
    assert percent_over(3.0, 2.0) == 50.0


@pytest.mark.parametrize(
    ("value", "limit", "at_least", "words"),
    [
        (1.1984, 1.2, True, "1.198 of 1.2"),
        (1.19996, 1.2, True, "1.19996 of 1.2"),
        (1.2, 1.2, True, "1.20 of 1.2"),
        (1.18, 1.2, True, "1.18 of 1.2"),
        (7.6, 7.5952, False, "7.600 of 7.595"),
        (1.2000000001, 1.2, False, "1.20 of 1.2"),
    ],
)
def test_text_tells_a_miss_from_its_limit(value, limit, at_least, words):
    assert str(Target("speed", value, limit, at_least, value_format=".2f")) == f"speed {words}"


def test_values_that_were_not_measured_are_counted():
    targets = [Target("a", 2.0, 1.0), Target("b", 0.5, 1.0), Target("c", None, 1.0)]
    assert [one.measured for one in targets] == ["2", "0.5", ""]
    assert str(targets[0]) == "a 2 of 1"
    assert counts(targets, " are met") == "1 of 2 are met, 1 more not measured"
    assert counts(targets[1:2]) == "0 of 1"


def test_bounds_are_data_of_known_experiments():
    lines = {name: limits(name) for name in EXPERIMENTS}
    with FILE.open(newline="") as file:
        assert sum(map(len, lines.values())) == sum(1 for _ in csv.DictReader(file))
    for name, found in lines.items():
        assert len({(one.key, one.metric) for one in found}) == len(found), name
        assert all(limit_of(name, one.key, one.metric).bound >= 0 for one in found)
    assert limit_of("speed", "one row, int4_g32, float32", "ratio").bound == 0.4
    with pytest.raises(KeyError, match="no target of 'ratio' of 'x'"):
        limit_of("qat", "x", "ratio")
