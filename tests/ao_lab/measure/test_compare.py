"""`compare`: rows hold what `evaluate` measures, sizes and speeds; what was measured is kept; wrong input is refused first."""

import importlib.util
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ao_lab
from ao_lab import SchemeConfig, compare, evaluate, model_size, plot, quantize_, save_pretrained
from ao_lab.cli.app import main
from ao_lab.install.extras import WrongInput
from ao_lab.install.revision import commit
from ao_lab.measure.compare import Remembered, Store, doubtful, publish, reason, unserved_of
from ao_lab.measure.comparison import Compared, Comparison
from ao_lab.measure.configurations import made_from, reasons_of
from ao_lab.measure.evaluate import fingerprint
from ao_lab.measure.memory import out_of_memory
from ao_lab.measure.times import differing
from ao_lab.plot.tradeoff import frontier
from ao_lab.transforms.plan import PYTHON_ADVICE
from tests.support.models import fake_harness
from tests.support.models.hf_models import WORDS, save_llama

transformers = pytest.importorskip("transformers")
pytest.importorskip("matplotlib")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:You passed `quantization_config`"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dense model, a version of it in our layout, and a text."""
    root = tmp_path_factory.mktemp("model")
    model = save_llama(root / "base")
    quantize_(model, SchemeConfig(scheme="nf4"))
    save_pretrained(model, root / "made")
    (root / "text.txt").write_text(" ".join([WORDS] * 30))
    (root / "other.txt").write_text(" ".join([WORDS[::-1]] * 30))
    return root


def given(folder, **more):
    return {"text": folder / "text.txt", "limit": 3, "length": 24, "new_tokens": 0, "device": "cpu", **more}


@pytest.fixture(scope="module")
def found(folder):
    """A comparison with everything."""
    configs = {"int8": "Int8WeightOnlyConfig", "nf4": "nf4", "made": folder / "made", "never": "int4_g512"}
    out = folder / "out"
    return compare(folder / "base", configs, out=out, **given(folder, new_tokens=3)), configs, out


def test_rows_are_what_evaluate_measures(folder, found):
    comparison, *_ = found
    rows = {row.name: row for row in comparison.rows}
    assert list(rows) == ["unquantized", "int8", "nf4", "made", "never"]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype="auto").eval()
    quantize_(model, SchemeConfig(scheme="nf4"))
    alone = evaluate(
        model,
        tokenizer=folder / "base",
        against=folder / "base",
        text=folder / "text.txt",
        limit=3,
        length=24,
    )
    for row in (rows["nf4"], rows["made"]):
        assert row.loss == alone.tasks["perplexity"]["loss"]
        assert (row.kl, row.difference) == (
            alone.tasks["agreement"]["kl"],
            alone.tasks["agreement"]["loss_difference"],
        )
    # Of the files: the folder is what save_pretrained wrote of the same configuration.
    assert (rows["nf4"].layout, rows["nf4"].bytes) == (rows["made"].layout, rows["made"].bytes)
    assert abs(rows["nf4"].bytes - model_size(model).bytes) < 1000  # buffers that no file holds
    low, high = rows["nf4"].interval
    assert low < rows["nf4"].perplexity < high
    assert rows["unquantized"].bits_per_parameter == pytest.approx(16, rel=1e-3)  # buffers count
    assert (rows["nf4"].layers, rows["nf4"].of_layers, rows["unquantized"].layers) == (8, 8, 0)


def test_speed_and_memory_are_measured(folder, found):
    for row in found[0].rows[:4]:
        assert row.tokens_per_second > 0
        assert row.baseline_tokens_per_second > 0
        assert row.peak_bytes > row.bytes
        assert 1 <= row.threads <= row.all_threads == torch.get_num_threads()
    assert len({row.threads for row in found[0].rows[:4]}) == 1
    assert "not compiled, timed with " in " ".join(found[0].notes)
    assert "peak MB" in found[0].table()[0]
    assert found[0].rows[0].speedup == 1


def test_layers_that_stay_are_counted_with_the_reason(folder):
    """A configuration that reaches a part of the model alone would else seem to be small and good."""
    found = compare(folder / "base", {"all": "nf4", "some": "int4_g256"}, **given(folder))
    every, some = found.rows[1:]
    assert (every.left, every.layers) == ({}, every.of_layers)
    assert some.layers == some.of_layers - sum(some.left.values()) == 1
    (note,) = found.left()
    assert note.startswith("some: 7 of 8 linear layers stay unquantized: 128 elements are not divisible by")
    assert "pad the tensor" not in note
    assert note in found.notes
    assert Comparison.from_dict(json.loads(json.dumps(found.to_dict()))).left() == [note]


