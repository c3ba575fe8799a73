"""Encoders and speech models in `ptq`: the whole command on random checkpoints, the metrics by the architecture, the page."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from ao_lab import quantize_
from ao_lab.cli.app import main
from ao_lab.config.base import SchemeConfig
from experiments.data import texts
from experiments.data.sentences import Reviews
from experiments.data.utterances import Utterance
from experiments.harness.paths import Paths
from experiments.harness.rows import Row, read
from experiments.models import speech
from experiments.models.causal_lm import Bench
from experiments.models.pretrained import task_of
from experiments.models.quantized_model import decoded_weights
from experiments.models.sentence_encoder import REVIEWS
from experiments.models.speech import DATA
from experiments.ptq.page import findings, sections
from experiments.ptq.real import PARTS, check_parts, default_schemes, of_parts, programs_for
from experiments.ptq.task_page import programs_section
from experiments.runs import benches
from experiments.runs.real_models import real_subject
from experiments.runs.settings import RealModels, settings_for
from tests.support.models.hf_models import WORDS, save_llama, save_mpnet, save_whisper

pytest.importorskip("transformers")
WORD = WORDS.split()
LABELS = (True, False) * 6
TEXTS = tuple(" ".join(np.random.default_rng(seed).permutation(WORD)[:6]) for seed in range(24))


def reviews(cache, fit, test):
    return Reviews(TEXTS[:12], LABELS, TEXTS[12:], LABELS)


def utterances(cache):
    sounds = np.random.default_rng(0).normal(size=(2, 8000)).astype(np.float32) / 10
    return (Utterance("a", "one two", sounds[0]), Utterance("b", "three of clubs", sounds[1]))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run of both models: rows and pages of `ao-lab reproduce ptq --model DIR --model DIR`."""
    made = tmp_path_factory.mktemp("tasks")
    save_mpnet(made / "tiny-mpnet")
    save_whisper(made / "tiny-whisper")
    with pytest.MonkeyPatch.context() as patch:
        settle(patch, made)
        assert main(command(made)) == 0
    return made


def settle(patch, place):
    patch.setenv("AO_LAB_CACHE", str(place / "cache"))
    patch.delenv(texts.VARIABLE, raising=False)
    patch.setattr(benches, "reviews", reviews)
    patch.setattr(benches, "utterances", utterances)
    patch.setattr(speech, "TOKENS", 3)


def command(place):
    models = [word for name in ("tiny-mpnet", "tiny-whisper") for word in ("--model", str(place / name))]
    only = ["--only", "int8_rowwise", "--only", "mxfp4_rceil"]
    return [
        "reproduce",
        "ptq",
        *models,
        *only,
        "--reports",
        str(place / "reports"),
        "--device",
        "cpu",
        "--json",
    ]


def rows_of(place):
    return read(Paths(place / "cache", place / "reports").rows("ptq"))


def values(rows, table, method, setting="weights"):
    return {
        row.metric: row.value
        for row in rows
        if (row.table, row.method, row.setting) == (table, method, setting)
    }


def test_the_architecture_chooses_the_metrics(place, tmp_path):
    assert task_of(place / "tiny-mpnet") == "encoder"
    assert task_of(place / "tiny-whisper") == "speech"
    save_llama(tmp_path)
    assert task_of(tmp_path) == "language model"
    (tmp_path / "modules.json").write_text("[]")
    assert task_of(tmp_path) == "encoder"
    tables = {row.table for row in rows_of(place)}
    assert tables == {
        *(f"encoder tiny-mpnet/quick/{data}" for data in ("model", REVIEWS)),
        *(f"speech tiny-whisper/quick/{data}" for data in ("model", DATA)),
    }


