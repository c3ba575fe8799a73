"""`ao-lab eval`: every kind of folder, offline."""

import hashlib
import importlib.util
import json
import lzma
import shutil
import sys
import types
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from ao_lab import SchemeConfig, quantize_, save_pretrained
from ao_lab.cli.app import main
from ao_lab.eval import NAMED
from tests.support.models import fake_harness, hf_models
from tests.support.models.hf_models import WORDS, save_llama

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:You passed `quantization_config`"
)

#: A task of lm-evaluation-harness whose rows are a file.
HARNESS_TASK = """
task: made_here
dataset_path: json
dataset_kwargs: {{data_files: {rows}}}
test_split: train
fewshot_split: train
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: ["one", "two"]
doc_to_target: "{{{{gold}}}}"
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base, and what was made of it in every layout that is read."""
    root = tmp_path_factory.mktemp("models")
    save_llama(root / "base")
    for name, config, layout in (("ours", "nf4", "ao_lab"), ("compressed", "int8_rowwise", "auto")):
        given = ["--config", config, "--layout", layout]
        assert main(["quantize", str(root / "base"), str(root / name), *given]) == 0
    # As another program writes it: without our records.
    shutil.copytree(root / "compressed", root / "foreign")
    from safetensors.torch import load_file, save_file

    tensors = load_file(root / "foreign" / "model.safetensors")
    save_file(tensors, root / "foreign" / "model.safetensors", metadata={"format": "pt"})
    (root / "text.txt").write_text(" ".join([WORDS] * 30))
    return root


