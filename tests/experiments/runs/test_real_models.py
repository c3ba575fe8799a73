"""The driver of runs on real models: what is measured again, when nothing more starts, what a failure leaves."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from experiments.data.texts import OwnText, is_held_out
from experiments.harness.measuring import Deadline, is_late, status
from experiments.harness.registry import EXPERIMENTS, WINDOWS
from experiments.harness.rows import Journal
from experiments.models import causal_lm
from experiments.models.causal_lm import FILE, MODEL, Undivided
from experiments.runs import outcome, real_models, run
from experiments.runs.real_models import Place, Tables, by_data
from experiments.runs.settings import RealModels, Settings
from experiments.runs.windows import measured_on, texts_of

TASKS = {Place("weights", name, 0): name for name in ("a", "b", "c")}


def values(task):
    return {data: {"loss": (1.0, "nat"), **status("ok")} for data in ("text", MODEL)}


class Clock:
    """Seconds that pass where somebody says so."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(real_models.time, "perf_counter", made)
    return made


def tables(tmp_path, journal, deadline=None):
    settings = Settings(scale="quick", device="cpu", cache=tmp_path)
    return Tables("ptq", settings, "real tiny", journal, deadline or Deadline(None))


def test_what_the_journal_has_is_not_measured_again(tmp_path, capsys):
    measured, journal = [], Journal()

    def load():
        return {"parameters": (1.0, "")}, lambda task: measured.append(task) or values(task)

    first = dict(list(TASKS.items())[:1])
    assert tables(tmp_path, journal).measure("", first, load) == []
    assert "kept" not in capsys.readouterr().err
    assert tables(tmp_path, journal).measure("tiny", TASKS, load) == []
    assert "tiny: 1 of 3 measurements are kept, 2 missing" in capsys.readouterr().err
    assert measured == ["a", "b", "c"]
    assert {row.method for row in journal.rows} == {FILE, "a", "b", "c"}
    assert tables(tmp_path, journal).measure("", TASKS, lambda: pytest.fail("loaded again")) == []
    other = {Place("weights", "a", 1): "a"}
    assert list(tables(tmp_path, journal).left({**TASKS, **other})) == list(other), (
        "another seed is another task"
    )


@pytest.mark.parametrize(("even", "late"), [(False, ["c"]), (True, ["b", "c"])])
def test_nothing_starts_after_the_deadline(tmp_path, clock, even, late):
    """Two tasks of six seconds in ten: the second would end after them, which matters of even ones alone. Loading, which takes
    longer, is not counted."""

    def load():
        clock.now += 30.0
        return {}, measure

    def measure(task):
        clock.now += 6.0
        return values(task)

    journal = Journal()
    run = tables(tmp_path, journal, Deadline(10.0, clock))
    failed = run.measure("", TASKS, load, even=even)
    assert [row.method for row in failed] == late
    assert all(row.metric.startswith("status: not run") for row in failed)
    assert not {row.method for row in journal.rows} & set(late)


def test_what_is_missing_says_so_and_the_others_go_on(tmp_path):
    journal = Journal()
    missing = {"b": "missing: torchao is not installed"}.get
    (row,) = tables(tmp_path, journal, Deadline(-1.0)).measure(
        "", {Place("weights", "b", 0): "b"}, lambda: ({}, values), missing
    )
    assert row.metric == "status: missing: torchao is not installed", "before the deadline is asked"
    (row,) = tables(tmp_path, journal).measure("", TASKS, lambda: ({}, values), missing)
    assert (row.method, {row.method for row in journal.rows}) == ("b", {"a", "c"})


@pytest.mark.parametrize(
    ("error", "word"), [(Undivided("no"), "missing: no"), (KeyError("x"), "error: KeyError: 'x'")]
)
def test_a_failure_leaves_its_status_alone(error, word):
    def work(found):
        found["text"] = {"loss": (1.0, "nat")}
        raise error

    assert by_data(work) == {MODEL: status(word)}
    assert set(by_data(lambda found: found.update(values("a")) or {})) == {"text", MODEL}


def test_what_is_compared_is_not_run_where_the_baseline_fails(tmp_path):
    """Five schemes of a model that cannot run would say the same five times."""
    measured = []

    def measure(task):
        measured.append(task)
        return {MODEL: status("error: IndexError: index out of range")}

    made = tables(tmp_path, Journal())
    failed = made.measure("", TASKS, lambda: ({}, measure), baseline=next(iter(TASKS)))
    assert measured == ["a"]
    assert [row.metric for row in failed if row.method == "b"] == [
        "status: not run: a failed, with which this is compared"
    ]
    late = tables(tmp_path, Journal(), Deadline(-1.0))
    failed = late.measure("", TASKS, lambda: pytest.fail("loaded"), baseline=next(iter(TASKS)))
    assert [is_late(row.metric) for row in failed] == [True] * 3, "the seconds are no failure of it"


