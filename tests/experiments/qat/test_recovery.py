"""What QAT recovers: arithmetic over paired seeds, resumption, and a whole run in small."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from ao_lab import IntxWeightOnlyConfig, PerGroup, QATConfig, quantize_
from experiments.harness.paths import Paths
from experiments.harness.rows import Interval, Journal, interval, publish, read
from experiments.models import train
from experiments.qat import page, run
from experiments.qat.run import (
    METHODS,
    PLANS,
    QUICK_METHODS,
    Method,
    Plan,
    deviations_of,
    recovery,
    target_of,
    targets_of,
)
from experiments.report import pages
from experiments.report.results import Results
from experiments.report.targets import Target
from tests.experiments.harness import tiny

BASE = [1.00, 1.02, 1.01]
PTQ = [1.20, 1.23, 1.21]
QAT = [1.02, 1.03, 1.03]
PLAN = Plan(
    methods=(
        Method(IntxWeightOnlyConfig("int4", PerGroup(32)), True),
        Method(IntxWeightOnlyConfig("int2", PerGroup(32))),
    ),
    seeds=2,
    start=None,
    steps=2,
    batch=2,
    rate=1e-3,
    scale_rate=1e-3,
    windows=3,
    evaluations=2,
)


def test_recovery_by_hand():
    found = recovery(BASE, PTQ, QAT)
    # Lost 0.20, 0.21, 0.20; kept 0.02, 0.01, 0.02; so 90%, 95.238...% and 90% came back.
    assert found.ptq.mean == pytest.approx(0.61 / 3)
    assert found.qat.mean == pytest.approx(0.05 / 3)
    parts = np.array([90.0, 2000 / 21, 90.0])
    assert found.recovered.mean == pytest.approx(parts.mean())
    assert found.recovered.half == pytest.approx(4.302652730 * parts.std(ddof=1) / 3**0.5)
    assert found.deviations == pytest.approx((0.61 / 3) / np.std([0.20, 0.21, 0.20], ddof=1))


def test_seeds_are_paired():
    """Seeds far apart in themselves take nothing from a loss that is the same in each."""
    apart = [0.0, 5.0, -3.0]
    moved = [
        [value + shift for value, shift in zip(values, apart, strict=True)] for values in (BASE, PTQ, QAT)
    ]
    near, far = recovery(BASE, PTQ, QAT), recovery(*moved)
    assert far.deviations == pytest.approx(near.deviations)
    assert far.recovered.half == pytest.approx(near.recovered.half)


@pytest.mark.parametrize("seeds", [2, 3, 12, 40])
def test_intervals_are_those_of_scipy(seeds):
    values = np.random.default_rng(seeds).normal(3.0, 0.5, seeds)
    found = interval(list(values))
    low, high = stats.t.interval(0.95, seeds - 1, loc=values.mean(), scale=stats.sem(values))
    assert (found.mean, found.half) == pytest.approx(((low + high) / 2, (high - low) / 2), rel=1e-9)
    low, high = stats.ttest_rel(values + 1.0, values * 0.9).confidence_interval(0.95)
    paired = interval(list(values + 1.0 - values * 0.9))
    assert (paired.mean, paired.half) == pytest.approx(((low + high) / 2, (high - low) / 2), rel=1e-9)


def test_an_interval_needs_seeds():
    for values in ([], [1.0]):
        with pytest.raises(ValueError, match="an interval takes at least 2 seeds"):
            interval(values)
    with pytest.raises(ValueError, match="at least two, got 1"):
        replace(PLAN, seeds=1)
    assert interval([2.0, 2.0]) == Interval(2.0, 0.0)


@pytest.mark.parametrize(("deviations", "said"), [(10.5, True), (9.5, False), (0.0, False), (-40.0, False)])
def test_no_percentage_under_ten_deviations(deviations, said):
    # Of 1 - d and 1 + d the standard deviation is d * sqrt(2).
    spread = 1 / (2**0.5 * deviations) if deviations else 1.0
    sign = math.copysign(1.0, deviations) if deviations else 0.0
    lost = [sign * (1 - abs(spread)), sign * (1 + abs(spread))] if deviations else [-1.0, 1.0]
    found = recovery([1.0, 2.0], [1.0 + lost[0], 2.0 + lost[1]], [1.0, 2.0])
    assert found.deviations == pytest.approx(deviations)
    assert (found.recovered is not None) == said
    rows = run.of_method(found, 90.0)
    assert ("recovered" in rows, run.NO_PERCENTAGE in rows) == (said, not said)
    assert "under 10 seed deviations" in run.NO_PERCENTAGE
    assert rows["bar"] == (90.0, "%")


def test_losses_without_spread():
    assert deviations_of([0.5, 0.5]) == math.inf
    assert deviations_of([0.0, 0.0]) == 0.0
    assert recovery([1.0, 2.0], [1.0, 2.0], [1.0, 2.0]).recovered is None
    assert recovery([1.0, 1.0], [1.5, 1.5], [1.0, 1.25]).recovered.mean == pytest.approx(75.0)


def test_what_is_measured():
    """The methods with targets, and at least five seeds on a GPU."""
    found = {
        (method.name, method.config.recipe().activation is None): target_of(method.name) for method in METHODS
    }
    four, three = 90.0, 80.0
    wanted = {
        ("int4_g32", False): four,
        ("int4_g256", False): four,
        ("int4_g128_asymmetric", True): four,
        ("int3_g32", True): three,
        ("int3_g128", True): three,
        ("int2_g32", True): None,
        ("mxfp4_rceil", False): None,
        ("nvfp4", False): None,
    }
    assert wanted.items() <= found.items()
    assert len({(method.setting, method.name) for method in METHODS}) == len(METHODS)
    assert PLANS["full"].methods == METHODS
    assert PLANS["full"].seeds >= 5
    assert set(QUICK_METHODS) <= set(METHODS)
    for method in METHODS:
        assert method.step("prepare").learn_scales == method.learn_scales
        assert method.step("prepare").scale_start == ("error" if method.learn_scales else "rule")
        assert method.step("convert").recipe() == method.config.recipe()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A whole run in small: settings, journal and rows."""
    folder = tmp_path_factory.mktemp("run")
    settings = tiny.settings(folder)
    path = folder / "journal.csv"
    return settings, path, run.run(settings, Journal(path), PLAN)


