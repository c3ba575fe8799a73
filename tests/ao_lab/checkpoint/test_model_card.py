"""Model cards: what the Hub reads, and what people do."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ao_lab
from ao_lab import (
    AWQ,
    GPTQ,
    FqnToConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8StaticActivationInt8WeightConfig,
    LoRA,
    PerGroup,
    QATConfig,
    SchemeConfig,
    quantize_,
    save_pretrained,
    write_card,
)
from ao_lab.checkpoint.card_origin import History, made_of
from ao_lab.checkpoint.io.markdown import base_name, yaml_line
from ao_lab.checkpoint.model_card import (
    CARD,
    GGUF_MODELS,
    SERVED_ARCHITECTURES,
    TASKS,
    architecture_of,
    is_ours,
    loader_of,
    model_card,
    unserved_weights,
    with_results,
)
from ao_lab.clients.gguf.architectures import ARCHITECTURES
from tests.ao_lab.checkpoint.test_api import LLAMA, small_model

transformers = pytest.importorskip("transformers")
yaml = pytest.importorskip("yaml")
from tests.ao_lab.quantization.test_models import MODELS  # noqa: E402
from tests.support.models.hf_models import dense_model, outputs, quantized_model  # noqa: E402
from tests.support.runs import forks  # noqa: E402

RESULTS = {
    "text": "sympy-1.14-aa", "tokens": 124, "device": "cpu", "against": "base",
    "tasks": {"perplexity": {"token_perplexity": 12.3456789, "word_perplexity": "inf"}, "weights": {"mxfp4": 0.1}},
}  # fmt: skip


def saved(folder, scheme="mxfp4", activation=None, **arguments):
    model = small_model()
    config = SchemeConfig(scheme=scheme, activation_scheme=activation)
    quantize_(model, config, lambda m, name: isinstance(m, nn.Linear) and name != "lm_head")
    save_pretrained(model, folder, config={**LLAMA, "_name_or_path": "owner/little"}, **arguments)
    return model


def front(card):
    yaml = pytest.importorskip("yaml")
    _, matter, body = card.split("---\n", 2)
    return yaml.safe_load(matter), body


def test_a_card_of_compressed_tensors(tmp_path):
    model = saved(tmp_path / "little-mxfp4")
    matter, body = front(model_card(tmp_path / "little-mxfp4", command="ao-lab quantize --config mxfp4"))
    assert matter["base_model"] == "owner/little"
    assert matter["base_model_relation"] == "quantized"
    assert matter["library_name"] == "transformers"
    assert matter["pipeline_tag"] == "text-generation"
    assert {"mxfp4", "compressed-tensors", "quantized"} <= set(matter["tags"])
    assert matter["quantized_by"].startswith("ao_lab ")
    for text in ("# little-mxfp4", "vllm serve little-mxfp4", 'from_pretrained("little-mxfp4")',
                 'ao_lab.load_pretrained("little-mxfp4")', "`lm_head.weight`", "Accuracy was not measured"):  # fmt: skip
        assert text in body
    assert "once `import ao_lab` has run" not in body
    linear = sum(
        m.weight.numel() for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"
    )
    assert {"w4a16"} <= set(matter["tags"])
    assert (
        f"| W4A16 MXFP4, group size 32: `mxfp4` | 7 | {linear:,} | {2 * linear:,} | {linear // 2 + linear // 32:,} |"
        in body
    )


def test_commands_of_a_card_work(tmp_path, monkeypatch):
    """The Python of a card is run."""
    pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    saved(tmp_path / "little")
    loading = model_card(tmp_path / "little").partition("To generate text")[0]
    blocks = re.findall(r"```python\n(.*?)```", loading, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        names = {}
        exec(block, names)
        assert names["model"](torch.arange(4)[None]).logits.shape[-1] == 256
    assert len(blocks) == 2


test_commands_of_a_card_work = pytest.mark.filterwarnings("ignore")(test_commands_of_a_card_work)


def test_a_card_of_our_layout(tmp_path):
    saved(tmp_path / "little", "nf4")
    matter, body = front(
        model_card(tmp_path / "little", base_model="/somewhere/else/base", notes=("no format",))
    )
    assert matter["library_name"] == "ao_lab"
    assert "base_model" not in matter
    assert "Quantized from `base`" in body
    assert "after `import ao_lab`, and refuses it without. Why not compressed-tensors: no format." in body
    assert "vllm" not in body
    assert "somewhere" not in body


def test_formats_that_are_not_served(tmp_path):
    saved(tmp_path / "a", "int3_g32_cast")
    card = model_card(tmp_path / "a")
    assert "vLLM lists no kernel for W3A16 INT3, group size 32." in card
    assert "such as vLLM" not in card
    assert unserved_weights(tmp_path / "a") == "W3A16 INT3, group size 32"
    model = small_model()
    quantize_(
        model,
        FqnToConfig(
            {r"re:.*mlp.*": SchemeConfig(scheme="mxfp4"), r"re:.*attn.*": SchemeConfig(scheme="nvfp4")}
        ),
    )
    save_pretrained(model, tmp_path / "b", config=LLAMA, layout="compressed-tensors")
    card = model_card(tmp_path / "b")
    assert "vllm serve b" in card
    assert "dequantize=True" not in card


def test_a_card_names_the_export_of_what_gguf_holds_alone(tmp_path):
    assert ARCHITECTURES.keys() == {*GGUF_MODELS}
    for scheme in ("int4_g32_f16", "mxfp4", "int4_g32", "nf4"):
        saved(tmp_path / scheme, scheme)
        found = "ao-lab export" in model_card(tmp_path / scheme)
        assert found == (scheme in ("int4_g32_f16", "mxfp4")), scheme
    model, config = small_model(), SchemeConfig(scheme="mxfp4")
    quantize_(model, config, lambda m, name: isinstance(m, (nn.Linear, nn.Embedding)))
    save_pretrained(model, tmp_path / "all", config=LLAMA)
    assert "ao-lab export all model.gguf\n" in model_card(tmp_path / "all")  # --embedding is refused there


def test_results_are_shown_and_replaced(tmp_path):
    saved(tmp_path / "little")
    (tmp_path / "little" / "eval.json").write_text(json.dumps(RESULTS))
    card = model_card(tmp_path / "little")
    assert "| perplexity | perplexity per token | 12.35 |" in card
    assert "text sympy-1.14-aa (Python source code of SymPy" in card
    assert "predicted tokens 124, device cpu, base model base." in card
    again = with_results(card, {**RESULTS, "tasks": {"accuracy": {"accuracy": 0.5}}})
    assert "12.35" not in again
    assert "| accuracy | next-token accuracy | 0.5 |" in again
    assert with_results(again, RESULTS) == card
    assert "## Results" in with_results("# A card of one's own\n", RESULTS)


def test_a_card_is_written(tmp_path):
    saved(tmp_path / "little")
    path = write_card(tmp_path / "little", base_model="owner/base")
    assert path.read_text() == model_card(tmp_path / "little", base_model="owner/base")
    with pytest.raises(FileNotFoundError, match="neither"):
        write_card(tmp_path)


def test_terms_of_the_base_stay(tmp_path):
    saved(tmp_path / "little")
    earlier = (
        "---\nlicense: apache-2.0\nlanguage: en\ntags:\n- a\nlibrary_name: other\n---\n# Base\nlicense: no\n"
    )
    (tmp_path / "little" / "README.md").write_text(earlier)
    matter, body = front(model_card(tmp_path / "little"))
    assert (matter["license"], matter["language"], matter["library_name"]) == (
        "apache-2.0",
        "en",
        "transformers",
    )
    assert "# Base" not in body


def test_a_list_of_languages_stays(tmp_path):
    saved(tmp_path / "little")
    (tmp_path / "little" / "README.md").write_text("---\nlanguage:\n- en\n  - de\ntags:\n- a\n---\n")
    assert front(model_card(tmp_path / "little"))[0]["language"] == ["en", "de"]


def test_what_readers_of_the_hub_look_for(tmp_path, monkeypatch):
    """A link to the base model, code that generates with its chat template; what differs from ao_lab comes last."""
    folder = tmp_path / "little"
    saved(folder)
    body = front(model_card(folder, notes=("a kernel",)))[1]
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    assert re.search(r"Quantized from \[`owner/little`\]\(https://[a-z.]+/owner/little\)", model_card(folder))
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.invalid")
    assert "Quantized from `owner/little`" in model_card(folder)
    assert 'AutoTokenizer.from_pretrained("owner/little")' in body
    assert body.index("## How to load it") < body.index("## Notes for ao_lab") < body.index("- a kernel")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    text = model_card(folder)
    assert 'AutoTokenizer.from_pretrained("little")' in text
    assert "tokenizer.apply_chat_template(chat" in text


def test_a_card_after_qat(tmp_path):
    """It says that the model was trained, and from which."""
    config = Int8DynamicActivationIntxWeightConfig("int4", PerGroup(32))
    for lora, tag, said in (
        (None, "qat", "trained with QAT (W4A8 INT4"),
        (LoRA(rank=2), "lora", "LoRA adapters trained (W4A8 INT4"),
    ):
        model = small_model()
        quantize_(model, QATConfig(config, step="prepare", lora=lora))
        model(torch.arange(4)[None])
        quantize_(model, QATConfig(config, step="convert"))
        model.config = SimpleNamespace(_name_or_path="owner/base")
        save_pretrained(model, tmp_path / tag, config=LLAMA, layout="ao_lab")
        matter, body = front((tmp_path / tag / "README.md").read_text())
        assert matter["base_model"] == "owner/base"
        assert tag in matter["tags"]
        assert said in body
        assert "QATConfig(base_config=Int8DynamicActivationIntxWeightConfig(weight_dtype='int4')" in body
        assert "calibration" not in body
    save_pretrained(model, tmp_path / "named", config=LLAMA, layout="ao_lab", base_model="owner/other")
    assert front((tmp_path / "named" / "README.md").read_text())[0]["base_model"] == "owner/other"


def test_a_card_from_python_says_how(tmp_path, monkeypatch):
    """Configuration and rounding; neither of weights that a folder had. And where ao_lab is to be had, once that is known."""
    monkeypatch.setattr("ao_lab.checkpoint.model_card.address", lambda: "https://host.invalid/it")
    saved(tmp_path / "a", "int8_g32")
    body = (tmp_path / "a" / "README.md").read_text()
    said = "with `ao_lab.quantize_(model, SchemeConfig(scheme='int8_g32'))`: weights rounded to nearest, without calibration"
    assert said in body
    assert f"Written by ao_lab {ao_lab.__version__} (https://host.invalid/it)." in body
    assert is_ours(body)
    nameless = made_of((), "", None, History(configurations=("NF4WeightOnlyConfig()",)))
    assert nameless == "Quantized with `ao_lab.quantize_(model, NF4WeightOnlyConfig())`."
    save_pretrained(ao_lab.load_pretrained(tmp_path / "a", small_model()), tmp_path / "b", config=LLAMA)
    assert "rounded to nearest" not in (tmp_path / "b" / "README.md").read_text()


def test_a_folder_whose_card_names_its_model_is_called_so(tmp_path):
    saved(tmp_path / "little")
    (tmp_path / "base").mkdir()
    for name, shown in (("owner/name", "owner/name"), ("owner/name: [x]", None)):
        (tmp_path / "base" / "README.md").write_text(f"---\nmodel_id: {name}\n---\n")
        given = {"base_model": str(tmp_path / "base"), "base_folder": tmp_path / "base"}
        assert front(model_card(tmp_path / "little", **given))[0].get("base_model") == shown


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("owner/name", "owner/name"),
        ("/a/b/name", "name"),
        ("./name", "name"),
        ("name", "name"),
        ("", ""),
        ("../..", ""),
        ("org/x`\n## Install\n[click](http://evil)", "evil)"),
        ("org/x\u202e\x1b[0m", "x [0m"),
        ("/x/hub/models--org--na-me/snapshots/0123abc", "org/na-me"),
    ],
)
def test_names_of_bases(given, shown):
    assert base_name(given) == shown


class Tokenizer:
    """As transformers' tokenizers save themselves."""

    def save_pretrained(self, folder):
        (Path(folder) / "tokenizer.json").write_text("{}")


