"""The whole experiment on models and shapes of a second: rows, resumption, the limit of seconds, the page, the command."""

from dataclasses import dataclass, field, replace
from itertools import count

import pytest

from ao_lab.cli.app import main
from experiments.fp8_training import blocks, convergence, linear, page
from experiments.fp8_training import convergence as planted
from experiments.fp8_training import run as experiment
from experiments.fp8_training.methods import (
    KNOWN_SIZES,
    LONG,
    OURS,
    PAIRED,
    PLAIN,
    PLANS,
    SWEEP,
    Method,
    Plan,
)
from experiments.fp8_training.page import of_grid, of_models
from experiments.fp8_training.run import Comparison, Part, comparison_of, measure_comparisons
from experiments.harness.measuring import Deadline, status
from experiments.harness.rows import Journal, table_parts
from experiments.models.llama import ModelSettings
from experiments.models.pretraining import Budget, Size, pretrain
from tests.experiments.harness import tiny
from tests.support.runs import fresh_processes

# What is measured whole: order, what a deadline cuts, what fails, what cannot run here.

LATE = status(Deadline(-1.0).reason())
BROKEN = status("error: x")
EAGER, COMPILED = "eager, 1 x 2", "compiled, 1 x 2"


@dataclass
class Runs:
    """Measures models of two methods, eager and compiled, at a time that grows; what is in `answers` instead."""

    settings: object
    journal: Journal = field(default_factory=Journal)
    made: list = field(default_factory=list)
    answers: dict = field(default_factory=dict)
    failed: list = field(default_factory=list)
    clock: object = field(default_factory=count)

    def part(self, data, setting, reason=None):
        def measure():
            self.made.append((data, setting))
            values = {"time": (float(next(self.clock)), "ms"), **status("ok")}
            return {(setting, one): self.answers.get((data, setting, one), values) for one in ("a", "b")}

        return Part.of(
            [(setting, "a", None), (setting, "b", None), (setting, "c", reason or "missing")], measure
        )

    def __call__(self, *names):
        comparisons = [
            Comparison("blocks", name, name, (self.part(name, EAGER), self.part(name, COMPILED)))
            for name in names
        ]
        self.made.clear()
        self.failed.clear()
        measure_comparisons("layers", comparisons, self.settings, self.journal, self.failed, Deadline(None))
        return list(self.made)

    def times(self, data):
        rows = [row for row in self.journal.rows if row.table.endswith(data) and row.metric == "time"]
        return {(row.setting, row.method): row.value for row in rows}


@pytest.fixture
def runs(tmp_path):
    return Runs(tiny.settings(tmp_path))


def both(name):
    return [(name, EAGER), (name, COMPILED)]


def test_all_of_a_whole_are_measured_where_one_is_missing(runs):
    assert runs("x") == both("x")
    assert runs("x") == []
    assert [(row.method, row.metric) for row in runs.failed] == [("c", "status: missing")] * 2
    runs.journal.drop([row for row in runs.journal.rows if (row.setting, row.method) == (COMPILED, "b")])
    before = runs.times("x")
    assert runs("x") == both("x")
    assert len(runs.times("x")) == 4
    assert not set(before.values()) & set(runs.times("x").values())


def test_what_was_never_measured_comes_before_what_fails(runs):
    runs.answers["x", EAGER, "b"] = BROKEN
    runs("x")
    assert (EAGER, "b") not in runs.times("x")
    assert runs("x", "y") == both("y") + both("x")
    assert [(row.method, row.metric) for row in runs.failed] == [("b", "status: error: x")]
    assert runs("x", "y") == both("x")


def test_a_whole_that_a_deadline_cut_leaves_nothing_and_no_older_one_goes(runs, capsys):
    runs.answers["x", COMPILED, "b"] = LATE
    assert runs("x") == both("x")
    assert runs.times("x") == {}
    assert "x: the time of this run ended before" in capsys.readouterr().err
    assert runs.failed == []
    runs.answers.clear()
    runs("y", "x")
    before = runs.times("x")
    assert len(before) == 4
    runs.journal.drop([row for row in runs.journal.rows if (row.setting, row.method) == (COMPILED, "b")])
    runs.answers["x", COMPILED, "b"] = LATE
    runs("x")
    assert runs.times("x").items() < before.items()