def test_a_run_that_measured_nothing_in_its_seconds_fails(tmp_path, monkeypatch):
    """The model as it is, and what an earlier run measured, are nothing that this one measured of what was asked."""
    settings = Settings(scale="quick", device="cpu", cache=tmp_path)

    def row(method, reason="ok"):
        return settings.row("ptq", "real m", MODEL, "weights", method, f"status: {reason}", 1.0, "")

    late = Deadline(1.0, lambda: 0.0)
    late.until = 0.0
    asked, dense, kept = row("gptq", late.reason()), row("bfloat16"), row("hqq")
    monkeypatch.setattr(outcome, "NOTHING", [])
    monkeypatch.setattr(outcome, "LATE", [])
    assert outcome.late_outcome("ptq", [dense, kept], {kept}) == ""
    assert outcome.late_outcome("ptq", [kept, asked], set()) == "; 1 measurement not reached"
    assert outcome.NOTHING == []
    assert outcome.late_outcome("ptq", [dense, kept, asked], {kept}) == "; 1 measurement not reached"
    (said,) = outcome.NOTHING
    assert said.startswith(
        "ptq: nothing that was asked for was measured, not run: the 1 s of this run did not"
    )
    outcome.say_late([asked, replace(asked, seed=1)])
    assert outcome.late_outcome("ptq", [], set()) == "; 2 measurements not reached", (
        "rows that are not published"
    )
    assert len(outcome.NOTHING) == 2


def test_what_was_not_reached_of_a_model_that_was_asked_for_is_a_row(tmp_path):
    """Of others the published pages stay as they are."""
    here = Settings(scale="quick", device="cpu", cache=tmp_path, seconds=1.0)
    failed = here.rows("ptq", "real m", MODEL, "weights", "gptq", status("not run: the seconds were over"))
    assert run.all_rows(here, Journal(), failed) == []
    assert run.all_rows(replace(here, asked=RealModels(models=("m",))), Journal(), failed) == failed


def test_an_experiment_of_which_nothing_was_measured_fails(tmp_path, monkeypatch, capsys):
    """Exit code 0 would say that five errors are a result; one result beside an error is one."""
    settings = Settings(scale="quick", device="cpu", cache=tmp_path)

    def rows(*reasons):
        return [
            settings.row("ptq", "real m", MODEL, "weights", str(at), f"status: {reason}", 1.0, "")
            for at, reason in enumerate(reasons)
        ] + [settings.row("ptq", "real m", MODEL, FILE, FILE, "status: ok", 1.0, "")]

    monkeypatch.setattr(outcome, "NOTHING", [])
    assert outcome.outcome("ptq", rows("ok", "missing: not divisible")) == ""
    assert outcome.outcome("ptq", rows("ok", "error: X: why")) == "; 1 of 2 measured"
    assert outcome.NOTHING == []
    assert "ptq: 1 of 2 measured; error: X: why" in capsys.readouterr().err
    assert outcome.outcome("ptq", rows("error: X: why", "not run: late")) == "; 0 of 2 measured"
    assert outcome.NOTHING == ["ptq: 0 of 2 measured; error: X: why"]


def test_a_tokenizer_of_another_model_is_refused_before_anything_is_measured(monkeypatch):
    table = nn.Embedding(16, 2)
    model = SimpleNamespace(folder="m")
    monkeypatch.setattr(causal_lm, "load", lambda *_: SimpleNamespace(get_input_embeddings=lambda: table))
    monkeypatch.setattr(
        causal_lm, "windows_for", lambda *_: [SimpleNamespace(ids=torch.tensor([[3, 49151]]))]
    )
    with pytest.raises(ValueError, match="token ids up to 49151, the model's embedding has 16 rows"):
        causal_lm.Bench.of(model, (), 2, 1, "cpu")