def test_every_seed_and_method_has_its_rows(small):
    settings, _, rows = small
    runs = [row for row in rows if row.table.startswith("runs/")]
    counted = {(row.method, row.metric, row.seed) for row in runs}
    methods = [(method.name, metric) for method in PLAN.methods for metric in (run.PTQ, run.QAT)]
    methods.append(("int4_g32", run.CLIPPED))
    methods += [(name, "bits per byte") for name in ("float32", "bfloat16")]
    assert counted == {(*method, seed) for method in methods for seed in range(2)}
    assert len(runs) == len(counted)
    assert all(0 < row.value < 12 for row in runs)
    # A journal keeps 9 digits; what follows from the rows is the same before and after.
    assert all(row.value == float(f"{row.value:.9g}") for row in runs)
    assert {row.commit for row in rows} == {settings.row("qat", "", "", "", "", "", 0, "").commit}


def test_the_means_are_those_of_the_runs(small):
    _, _, rows = small
    found = {(row.method, row.metric, row.seed): row.value for row in rows if row.table.startswith("runs/")}
    base, ptq, qat = (
        [found[method, metric, seed] for seed in range(2)]
        for method, metric in (("float32", "bits per byte"), ("int2_g32", run.PTQ), ("int2_g32", run.QAT))
    )
    over = {
        row.metric: row.value
        for row in rows
        if row.table.startswith("recovery/") and row.method == "int2_g32"
    }
    assert over["loss, PTQ"] == pytest.approx(np.mean(np.subtract(ptq, base)))
    assert over["loss, QAT"] == pytest.approx(np.mean(np.subtract(qat, base)))
    assert ("recovered" in over) != (run.NO_PERCENTAGE in over)


def test_the_baseline_is_trained_like_the_others_and_quantized_by_quantize(small):
    """By hand, seed 1: the same start, text, steps and optimizer; with no method, float32."""
    settings, _, rows = small
    training = PLAN.training(settings, 1)
    assert (training.steps, training.matrix_rate) == (2, None)
    # No seed goes on with the text that it began with.
    assert PLAN.training(settings, 0).seed not in (training.seed, training.start.seed)
    initial = train.trained_model(training.start, settings.corpus, "cpu", settings.cache).model
    model = train.trainable(initial)
    config = PLAN.methods[0].config
    quantize_(
        model,
        QATConfig(config, learn_scales=True, scale_start="error"),
        filter_fn=lambda module, _: isinstance(module, torch.nn.Linear),
    )
    scales = {name: value.clone() for name, value in model.named_parameters() if name.endswith("qat_scale")}
    assert len(scales) == len(model.linears())
    train.fit(model, training, settings.corpus)
    assert all(not torch.equal(value, dict(model.named_parameters())[name]) for name, value in scales.items())
    quantize_(model, QATConfig(config, step="convert"))
    evaluations = run.evaluations_of(settings, PLAN)
    found = {(row.method, row.metric, row.seed): row.value for row in rows}
    assert run.bits(model, evaluations) == pytest.approx(found["int4_g32", run.QAT, 1], abs=1e-6)
    base = train.train(training, settings.corpus, "cpu", initial)[0]
    assert run.bits(base, evaluations) == pytest.approx(found["float32", "bits per byte", 1], abs=1e-6)
    scaled = train.trainable(base)
    quantize_(
        scaled,
        PLAN.methods[0].step("prepare"),
        filter_fn=lambda module, _: isinstance(module, torch.nn.Linear),
    )
    quantize_(scaled, QATConfig(config, step="convert"))
    clipped = found["int4_g32", run.CLIPPED, 1]
    assert run.bits(scaled, evaluations) == pytest.approx(clipped, abs=1e-6)
    quantize_(base, config, filter_fn=lambda module, _: isinstance(module, torch.nn.Linear))
    assert run.bits(base, evaluations) == pytest.approx(found["int4_g32", run.PTQ, 1], abs=1e-6)
    assert not torch.equal(initial.lm_head.weight, base.lm_head.weight.dequantize())