def test_a_card_says_what_calibration_did_and_never_that_a_tokenizer_is_missing(tmp_path):
    """As that of the command line does: methods, tokens, what was rounded, what `for_layout` changed."""
    model, base = small_model(), tmp_path / "base"
    base.mkdir()
    (base / "pretrained.json").write_text('{"grid": "layers Q4_1 (blocks of 32)"}')
    config = Int4WeightOnlyConfig(group_size=32).for_layout("compressed-tensors")
    batches = [torch.randint(0, 256, (2, 16)) for _ in range(2)]
    quantize_(model, config, calibration=batches, methods=(AWQ(ratios=3), GPTQ()))
    given = {"config": {**LLAMA, "_name_or_path": str(base)}, "base_model": str(base)}
    save_pretrained(model, tmp_path / "a", **given)
    body = front((tmp_path / "a" / CARD).read_text())[1]
    assert (
        "Quantized from `base` (a local folder) with `ao_lab.quantize_(model, Int4WeightOnlyConfig(scheme="
        in body
    )
    assert ", calibration=batches, methods=(AWQ(ratios=3), GPTQ()))`: weights quantized by " in body
    assert re.search(r"\w \(\d layers?\).* on 64 tokens of calibration data", body)
    assert "`lm_head.weight` rounded to nearest" in body
    assert config.changes
    assert all(change in body for change in config.changes)
    assert "once its tokenizer is in this folder" in body
    assert "none was saved" not in body
    assert "had been quantized before: layers Q4_1 (blocks of 32) in the base model's file" in body
    (base / "pretrained.json").write_text('{"grid": "none: float32, never quantized"}')
    saved = save_pretrained(model, tmp_path / "b", tokenizer=Tokenizer(), **given)
    assert tmp_path / "b" / "tokenizer.json" in saved.files
    assert "To generate text:" in (tmp_path / "b" / CARD).read_text()
    assert "quantized before" not in (tmp_path / "b" / CARD).read_text()
    with pytest.raises(TypeError, match="tokenizer has no save_pretrained"):
        save_pretrained(model, tmp_path / "c", tokenizer="b", **given)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("", "weights rounded to nearest, without calibration data."),
        ("--method hqq", "weights quantized by hqq, without calibration data."),
        (
            "--calibration a.txt --method 'gptq damping=0.1'",
            "weights quantized by gptq damping=0.1 with calibration data.",
        ),
        ("--calibration a.txt --method clip", "weights quantized by clip with calibration data."),
    ],
)
def test_methods_are_said(options, said):
    assert made_of((), "", f"ao-lab quantize a b {options}").endswith(f": {said}")