def test_what_fits_no_layer_is_said_before_anything_is_measured(folder, monkeypatch, capsys):
    monkeypatch.setattr("ao_lab.measure.compare.compare", lambda *_, **__: pytest.fail("measured"))
    base = ["compare", str(folder / "base")]
    assert main([*base, "Int4WeightOnlyConfig group_size=511"]) == 2
    assert (
        "groups of 511 divide the inputs of no layer (128, 256); use group_size=" in capsys.readouterr().err
    )
    with pytest.raises(pytest.fail.Exception):
        main([*base, "Int4WeightOnlyConfig group_size=511", "nf4"])
    assert "group_size=511 will have failed: groups of 511" in capsys.readouterr().err


def test_what_cannot_be_applied_says_why(found):
    row = found[0].rows[-1]
    # A message for users needs no name of a class or a function, and ends with a whole word.
    assert row.reason == "groups of 512 divide the inputs of no layer (128, 256); use group_size=128"
    assert reason(ValueError("quantize_: " + "word " * 300)).endswith("word word...")
    assert reason(RuntimeError("of torch")) == "RuntimeError: of torch"
    assert row.loss is None
    assert any(note.startswith("never failed: groups of 512") for note in found[0].notes)
    assert found[0].table()[-1][:2] == ["never", "failed"]
    assert len({len(line) for line in found[0].table()}) == 1


def test_faults_are_no_refusals(folder, tmp_path, monkeypatch):
    """Memory that does not suffice is the answer of a row; an error of a GPU ends the comparison, and rows stay."""
    errors = {
        "nf4": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        "mxfp4": RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        "nvfp4": RuntimeError("CUDA error: an illegal memory access was encountered"),
    }

    def quantized(self, config, base):
        raise errors[config.scheme.name]

    monkeypatch.setattr("ao_lab.measure.compare.Work.quantized", quantized)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        compare(folder / "base", list(errors), out=tmp_path, **given(folder))
    rows = {
        row["name"]: row["reason"] for row in json.loads((tmp_path / "comparison.json").read_text())["rows"]
    }
    assert list(rows) == ["unquantized", "nf4", "mxfp4"]
    assert rows["nf4"].startswith("OutOfMemoryError: CUDA out of memory")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        main(
            [
                "compare",
                str(folder / "base"),
                "nvfp4",
                "--layout",
                "ao_lab",
                "--limit",
                "1",
                "--length",
                "8",
                "--new-tokens",
                "0",
            ]
        )


def test_a_gpu_is_the_current_device_inside(folder, monkeypatch):
    """With a stand-in for the GPU: the device that was named holds model and inputs, is current, is named, and is emptied."""
    log = []

    class Current:
        def __init__(self, device):
            log.append(("current", device))

        def __enter__(self):
            log.append("begin")

        def __exit__(self, *error):
            log.append("end")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", Current)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of {device}")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("emptied"))
    real = ao_lab.measure.compare.in_memory
    monkeypatch.setattr(
        "ao_lab.measure.compare.in_memory",
        lambda model, device: log.append(("loaded", device)) or real(model, "cpu"),
    )
    found = compare(folder / "base", ["nf4"], **given(folder, device="cuda:1"))
    assert found.conditions["device"] == "GPU of cuda:1"
    assert log == [("current", "cuda:1"), "begin", ("loaded", "cuda:1"), "emptied", "end"]
    assert (
        compare(folder / "base", ["nf4"], **given(folder, device=None)).conditions["device"] == "GPU of cuda"
    )