def evaluated(capsys, folder, *arguments):
    assert main(["eval", str(folder), "--json", "--limit", "4", "--length", "32", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def complaint(capsys, *arguments):
    code = main(["eval", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ao-lab: ")
    return code, err


def test_a_dense_folder_on_the_built_in_text(capsys, folders):
    made = evaluated(capsys, folders / "base")
    assert set(made["tasks"]) == {"perplexity", "accuracy"}
    assert made["text"].startswith("sympy-")
    assert "word_perplexity" not in made["tasks"]["perplexity"]
    assert "no published perplexity compares" in made["comparable"]
    assert (made["windows"], made["length"], made["tokens"]) == (4, 32, 4 * 31)
    # Of random weights: about as many choices as tokens.
    assert 200 < made["tasks"]["perplexity"]["token_perplexity"] < 600


def test_perplexity_is_that_of_transformers(capsys, folders):
    made = evaluated(capsys, folders / "base", "--text", str(folders / "text.txt"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folders / "base" / "tokenizer.json"))
    ids = torch.tensor(tokenizer((folders / "text.txt").read_text())["input_ids"])[: 4 * 32].reshape(4, 32)
    model = transformers.AutoModelForCausalLM.from_pretrained(folders / "base", dtype="auto")
    with torch.no_grad():
        losses = [model(row[None], labels=row[None]).loss.item() for row in ids]
    assert made["tasks"]["perplexity"]["loss"] == pytest.approx(sum(losses) / 4, rel=1e-3)


def with_bos(folder, target, *, processor=True, **fields):
    """A folder whose tokenizer has a token <s>, and puts it before a text."""
    from tokenizers import processors

    shutil.copytree(folder, target)
    made = hf_models.tokenizer()
    made.add_special_tokens(["<s>"])
    token = made.token_to_id("<s>")
    if processor:
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", token)])
    made.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", **fields}))
    return token


@pytest.mark.parametrize(
    ("given", "begins"),
    [
        ({}, True),
        ({"add_bos_token": False}, False),
        ({"processor": False}, False),
        ({"model_max_length": 10**30}, True),
        ({"processor": False, "add_bos_token": True}, True),
        ({"processor": False, "add_bos_token": True, "bos_token": {"content": "<s>"}}, True),
        ({"processor": False, "add_bos_token": True, "bos_token": None}, False),
    ],
)
def test_windows_begin_as_the_tokenizer_begins_a_text(capsys, folders, tmp_path, given, begins):
    """As transformers' own encoding of each window does."""
    token = with_bos(folders / "base", tmp_path / "bos", **given)
    made = evaluated(capsys, tmp_path / "bos", "--text", str(folders / "text.txt"))
    assert made["windows_begin_with"] == ("<s>" if begins else None)
    assert (made["windows"], made["length"], made["tokens"]) == (4, 32, 4 * 31)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bos", dtype="auto")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "bos" / "tokenizer.json"))
    ids = torch.tensor(tokenizer((folders / "text.txt").read_text(), add_special_tokens=False)["input_ids"])
    ids = ids[: 4 * (32 - begins)].reshape(4, -1)
    ids = torch.cat([torch.full((4, int(begins)), token), ids], 1)
    with torch.no_grad():
        wanted = torch.stack([model(row[None], labels=row[None]).loss.float() for row in ids]).mean().item()
    # The same logits and positive losses: float32 means of 31 and of 4, beside ours in float64.
    assert made["tasks"]["perplexity"]["loss"] == pytest.approx(wanted, rel=(31 + 4 + 2) * 2.0**-24)
    (tmp_path / "bos" / "README.md").write_text("# A card\n")
    assert main(["eval", str(tmp_path / "bos"), "--limit", "1", "--length", "16", "--save"]) == 0
    assert ("each sequence starts with <s>" in " ".join(capsys.readouterr().out.split())) == begins
    assert ("each sequence starts with" in (tmp_path / "bos" / "README.md").read_text()) == begins


@pytest.mark.parametrize("name", ["ours", "compressed", "foreign"])
def test_quantized_folders_against_their_base(capsys, folders, name):
    made = evaluated(capsys, folders / name, "--against", str(folders / "base"))
    assert made["against"] == "base"
    assert 0.3 < made["tasks"]["agreement"]["agreement"] <= 1.0
    assert 0 < made["tasks"]["agreement"]["kl"] < 0.1
    schemes = {"ours": "nf4", "compressed": "int8_rowwise_cast"}
    assert list(made["tasks"]["weights"]) == ([schemes[name]] if name in schemes else [])


def test_dequantized_by_transformers_or_read_by_us(capsys, folders):
    """The same weights: the same numbers to the rounding of the products."""
    ours, theirs = (
        evaluated(capsys, folders / name)["tasks"]["perplexity"]["loss"] for name in ("compressed", "foreign")
    )
    assert ours == pytest.approx(theirs, rel=1e-3)


def test_some_tasks_alone(capsys, folders):
    made = evaluated(
        capsys, folders / "ours", "--tasks", "accuracy,weights", "--against", str(folders / "base")
    )
    assert set(made["tasks"]) == {"accuracy", "weights"}
    assert 0.05 < made["tasks"]["weights"]["nf4"] < 0.2


def test_a_table_and_results_in_the_card(capsys, folders, tmp_path):
    folder = tmp_path / "made"
    shutil.copytree(folders / "compressed", folder)
    assert "Accuracy was not measured" in (folder / "README.md").read_text()
    arguments = ["eval", str(folder), "--limit", "2", "--length", "16", "--against", str(folders / "base")]
    assert main(arguments) == 0
    assert "token_perplexity" in capsys.readouterr().out
    assert not (folder / "eval.json").exists()
    for _ in range(2):
        assert main([*arguments, "--save"]) == 0
    kept = json.loads((folder / "eval.json").read_text())
    card = (folder / "README.md").read_text()
    assert f"{kept['tasks']['perplexity']['token_perplexity']:.4g}" in card
    assert card.count("perplexity per token |") == 1
    assert "Accuracy was not measured" not in card


def test_models_without_a_tokenizer(capsys, tmp_path):
    """256 tokens are bytes; others need one."""
    save_llama(tmp_path / "bytes", vocabulary=256, with_tokenizer=False)
    (tmp_path / "text.txt").write_text("h\u00e9llo " * 100)
    made = evaluated(capsys, tmp_path / "bytes", "--text", str(tmp_path / "text.txt"))
    assert made["tokenizer"] == "bytes"
    bits = made["tasks"]["perplexity"]
    assert bits["bits_per_byte"] == pytest.approx(bits["loss"] / 0.6931471805599453, rel=0.02)
    save_llama(tmp_path / "other", with_tokenizer=False)
    code, err = complaint(capsys, tmp_path / "other")
    assert code == 2
    assert "no tokenizer.json and its model has 320 tokens; copy the tokenizer" in err


def test_wrong_input_is_one_line(capsys, folders, tmp_path, monkeypatch):
    base = folders / "base"
    assert "no config.json" in complaint(capsys, tmp_path)[1]
    assert "--against" in complaint(capsys, base, "--tasks", "agreement")[1]
    assert "is the model itself" in complaint(capsys, base, "--against", base)[1]
    assert "at least 1 sequence" in complaint(capsys, base, "--limit", "0")[1]
    (tmp_path / "short.txt").write_text("a b")
    assert "one window has 64" in complaint(capsys, base, "--text", tmp_path / "short.txt")[1]
    shutil.copytree(base, tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").write_text("{}")
    assert "is no tokenizer" in complaint(capsys, tmp_path / "other")[1]
    shutil.copytree(base, tmp_path / "list")
    (tmp_path / "list" / "config.json").write_text("[]")
    assert "config.json holds a JSON object, got list" in complaint(capsys, tmp_path / "list")[1]
    save_llama(tmp_path / "small", vocabulary=64)
    assert "it belongs to another model" in complaint(capsys, tmp_path / "small")[1]
    if importlib.util.find_spec("lm_eval") is None:
        code, err = complaint(capsys, base, "--tasks", "hellaswag")
        assert code == 2
        assert "[eval]" in err
        assert "the nearest is perplexity" in complaint(capsys, base, "--tasks", "perplexty")[1]


@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "T5ForConditionalGeneration"])
def test_only_causal_language_models_have_perplexities(capsys, tmp_path, kind):
    if kind.startswith("T5"):
        config = transformers.T5Config(
            vocab_size=256, d_model=64, d_kv=32, d_ff=64, num_layers=1, num_heads=2
        )
    else:
        config = transformers.BertConfig(
            vocab_size=256, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
        )
    getattr(transformers, kind)(config).save_pretrained(tmp_path / "dense")
    # transformers cannot load T5 in a packed format.
    layout, scheme = ("ao_lab", "int8_rowwise") if kind.startswith("T5") else ("auto", "int8_rowwise_cast")
    given = ["--config", "int8_rowwise", "--layout", layout]
    assert main(["quantize", str(tmp_path / "dense"), str(tmp_path / "int8"), *given]) == 0
    capsys.readouterr()
    for folder in ("dense", "int8"):
        code, err = complaint(capsys, tmp_path / folder, "--limit", "1")
        assert code == 2
        assert f"holds {kind}, not a causal language model" in err
    made = evaluated(capsys, tmp_path / "int8", "--against", tmp_path / "dense", "--tasks", "weights")
    assert 0 < made["tasks"]["weights"][scheme] < 0.01


def test_faults_of_ours_are_not_the_users(folders, monkeypatch):
    """What is wrong in our own code is no wrong input: it keeps its traceback; memory that does not suffice is a line."""

    def fault(*given):
        raise error

    monkeypatch.setattr("ao_lab.measure.evaluate.measured", fault)
    for error in (ValueError("shapes differ"), TypeError("no float"), RuntimeError("shapes differ")):
        with pytest.raises(type(error), match=str(error)):
            main(["eval", str(folders / "base"), "--limit", "1", "--length", "8"])


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "CUDA out of memory"),
        (MemoryError(), "ao-lab: there is not enough memory; use"),
    ],
)
def test_memory_that_does_not_suffice_is_one_line(capsys, folders, monkeypatch, error, words):
    def full(*given):
        raise error

    monkeypatch.setattr("ao_lab.measure.evaluate.measured", full)
    code, err = complaint(capsys, folders / "base", "--limit", "1", "--length", "8")
    assert (code, err.count("\n")) == (1, 1)
    assert words in err
    assert "--device cpu" in err


