"""Experiment `pretraining`: rows, their code, the sweep of a command, and the page."""

import json

import pytest
import torch

from ao_lab.cli.app import main
from experiments.data.corpus import SplitCorpus, SplitDocument
from experiments.harness.rows import Journal, read
from experiments.models.pretraining import SIZES, Budget, ByteLevelModel, Size, TextBits, bits_per_byte
from experiments.models.train import Checkpoint
from experiments.pretraining import page
from experiments.pretraining import run as experiment
from experiments.pretraining.run import settings_with, sweep
from tests.experiments.harness import tiny
from tests.experiments.harness.tiny import PRETRAINED as MODEL

BUDGET = Budget(bytes=6 * 64)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(SIZES, "tiny", Size(MODEL, batch=4, rate=1e-2))


def prose():
    """A corpus with the splits of `prose`."""
    text = b"".join(document.data for document in tiny.corpus().documents)
    names = ("train/a", "heldout/b", "heldout/c", "wikitext2-test/d")
    sizes = (20_000, 300, 100, 200)
    return SplitCorpus(
        "prose", "1", tuple(SplitDocument(name, text[:size]) for name, size in zip(names, sizes, strict=True))
    )


def settings(folder, *trainings):
    return settings_with(tiny.replace(tiny.settings(folder), text=prose()), trainings)


def test_rows_of_a_sweep(tmp_path):
    journal = Journal()
    given = settings(tmp_path, *sweep("tiny", BUDGET, (1e-2, 2e-2), (0, 1)))
    rows = experiment.run(given, journal)
    lines = {(row.setting, row.method, row.seed) for row in rows}
    assert lines == {
        ("tiny, 0.000384 MB", f"float32, rate {rate}, 64 bytes a step", seed)
        for rate in ("0.01", "0.02")
        for seed in (0, 1)
    }
    assert {row.table for row in rows} == {f"{kind}/quick/{prose().name}" for kind in ("runs", "curves")}
    first = {row.metric: row.value for row in rows if (row.setting, row.method, row.seed) == min(lines)}
    b, c = first["bits per byte, heldout/b"], first["bits per byte, heldout/c"]
    assert first["bits per byte, heldout"] == pytest.approx((300 * b + 100 * c) / 400)
    assert first["bits per byte, wikitext2-test"] == first["bits per byte, wikitext2-test/d"]
    assert first["share of rare bytes, heldout"] == 0
    for metric in ("bits per common byte", "bits without rare bytes"):
        assert first[f"{metric}, heldout"] == pytest.approx(first["bits per byte, heldout"])
    assert (first["steps"], first["trained bytes"]) == (6, 384)
    assert len(page.findings(rows)) == 1
    (section,) = page.sections(rows)
    assert {len(table.lines) for table in section.tables} == {4}
    assert "bits per common byte, wikitext2-test" in section.tables[0].columns


def test_common_bytes_of_a_split_are_over_its_texts():
    """Each text by its own bytes; one without common bytes says so and has no bits of them."""
    texts = {"a/b": TextBits(9.0, 4, 2.0, 2), "a/c": TextBits(8.0, 4, 4.0, 4), "d": TextBits(7.0, 2, 0.0, 0)}
    found = {metric: value for metric, (value, _) in experiment.common_quality(texts).items()}
    assert found == {
        "share of rare bytes, a/b": 50, "share of rare bytes, a/c": 0, "share of rare bytes, a": 25,
        "share of rare bytes, d": 100,
        "bits per common byte, a/b": 1, "bits per common byte, a/c": 1, "bits per common byte, a": 1,
    }  # fmt: skip


def test_rare_bytes_are_deleted_from_texts_before_the_model_sees_them():
    """What is left is a text of its own; one of which nothing is left has no bits, one that is whole is not run again."""
    torch.manual_seed(0)
    model, common = ByteLevelModel(MODEL).eval(), torch.arange(256) != ord("<")
    texts = {"a/b": b"<one> <two" * 3, "a/c": b"three", "d": b"<<"}
    found = experiment.left_quality(model, texts, 16, common, {"a/b": 0.0, "a/c": 2.0, "d": 9.0})
    (expected,) = bits_per_byte(model, {"": b"one> two" * 3}, 16).values()
    assert {metric: value for metric, (value, _) in found.items()} == {
        "bits without rare bytes, a/b": expected,
        "bits without rare bytes, a/c": 2.0,
        "bits without rare bytes, a": pytest.approx((24 * expected + 5 * 2.0) / 29),
    }


def test_finished_trainings_are_not_repeated(tmp_path, monkeypatch):
    journal, trainings = Journal(), sweep("tiny", BUDGET)
    rows = experiment.run(settings(tmp_path, *trainings), journal)
    monkeypatch.setattr(experiment, "pretrain", lambda *_, **__: pytest.fail("trained again"))
    assert experiment.run(settings(tmp_path, *trainings), journal) == rows
    assert list((tmp_path / "models").glob("*")) == []


def test_a_killed_training_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    """Stopped behind its fourth step, the same run takes the other two, and leaves no checkpoint."""
    given, real, resumed = settings(tmp_path, *sweep("tiny", BUDGET)), Checkpoint.reached, []
    monkeypatch.setattr(experiment, "CHECKPOINT_SECONDS", 0.0)

    def killed(self, run):
        real(self, run)
        if len(run.losses) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoint, "reached", killed)
    with pytest.raises(KeyboardInterrupt):
        experiment.run(given)
    monkeypatch.setattr(Checkpoint, "reached", lambda self, run: resumed.append(self.resumed))
    steps = [row.value for row in experiment.run(given) if row.metric == "steps"]
    assert (steps, resumed) == ([6.0], [4, 4])
    assert list((tmp_path / "models").glob("*")) == []


def test_the_command_sweeps_and_publishes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("experiments.runs.run.load", lambda name, path: prose())
    common = ["pretrain", "tiny", "--megabytes", "0.000384", "--scale", "quick", "--device", "cpu"]
    where = ["--reports", str(tmp_path), "--corpus", "prose", "--corpus-path", str(tmp_path)]
    monkeypatch.setattr("experiments.report.pages.write_pages", lambda places: [])
    assert main([*common, "--rate", "0.01", *where]) == 0
    # On another machine, whose cache is empty, too.
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path / "another"))
    assert main([*common, "--rate", "0.02", "--seed", "3", *where]) == 0
    rows = read(tmp_path / "data" / "pretraining.csv")
    assert {(row.method.split(",")[1], row.seed) for row in rows} == {(" rate 0.01", 0), (" rate 0.02", 3)}
    corpus = json.loads((tmp_path / "data" / f"{prose().name}.json").read_text())
    assert corpus["sha256"] == prose().sha256


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["30n", "--seconds", "1"], ["the nearest is 30m", "tiny, 30m, 120m"]),
        (["30m"], ["positive number of bytes"]),
        (["30m", "--seconds", "1", "--corpus", "pros"], ["the corpora are sympy, prose"]),
        (["30m", "--seconds", "1", "--rate", "-1"], ["rate are positive"]),
    ],
)
def test_wrong_input_is_one_line(capsys, arguments, words):
    assert main(["pretrain", *arguments, "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert [word for word in words if word not in err] == []
    assert err.count("\n") == 1