@pytest.mark.parametrize(
    ("kind", "data", "measure"),
    [("encoder tiny-mpnet", REVIEWS, "cosine distance"), ("speech tiny-whisper", DATA, "KL")],
)
def test_every_scheme_has_its_rows(place, kind, data, measure):
    """The dense model at no distance from itself, coarser schemes farther; a file of no record says so."""
    rows, table = rows_of(place), f"{kind}/quick/{data}"
    assert (
        values(rows, f"{kind}/quick/model", "file", "file")["grid: not stated: the folder's own weights"] == 1
    )
    assert values(rows, table, "float32")[measure] == pytest.approx(0, abs=1e-12)
    fine, coarse = (values(rows, table, method)[measure] for method in ("int8_rowwise", "mxfp4_rceil"))
    assert 0 < fine < coarse
    inputs = {row.setting for row in rows if row.table == table and row.method == "mxfp4_rceil"}
    assert inputs == {"weights", "weights + activations in mxfp4_rceil"}
    assert all(row.metric == "status: ok" for row in rows if row.metric.startswith("status"))


def test_sizes_leave_out_what_stays_dense(place):
    rows = rows_of(place)
    dense = values(rows, "speech tiny-whisper/quick/model", "float32")["size"]
    four = values(rows, "speech tiny-whisper/quick/model", "mxfp4_rceil")
    count = values(rows, "speech tiny-whisper/quick/model", "file", "file")["quantized layers"]
    assert count == 6 + 10, "a head that is tied to the embedding is none"
    weights = 12 * 64 * 64 + 4 * 64 * 128
    assert four["bits per weight"] == 4.25
    assert dense - four["size"] == weights * (4 - 4.25 / 8)


def test_the_same_call_measures_nothing_again(place, monkeypatch, capsys):
    settle(monkeypatch, place)
    monkeypatch.setattr("experiments.ptq.real.any_bench_of", lambda *_: pytest.fail("measured again"))
    capsys.readouterr()
    assert main(command(place)) == 0
    assert "0 of them measured now" in json.loads(capsys.readouterr().out)["written"][0]["what"]


def test_the_page_has_a_section_for_each(place):
    rows = rows_of(place)
    made = {one.title: one for one in sections(rows)}
    encoder = made["tiny-mpnet, encoder (short run, CPU)"]
    spoken = made["tiny-whisper, speech (short run, CPU)"]
    assert encoder.paragraphs[0].startswith("**Grid of the file's weights before:** not stated")
    assert "12 texts; the dense model's accuracy is" in encoder.paragraphs[1]
    assert [line[:2] for line in spoken.tables[0].lines] == [
        ["float32", ""], ["int8_rowwise", ""], ["int8_rowwise", "int8_rowwise"], ["mxfp4_rceil", ""],
        ["mxfp4_rceil", "mxfp4_rceil"],
    ]  # fmt: skip
    assert all(len(line) == len(spoken.tables[0].columns) for line in spoken.tables[0].lines)
    assert len(encoder.drawings) == len(spoken.drawings) == 1
    said = " ".join(findings(rows))
    assert "tiny-mpnet, accuracy on film-reviews (short run, CPU; dense" in said
    assert "mxfp4_rceil with inputs" in said


def test_a_part_measures_the_models_of_its_task(place, tmp_path, monkeypatch):
    """With the named schemes alone, and no stand-in; without any all default ones."""
    settle(monkeypatch, place)
    monkeypatch.setitem(PARTS, "encoders", (str(place / "tiny-mpnet"),))
    here = replace(settings_for("quick", "cpu", tmp_path), only=("encoders", "int8_rowwise"))
    command = [
        "reproduce",
        "ptq",
        "--only",
        "encoders",
        "--only",
        "int8_rowwise",
        "--device",
        "cpu",
        "--json",
    ]
    assert main([*command, "--reports", str(tmp_path / "reports")]) == 0
    rows = read(Paths(place / "cache", tmp_path / "reports").rows("ptq"))
    assert {row.table for row in rows} == {f"encoder tiny-mpnet/quick/{data}" for data in ("model", REVIEWS)}
    assert {row.method for row in rows} == {"file", "float32", "int8_rowwise"}
    whole = of_parts(replace(here, only=("speech",)))
    assert whole.models == ("whisper-base",)
    assert set(whole.only) == set(default_schemes(here)) > {"nvfp4", "int2_g32"}
    assert of_parts(replace(here, only=())).models == here.models
    assert of_parts(replace(here, only=("speech", "weights"))).only == (*whole.only, "weights")