def test_a_damaged_folder_is_wrong_input(capsys, folders, tmp_path):
    """What our reader says of a folder is about the folder."""
    shutil.copytree(folders / "ours", tmp_path / "ours")
    (file,) = (tmp_path / "ours").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-64])
    code, err = complaint(capsys, tmp_path / "ours")
    assert (code, err.count("\n")) == (2, 1)


def test_progress_is_that_of_eval(folders, monkeypatch, capsys):
    """Lines and bars are labelled by the command, and count windows."""
    seen = []

    @contextmanager
    def track(name, **options):
        seen.append((name, options["plain"]))
        yield types.SimpleNamespace(at=lambda *at: seen.append(at))

    monkeypatch.setattr("ao_lab.cli.evaluate.track_progress", track)
    evaluated(capsys, folders / "base", "--tasks", "accuracy")
    assert seen[0] == ("eval", True)
    assert (seen[1], seen[-1]) == ((0, "windows", 4), (4, "windows", 4))


def test_tasks_of_the_harness(capsys, folders, monkeypatch):
    """With a stand-in for it: what it is given, and what is shown of its results."""
    calls = fake_harness.install(monkeypatch)
    with_bos(folders / "compressed", folders / "asked")
    asked = folders / "asked"
    made = evaluated(capsys, asked, "--tasks", "accuracy", "--tasks", "made_up")
    assert made["tasks"]["made_up"] == {"acc": 0.5, "acc_stderr": 0.25, "sample_len": 4}
    assert "accuracy" in made["tasks"]
    assert (calls["tasks"], calls["limit"]) == (["made_up"], 4)
    defaults = ("num_fewshot", "batch_size", "apply_chat_template", "include_path")
    assert [calls[name] for name in defaults] == [None, 1, False, None]
    own = folders / "mine.yaml"
    own.write_text("task: mine")
    (asked / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    given = [
        "--num-fewshot",
        "2",
        "--batch-size",
        "auto:4",
        "--apply-chat-template",
        "--include-path",
        str(folders),
    ]
    made = evaluated(capsys, asked, "--tasks", str(own), *given)
    assert calls["tasks"] == [str(own)]
    assert [calls[name] for name in defaults] == [2, "auto:4", True, str(folders)]
    assert (made["harness_num_fewshot"], made["harness_chat_template"]) == ({"made_up": 2}, True)
    assert main(["eval", str(asked), "--tasks", str(own), *given]) == 0
    assert "at most 32 examples of each (--limit); made_up 2-shot, by the chat template" in " ".join(
        capsys.readouterr().out.split()
    )
    monkeypatch.setattr("ao_lab.measure.evaluate.loaded", lambda *_: pytest.fail("the model was read"))
    assert "neither bos_token nor eos_token" in complaint(capsys, folders / "ours", "--tasks", "made_up")[1]
    for wrong, near in (("nosuchtask", "known are"), ("mmul", "mmlu"), ("acuracy", "accuracy")):
        assert main(["eval", str(asked), "--tasks", wrong]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert f"unknown task '{wrong}'" in err
        assert near in err


def test_text_of_a_name(capsys, folders, tmp_path, monkeypatch):
    """WikiText-2 from its corpus's folder; one line where it is not there, or is another text."""
    base, named = folders / "base", ["--text", "wikitext2"]
    assert "give its folder by --corpus-path" in complaint(capsys, base, *named)[1]
    assert "has no wikitext2-test.txt.xz" in complaint(capsys, base, *named, "--corpus-path", tmp_path)[1]
    file = tmp_path / "wikitext2-test.txt.xz"
    data = (folders / "text.txt").read_bytes()
    file.write_bytes(lzma.compress(data))
    assert "is not wikitext-2-v1-test" in complaint(capsys, base, *named, "--corpus-path", tmp_path)[1]
    digest = hashlib.sha256(data).hexdigest()
    monkeypatch.setitem(NAMED, "wikitext2", replace(NAMED["wikitext2"], sha256=digest))
    made = evaluated(capsys, base, *named, "--corpus-path", str(tmp_path))
    assert made["text"] == f"wikitext-2-v1-test-{digest[:8]}"
    assert "wikitext-2-raw-v1" in made["comparable"]
    same = evaluated(capsys, base, "--text", str(folders / "text.txt"))
    assert made["tasks"] == same["tasks"]
    assert "word_perplexity" in same["tasks"]["perplexity"]
    assert (
        "--corpus-path is the folder of named texts" in complaint(capsys, base, "--corpus-path", tmp_path)[1]
    )
    assert "or a name: wikitext2" in complaint(capsys, base, "--text", tmp_path / "none.txt")[1]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--num-fewshot", "-1"], "0 or more, got -1"),
        (["--batch-size", "0"], "1 or more, auto or auto:N (looked for N times), got '0'"),
        (["--batch-size", "many"], "got 'many'"),
        (["--include-path", "nowhere"], "--include-path nowhere is no folder"),
        (["--apply-chat-template"], "has no chat template"),
    ],
)
def test_options_of_the_harness_that_it_does_not_take(capsys, folders, monkeypatch, given, said):
    """One line before the harness is imported; also without any of its tasks."""
    assert "--tasks names none" in complaint(capsys, folders / "base", *given)[1]
    spec = importlib.util.spec_from_loader("lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval", types.SimpleNamespace(__spec__=spec))
    code, err = complaint(capsys, folders / "base", "--tasks", "made_up", *given)
    assert (code, err.count("\n")) == (2, 1)
    assert said in err


