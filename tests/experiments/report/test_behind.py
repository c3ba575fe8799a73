"""Where another library is ahead, and what users ask: from rows by hand, by rule."""

import pytest

from docs import generate
from experiments.harness.paths import Paths
from experiments.harness.registry import EXPERIMENTS
from experiments.harness.rows import Row
from experiments.report import asked, behind, pages
from experiments.report.content import inline
from experiments.report.results import by_run
from experiments.report.targets import AHEAD, RunTargets, Target, missed_tables

NOTHING = {name: [] for name in EXPERIMENTS}
SETTING, OURS, THEIRS = "1 row, CUDA graph", "int8", "torchao int8wo"


def row(method, value, metric="time", table="torchao/full/14336x4096", experiment="linear", setting=SETTING):
    return Row(
        experiment=experiment, table=table, setting=setting, method=method, metric=metric, value=value, unit="us",
        device="NVIDIA H200", seed=0, date="2026-11-26T10:00:00",
    )  # fmt: skip


@pytest.mark.parametrize(("ours", "again", "lost"), [
    (10.1, 1.0, False), (10.3, 1.0, True), (10.3, 1.05, False), (10.3, 0.9, False), (5.0, 1.0, False),
])  # fmt: skip
def test_a_difference_counts_beyond_the_tolerance_and_the_drift_of_its_table(ours, again, lost):
    rows = [row(OURS, ours), row(THEIRS, 10.0), row("bfloat16", again, behind.REPEAT)]
    (found,) = behind.comparisons({**NOTHING, "linear": rows})
    assert (found.behind, found.worse) == (lost, ours / 10)
    table = behind.table_of([found])
    assert table.caption == f"Behind another library: {int(lost)} of 1 comparisons"
    words = ["[linear](linear.md)", OURS, THEIRS, "time", "14336 x 4096: 1 row, CUDA graph"]
    assert table.lines == ([[*words, "1.03", "NVIDIA H200", "2026-11-26"]] if lost else [])


def test_of_several_forms_of_theirs_the_best_counts_and_more_may_be_better():
    def trained(method, value):
        return row(method, value, table="linear/full/1x1x1", experiment="fp8_training", setting="eager")

    forms = [
        trained("ours, rowwise", 9.0),
        trained("torchao, rowwise", 10.0),
        trained("torchao, rowwise, compiled", 6.0),
    ]
    decoded = [row("int8wo", value, "tokens/s", "decode/full/llama", "decode", who)
               for who, value in (("ours", 200.0), ("torchao", 100.0))]  # fmt: skip
    found = behind.comparisons({**NOTHING, "fp8_training": forms, "decode": decoded})
    assert {one.experiment: one.worse for one in found} == {"fp8_training": 1.5, "decode": 0.5}
    assert behind.counts(found) == [
        ["[decode](decode.md)", "1", "0", "0", "1"],
        ["[fp8_training](fp8_training.md)", "1", "1", "0", "0"],
    ]


def test_times_of_short_runs_are_none_and_errors_of_them_are():
    short = [row(one, value, table="torchao/quick/8x8") for one, value in ((OURS, 2.0), (THEIRS, 1.0))]
    errors = [row(f"{who}, 8 bits", value, "rms difference", "updates/quick/normal", "optimizers", "ratio 1")
              for who, value in (("ours", 0.11), ("torchao", 0.02))]  # fmt: skip
    found = behind.comparisons({**NOTHING, "linear": short, "optimizers": errors})
    assert [(one.experiment, one.behind) for one in found] == [("optimizers", True)]


def test_a_ratio_that_is_better_than_1_is_not_among_the_losses():
    """0.905 of torchao's time misses "at most 0.5" and is no loss; 1.1 is, and so is a bare time."""
    targets = [Target("a: time over torchao's best", value, 0.5, False) for value in (0.905, 1.1)]
    targets += [Target("b", 11.0, 10.4, False, "us"), Target("c", 1.6, 1.7), Target("d", 0.9, 0.95)]
    (where,) = by_run([row(OURS, 1.0)], "torchao")
    lost, ahead = missed_tables([RunTargets(where, targets, unit="times bfloat16")])
    assert [line[2].split()[0] for line in lost.lines] == ["1.1", "11", "0.9"]
    assert (ahead.caption, [line[2] for line in ahead.lines]) == (
        f"NVIDIA H200: {AHEAD}",
        ["0.905 times bfloat16", "1.6 times bfloat16"],
    )


def test_without_rows_answers_have_no_numbers_and_say_what_was_not_measured():
    found = asked.asked(NOTHING, [])
    assert all(one.title.endswith("?") and one.missing and one.links.startswith("[") for one in found)
    assert not [one.title for one in found for said in one.said if "nan" in said or "None" in said]


@pytest.mark.parametrize(
    ("gap", "half", "said"), [(0.1, 0.2, "within"), (2.0, 0.3, "beyond"), (0.4, 0.3, "undecided")]
)
def test_a_gap_is_judged_by_its_interval(gap, half, said):
    assert asked.verdict(gap, half).startswith(said)


def cached(model, recipe, change, experiment="kv_cache"):
    table = f"real {model}/full/books-held-out"
    return row(recipe, change, asked.LOSS, table, experiment, "all positions")