def test_static_scales_are_said(tmp_path):
    """They may come from data."""
    model = torch.nn.Sequential(torch.nn.Linear(128, 128))
    quantize_(model, Int8StaticActivationInt8WeightConfig(act_quant_scale=0.5))
    for layout in ("auto", "ao_lab"):
        save_pretrained(model, tmp_path / layout, layout=layout)
        text = write_card(tmp_path / layout).read_text()
        assert "static activation scales" in text
        assert "without calibration data" not in text


def test_errors_of_weights_are_called_so():
    assert "| weights | relative RMS error of mxfp4 | 0.1 |" in with_results("", RESULTS)


EVIL = "x`\n\n## Install\n\n[run](http://evil) <script> | \u202e\x1b[2J"


def test_text_of_files_adds_nothing_to_a_card(tmp_path):
    """Whatever a configuration, names of tensors, results and an earlier card say."""
    folder = tmp_path / "a`b\n# c <i>"
    model = nn.ModuleDict({"a": nn.Linear(128, 32), EVIL.replace(".", ""): nn.Linear(4, 4)})
    quantize_(model, SchemeConfig(scheme="nf4"), lambda m, name: name == "a")
    save_pretrained(
        model, folder, config={"model_type": "x", "architectures": [EVIL], "_name_or_path": f"org/{EVIL}"}
    )
    results = {"text": f"{EVIL}<!-- end of results -->", "tasks": {EVIL: {EVIL: 1.0}}}
    (folder / "eval.json").write_text(json.dumps(results))
    (folder / "README.md").write_text(
        f"---\nlicense: mit: [\nlicense_link: {EVIL!r}\nlanguage: [en, de]\n---\n"
    )
    card = model_card(folder, command=f"ao-lab quantize --option {EVIL}", notes=(EVIL,))
    matter, body = front(card)
    assert set(matter) <= {"license", "license_link", "language", "base_model", "base_model_relation", "library_name",
                           "quantized_by", "tags", "pipeline_tag"}  # fmt: skip
    assert matter["license"] == "mit: ["
    assert matter["language"] == ["en", "de"]
    headings = [line for line in card.splitlines() if line.startswith("#")]
    assert headings == ["# a\\`b # c \\<i\\>", "## What was quantized", "## Results", "## How to load it"]
    outside = re.sub(r"```.*?```|`[^`]*`", "", body.replace(r"\`", ""), flags=re.DOTALL)
    assert not re.search(r"(?<!\\)\]\(|(?<!\\)<(?!!-- (results|end) of)", outside)
    assert card.count("<!-- end of results -->") == 1
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", card)


