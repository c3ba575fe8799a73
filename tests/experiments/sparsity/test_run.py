"""The whole experiment on models of a second: rows, resumption, gaps by hand, the page, the command."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from ao_lab.cli.app import main
from experiments.harness.measuring import Deadline
from experiments.harness.rows import Journal, Row, table_parts
from experiments.models.encoders import VIT_L
from experiments.models.llama import ModelSettings
from experiments.sparsity import accuracy_page, models, page, pairs, products
from experiments.sparsity import run as experiment
from experiments.sparsity import subjects as vision
from experiments.sparsity.page import targets_by_run
from experiments.sparsity.pairs import (
    FINE_TUNINGS,
    GROUP,
    METHODS,
    STORAGES,
    Schedule,
    bits_per_weight,
    inside_blocks,
    is_sparse,
    parts_of,
    prune,
    sparse_layers,
    store,
    stored_as,
)
from experiments.sparsity.subjects import Collages, load
from tests.experiments.harness import tiny

# Targets of 2:4 sparsity, by rows by hand: published speeds, memory of a step, margins of what was trained on.

FACTS = {"unit": "", "device": "GPU", "seed": 0, "experiment": "sparsity", "date": "2026-11-27T"}


def row(table, setting, method, metric, value):
    return Row(table=table, setting=setting, method=method, metric=metric, value=value, **FACTS)


@pytest.mark.parametrize(("speed", "verdict"), [(1.26, "no"), (1.28, "yes")])
def test_layers_are_held_to_the_published_speed_as_a_graph(speed, verdict):
    table = "linear/full/13008x4096x1024"
    rows = [
        row(table, setting, products.LINEAR_OWN, "speed over dense", value)
        for setting, value in ((products.EAGER, 0.5), (products.GRAPH, speed))
    ]
    (run,) = targets_by_run(rows)
    (target,) = run.targets
    assert (target.limit, target.value, target.verdict, target.day) == (1.27, speed, verdict, "2026-11-27")
    assert (
        targets_by_run([row(table, products.GRAPH, products.LINEAR_OWN, "time", 1.0)])[0].targets[0].value
        is None
    )


def test_a_step_is_held_to_speed_and_memory():
    table, setting = f"{models.TRAINING}/full/{VIT_L.name}", models.training_setting()
    values = {
        (models.OWN, "speed over dense"): 1.04, (models.OWN, "peak memory"): 9.0, ("dense", "peak memory"): 10.0,
    }  # fmt: skip
    (run,) = targets_by_run([row(table, setting, *key, value) for key, value in values.items()])
    assert [(one.limit, one.value, one.verdict) for one in run.targets] == [
        (1.06, 1.04, "no"),
        (1.0, 0.9, "yes"),
    ]


def test_what_was_trained_on_is_held_to_the_margin_where_that_is_decided():
    gaps = {
        "one-shot, magnitude": (4.0, 0.5), "fine-tuned, fixed masks": (0.1, 0.1), "fine-tuned, SR-STE": (0.9, 0.9),
        "fine-tuned, SR-STE + int4": (2.0, 0.5),
    }  # fmt: skip
    rows = [
        row("vision gaps/full/collages", "vit", method, f"gap{end}", value)
        for method, (mean, half) in gaps.items()
        for end, value in (("", mean), (", 95% interval", half), (", seeds", 5.0))
    ]
    (run,) = targets_by_run(rows)
    assert [(one.name.partition(":")[0], one.verdict) for one in run.targets] == [
        ("fine-tuned, fixed masks", "yes"),
        ("fine-tuned, SR-STE + int4", "no"),
    ]


# What is 2:4, what survives quantization, and bits by hand.


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(64, 32, bias=False)])
        self.head = nn.Linear(32, 16, bias=False)

    def forward(self, x):
        return self.head(self.blocks[0](x))


def test_two_of_four_are_counted_in_groups():
    assert is_sparse(torch.tensor([[1.0, 0, 2, 0, 0, 0, 0, 3]]))
    assert not is_sparse(torch.tensor([[0, 1.0, 2, 3, 0, 0, 0, 0]]))


@pytest.mark.parametrize("storage", STORAGES)
def test_pruned_layers_stay_so_when_they_are_quantized(storage):
    model = Model()
    assert sparse_layers(model) == (0, 1)
    prune(model, "magnitude", ())
    store(model, storage)
    assert sparse_layers(model) == (1, 1)
    assert type(model.head.weight) is nn.Parameter


def test_bits_by_hand():
    # Scales of 4 bytes: one for 32 codes of 4 bits, one for a row of 64 codes of 8 bits.
    assert GROUP == 32
    dense = {"": 16, "int4": 4 + 1, "fp8": 8 + 0.5}
    sparse = {"": 8 + 1, "int4": 2 + 1 + 1, "fp8": 4 + 1 + 0.5}
    for storage in STORAGES:
        model = Model()
        store(model, storage)
        assert bits_per_weight(model, sparse=False) == dense[storage]
        assert bits_per_weight(model, sparse=True) == sparse[storage]


def test_names_are_taken_apart_again():
    for method in METHODS:
        for storage in STORAGES:
            assert parts_of(stored_as(method, storage)) == (method, storage)


def test_layers_of_blocks_are_chosen():
    assert inside_blocks(nn.Linear(1, 1), "model.layers.0.mlp.up_proj")
    assert not inside_blocks(nn.Linear(1, 1), "lm_head")
    assert not inside_blocks(nn.LayerNorm(1), "blocks.0.norm1")


# Collages of real digits: where they lie, what is held out, what depends on the seed alone.


def test_the_file_holds_the_digits_that_scikit_learn_has():
    train, held_out = load()
    assert (len(train.labels), len(held_out.labels)) == (1347, 450)
    # The first line of the file is a zero: its second row of pixels, in sixteenths.
    assert train.labels[:10].tolist() == list(range(10))
    assert (16 * train.images[0, 1]).tolist() == [0, 0, 13, 15, 10, 15, 5, 0]
    assert train.images.min() == 0
    assert train.images.max() == 1


def test_each_cell_holds_the_digit_of_its_label():
    train, _ = load()
    plain = Collages(cell=11, noise=0.0, faintest=1.0)
    images, labels = plain.draw(train, 5, torch.Generator().manual_seed(1))
    assert images.shape == (5, 1, 22, 22)
    # Less its mean, an image without noise has the least value where there is no ink.
    ink = images - images.amin((1, 2, 3), keepdim=True)
    for image, four in zip(ink, labels, strict=True):
        for place, label in enumerate(four.tolist()):
            down, right = place // 2 * 11, place % 2 * 11
            cell = image[0, down : down + 11, right : right + 11]
            views = cell.unfold(0, 8, 1).unfold(1, 8, 1).reshape(-1, 64)
            same = train.images[train.labels == label].reshape(-1, 64)
            # The digit lies in one of 16 places, and is one of those with this label: the mean's rounding is left.
            assert torch.cdist(views, same).min() < 1e-4


def test_a_seed_draws_the_same_collages():
    train, _ = load()
    first, again, other = (
        Collages().draw(train, 3, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


def test_another_file_is_refused(monkeypatch, tmp_path):
    other = tmp_path / "digits.csv.gz"
    other.write_bytes(b"x")
    monkeypatch.setattr(vision, "FILE", other)
    with pytest.raises(ValueError, match="is not the file of 1797 digits"):
        load.__wrapped__()


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
        "Vision transformer", "Language model", "Nothing has been timed yet: times need a GPU."
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
    assert (found.mean, found.verdict(1.0)) == (1.0, "undecided")


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