@pytest.mark.nightly
def test_the_harness_itself(capsys, folders, tmp_path):
    """Where it is installed: a task of a folder, with examples before each question, in the chat template, two at once."""
    pytest.importorskip("lm_eval")
    with_bos(folders / "compressed", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    )
    rows = [json.dumps({"q": f"{WORDS[:20]} {index}", "gold": index % 2}) for index in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "task.yaml").write_text(HARNESS_TASK.format(rows=tmp_path / "rows.jsonl"))
    given = [
        "--num-fewshot",
        "2",
        "--batch-size",
        "2",
        "--apply-chat-template",
        "--include-path",
        str(tmp_path),
    ]
    made = evaluated(capsys, tmp_path / "model", "--tasks", "made_here", *given)
    assert 0 <= made["tasks"]["made_here"]["acc"] <= 1
    assert made["harness_num_fewshot"] == {"made_here": 2}


def test_torchaos_folders(capsys, tmp_path):
    torchao = pytest.importorskip("torchao.quantization")
    save_llama(tmp_path / "base")
    quantized = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base",
        quantization_config=transformers.TorchAoConfig(torchao.Int8WeightOnlyConfig(version=2)),
    )
    quantized.save_pretrained(tmp_path / "torchao")
    shutil.copy(tmp_path / "base" / "tokenizer.json", tmp_path / "torchao")
    made = evaluated(capsys, tmp_path / "torchao", "--against", str(tmp_path / "base"))
    assert list(made["tasks"]["weights"]) == ["torchao.int8_rowwise"]


def test_folders_that_were_saved_by_hand(capsys, tmp_path):
    """Embeddings quantized, weights tied: our layout."""
    model = save_llama(tmp_path / "model", tied=True)
    quantize_(model, SchemeConfig(scheme="int8_rowwise"), lambda module, name: True)
    save_pretrained(model, tmp_path / "out")
    shutil.copy(tmp_path / "model" / "tokenizer.json", tmp_path / "out")
    made = evaluated(capsys, tmp_path / "out", "--against", str(tmp_path / "model"))
    assert made["tasks"]["agreement"]["kl"] < 0.1