def test_a_class_that_a_file_names_is_a_name_or_none():
    named = [
        architecture_of({"architectures": given})
        for given in (["LlamaModel"], [EVIL], "L", {"a": 1}, [], [3], None)
    ]
    assert named == ["LlamaModel", *[None] * 6]


@pytest.mark.parametrize(
    "value", ['["x]', "['a', \"b]", "[a']", "[a,", "[en, 'de', \"fr\"]", "[]", "x" * 10**5]
)
def test_what_is_taken_over_is_yaml_of_one_value(value):
    """A quote that does not end would make a list of the rest of the front matter."""
    yaml = pytest.importorskip("yaml")
    line = yaml_line(f"license: {value}")
    assert len(line) < 300
    assert set(yaml.safe_load(f"{line}\ntags: [a]")) == {"license", "tags"}


# Cards of every architecture: class, task of the Hub, code that a stranger can paste, and vLLM where it serves the model.


pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
transformers.utils.logging.disable_progress_bar()
#: Class, auto class, task, whether vLLM serves it in compressed-tensors' formats.
CARDS = [
    ("LlamaForCausalLM", "AutoModelForCausalLM", "text-generation", True),
    ("GPT2LMHeadModel", "AutoModelForCausalLM", "text-generation", False),
    ("BertForMaskedLM", "AutoModelForMaskedLM", "fill-mask", False),
    ("WhisperForConditionalGeneration", "AutoModelForSpeechSeq2Seq", "automatic-speech-recognition", False),
    ("ViTForImageClassification", "AutoModelForImageClassification", "image-classification", False),
    ("T5ForConditionalGeneration", "AutoModelForSeq2SeqLM", None, False),
    ("Wav2Vec2ForCTC", "AutoModelForCTC", "automatic-speech-recognition", False),
    ("CLIPVisionModelWithProjection", "CLIPVisionModelWithProjection", None, False),
]