def test_evaluations_differ(small):
    settings, _, _ = small
    one, two = run.evaluations_of(settings, PLAN)
    assert one.tokens.shape == two.tokens.shape
    assert not torch.equal(one.tokens, two.tokens)
    assert one.settings.windows == PLAN.windows


def test_seeds_and_methods_that_are_finished_are_not_measured_again(small, monkeypatch):
    settings, path, rows = small
    kept = [
        row
        for row in rows
        if not (row.method == "int2_g32" and row.seed == 1) and not row.table.startswith("rec")
    ]
    partial = Journal(path.with_name("partial.csv"))
    partial.add(kept)
    measured = []
    whole = run.measure
    monkeypatch.setattr(run, "measure", lambda shared, task: measured.append(task) or whole(shared, task))
    again = run.run(settings, partial, PLAN)
    assert [(task.method.name, task.seed) for task in measured] == [("int2_g32", 1)]
    assert {row.key: row.value for row in again} == pytest.approx(
        {row.key: row.value for row in rows}, abs=1e-6
    )
    measured.clear()
    monkeypatch.setattr(run, "models_of", lambda *_: pytest.fail("trained again"))
    assert len(run.run(settings, Journal(path), PLAN)) == len(read(path)) == len(rows)
    assert measured == []


def test_targets_are_those_of_the_methods(small):
    _, _, rows = small
    over = Results(row for row in rows if row.table.startswith("recovery/"))
    (target,) = targets_of(over)
    assert (target.name, target.limit) == ("int4_g32", 90.0)
    assert target.value == over.value("weights", "int4_g32", "recovered")


@pytest.mark.parametrize("lost", [0.0, 1e-6, None], ids=["same models", "other models", "no baseline"])
def test_a_seed_whose_models_changed_is_measured_again(small, monkeypatch, lost):
    """All of the seed, for its rows would be no pairs; of other seeds nothing."""
    settings, path, rows = small
    partial = Journal(path.with_name(f"changed {lost}.csv"))
    missing = [
        row
        for row in rows
        if row.seed == 1 and (row.method == "int2_g32" or (lost is None and row.method == "float32"))
    ]
    for row in rows:
        if row.table.startswith("runs") and row not in missing:
            other = row.seed == 1 and row.method == "float32"
            partial.add([replace(row, value=row.value + (lost or 0.0) * other)])
    measured = []
    monkeypatch.setattr(run, "measure", lambda shared, task: measured.append(task) or [])
    monkeypatch.setattr(run, "summary", lambda *_: [])
    run.run(settings, partial, PLAN)
    wanted = [task for task in run.all_tasks(PLAN) if task.seed == 1]
    assert measured == (wanted[-1:] if lost == 0.0 else wanted)
    # What broke off there would have to find nothing of the old models.
    assert {row.seed for row in Journal(partial.path).rows} == ({0, 1} if lost == 0.0 else {0})


def test_journals_are_of_one_training(small):
    settings, _, _ = small
    key = run.subject(settings)
    assert run.subject(replace(settings, train=replace(settings.train, steps=3))) != key
    assert run.subject(settings) == key


def test_the_page_says_what_was_recovered(small, tmp_path):
    places = Paths(tmp_path / "cache", tmp_path / "reports")
    publish(places.rows("qat"), small[2])
    pages.write_pages(places)
    assert "**Targets of the mean recovered part; " in (places.reports / "qat.md").read_text()
    assert "data/qat.csv" in (places.reports / "qat.html").read_text()
    made = pages.make_page(places, "qat")
    assert "qat-recovery-quick-cpu-made" in made.pictures
    published, section = made.sections
    assert published.title == "Published accuracies"
    corpus, verdict = section.paragraphs[:2]
    assert "trained on the corpus made-1-" in corpus
    assert verdict.startswith("**Targets of the mean recovered part; ")
    assert "int4_g32" in verdict
    table, seeds = section.tables
    assert [line[0] for line in table.lines] == ["int4_g32", "int2_g32"]
    assert seeds.columns == ["model", "seed 0", "seed 1"]
    assert [line[0] for line in seeds.lines][:3] == ["float32", "bfloat16", "int4_g32, PTQ"]
    assert all(cell for line in seeds.lines for cell in line)


def test_outcomes():
    outcomes = {90.0: "reached", 89.9: "missed", None: "without a percentage"}
    assert {value: page.outcome_of(Target("int4_g32", value, 90.0)) for value in outcomes} == outcomes