def test_tasks_of_the_harness_beside_the_rest(folder, capsys, monkeypatch):
    """With a stand-in for it: each row's own model is asked, with the options; what it says stands in columns of their own."""
    base = [str(folder / "base"), "nf4", "--limit", "2", "--length", "16", "--new-tokens", "0"]
    if importlib.util.find_spec("lm_eval") is None:
        assert main(["compare", *base, "--tasks", "made_up"]) == 2
        assert "or leave --tasks out" in capsys.readouterr().err
    calls = fake_harness.install(monkeypatch)
    monkeypatch.setattr("ao_lab.eval.tokenizer_of", lambda *_: "tokenizer")
    found = compare(folder / "base", ["nf4"], tasks=["made_up"], **given(folder, limit=2))
    assert [row.tasks for row in found.rows] == [
        {"made_up": {"acc": 0.5, "acc_stderr": 0.25, "sample_len": 4}}
    ] * 2
    assert (calls["tasks"], calls["limit"]) == (["made_up"], 2)
    quantized = [
        any(isinstance(p, ao_lab.QuantizedTensor) for p in one.parameters()) for one in calls["models"]
    ]
    assert quantized == [False, True]
    head, *rows = found.table()
    assert head[-1] == "made_up acc"
    # Of four examples: Student's t with 3 degrees of freedom, 3.18.
    assert [line[-1] for line in rows] == ["0.50 ± 0.80"] * 2
    assert any("at most 2 examples of each; ±: half of a 95% interval over" in note for note in found.notes)
    assert Comparison.from_dict(json.loads(json.dumps(found.to_dict()))).rows == found.rows
    assert (
        main(["compare", *base, "--tasks", "made_up", "--num-fewshot", "2", "--batch-size", "4", "--json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["conditions"]["tasks"]["num_fewshot"] == "2"
    assert (calls["num_fewshot"], calls["batch_size"]) == (2, "4")
    for wrong, said in (
        (["made_op"], "unknown task 'made_op'"),
        (["perplexity"], "compare takes tasks of lm-eval"),
    ):
        assert main(["compare", *base, "--tasks", *wrong]) == 2
        assert said in capsys.readouterr().err


def test_a_stopped_comparison_goes_on(folder, found, monkeypatch):
    """Rows that are there are not measured again; those that failed are tried again; others join them."""
    comparison, configs, out = found
    measured = []
    real = ao_lab.measure.compare.Work.row
    monkeypatch.setattr(
        "ao_lab.measure.compare.Work.row",
        lambda self, name, *more: measured.append(name) or real(self, name, *more),
    )
    again = compare(
        folder / "base", {"nf4": configs["nf4"], "mx": "mxfp4"}, out=out, **given(folder, new_tokens=3)
    )
    assert measured == ["mx"]
    assert again.rows[1] == comparison.rows[2], "its date too"
    assert all(row.date and row.commit == commit() for row in again.rows)
    assert {"ao_lab", "torch", "transformers"} <= again.conditions["versions"].keys()
    (speed,) = (note for note in again.notes if "tokens/s" in note)
    assert "a prompt of 16 tokens and 3 new ones, prefill in the time" in speed
    other = {**again.conditions, "versions": {**again.conditions["versions"], "torch": "1.0"}}
    assert differing(other, again.conditions).startswith("versions was {'torch': '1.0'}, now {'torch': ")
    kept = [row["name"] for row in json.loads((out / "comparison.json").read_text())["rows"]]
    assert kept == ["unquantized", "int8", "nf4", "made", "mx"]
    with pytest.raises(ValueError, match=r"other conditions: --length was 24, now 20; choose"):
        compare(folder / "base", ["nf4"], out=out, **given(folder, new_tokens=3, length=20))


def test_files_hold_the_table_and_the_picture(found):
    comparison, _, out = found
    assert "| unquantized | 0/8 |" in (out / "comparison.md").read_text()
    assert ">nf4<" in (out / "comparison.svg").read_text()
    assert (out / "comparison-dark.svg").read_text() != (out / "comparison.svg").read_text()
    assert Comparison.from_dict(json.loads(json.dumps(comparison.to_dict()))) == comparison
    assert list(comparison.to_frame()["name"]) == [row.name for row in comparison.rows]
    assert "unquantized" in str(comparison)
    assert isinstance(comparison.plot(), type(plot.values("int4")))


def test_methods_and_models_in_memory(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype="auto").eval()
    more = given(folder, calibration=folder / "other.txt", methods=["gptq"], calibration_windows=2)
    calibrated = compare(model, ["int4_g32"], tokenizer=folder / "base", **more)
    gptq = calibrated.rows[1]
    assert [line[0] for line in calibrated.table()[1:]] == ["unquantized", "int4_g32 + gptq"]
    assert (gptq.name, gptq.methods) == ("int4_g32", "gptq")
    plain = compare(model, ["int4_g32"], tokenizer=folder / "base", **given(folder)).rows[1]
    assert (gptq.status, gptq.bytes) == ("ok", plain.bytes)
    assert gptq.kl != plain.kl
    assert not any(isinstance(one, ao_lab.QuantizedTensor) for one in model.parameters())


def test_the_same_text_is_told(folder):
    more = given(folder, calibration=folder / "text.txt", methods=["gptq"], calibration_windows=2)
    assert any(
        "Calibrated on the text that is measured" in note
        for note in compare(folder / "base", ["nf4"], **more).notes
    )


def test_other_weights_of_the_same_name_are_told_apart(folder, tmp_path):
    """A comparison of a model that has changed since does not go on."""
    compare(folder / "base", ["nf4"], out=tmp_path / "out", **given(folder))
    other = tmp_path / "base"
    save_llama(other, seed=1)
    with pytest.raises(ValueError, match=r"other conditions: the model's weights differ"):
        compare(other, ["nf4"], out=tmp_path / "out", **given(folder))


def test_what_a_comparison_is_of_is_told_apart(folder, tmp_path):
    """Other texts of one name, other dtypes, and folders of another content under one path do not share rows."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype="auto")
    texts = [ao_lab.measure.evaluate.Text("mine", " ".join([words] * 30)) for words in (WORDS, WORDS[::-1])]
    out = tmp_path / "out"
    one = compare(folder / "base", ["nf4"], out=out, **given(folder, text=texts[0], limit=1))
    assert [(row.loss_stderr, row.interval) for row in one.rows] == [(None, None)] * 2  # of a single window
    assert "95% interval" not in one.table()[0]
    assert "±" not in str(one)
    with pytest.raises(ValueError, match=r"other conditions: the text's tokens differ"):
        compare(folder / "base", ["nf4"], out=out, **given(folder, text=texts[1], limit=1))
    assert fingerprint(model) != fingerprint(model.float())
    shutil.copytree(folder / "made", tmp_path / "made")
    before = made_from(tmp_path / "made")
    assert made_from(tmp_path / "made") == before
    (weights,) = (tmp_path / "made").glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 4096] = bytes(4096)
    weights.write_bytes(data)
    assert made_from(tmp_path / "made") != before


def test_logits_are_kept_while_they_fit(monkeypatch):
    class Model(nn.Module):
        calls = 0

        def forward(self, ids):
            self.calls += 1
            logits = torch.zeros(1, ids.shape[1], 8)
            return type("Out", (), {"logits": logits})() if self.calls % 2 else logits

    model = Model()
    base = Remembered(model)
    one, other = torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4, dtype=torch.int64)
    monkeypatch.setattr("ao_lab.measure.compare.KEPT", 4 * 8 * 4)
    for ids in (one, one, other, other):
        base(ids)
    assert model.calls == 3


@pytest.mark.parametrize(
    ("configs", "wrong", "said"),
    [
        (
            ["Int4WeightOnly"],
            {},
            "unknown configuration or scheme 'Int4WeightOnly'; the nearest are Int4WeightOnlyConfig",
        ),
        ([], {}, "one configuration or more"),
        (["nf4", "nf4"], {}, "'nf4' is given twice"),
        (["nf4"], {"length": 65}, "takes at most 64 tokens"),
        (["nf4"], {"text": "nowhere"}, "is no file"),
        (["nf4"], {"methods": ["gptq"]}, "gptq needs calibration data"),
        (["nf4"], {"methods": ["gptq"], "calibration": "nowhere"}, "^--calibration nowhere is no file"),
        (["nf4"], {"methods": ["gptk"]}, "unknown method 'gptk'"),
        (["nf4"], {"new_tokens": -1}, "new_tokens is 0 or more"),
        (["nf4"], {"new_tokens": 49}, "the new tokens are 65, and the model takes at most 64"),
        (["nf4"], {"device": "gpu"}, "--device gpu: Expected one of cpu"),
        (["Int8StaticActivationInt8WeightConfig"], {}, "needs calibration data"),
    ],
)
def test_what_does_not_fit(folder, configs, wrong, said, monkeypatch):
    monkeypatch.setattr("ao_lab.measure.evaluate.loaded", lambda *_: pytest.fail("the model was read"))
    with pytest.raises(ValueError, match=said):
        compare(folder / "base", configs, **given(folder, **wrong))


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (KeyError("CUDA error: out of memory"), False),
    ],
)
def test_errors_of_full_memory(error, full):
    assert out_of_memory(error) is full


def test_weights_of_other_shapes_than_the_configuration(folder, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(folder / "base", model)
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(fields | {"vocab_size": 2 * fields["vocab_size"]}))
    with pytest.raises(
        WrongInput, match=r"config\.json describes weights of other shapes than the files have"
    ):
        compare(model, ["nf4"], **given(folder))


def test_models_that_cannot_be_compared(folder):
    with pytest.raises(ValueError, match="is quantized already; give its unquantized base model"):
        compare(folder / "made", ["nf4"], **given(folder))
    with pytest.raises(ValueError, match="names on the Hub are not fetched"):
        compare("some/model", ["nf4"], **given(folder))
    with pytest.raises(ValueError, match=r"Linear has no generate\(\) of transformers"):
        compare(nn.Linear(4, 4), ["nf4"], **given(folder, new_tokens=1))
    with pytest.raises(ValueError, match="--device cpu: the model in memory is on meta"):
        compare(nn.Linear(4, 4, device="meta"), ["nf4"], **given(folder))


def test_labels_say_what_differs():
    from ao_lab.measure.configurations import label_of

    assert label_of(ao_lab.Int4WeightOnlyConfig(group_size=32)) == "Int4WeightOnlyConfig group_size=32"
    assert label_of(ao_lab.NF4WeightOnlyConfig()) == "NF4WeightOnlyConfig"


def test_from_the_command_line(folder, capsys):
    arguments = [
        "compare",
        str(folder / "base"),
        "--configs",
        "nf4,int8_rowwise",
        "Int4WeightOnlyConfig group_size=32",
    ]
    text = ["--text", str(folder / "text.txt"), "--limit", "2", "--length", "16", "--new-tokens", "0"]
    assert main([*arguments, *text, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    names = ["unquantized", "nf4", "int8_rowwise", "Int4WeightOnlyConfig group_size=32"]
    assert [row["name"] for row in told["rows"]] == names
    # What `ao-lab quantize` writes for transformers is what is measured, and the row says so.
    as_written = ao_lab.Int4WeightOnlyConfig(group_size=32).for_layout("compressed-tensors")
    loss = compare(folder / "base", [as_written], **given(folder, limit=2, length=16)).rows[1].loss
    assert (told["rows"][3]["loss"], told["rows"][1]["changes"]) == (loss, "")
    assert "int4_g32_cast in place of int4_g32_asymmetric" in told["rows"][3]["changes"]
    for wrong, said in (
        (["mxfp5"], "the nearest are mxfp4"),
        (["Int4WeightOnlyConfig grup=1"], "has no option grup"),
        (["nf4", "--eval", "nowhere"], "--text nowhere is no file"),
        (["nf4", "--out", str(folder / "text.txt")], "is a file, and a folder is needed"),
    ):
        assert main(["compare", str(folder / "base"), *text[2:], *wrong]) == 2
        assert said in capsys.readouterr().err


def test_losses_are_kept_while_generate_is_timed(folder, tmp_path, monkeypatch):
    """A minute of perplexity is not lost where the call stops a second later."""

    def stopped(self, model, base):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ao_lab.measure.compare.Work.speed", stopped)
        with pytest.raises(KeyboardInterrupt):
            compare(folder / "base", ["nf4"], out=tmp_path, **given(folder, new_tokens=2))
    kept = json.loads((tmp_path / "comparison.json").read_text())
    assert (kept["rows"], list(kept["parts"])) == ([], ["unquantized"])
    # Those of a row that is not asked for now stay in the file, as whole rows do.
    other = {
        **kept,
        "made_by": {**kept["made_by"], "mxfp4": "theirs"},
        "parts": {**kept["parts"], "mxfp4": {}},
    }
    (tmp_path / "comparison.json").write_text(json.dumps(other))
    measured = []
    real = ao_lab.measure.compare.measured
    monkeypatch.setattr(
        "ao_lab.measure.compare.measured", lambda *given: measured.append(given[0]) or real(*given)
    )
    found = compare(folder / "base", ["nf4"], out=tmp_path, **given(folder, new_tokens=2))
    assert len(measured) == 1  # of nf4 alone
    assert found.rows[0].loss == kept["parts"]["unquantized"]["loss"]
    assert json.loads((tmp_path / "comparison.json").read_text())["parts"] == {"mxfp4": {}}


def test_a_sentence_is_said_once_with_its_configurations():
    rows = (
        Compared("unquantized"),
        Compared("a", changes="weights: x in place of y, because files are small"),
        Compared("b", changes="weights: x in place of y, because none reads them; files are small"),
        Compared("c", "failed", reason="no room"),
        Compared("d", "failed", reason="no room"),
    )
    found = Comparison("m", rows, {"text": "t", "windows": 1, "length": 2, "device": "cpu"})
    first, *why = found.changed()
    assert first.endswith("writes them (--layout ao_lab: unchanged): a, b: weights: x in place of y.")
    assert why == ["Because files are small: a, b.", "Because none reads them: b."]
    assert found.notes[0] == "c, d failed: no room"


def test_reasons_have_no_advice_for_calls_of_quantize():
    layer = SimpleNamespace(
        changed=False, shape=(2, 2), kind="Linear", reason=f"tied{PYTHON_ADVICE}can select it"
    )
    assert reasons_of(SimpleNamespace(layers=[layer])) == {"tied": 1}


def test_files_of_earlier_versions_are_read():
    old = {"name": "a", "status": "why not", "bits": 4.5, "speed": 2.0}
    (row,) = Comparison.from_dict({"model": "m", "conditions": {}, "rows": [old]}).rows
    assert (row.status, row.reason) == ("failed", "why not")
    assert (row.bits_per_parameter, row.speedup) == (4.5, 2.0)


def test_speedups_that_cannot_be_trusted_say_so():
    """A busy machine is told of once, a noisy speedup in its cell and with its reason; small divergences are no zeros."""
    doubt = "the rounds' ratios spread from 1.00 to 5.00"
    rows = (
        Compared("bfloat16", speedup=1.0, load=0.5, cores=2),
        Compared("int8", speedup=4.9, load=10.6, cores=2, doubt=doubt, kl=1.2e-5),
    )
    told = {"text": "a text", "windows": 4, "length": 8, "device": "a CPU", "new_tokens": 8}
    shown = Comparison("m", rows, told)
    head, first, second = shown.table()
    at = head.index("speedup")
    assert (first[at], second[at], second[head.index("KL")]) == ("1.00x", "4.90x (noisy)", "1.2e-05")
    assert "Load 10.6 on 2 cores: times are not reliable, end other work first." in shown.notes
    assert "Noisy: int8: its rounds disagree" in " ".join(shown.notes)
    assert not any(note.startswith("On a CPU") for note in shown.notes)
    on_cpu = Comparison("m", rows, {**told, "device": "cpu"}).notes
    assert any(note.startswith("On a CPU") and "kernel=int8" in note for note in on_cpu)
    assert Comparison.from_dict(shown.to_dict()) == shown
    assert not any("reliable" in note or "noisy" in note for note in Comparison("m", rows[:1], told).notes)


def compared(name, difference, error, size, windows=8, layers=7, **more):
    return Compared(
        name, difference=difference, difference_stderr=error, bytes=size, loss=2.0, windows=windows, layers=layers,
        of_layers=8, **more,
    )  # fmt: skip


CONDITIONS = {"text": "t", "windows": 8, "length": 2, "device": "cpu"}


def test_which_is_best_is_said_as_far_as_windows_tell():
    """Upper ends of intervals count, against 1% of perplexity (0.00995): a wide interval around less loss is no merit."""
    rows = [Compared("unquantized", bytes=100, loss=2.0, windows=8)]
    rows += [
        compared("a", 0.0023, 0.001, 40),
        compared("b", 0.0001, 0.001, 60),
        compared("c", 0.01, 0.001, 20, layers=6),
        compared("d", 0.001, 0.01, 10),
    ]
    found = Comparison("m", tuple(rows), CONDITIONS)
    assert found.notes[0] == found.best
    assert found.best.startswith(
        "Best: a (the smallest that surely loses no more than 1% of perplexity; --tolerance): 4e-05 MB"
    )
    assert "loss +0.0023 ± 0.0024 nats per token, perplexity at most +0.468%." in found.best
    assert found.to_dict()["best"]["name"] == "a"
    assert found.to_dict()["rows"][1]["difference_95"] == pytest.approx(
        (0.0023 - 0.002365, 0.0023 + 0.002365), abs=1e-6
    )
    assert Comparison("m", tuple(rows), CONDITIONS, tolerance=5.0).choice[0] is rows[4]
    assert Comparison.from_dict(Comparison("m", tuple(rows), {}, 5.0).to_dict()).tolerance == 5.0
    least = Comparison("m", (rows[0], *rows[3:]), {}).best
    head, *lines = found.tables()[0]
    assert [line[head.index("change")] for line in lines] == [
        "-", "+0.23 ± 0.24%", "+0.01 ± 0.24%", "+1.01 ± 0.24%", "+0.1 ± 2.4%",
    ]  # fmt: skip
    assert least.startswith(
        "None surely loses no more than 1% of perplexity (--tolerance); c loses least for sure: "
    )
    few = Comparison("m", (rows[0], compared("a", 0.0, 0.1, 40, windows=7)), CONDITIONS)
    assert few.best.startswith("No best configuration: 7 windows cannot tell; measure 8 or more")
    assert Comparison("m", (rows[0],), CONDITIONS).best == ""
    guessing = replace(rows[0], loss=12.0, vocabulary=49152)
    assert Comparison("m", (replace(guessing, loss=11.0), *rows[1:]), {}).choice[0] is rows[1]
    assert (
        "No best configuration: the unquantized model's perplexity is 1.63e+05, worse than guessing among 49152 tokens"
        in (Comparison("m", (guessing, *rows[1:]), {}).best)
    )
    # Layers that stayed are in the label. Without losses of windows these alone say what is drawn as better, with them the
    # differences of two configurations: b differs from d by nothing but noise.
    assert "c (6 of 8 layers)" in {one.name for one in found.points()}
    assert [one.name for one in frontier(found.points())] == ["d", "b", "unquantized"]
    noise = (0.1, -0.1, 0.2, -0.2, 0.1, -0.1, 0.2, -0.2)
    paired = [replace(rows[4], differences=(0.001,) * 8), replace(rows[2], differences=noise)]
    assert [one.name for one in frontier(Comparison("m", (rows[0], *paired), {}).points())] == ["d"]


def test_none_is_best_whose_predictions_are_other_ones():
    """Quantization that destroyed them may have less loss by chance; an interval of KL that reaches below 0.5 nats is none."""
    base = Compared("unquantized", bytes=100, loss=2.0, windows=8)
    good = compared("good", 0.001, 0.001, 60, kl=0.1, kl_stderr=0.01)
    far = compared("far", -0.19, 0.01, 40, kl=1.5, kl_stderr=0.1)
    wide = compared("wide", 0.002, 0.001, 50, kl=0.6, kl_stderr=0.1)
    assert Comparison("m", (base, good, far), CONDITIONS).choice[0] is good
    assert Comparison("m", (base, good, wide), CONDITIONS).choice[0] is wide
    alone = Comparison("m", (base, far), CONDITIONS)
    assert alone.choice[0] is None
    assert "all predict something else than the unquantized model (KL surely over 0.5 nats)" in alone.best


def test_vllm_is_named_for_what_it_has_kernels_for(folder):
    """As the card: the layout's other reader takes more formats."""
    rows = [Compared("unquantized", bytes=100, loss=2.0, windows=8)]
    rows += [
        compared("int3", 0.001, 0.001, 40, layout="compressed-tensors", unserved="W3A16"),
        compared("int4", 0.002, 0.001, 60, layout="compressed-tensors"),
    ]
    found = Comparison("m", tuple(rows), CONDITIONS)
    assert found.readable == "int4"
    assert (
        "without ao_lab; vLLM lists no kernel for W3A16. Of those that vLLM loads: int4, 6e-05 MB."
        in found.best
    )
    assert found.layouts()[1].endswith(" and in vLLM, without ao_lab: int4.")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype="auto")
    quantize_(model, SchemeConfig(scheme="int3_g64"))
    assert "W3A16" in unserved_of(model, None)


def test_the_best_names_its_layout_and_the_best_that_every_client_reads():
    """A layout that transformers alone refuses is no answer for who serves by vLLM."""
    rows = [Compared("unquantized", bytes=100, loss=2.0, windows=8)]
    rows += [
        compared("nf4", 0.001, 0.001, 40, layout="ao_lab"),
        compared("int4", 0.002, 0.001, 60, layout="compressed-tensors"),
        compared("int8", 0.000, 0.001, 90, layout="compressed-tensors"),
    ]
    found = Comparison("m", tuple(rows), CONDITIONS)
    assert found.best.startswith("Best: nf4 (")
    assert found.best.endswith("alone refuses it. Of those that vLLM loads: int4, 6e-05 MB.")
    assert found.to_dict()["best"]["readable"] == "int4"
    assert [row[2] for row in found.table()] == ["layout", "-", "ao_lab", *["compressed-tensors"] * 2]
    assert any(one.startswith("Layout ao_lab, loads with ao_lab.load_pretrained") for one in found.notes)
    assert "layout" not in Comparison("m", (rows[0], *rows[2:]), CONDITIONS).best


def test_a_folder_of_another_model_is_refused(folder, tmp_path):
    shutil.copytree(folder / "made", tmp_path / "made")
    fields = json.loads((tmp_path / "made" / "config.json").read_text())
    (tmp_path / "made" / "config.json").write_text(json.dumps(fields | {"hidden_size": 576}))
    with pytest.raises(ValueError, match="made is no version of base: hidden_size is 576 there and 128 here"):
        compare(folder / "base", [tmp_path / "made"], **given(folder))


def test_a_folder_whose_tokenizer_reads_other_tokens_is_refused(folder, tmp_path):
    """Two models of one architecture may have tables of the same sizes."""
    shutil.copytree(folder / "made", tmp_path / "made")
    fields = json.loads((folder / "base" / "tokenizer.json").read_text())
    words = fields["model"]["vocab"]
    turned = dict(zip(words, reversed(words.values()), strict=True))
    (tmp_path / "made" / "tokenizer.json").write_text(
        json.dumps({**fields, "model": {**fields["model"], "vocab": turned}})
    )
    with pytest.raises(ValueError, match=r"made is no version of this model: its tokenizer\.json reads"):
        compare(folder / "base", [tmp_path / "made"], **given(folder))


def test_speeds_of_a_busy_host_are_noisy():
    """By a baseline that was slower than beside another configuration, and by what else the host had to run."""
    rows = [
        Compared("unquantized", baseline_tokens_per_second=6.0, speedup=1.0, load=1.0, cores=2),
        Compared("quick", baseline_tokens_per_second=6.1, speedup=0.9, load=1.0, cores=2),
        Compared("slow", baseline_tokens_per_second=3.0, speedup=0.9, load=1.0, cores=2),
        Compared("busy", baseline_tokens_per_second=6.0, speedup=0.9, load=7.4, cores=2),
        Compared("alone"),
        Compared("unquantized", baseline_tokens_per_second=3.0, speedup=1.0, load=0.1, cores=2),
    ]
    assert [row.doubt for row in doubtful(rows)] == [
        "", "", "the baseline took 2.0 times as long as beside another configuration",
        "the host had more than 3 processes to run on 2 cores", "",
        "the baseline took 2.0 times as long as beside another configuration",
    ]  # fmt: skip


def test_without_matplotlib_the_table_is_written(tmp_path, monkeypatch):
    found = Comparison(
        "m", (Compared("unquantized", bytes=100, loss=2.0), compared("a", 0.0, 0.1, 40)), CONDITIONS
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    publish(found, tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["comparison.md"]


def test_tables_of_a_terminal_have_80_columns():
    long = compared(
        "Float8DynamicActivationFloat8WeightConfig granularity=PerRow", -0.000507, 0.000269, 123_456_789, kl=1.234e-3,
        kl_stderr=1e-5, tokens_per_second=123.0, speedup=1.25, doubt="x", peak_bytes=10**9, bits_per_parameter=8.25,
    )  # fmt: skip
    found = Comparison("m", (Compared("unquantized", bytes=10**9, loss=2.0), long), CONDITIONS)
    text = str(found)
    assert max(map(len, text.splitlines()[:-1])) <= 80
    assert "Float8DynamicActivation" in text
    assert "  Float8WeightConfig" in text
    assert "-0.00051 ± 0.00064" in text
    assert "0.001234 ± 0.000024" in text
    assert "bits/param" in text


def test_two_calls_in_one_folder_keep_the_rows_of_both(tmp_path):
    """Each writes the whole file: what the other has measured since stays in it, under the same conditions alone."""
    conditions = {"text": "t", "windows": 8}
    one, other = (Store.of("m", conditions, {name: name}, tmp_path) for name in ("nf4", "mxfp4"))
    one.add(Compared("nf4", loss=1.0))
    other.add(Compared("mxfp4", loss=2.0))
    one.add(Compared("unquantized", loss=0.5))
    kept = json.loads((tmp_path / "comparison.json").read_text())
    assert {row["name"]: row["loss"] for row in kept["rows"]} == {
        "nf4": 1.0,
        "mxfp4": 2.0,
        "unquantized": 0.5,
    }
    assert set(kept["made_by"]) == {"nf4", "mxfp4", "unquantized"}
    assert [row.name for row in one.comparison(["nf4"]).rows] == ["nf4"]
    # Both measure int8, of which one is done; int4 is another configuration there, and fp8 failed.
    one, other = (
        Store.of("m", conditions, {"int8": "int8", "int4": bits, "fp8": "fp8"}, tmp_path)
        for bits in ("3", "4")
    )
    for row in (Compared("int8", loss=3.0), Compared("int4", loss=4.0), Compared("fp8", "failed")):
        other.add(row)
    one.add_part("unquantized", {"loss": 9.0})
    assert set(one.rows) == {"nf4", "mxfp4", "unquantized", "int8"}
    replace(one, conditions={"text": "u", "windows": 8}, rows={}, made_by={}).write()
    assert json.loads((tmp_path / "comparison.json").read_text())["rows"] == []