def matter_of(card):
    return yaml.safe_load(card.split("---\n", 2)[1])


def run(card, folder):
    """The models of a card's blocks of Python, each run as it stands."""
    made = []
    for block in re.findall(r"```python\n(.*?)```", card, re.DOTALL):
        names = {}
        exec(block, names)
        made.append(names["model"])
    return made


@pytest.mark.parametrize(("kind", "auto", "task", "served"), CARDS, ids=lambda x: str(x))
def test_code_of_every_architecture(kind, auto, task, served, tmp_path, monkeypatch):
    """In our layout and in compressed-tensors'. What is loaded is of the class that was saved, and computes."""
    monkeypatch.chdir(tmp_path)
    model, inputs = dense_model(kind)
    quantize_(model, SchemeConfig(scheme="int8_rowwise"))
    linear = any(isinstance(m, nn.Linear) for m in model.modules())
    # transformers cannot load T5 and Wav2Vec2 with packed weights (tests/ao_lab/checkpoint/test_plain_readers.py).
    ours = not linear or kind in ("GPT2LMHeadModel", "T5ForConditionalGeneration", "Wav2Vec2ForCTC")
    for layout in ("ao_lab",) if ours else ("ao_lab", "compressed-tensors"):
        save_pretrained(model, tmp_path / "little", layout=layout)
        card = (tmp_path / "little" / CARD).read_text()
        assert matter_of(card).get("pipeline_tag") == task
        assert f"from transformers import {auto}" in card
        assert ("vllm serve little" in card) == (served and layout == "compressed-tensors")
        loaded = run(card.partition("To generate text")[0], tmp_path)
        assert [type(m).__name__ for m in loaded] == [kind, kind]
        if layout == "ao_lab":
            assert all(torch.equal(outputs(m, inputs), outputs(model, inputs)) for m in loaded)
        assert ("among its models for text generation" in card) == (
            not served and layout == "compressed-tensors"
        )