def test_ones_own_text_is_evaluated_on_whole_where_nothing_trains_on_it(tmp_path):
    """As `ao-lab compare --eval` reads it: numbers of both compare."""
    (tmp_path / "own.txt").write_text("word " * 50)
    settings = Settings(scale="quick", device="cpu", cache=tmp_path)
    own = OwnText.of(tmp_path / "own.txt", whole=True)
    (text,) = texts_of(replace(settings, asked=RealModels(models=("m",), own_text=own)))
    assert text.documents == ("word " * 50,)
    assert text.name.startswith("own.txt-")
    own = OwnText.of(tmp_path / "own.txt")
    texts = texts_of(replace(settings, asked=RealModels(models=("m",), own_text=own)))
    assert (texts[0].name, len(texts[0].documents[0])) == (f"{text.name}-held-out", 25)
    assert is_held_out(texts[0].name, "own.txt"), "as pages find it"
    assert not is_held_out(texts[0].name, "own")
    run.check_asked(["ptq"], RealModels(models=("m",), own_text=own), ())
    own = OwnText.of(tmp_path / "own.txt", alone=True)
    (text,) = texts_of(replace(settings, asked=RealModels(models=("m",), own_text=own)))
    assert (text.name, text.documents) == (texts[0].name, texts[0].documents)
    run.check_asked(["calibration"], RealModels(models=("m",), own_text=own), ())
    with pytest.raises(ValueError, match="--text goes with one of ptq, calibration, qat, fp8_training alone"):
        run.check_asked(["decode"], RealModels(models=("m",), own_text=own), ())


def test_published_rows_of_another_text_or_other_windows_are_not_taken(tmp_path):
    """Nor the row of the model that stands for the measurement; what has no windows is."""
    (tmp_path / "own.txt").write_text("word " * 50)
    settings = Settings(scale="quick", device="cpu", cache=tmp_path)
    own = OwnText.of(tmp_path / "own.txt", whole=True)
    asked = replace(settings, asked=RealModels(models=("m",), own_text=own, windows=2, length=64))
    (text,) = texts_of(asked)

    def measured(name, windows=2, length=64, method="int8"):
        values = {"windows": (windows, ""), "tokens of a window": (length, ""), **status("ok")}
        return [
            *settings.rows("ptq", "real m", name, "weights", method, values),
            *settings.rows(
                "ptq", "real m", MODEL, "weights", method, {"size": (1.0, "byte"), **status("ok")}
            ),
        ]

    mine, layers = measured(text.name), settings.rows("ptq", "layers", "x", "weights", "int8", status("ok"))
    taken = partial(measured_on, settings=asked, windows=WINDOWS)
    assert taken([*mine, *layers]) == [*mine, *layers]
    for others in (measured("other"), measured(text.name, 3), measured(text.name, 2, 128)):
        assert taken([*others, *layers]) == layers
    assert taken([*mine, *measured("other", method="int4")]) == mine


def test_windows_are_those_of_the_experiment(tmp_path):
    """Of caches and attention a text stands for itself, a short run reads one, and some rows name their length alone."""
    (tmp_path / "own.txt").write_text("word " * 50)
    own = OwnText.of(tmp_path / "own.txt")
    settings = Settings(
        scale="quick", device="cpu", cache=tmp_path, asked=RealModels(models=("m",), own_text=own)
    )
    first, second = texts_of(settings)

    def attended(text, tokens):
        return settings.rows(
            "prefill_attention", "real m", text.name, "attention", "int8", tokens | status("ok")
        )

    for name in ("kv_cache", "prefill_attention"):
        windows = EXPERIMENTS[name].windows
        assert texts_of(settings, windows) == (first,)
        mine = attended(first, {"tokens": (192, "")})
        assert measured_on([*mine, *attended(second, {"tokens": (192, "")})], settings, windows) == mine
        assert measured_on(attended(first, {"tokens": (512, "")}), settings, windows) == []
        whole = replace(settings, scale="full")
        assert texts_of(whole, windows) == (first, second)


def test_a_measurement_says_what_is_left_of_it(monkeypatch):
    """By the pace of its layers; what is measured first, for comparison, goes by its own name."""
    now = iter(range(0, 1000, 10))
    clock = SimpleNamespace(monotonic=lambda: float(next(now)), perf_counter=lambda: 0.0)
    monkeypatch.setattr("ao_lab.progress.time", clock)
    monkeypatch.setattr(real_models, "time", clock)
    watch, told = real_models.Watch(Deadline(None)), []
    monkeypatch.setattr(watch, "tell", told.append)
    watch.begins("gptq")
    with watch.first("rounding"):
        watch.at("a text")
    for done in (1, 2, 3, 4):
        watch.progress("a layer", done, 10)
    assert told[1:4] == ["rounding, for gptq", "rounding, for gptq: a text", "gptq"]
    assert told[4] == "gptq: a layer, 1 of 10"
    assert told[-1].startswith("gptq: a layer, 4 of 10, about ")
    assert told[-1].endswith(" left of it")