def test_parts_are_asked_for_by_name():
    check_parts(["encoders", "speech", "nvfp4", "weights"])
    with pytest.raises(ValueError, match="weights says what to measure; name the models"):
        check_parts(["weights"])
    with pytest.raises(ValueError, match="nvfp4 is a scheme; name the models beside it: --only encoders"):
        check_parts(["nvfp4"])
    with pytest.raises(ValueError, match="nvfp5"):
        check_parts(["encoders", "nvfp5"])


def test_programs_have_a_table_where_they_were_run():
    def row(method, metric, value, setting="weights"):
        return Row(experiment="ptq", table="real m/quick/model", setting=setting, method=method, metric=metric, value=value,
                   unit="", device="cpu", seed=0)  # fmt: skip

    base = [row("bfloat16", "HumanEval: problems", 9), row("bfloat16", "HumanEval: pass@1", 100 / 3)]
    four = [
        row("mxfp4_rceil", metric, value)
        for metric, value in (
            ("HumanEval: problems", 9),
            ("HumanEval: pass@1", 200 / 9),
            ("HumanEval: pass@1, change", -100 / 9),
            ("HumanEval: pass@1, standard error of the change", 100 / 9),
        )
    ]
    (section,) = programs_section([*base, *four, row("int8_rowwise", "size", 1.0)])
    assert section.tables[0].lines == [
        ["bfloat16", "", "9", "33.3", ""],
        ["mxfp4_rceil", "", "9", "22.2", "(-11 ± 22)"],
    ]
    assert programs_section([row("int8_rowwise", "size", 1.0)]) == []


def test_a_task_that_an_experiment_does_not_measure_is_refused(place, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path / "cache"))
    arguments = [
        "reproduce",
        "decode",
        "--model",
        str(place / "tiny-whisper"),
        "--reports",
        str(tmp_path / "reports"),
    ]
    assert main(arguments) == 2
    assert "tiny-whisper is no language model but speech, which decode does not measure" in " ".join(
        capsys.readouterr().err.split()
    )


def test_programs_run_where_they_were_asked_for_alone(place, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path / "cache"))
    for arguments, message in (
        (["ptq", "--execute"], "go with --model DIR"),
        (["decode", "--model", str(place / "tiny-mpnet"), "--execute"], "--execute is of ptq alone"),
    ):
        assert main(["reproduce", *arguments, "--reports", str(tmp_path / "reports")]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    asked = RealModels(models=("x",))
    here = replace(settings_for("quick", "cpu", tmp_path), asked=asked)
    bench = object.__new__(Bench)
    assert programs_for(here, bench) is None
    monkeypatch.setattr("experiments.ptq.real.problems", lambda cache, every: ("problem",) * every)
    monkeypatch.setattr("experiments.ptq.real.programs_of", lambda folder, base, found: len(found))
    object.__setattr__(bench, "model", SimpleNamespace(folder=tmp_path))
    object.__setattr__(bench, "base", None)
    assert programs_for(replace(here, asked=replace(asked, execute=True)), bench) == 20
    assert real_subject(here) != real_subject(replace(here, asked=replace(asked, execute=True)))


def test_decoded_weights_are_for_a_while_and_of_weight_only_layers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    quantize_(model[0], SchemeConfig(scheme="mxfp4_rceil"))
    quantize_(model[1], SchemeConfig(scheme="mxfp4_rceil", activation_scheme="mxfp4_rceil"))
    stored = [layer.weight for layer in model]
    x = torch.randn(3, 64)
    wanted = model(x)
    with decoded_weights(model):
        assert type(model[0].weight) is nn.Parameter
        assert model[1].weight is stored[1]
        assert torch.allclose(model(x), wanted, rtol=1e-4, atol=1e-5)
    assert [layer.weight for layer in model] == stored