def test_a_stranger_pastes_it(tmp_path):
    """In a process of its own, which knows the folder and nothing else."""
    save_pretrained(quantized_model("BertForMaskedLM", "nf4")[0], tmp_path / "little", layout="ao_lab")
    block = re.search(r"```python\n(.*?)```", (tmp_path / "little" / CARD).read_text(), re.DOTALL)[1]
    script = (
        block
        + "\nprint(type(model).__name__, type(model.bert.encoder.layer[0].output.dense.weight).__name__)"
    )
    done = forks.python("-c", script, server="transformers", cwd=tmp_path)
    assert done.stdout.split() == ["BertForMaskedLM", "QuantizedTensor"], done.stderr[-2000:]


def test_dtype_is_explained(tmp_path):
    """Scales in float32 are rounded by readers of a bfloat16 model; power-of-two scales are not."""
    for scheme, said in (("int8_rowwise", True), ("mxfp4", False)):
        save_pretrained(quantized_model("LlamaForCausalLM", scheme)[0], tmp_path, layout="compressed-tensors")
        assert ("float32 scales" in (tmp_path / CARD).read_text()) == said
    save_pretrained(quantized_model("LlamaForCausalLM", "nf4")[0], tmp_path, layout="ao_lab")
    assert "`dtype=` is the dtype of the computation" in (tmp_path / CARD).read_text()


def test_cards_of_others_stay(tmp_path):
    """save_pretrained writes over its own cards alone."""
    model, _ = quantized_model("LlamaForCausalLM", "nf4")
    saved = save_pretrained(model, tmp_path, layout="ao_lab")
    assert tmp_path / CARD in saved.files
    assert is_ours((tmp_path / CARD).read_text())
    (tmp_path / CARD).write_text("# A card of one's own\n")
    saved = save_pretrained(model, tmp_path, layout="ao_lab")
    assert tmp_path / CARD not in saved.files
    assert (tmp_path / CARD).read_text() == "# A card of one's own\n"


def test_models_of_ones_own(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64))
    quantize_(model, SchemeConfig(scheme="nf4"))
    save_pretrained(model, tmp_path / "little")
    card = model_card(tmp_path / "little")
    assert "`ao_lab.load_pretrained('little', model)` loads it into a model of the same architecture." in card
    assert "pipeline_tag" not in matter_of(card)
    assert "```" not in card


def test_the_tables():
    """Every auto class and every served class is one of transformers'."""
    assert [name for name in TASKS if not hasattr(transformers, name)] == []
    assert [name for name in SERVED_ARCHITECTURES if not hasattr(transformers, name)] == []
    for kind, auto in (("MixtralForCausalLM", "AutoModelForCausalLM"), ("BertModel", "AutoModel")):
        given = {
            "model_type": kind.removesuffix("ForCausalLM").removesuffix("Model").lower(),
            "architectures": [kind],
        }
        assert loader_of(given).name == auto
    assert (
        loader_of({"model_type": "llama", "architectures": ["SomebodysLlama"]}).name == "AutoModelForCausalLM"
    )
    assert loader_of({"model_type": "llama"}).name == "AutoModelForCausalLM"
    assert loader_of({}) is None
    for kind in MODELS:
        fields = getattr(transformers, kind).config_class(**MODELS[kind][0]).to_dict()
        assert loader_of({**fields, "architectures": [kind]}) is not None