def test_a_whole_that_fails_entirely_leaves_what_was_there(runs):
    runs("x")
    before = runs.times("x")
    runs.journal.drop([row for row in runs.journal.rows if (row.setting, row.method) == (COMPILED, "b")])
    runs.answers |= {("x", one, method): BROKEN for one in (EAGER, COMPILED) for method in ("a", "b")}
    assert runs("x") == both("x")
    assert len(runs.times("x")) == 3
    assert runs.times("x").items() < before.items()


def test_what_belongs_together():
    assert comparison_of("linear/full/x", "eager") == comparison_of("linear/full/x", "CUDA graph")
    assert comparison_of("blocks/full/x", EAGER) == comparison_of("blocks/full/x", COMPILED)
    assert comparison_of("blocks/full/x", EAGER) != comparison_of("blocks/full/x", "eager, 2 x 2")
    assert comparison_of("grid/full/x", "M=1") != comparison_of("grid/full/x", "M=2")
    assert comparison_of("paired/full/x", "30m") is None


MODEL = ModelSettings(width=32, layers=2, heads=2, kv_heads=2, feed_forward=64, context=16)
MINE = Method(library=OURS, recipe="rowwise")
BUDGET = Budget(bytes=4 * 64)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Plans, shapes and models of a second."""
    monkeypatch.setitem(KNOWN_SIZES, "micro", Size(MODEL, batch=4, rate=1e-2))
    plan = Plan(
        paired="micro", budget=BUDGET, seeds=2, recipes=("mxfp8",), sweeps=(("micro", BUDGET, (1e-2, 2e-2)),), evaluated=64
    )  # fmt: skip
    monkeypatch.setitem(PLANS, "quick", plan)
    monkeypatch.setitem(planted.BUDGETS, "quick", ("micro", BUDGET))
    monkeypatch.setattr(planted, "CASES", planted.CASES[:3])
    monkeypatch.setattr(planted, "FAULTS", planted.FAULTS[:1])
    monkeypatch.setattr(linear, "STAND_INS", ((32, 64, 32),))
    monkeypatch.setattr(linear, "all_methods", lambda device: (PLAIN, MINE))
    monkeypatch.setattr(linear, "GRID_STAND_INS", ((32, 32, 32),))
    group = replace(
        blocks.TINY_GROUPS[1], recipes=("mxfp8",), length=32, plan=replace(blocks.QUICK, rounds=1)
    )
    monkeypatch.setattr(blocks, "TINY_GROUPS", (group,))
    fresh_processes.context()
    monkeypatch.setattr(blocks, "START", fresh_processes.FORKSERVER)


@pytest.fixture
def settings(tmp_path):
    return tiny.settings(tmp_path)


def kinds(rows):
    return {table_parts(row.table)[0] for row in rows}


@pytest.mark.parametrize("left", [blocks.FSDP_KIND, pytest.param("", marks=pytest.mark.nightly)])
def test_rows_of_all_parts_and_their_page(settings, monkeypatch, left):
    """By day without two ranks, which take as long to start as all the rest."""
    monkeypatch.setattr(
        experiment, "PARTS", {name: one for name, one in experiment.PARTS.items() if name != left}
    )
    rows = experiment.run(settings, journal := Journal())
    parts = {"linear", "blocks", "fsdp", "grid", "faults", "sweep", "paired", "curves", "gaps"}
    assert kinds(rows) == parts - {left}
    assert len({row.key for row in rows}) == len(rows)
    assert [row.metric for row in rows if row.metric.startswith("status") and row.value != 1] == []
    paired = {(row.method, row.seed) for row in rows if table_parts(row.table)[0] == PAIRED}
    assert paired == {(name, seed) for name in ("float32", "mxfp8") for seed in (0, 1)}
    alone = pretrain(PLANS["quick"].trials((PAIRED,))[1].settings, settings.corpus, "cpu").last_loss
    assert alone in {row.value for row in rows if row.seed == 1 and row.metric == convergence.TRAINED}
    gaps, rates, faults = page.findings(rows)
    assert ("Gap" in gaps, "rate" in rates, "fault" in faults) == (True, True, True)
    titles = [section.title.partition(" (")[0] for section in page.sections(rows)]
    assert titles[0] == "Recipes over paired seeds"
    assert len(titles) == 7 - bool(left)
    before = len(rows)
    assert len(experiment.run(settings, journal)) == before


def test_finished_trainings_are_skipped_and_a_killed_run_goes_on(settings, monkeypatch):
    only, journal, real, made = replace(settings, only=(PAIRED,)), Journal(), convergence.measure, []

    def measured(settings, plan, trial, checkpoint):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append((trial.recipe, trial.settings.seed))
        return real(settings, plan, trial, checkpoint)

    monkeypatch.setattr(convergence, "measure", measured)
    with pytest.raises(KeyboardInterrupt):
        experiment.run(only, journal)
    assert made == [("bf16", 0), ("bf16", 1), ("mxfp8", 0)]
    assert "gaps" not in kinds(journal.rows)
    made.clear()
    rows = experiment.run(only, journal)
    assert made == [("mxfp8", 1)]
    gaps = {row.metric: row.value for row in rows if table_parts(row.table)[0] == "gaps"}
    assert gaps["gap, training bits per byte at the end, seeds"] == 2
    assert gaps["gap, bits per common byte, held out, seeds"] == 2


def test_nothing_starts_after_the_limit(settings):
    assert experiment.run(replace(settings, seconds=1e-9)) == []


def test_a_method_that_was_not_reached_is_measured_by_the_next_run(settings):
    only, journal = replace(settings, only=("linear",)), Journal()
    experiment.run(only, journal)
    late, before = [row for row in journal.rows if row.method == MINE.name], {row.key for row in journal.rows}
    journal.drop(late)
    base = {row.key: row.value for row in journal.rows if row.metric == "time"}
    rows = experiment.run(only, journal)
    assert {row.key for row in rows} == {*(row.key for row in late), *before}
    # bfloat16 is measured again with it: times of two runs make no ratio.
    assert all(row.value != base[row.key] for row in rows if row.key in base)


def test_a_gap_is_of_bfloat16_on_the_same_seeds():
    found = convergence.over_seeds("x", {0: 2.0, 1: 4.0, 2: 9.0}, {1: 4.004, 0: 2.002})
    assert found[0] == ("gap, x", pytest.approx(0.1), "%")
    assert found[2] == ("gap, x, seeds", 2, "")
    assert convergence.over_seeds("x", {0: 1.0}, {0: 1.0}) == []


def test_published_values_stand_beside_the_grid_alone():
    assert len(of_grid()) == 216
    assert set(of_grid()) == {linear.setting_of(cell) for cell in linear.CELLS}
    found = page.comparisons([])
    assert len(found) == 216 + len(of_models())
    assert {one.measured for one in found} == {None}


def test_the_page_shows_published_tables_beside_the_real_shapes(settings):
    full = replace(settings, scale="full")
    cell = (linear.MODULE, "M=1024 K=1024 N=1024")
    rows = [
        full.row("fp8_training", "blocks", blocks.GPU_GROUPS[0].shape.name, "eager", "bfloat16", "time", 1.0, "ms"),
        full.row("fp8_training", "grid", *cell, linear.FORCED.name, page.SPEED, 1.2, "ratio"),
        full.row("fp8_training", "grid_eager", *cell, linear.TUNED.name, page.WALL, 0.9, "ratio"),
    ]  # fmt: skip
    rows = [replace(row, device="a GPU") for row in rows]
    sections = {section.title.partition(" (")[0]: section for section in page.sections(rows)}
    assert [table.caption for table in sections["Decoder layers"].tables] == [
        "Targets", "A training step", "Published: Llama-3-8B", "Published: not stated"
    ]  # fmt: skip
    assert len(sections["LayerNorm, linear, sigmoid"].drawings) == 3
    eager = sections["LayerNorm, linear, sigmoid: eager steps"]
    assert len(eager.drawings) == 2
    assert eager.paragraphs[0].startswith("**Missed targets: 1 of 1")
    measured = [one for one in page.comparisons(rows) if one.measured is not None]
    assert [(one.measured, one.published) for one in measured] == [(1.2, 0.42)]


def test_one_recipe_of_the_paired_trainings(settings):
    chosen = replace(settings, only=("paired:rowwise",))
    rows = experiment.run(chosen)
    assert kinds(rows) == {"paired", "curves", "gaps"}
    assert {row.method for row in rows if table_parts(row.table)[0] == PAIRED} == {"float32", "rowwise"}


def test_rare_bytes_are_told_by_two_seeds_and_one_of_a_recipe(settings, monkeypatch):
    """A part that no run has unless it is named."""
    bases = replace(PLANS["quick"], recipes=())
    monkeypatch.setattr(experiment, "RARE_BYTES", (bases, replace(bases, seeds=1, recipes=("mxfp8",))))
    rows = experiment.run(replace(settings, only=("rare_bytes",)))
    made = {(row.method, row.seed) for row in rows if row.metric == "share of rare bytes, held out"}
    assert made == {("float32", 0), ("float32", 1), ("mxfp8", 0)}
    assert kinds(rows) == {"paired", "curves"}
    assert "rare_bytes" not in experiment.PARTS


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["fp8_training", "--only", "pairs"],
            "the parts are linear, blocks, fsdp, grid, grid_eager, faults, sweep, paired, long, paired:RECIPE for one of "
            "tensorwise, rowwise, rowwise_with_gw_hp, blockwise, mxfp8, mxfp6, mxfp4, nvfp4, long:RECIPE for one of bf16,",
        ),
        (["fp8_training", "--seconds", "0"], "--seconds is a positive limit"),
        (["formats", "--seconds", "5"], "--seconds is a positive limit"),
        (["fp8_training", "--workers", "0"], "--workers is a positive number of processes"),
        (["formats", "--workers", "2"], "--workers is a positive number of processes"),
        (["formats", "--only", "x"], "--only names parts of one experiment"),
    ],
)
def test_wrong_input_is_one_line(capsys, arguments, words):
    assert main(["reproduce", *arguments, "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_the_plan_of_a_gpu_names_what_the_issue_asks():
    plan = PLANS["full"]
    paired = plan.trials((PAIRED,))
    assert len(paired) == 5 * 9
    assert {one.settings.compiled for one in paired} == {False}
    assert [one.settings.seed for one in paired[:6]] == [0, 1, 2, 3, 4, 0]
    assert [one.settings.rate for one in plan.trials((SWEEP,))] == [1.25e-4, 2.5e-4, 5e-4, 1e-3] * 2
    assert [one.recipe for one in plan.trials((LONG,))] == ["bf16", "rowwise", "mxfp8"]
    assert [one.recipe for one in plan.of_recipe("mxfp8").trials((LONG,))] == ["mxfp8"]
    assert [one.recipe for one in plan.of_recipe("bf16").trials((PAIRED, LONG))] == ["bf16"] * 6


def test_decoder_layers_of_one_setting():
    """One table is measured alone, eager and compiled; in eager mode bfloat16 has our fused layers too."""
    name = "blocks:1 x 8192, checkpointing per operation"
    assert name in experiment.SMALLER
    groups = [one for one in blocks.GPU_GROUPS if one.setting.endswith(name.partition(":")[2])]
    assert [(one.compiled, any(m.recipe == "bf16" for m in one.methods)) for one in groups] == [
        (False, True),
        (True, False),
    ]