def test_the_cache_that_is_named_is_the_one_whose_worst_model_loses_least():
    """Not the one that is best on the first model, nor one that a model was not measured with; models without any are none."""
    rows = [cached("A", "int8", 0.0), cached("A", "int8_channels", 0.002), cached("A", "fp8", 0.001)]
    rows += [cached("B", "int8", 0.03), cached("B", "int8_channels", -0.004), cached("C", "other", 0.5)]
    (said,) = asked.least_change(rows)
    assert said.startswith("**Take `int8_channels`** (the default of `use_kv_cache_` is `int8`).")
    assert said.endswith(
        "A on books-held-out `int8_channels` +0.20%, `int8` +0.00%, `fp8` +0.10%; "
        "B on books-held-out `int8_channels` -0.40%, `int8` +3.05%."
    )
    (said,) = asked.least_change(rows[:3])
    assert said.startswith("**Take `int8`, the default of `use_kv_cache_`**.")
    assert asked.least_change([*rows[:1], *rows[4:]]) == []


@pytest.mark.parametrize(
    ("deep", "missing"), [(False, "all 32 layers at batch 64"), (True, "batches of more")]
)
def test_what_generate_has_not_measured_follows_its_rows(deep, missing):
    rows = [row("int4 g128", 1.5, asked.SPEED, "generate/full/llama-3.1-8b-32-layers", "generate", f"batch {one}, compiled")
            for one in ((1, 64) if deep else (1,))]  # fmt: skip
    found = asked.generating({**NOTHING, "generate": rows})
    assert found.missing.startswith(missing)
    assert "1.50 at batch 1" in found.said[0]
    assert ("1.50 at batch 64" in found.said[0]) == deep


def test_answers_on_int4_name_the_form_of_each_number_and_take_those_of_zero_points_where_they_are():
    def generated(layers, method, value):
        table = f"generate/full/llama-3.1-8b-{layers}-layers"
        return row(method, value, asked.SPEED, table, "generate", "batch 1, compiled")

    rows = [
        generated(32, "int4 g128", 1.6),
        generated(8, "int4 g128", 1.4),
        generated(8, "int4 g128, zero points", 1.3),
    ]
    found = asked.four_bits({**NOTHING, "generate": rows})
    assert [one.partition("layers, ")[2].partition(": ")[2] for one in found.said if "layers, " in one] == [
        "symmetric 1.60 at batch 1.",
        "symmetric 1.40 at batch 1; with zero points 1.30 at batch 1.",
    ]
    assert "zero points (4.31 bits per weight)" in found.said[1]
    assert "symmetric (4.25 bits)" in found.said[1]
    assert "all 32 layers with zero points" in asked.generating({**NOTHING, "generate": rows}).missing
    deep = [*rows, generated(32, "int4 g128, zero points", 1.5)]
    assert "all 32 layers with zero points" not in asked.generating({**NOTHING, "generate": deep}).missing


def test_speeds_of_the_lean_loop_are_over_the_fastest_bfloat16_in_answers_as_on_its_page():
    def decoded(setting, method, metric, value):
        return row(method, value, metric, "decode/full/llama-3.1-8b-random", "decode", setting)

    rows = [
        decoded("baseline", "bfloat16", "tokens/s", 200.0),
        decoded("baseline", "bfloat16", "model size", 15.0),
    ]
    for method in ("int4wo-64", "nvfp4wo"):
        rows += [decoded("ours", method, name, value) for name, value in (
            ("tokens/s", 500.0), ("model size", 4.2), ("speedup over bfloat16", 2.7), ("bfloat16 before", 250.0),
        )]  # fmt: skip
    (said,) = [one for one in asked.four_bits({**NOTHING, "decode": rows}).said if "lean loop" in one]
    assert "zero points in bfloat16 2.00 " in said
    assert "NVFP4 2.00 " in said
    (found,) = [one for one in EXPERIMENTS["decode"].page_module().findings(rows) if "int4wo-64" in one]
    assert "the fastest bfloat16 generates 250: 2.00 times" in found


def test_the_furthest_behind_of_each_experiment_is_named():
    rows = [
        row(OURS, 30.0),
        row(THEIRS, 10.0),
        row(OURS, 11.0, setting="64 rows"),
        row(THEIRS, 10.0, setting="64 rows"),
    ]
    found = asked.against_others(behind.comparisons({**NOTHING, "linear": rows}))
    assert found.said[1:] == [
        "Furthest behind of each page, ours over theirs: [linear](linear.md) time 3 (int8 beside torchao int8wo; 14336 x 4096: "
        "1 row, CUDA graph)."
    ]


def test_links_to_the_documentation_are_words_where_it_is_not_there(tmp_path):
    one = asked.Asked("Q?", [], "x", "[choose](../docs/choose.md), [ptq](ptq.md)")
    places = Paths(tmp_path, tmp_path / "reports")
    assert pages.linked(places, one).links == "choose (documentation), [ptq](ptq.md)"
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("")
    assert pages.linked(places, one) == one
    assert (
        inline("[choose](../docs/choose.md#x) [a b](ptq.md)")
        == '<a href="../docs/choose.md#x">choose</a> <a href="ptq.html">a b</a>'
    )
    site = generate.of_site('<a href="../docs/guides/index.md">a</a> <a href="../docs/choose.md#x">b</a>')
    assert site == '<a href="../guides/index.html">a</a> <a href="../choose.html#x">b</a>'
