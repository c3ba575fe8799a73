"""The whole experiment on models of a second: rows, resumption, gaps by hand, the page, the command."""

from dataclasses import replace

import pytest

from ao_lab.cli.app import main
from experiments.harness.measuring import Deadline
from experiments.harness.rows import Journal, table_parts
from experiments.models.llama import ModelSettings
from experiments.sparsity import accuracy_page, page, pairs
from experiments.sparsity import run as experiment
from experiments.sparsity import subjects as vision
from experiments.sparsity.methods import FINE_TUNINGS, METHODS, STORAGES, stored_as
from experiments.sparsity.pairs import Schedule
from tests.experiments.harness import tiny

SHORT = Schedule(steps=2, batch=2, rate=1e-3)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Plans of a second."""
    images = vision.Plan(
        model=vision.sized("tiny", 32, 1), start=SHORT, tune=SHORT, seeds=2, evaluated=20, calibrated=4
    )
    monkeypatch.setitem(vision.PLANS, "quick", images)
    model = ModelSettings(width=32, layers=1, heads=2, kv_heads=2, feed_forward=64, context=16)
    text = vision.LanguagePlan(model=model, start=SHORT, tune=SHORT, seeds=2, calibrated=4, evaluated=64)
    monkeypatch.setitem(vision.LANGUAGE_PLANS, "quick", text)


@pytest.fixture
def settings(tmp_path):
    return tiny.settings(tmp_path)


def kinds(rows):
    return {table_parts(row.table)[0] for row in rows}


def test_rows_of_all_parts_and_their_page(settings):
    rows = experiment.run(settings, journal := Journal())
    trained = {"vision", "vision gaps", "language", "language gaps"}
    assert kinds(rows) == {*trained, "products", "linear", "blocks", "vit", "sam", "decode"}
    assert len({row.key for row in rows}) == len(rows)
    everything = {stored_as(method, storage) for method in METHODS for storage in STORAGES}
    for kind in ("vision", "language"):
        found = {(row.method, row.seed) for row in rows if table_parts(row.table)[0] == kind}
        assert found == {(method, seed) for method in (pairs.START, *everything) for seed in (0, 1)}
        gaps = {row.method for row in rows if table_parts(row.table)[0] == f"{kind} gaps"}
        assert gaps == everything - {"dense"}
    # On a CPU nothing is timed, and rows say so.
    timed = [row for row in rows if table_parts(row.table)[0] not in trained]
    assert {row.metric for row in timed} == {"status: not run: times are of a GPU at full scale"}
    assert [words.partition(",")[0] for words in page.findings(rows)] == [
        "Vision transformer", "Language model", "Nothing is timed yet: times are of a GPU at full scale."
    ]  # fmt: skip
    sections = page.sections(rows)
    assert [section.title.partition(" (")[0] for section in sections[:2]] == [
        "Vision transformer",
        "Language model",
    ]
    assert len(sections) == 10
    assert len(sections[0].drawings) == 2
    before = {row.key: row.value for row in journal.rows}
    again = experiment.run(replace(settings, only=("vision", "language")), journal)
    assert {row.key: row.value for row in again} == before


def test_the_seeds_are_paired_and_a_killed_run_goes_on(settings, monkeypatch):
    only, journal, real, made = replace(settings, only=("vision",)), Journal(), pairs.train_sparse, []
    limit = [3]

    def trained(subject, model, tuning, seed):
        if limit and len(made) == limit[0]:
            raise KeyboardInterrupt
        made.append((tuning.name, seed))
        return real(subject, model, tuning, seed)

    monkeypatch.setattr(pairs, "train_sparse", trained)
    monkeypatch.setattr("experiments.harness.measuring.cores", lambda: 1)
    with pytest.raises(KeyboardInterrupt):
        experiment.run(only, journal)
    names = [one.name for one in FINE_TUNINGS]
    assert made == [(names[0], 0), (names[0], 1), (names[1], 0)]
    assert "vision gaps" not in kinds(journal.rows)
    made.clear()
    limit.clear()
    rows = experiment.run(only, journal)
    assert made == [(names[1], 1)]
    assert {row.value for row in rows if row.metric == "gap, seeds"} == {2}


def test_a_start_is_read_from_the_cache_by_its_seed(settings, monkeypatch):
    subject = vision.subject(settings)
    first = pairs.started(settings, subject, 0)
    monkeypatch.setattr(vision, "start", lambda *_: pytest.fail("trained again"))
    again = pairs.started(settings, vision.subject(settings), 0)
    assert all(bool((a == b).all()) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    with pytest.raises(pytest.fail.Exception):
        pairs.started(settings, vision.subject(settings), 1)


def test_a_model_that_is_not_sparse_gets_no_row(settings):
    subject = vision.subject(settings)
    with pytest.raises(ValueError, match="4 of 4 layers are not 2:4"):
        pairs.evaluations(subject, subject.build(0), "x", sparse=True)


def test_nothing_starts_after_the_limit(settings):
    assert experiment.run(replace(settings, seconds=1e-9)) == []


def test_gaps_by_hand(settings):
    images, text = vision.subject(settings), vision.language_subject(settings)
    # Points that are lost: 2 and 4; percent of more bits: 10 and 20. Student's 12.7062 / sqrt(2) times the deviation.
    lost = pairs.gap_of(images, [90.0, 80.0], [88.0, 76.0])
    assert (lost.mean, lost.half, lost.seeds) == (pytest.approx(3), pytest.approx(12.7062), 2)
    more = pairs.gap_of(text, [2.0, 1.0], [2.2, 1.2])
    assert (more.mean, more.half) == (pytest.approx(15), pytest.approx(63.531))


def test_a_method_without_the_dense_models_seeds_has_no_gap(settings):
    subject = vision.subject(settings)

    def row(method, seed, value):
        where = "sparsity", "vision", subject.data, subject.setting, method
        return replace(settings, seed=seed).row(*where, vision.ACCURACY, value, "%")

    rows = [
        row("dense", 0, 90.0),
        row("dense", 1, 90.0),
        row("a", 0, 1.0),
        row("b", 0, 89.0),
        row("b", 1, 89.0),
    ]
    made = pairs.gap_rows(settings, subject, rows)
    assert {(one.method, one.metric, one.value) for one in made} == {
        ("b", "gap", 1.0), ("b", "gap, 95% interval", 0.0), ("b", "gap, seeds", 2.0)
    }  # fmt: skip
    found = accuracy_page.gap_of(accuracy_page.Results(made), "b")
    assert (found.mean, found.verdict(vision.MARGIN)) == (1.0, "undecided")


def test_the_rate_rises_and_falls():
    schedule = Schedule(steps=20, batch=1, rate=2.0)
    assert schedule.rate_at(0) == pytest.approx(1.0)
    assert schedule.rate_at(1) == pytest.approx(2.0, abs=0.02)
    assert schedule.rate_at(10) == pytest.approx(1.0)
    assert 0 < schedule.rate_at(19) < 0.02


def test_five_seeds_at_both_scales():
    assert {vision.LANGUAGE_PLANS["full"].seeds, vision.PLANS["full"].seeds} == {5}
    assert vision.LANGUAGE_PLANS["full"].model.name == "byte-level-30m"
    assert Deadline(None).reason() is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["sparsity", "--only", "x"],
            "the parts are vision, language, products, linear, blocks, vit, sam, decode",
        ),
        (["sparsity", "--seconds", "0"], "--seconds is a positive limit"),
        (["sparsity", "--workers", "0"], "--workers is a positive number of processes"),
    ],
)
def test_wrong_input_is_one_line(capsys, arguments, words):
    assert main(["reproduce", *arguments, "--device", "cpu"]) == 2
    assert words in capsys.readouterr().err
