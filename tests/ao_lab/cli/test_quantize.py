"""`ao-lab quantize`: a folder in, a folder out."""

import json
import re
import shutil
import stat
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ao_lab import (
    Int8WeightOnlyConfig,
    QuantizedTensor,
    SparseQuantizedTensor,
    SparsityConfig,
    load_pretrained,
    quantize_,
    quantize_pretrained,
    sparsify_,
)
from ao_lab.calibration.result import LayerResult
from ao_lab.cli.app import main
from ao_lab.cli.layout import SkippedLayers, ending
from ao_lab.cli.named_config import config_of
from ao_lab.cli.quantize import bits_per_parameter, grouped
from ao_lab.cli.terminal import WrongInput
from ao_lab.quantization.report import Layer, Report
from ao_lab.transforms.low_rank import add_residual

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:You passed `quantization_config`"
)
TOKENS = torch.arange(20).reshape(2, 10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Llama with a file beside it."""
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "little-llama"
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


def complaint(capsys, *arguments):
    """Exit code and the one line on stderr of a command that fails."""
    code = main(["quantize", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ao-lab: ")
    return code, err


def test_a_folder_that_transformers_reads(capsys, folder, tmp_path):
    target = tmp_path / "out"
    assert (
        main(
            [
                "quantize",
                str(folder),
                str(target),
                "--config",
                "Int4WeightOnlyConfig group_size=32",
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    # Neither folders of this machine nor the class's defaults: what transformers wrote of the dense model, and one field more.
    fields, dense = (json.loads((one / "config.json").read_text()) for one in (target, folder))
    assert {name: value for name, value in fields.items() if name != "quantization_config"} == dense
    # A server of another user reads the weights where it reads the configuration.
    assert (
        len({stat.S_IMODE((target / name).stat().st_mode) for name in ("model.safetensors", "config.json")})
        == 1
    )
    assert "int4_g32_cast in place of int4_g32_asymmetric" in shown
    assert "layout: compressed-tensors; loads in transformers" in shown
    assert "Embedding: only linear layers and experts are quantized" in shown
    assert "filter_fn" not in shown
    # Columns and words that would say nothing of this model.
    assert shown.startswith(f"done: {target}, ")
    # 4 bits, a bfloat16 scale for each 32, and the 16 bytes of weight_shape.
    assert re.search(r", 4\.5\d* bits per quantized weight, ", shown)
    size = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_pretrained(folder).parameters())
    bits = 8 * (target / "model.safetensors").stat().st_size / size
    # The file has a header, too.
    assert float(re.search(r"([\d.]+) bits/param of the model", " ".join(shown.split()))[1]) == pytest.approx(
        bits, rel=0.05
    )
    assert "sparsity" not in shown.partition("Layers")[2]
    assert "Linear" not in shown.partition("Layers")[2]
    names = sorted(path.name for path in target.iterdir())
    assert names == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    card = (target / "README.md").read_text()
    assert "--layout compressed-tensors too (zero points" in " ".join(shown.split())
    assert card.index("int4_g32_cast in place of int4_g32_asymmetric") > card.index("## Notes for ao_lab")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(target)
    ours = load_pretrained(target)
    assert torch.equal(theirs(TOKENS).logits, ours(TOKENS).logits)
    for name, parameter in ours.named_parameters():
        value = parameter.dequantize() if isinstance(parameter, QuantizedTensor) else parameter
        assert torch.equal(theirs.get_parameter(name), value)
    # The same layers as `quantize_` and HfConfig take: an untied head is one of them.
    assert isinstance(ours.lm_head.weight, QuantizedTensor)


def test_layers_that_groups_do_not_divide_are_told_above_the_table(capsys, folder, tmp_path):
    """With the option that quantizes them, and without advice that is Python."""
    assert (
        main(
            [
                "quantize",
                str(folder),
                str(tmp_path / "out"),
                "--config",
                "Int4WeightOnlyConfig group_size=256",
            ]
        )
        == 0
    )
    shown = " ".join(capsys.readouterr().out.split())
    said = "7 of 8 layers stay unquantized: groups of 256 do not divide their inputs (128); --option group_size=128 quantizes"
    assert said in shown.partition("Layers")[0]
    assert "pad the tensor" not in shown


def test_layers_of_all_blocks_are_one_line():
    layer = Layer("model.layers.0.q.weight", "Linear", (3, 3), "nf4", "fused", 3, "Linear")
    alone = replace(layer, name="model.layers.2.q.weight", scheme="")
    one, two = grouped([layer, alone, replace(layer, name="model.layers.11.q.weight")])
    assert (one["layer"], one["layers"], one["bytes"]) == ("model.layers.*.q.weight", 2, 6)
    assert (two["layer"], two["layers"], two["bytes"]) == (alone.name, 1, 3)


def test_calibrated_layers_of_all_blocks_are_one_line():
    """What was won, from the least to the most; a layer with a note of its own stays apart."""
    won = [LayerResult("gptq", error, 1.0, 90, 10, 0.01) for error in (0.5, 0.25, 0.75)]
    won[2] = replace(won[2], notes=("no bias",))
    layers = [
        Layer(f"layers.{i}.q", "Linear", (3, 3), "nf4", "", 3, f"Linear; {one}", calibrated=one)
        for i, one in enumerate(won)
    ]
    assert [row["reason"] for row in grouped(layers)] == [
        "Linear; gptq, 0.250 to 0.500 of rounding's output error on 10 held-out tokens",
        f"Linear; {won[2]}",
    ]


def test_what_skip_is_given_names_no_other_layer():
    others = ["bert.encoder.layer.0.output.dense.weight", "bert.encoder.layer.0.attention.self.query.weight"]
    assert ending("bert.pooler.dense", others) == "pooler.dense"
    assert ending("model.layers.0.experts", others) == "experts"
    assert ending("dense", others) == "dense"


def test_a_report_says_that_few_tokens_decided():
    enough, few = LayerResult("awq", 0.5, 1.0, 900, 100), LayerResult("awq", 0.5, 1.0, 116, 12)
    layers = tuple(Layer("q", "Linear", (3, 3), "nf4", "", 3, "", calibrated=one) for one in (enough, few))
    assert Report(layers[:1]).few_judges() == ""
    assert "few tokens: 12 held-out tokens decided" in str(Report(layers))
    assert Report((replace(layers[0], calibrated=LayerResult("hqq", 0.5, 1.0)),)).few_judges() == ""


def test_json_and_our_layout(capsys, folder, tmp_path):
    arguments = [
        "quantize",
        str(folder),
        str(tmp_path / "out"),
        "--config",
        "nf4",
        "--skip",
        "q_proj",
        "--layout",
        "ao_lab",
        "--json",
    ]
    assert main(arguments) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["layout"] == "ao_lab"
    assert "import ao_lab" in made["readers"]
    assert made["changes"] == made["limits"] == []
    assert made["bytes"] < made["bytes_before"]
    schemes = {row["layer"]: row["scheme"] for row in made["layers"]}
    assert schemes["model.layers.0.self_attn.q_proj.weight"] == ""
    assert schemes["lm_head.weight"] == "nf4"
    assert "import ao_lab" in (tmp_path / "out" / "README.md").read_text()


def test_weights_and_inputs(folder, tmp_path):
    assert (
        main(
            [
                "quantize",
                str(folder),
                str(tmp_path / "o"),
                "--config",
                "fp8_rowwise",
                "--activation",
                "fp8_rowwise",
            ]
        )
        == 0
    )
    stored = json.loads((tmp_path / "o" / "config.json").read_text())["quantization_config"]
    assert stored["format"] == "float-quantized"
    assert stored["config_groups"]["group_0"]["input_activations"]["dynamic"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "int44"], "no configuration (ao-lab configs lists them) and no scheme"),
        (["--config", "Int4WeightOnlyConfig", "--option", "group=3"], "group"),
        (["--config", "Int4WeightOnlyConfig", "--option", "group"], "key=value"),
        (["--config", "FqnToConfig"], "no configuration (ao-lab configs lists them) and no scheme"),
        (["--config", "nf4", "--option", 'axis="x"'], "axis is an integer"),
        (["--config", "mxfp4", "--skip", "nowhere"], "--skip nowhere: no layer or submodule has this name"),
        (["--config", "Int8WeightOnlyConfig", "--option", "granularity=PerGroup"], "PerGroup(64)"),
        (
            ["--config", "Int4WeightOnlyConfig", "--option", "group_size=96"],
            "groups of 96 divide the inputs of no layer (128, 256); use",
        ),
        (["--config", "mxfp4", "--skip", "re:("], "--skip: 're:(' is no regular expression"),
        (["--config", "nf4", "--layout", "compressed-tensors"], "compressed-tensors has no format for nf4"),
        (["--config", "NF4WeightOnlyConfig", "--layout", "compressed-tensors"], "give --layout ao_lab"),
        (
            ["--config", "Int8DynamicActivationInt8WeightConfig", "--layout", "compressed-tensors"],
            "--layout auto adapts the configuration to what loaders compute",
        ),
    ],
)
def test_wrong_input_is_one_line(capsys, folder, tmp_path, arguments, message):
    code, err = complaint(capsys, folder, tmp_path / "out", *arguments)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "there", "absent"),
    [
        (["--config", "int44"], "the nearest are int4", "HfConfig"),
        (["--config", "HfConfig"], "no configuration (ao-lab configs lists them) and no scheme", "__init__"),
        (["--config", "Int4WeightOnlyConfig", "--option", "nope=3"], "it has group_size, scheme, kernel, axis", "__init__"),
        (
            ["--config", "Int4WeightOnlyConfig", "--option", "groupsize=32"],
            "Int4WeightOnlyConfig has no option groupsize; the nearest is group_size; it has group_size, scheme, kernel, axis",
            "SchemeConfig",
        ),
        (["--config", "int4"], "the nearest are Int4WeightOnlyConfig, ", "HfConfig"),
        (["--config", "Int4WeightOnlyConfig group_size=0"], "--config Int4WeightOnlyConfig: group_size ", "ConfigConfig"),
        (["--config", "nf4", "--option", "nope=3"], "has no option nope; it has kernel, axis", "SchemeConfig"),
        (["--config", "nf4", "--layout", "compressed-tensors"], "no format for nf4; give --layout ao_lab", "layout='ao_lab'"),
        (["--config", "nf4", "--layout", "compressed-tensors"], "give --layout ao_lab", "--layout auto"),
        (["--config", "nvfp4", "--activation", "nvfp4", "--layout", "compressed-tensors"], "give --layout ao_lab", "auto"),
        (["--config", "Int8DynamicActivationInt8WeightConfig", "--layout", "compressed-tensors"], "auto", "for_layout("),
    ],
)  # fmt: skip
def test_messages_say_one_way_out(capsys, folder, tmp_path, arguments, there, absent):
    """What there is, in the words of the command line, once, and nothing that would be refused again."""
    code, err = complaint(capsys, folder, tmp_path / "out", *arguments)
    assert code == 2
    assert there in err
    assert absent not in err
    assert err.count("--layout ao_lab") + err.count("layout=") <= 1


@pytest.mark.parametrize("config", ["nf4", "int44", "mxfp4"])
def test_folders_without_a_model_are_told_before_all_else(capsys, folder, tmp_path, config):
    code, err = complaint(capsys, tmp_path / "nope", tmp_path / "out", "--config", config)
    assert (code, "there is no folder" in err) == (2, True)
    (tmp_path / "in").mkdir()
    shutil.copyfile(folder / "config.json", tmp_path / "in" / "config.json")
    code, err = complaint(capsys, tmp_path / "in", tmp_path / "out", "--config", config)
    assert (code, err.count("\n")) == (2, 1)
    assert "in has a config.json and no weights: no file named model.safetensors" in err
    assert not (tmp_path / "out").exists()


def test_heads_with_few_rows_of_zero_points(capsys, tmp_path, monkeypatch):
    """A classifier's, whose packed zero points no reader unpacks: refused before any weight is quantized."""
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.BertForSequenceClassification(config).to(torch.bfloat16)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(tmp_path / "bert")
    monkeypatch.setattr("ao_lab.cli.quantize.loaded", None)  # no weight is read
    given = [
        "--config",
        "Int4WeightOnlyConfig",
        "--option",
        "group_size=32",
        "--layout",
        "compressed-tensors",
    ]
    code, err = complaint(capsys, tmp_path / "bert", tmp_path / "out", *given)
    assert code == 2
    assert "classifier.weight: compressed-tensors 0.20 cannot read the packed zero points of 2 rows" in err
    assert "--skip classifier leaves these layers unquantized" in err
    assert err.count("--layout ao_lab") == 1


def test_folders_are_looked_at_first(capsys, folder, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("")
    assert "not an empty folder" in complaint(capsys, folder, tmp_path / "full", "--config", "mxfp4")[1]
    assert "no config.json" in complaint(capsys, tmp_path, tmp_path / "out", "--config", "mxfp4")[1]
    assert main(["quantize", str(folder), str(tmp_path / "once"), "--config", "mxfp4"]) == 0
    capsys.readouterr()
    assert (
        "quantized already"
        in complaint(capsys, tmp_path / "once", tmp_path / "twice", "--config", "mxfp4")[1]
    )


def test_granularities_have_names(capsys, folder, tmp_path):
    arguments = [
        "--config",
        "Int8WeightOnlyConfig",
        "--option",
        "granularity=PerGroup(64)",
        "--skip",
        "o_proj",
        "--json",
    ]
    assert main(["quantize", str(folder), str(tmp_path / "out"), *arguments]) == 0
    layers = {row["layer"]: row for row in json.loads(capsys.readouterr().out)["layers"]}
    assert layers["model.layers.0.self_attn.q_proj.weight"]["scheme"] == "int8_g64_cast"
    assert layers["model.layers.0.self_attn.q_proj.weight"]["reason"] == "Linear"
    assert layers["model.layers.0.self_attn.o_proj.weight"]["reason"] == "--skip o_proj"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "--option granularity=PerGroup(64) --skip o_proj`" in card


@pytest.mark.parametrize("command", ["quantize", "eval"])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"[1]", "config.json"),
        ("config.json", b"{", "config.json"),
        ("model.safetensors", b"short", "cut off"),
        ("model.safetensors", None, "no file named model.safetensors"),
    ],
)
def test_folders_that_cannot_be_read(capsys, folder, tmp_path, command, name, content, message):
    shutil.copytree(folder, tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").unlink()
    (tmp_path / "in" / name).unlink()
    if content is not None:
        (tmp_path / "in" / name).write_bytes(content)
    more = [str(tmp_path / "out"), "--config", "mxfp4"] if command == "quantize" else ["--limit", "1"]
    code = main([command, str(tmp_path / "in"), *more])
    err = capsys.readouterr().err
    assert code in ((1, 2) if content is None else (2,))
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("terminal", "term", "flags", "shown"),
    [
        (True, "xterm", [], True),
        (True, "xterm", ["--json"], False),
        (False, "xterm", [], False),
        # Of editors and CI: nothing there can move.
        (True, "dumb", [], False),
    ],
)
def test_progress_is_for_terminals(capsys, folder, tmp_path, monkeypatch, terminal, term, flags, shown):
    """On stderr, and neither beside JSON nor in a file."""
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    assert main(["quantize", str(folder), str(tmp_path / "out"), "--config", "int8_rowwise", *flags]) == 0
    out, err = capsys.readouterr()
    assert ("8/8" in err) == shown
    assert "8/8" not in out


def quantized_json(capsys, *arguments):
    """What a successful command says, as JSON."""
    assert main(["quantize", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("config", "said"),
    [("int3_g32", "W3A16 INT3, group size 32"), ("int4_g16", "W4A16 INT4, group size 16 (its kernels take")],
)
def test_weights_that_vllm_has_no_kernel_for_are_named(capsys, folder, tmp_path, config, said):
    readers = quantized_json(capsys, folder, tmp_path / "a", "--config", config)["readers"]
    assert f"without ao_lab; vLLM lists no kernel for {said}" in readers
    assert "and in vLLM" not in readers


def test_changes_for_readers_are_told_with_their_reasons(capsys, folder, tmp_path):
    made = quantized_json(capsys, folder, tmp_path / "a", "--config", "Int8DynamicActivationInt8WeightConfig")
    assert made["layout"] == "compressed-tensors"
    assert made["changes"] == [
        "weights: int8_rowwise_cast in place of int8_rowwise, because loaders store scales in the weight's dtype",
        "inputs: compressed_tensors.int8_token in place of int8_rowwise, because loaders scale inputs by 127.5, without zero "
        "points, in the input's dtype",
        "kernel: dequantize, so that results are bitwise those of transformers, which dequantizes weights and inputs before "
        "each matmul; this takes as long as dense layers or longer (on a CPU up to three times), the option kernel=int8 "
        "selects a faster kernel",
    ]
    # All layers of a Llama see three axes.
    assert not any("one scale for all tokens" in line for line in made["limits"])
    assert made["files"] == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    code = main(
        ["quantize", str(folder), str(tmp_path / "b"), "--config", "Int8DynamicActivationInt8WeightConfig"]
    )
    assert code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(line in shown for line in [*made["changes"], "--layout ao_lab stores"])
    # What readers' kernels do is in the model card, and here with -v.
    assert not any(line in shown for line in made["limits"])
    assert "README.md in the folder has notes" in shown
    card = (tmp_path / "b" / "README.md").read_text()
    assert card.index("with it transformers does not round inputs, and results differ") < card.index(
        "With vLLM ("
    )
    assert "quantized before" not in card


def test_zero_points_by_name_and_their_limit(capsys, folder, tmp_path):
    where = tmp_path / "out"
    made = quantized_json(
        capsys, folder, where, "--config", "Int4WeightOnlyConfig", "--layout", "compressed-tensors"
    )
    assert made["changes"] == []
    assert any("zero points" in line and "dequantize: config.json" in line for line in made["limits"])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(where)
    assert torch.equal(theirs(TOKENS).logits, load_pretrained(where)(TOKENS).logits)


SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
SEEN = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
}  # fmt: skip
#: Models of which compressed-tensors cannot hold a layer: class, configuration, dtype.
LACKING = {
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 64, "n_positions": 32, "n_embd": 64, "n_layer": 1, "n_head": 2}, "float32"),
    "llama": ("LlamaForCausalLM", SIZES, "float32"),
    "experts": ("Qwen3MoeForCausalLM", {**SIZES, **EXPERTS}, "bfloat16"),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {"text_config": SIZES, "vision_config": {**SEEN, "patch_size": 14}, "mm_tokens_per_image": 4},
        "bfloat16",
    ),
}  # fmt: skip
#: Of each, a configuration that it cannot hold, the reason, and what to leave out.
REASONS = [
    ("gpt2", "Int8WeightOnlyConfig", "transformer.h.0.attn.c_attn.weight and 3 more: it is not the weight of an nn.Linear", ""),
    ("llama", "mxfp4", "in bfloat16, and the model is saved in float32", ""),
    ("experts", "Float8DynamicActivationFloat8WeightConfig", "quantizes none of their inputs", "--skip experts"),
    ("gemma3", "Int8WeightOnlyConfig", "SiglipVisionModel initializes a Linear by weights", "--skip model.vision_tower"),
]  # fmt: skip


@pytest.fixture(scope="module")
def lacking(tmp_path_factory):
    """Folders of these models."""
    root = tmp_path_factory.mktemp("lacking")
    transformers.utils.logging.disable_progress_bar()
    for name, (kind, fields, dtype) in LACKING.items():
        kind = getattr(transformers, kind)
        torch.manual_seed(0)
        kind(kind.config_class(**fields)).to(getattr(torch, dtype)).save_pretrained(root / name)
    return root


@pytest.mark.parametrize(("name", "config", "reason", "skip"), REASONS)
def test_layers_that_the_layout_lacks_stop_the_work_before_it_begins(
    capsys, lacking, tmp_path, monkeypatch, name, config, reason, skip
):
    """The named layout is refused, before a weight is read, in the words of the command."""
    monkeypatch.setattr("ao_lab.cli.quantize.loaded", None)  # no weight is read
    # As "auto" changes them: what is left is the layer's.
    monkeypatch.setattr(
        "ao_lab.cli.quantize.config_of", lambda *given: config_of(*given).for_layout("compressed-tensors")
    )
    given = ["--config", config, "--layout", "compressed-tensors"]
    code, err = complaint(capsys, lacking / name, tmp_path / "out", *given)
    assert code == 2
    assert reason in err
    assert err.count("--layout ao_lab") == 1
    assert not any(python in err for python in ("for_layout", "layout=", "PerTensor,", "QuantizedTensor("))
    assert skip in err
    assert ("--skip" in err) == bool(skip)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "config", "reason", "skip"),
    [pytest.param(*one, marks=() if one[0] == "gemma3" else pytest.mark.nightly) for one in REASONS],
)
def test_such_models_go_into_our_layout_or_leave_the_layers_out(
    capsys, lacking, tmp_path, name, config, reason, skip
):
    made = quantized_json(capsys, lacking / name, tmp_path / "out", "--config", config)
    assert (made["layout"], made["changes"]) == ("ao_lab", [])
    assert reason in made["reasons"][0]
    assert ("--skip" in made["reasons"][0]) == bool(skip)
    assert reason in (tmp_path / "out" / "README.md").read_text()
    load_pretrained(tmp_path / "out")
    if not skip:
        return
    more = made["reasons"][0].partition("; --skip ")[2].partition(" leaves")[0]
    given = ["--config", config, *f"--skip {more}".split()]
    made = quantized_json(capsys, lacking / name, tmp_path / "plain", *given)
    assert (made["layout"], made["reasons"]) == ("compressed-tensors", [])
    getattr(transformers, LACKING[name][0]).from_pretrained(tmp_path / "plain")


@pytest.mark.parametrize(
    ("skip", "named"),
    [
        ("vision_tower", [0, 1]),
        ("model.vision_tower", [0, 1]),
        ("re:.*vision_tower.*", [0, 1]),
        ("re:.*fc1", [0]),
        ("layers.0", [0, 1, 2]),
        ("language_model.layers.0", [2]),
        ("q_proj", [1, 2]),
        ("lm_head", [3]),
    ],
)
def test_parts_of_a_model_are_left_out(skip, named):
    paths = [
        "model.vision_tower.layers.0.mlp.fc1",
        "model.vision_tower.layers.0.self_attn.q_proj",
        "model.language_model.layers.0.self_attn.q_proj",
        "lm_head",
    ]
    layer = torch.nn.Linear(2, 2)
    for skipped in (SkippedLayers([skip]), SkippedLayers([skip, "nowhere"])):
        assert [i for i, path in enumerate(paths) if not skipped(layer, path)] == named
    with pytest.raises(WrongInput, match="--skip nowhere: no layer or submodule has this name"):
        skipped.check()
    assert all(SkippedLayers(["vision"])(layer, path) for path in paths)


def test_what_no_format_is_like_goes_into_our_layout(capsys, folder, tmp_path):
    """As save_pretrained does, with the reason."""
    for name, config in (("a", ["nf4"]), ("b", ["nvfp4", "--activation", "nvfp4"])):
        made = quantized_json(capsys, folder, tmp_path / name, "--config", *config)
        assert (made["layout"], made["changes"]) == ("ao_lab", [])
        assert "nvfp4" in made["reasons"][0] or "no format for nf4" in made["reasons"][0]
        load_pretrained(tmp_path / name)


def test_values_that_the_layout_lacks_are_not_lost(capsys, folder, tmp_path):
    """NaN in a row, which no reader of packed integers has: the model goes into our layout after all, or is refused by name."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    made = quantized_json(capsys, tmp_path / "in", tmp_path / "a", "--config", "Int8WeightOnlyConfig")
    assert made["layout"] == "ao_lab"
    assert "up_proj" in made["reasons"][0]
    given = ["--config", "int8_rowwise_cast", "--layout", "compressed-tensors"]
    code, err = complaint(capsys, tmp_path / "in", tmp_path / "b", *given)
    assert (code, err.count("--layout ao_lab"), "for_layout" in err) == (2, 1, False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": "128"}, "describes no model that transformers can build"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 5}},
            "describes no model that transformers can build",
        ),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN, no number"),
        ({"num_hidden_layers": 0}, "has weights of model.layers.0, which its config.json leaves out"),
    ],
    ids=["a string", "factors", "NaN", "fewer layers"],
)
def test_configurations_that_are_not_the_models(capsys, folder, tmp_path, fields, message):
    """transformers raises what it likes for the first, computes with NaN, and drops layers that are not counted."""
    source = tmp_path / "model"
    shutil.copytree(folder, source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **fields}))
    code, line = complaint(capsys, source, tmp_path / "out", "--config", "Int8WeightOnlyConfig")
    assert code == 2
    assert message in line
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_layers_that_are_not_counted_are_told(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 0}))
    with pytest.warns(UserWarning, match="has weights of model.layers.0, which its config.json leaves out"):
        quantize_pretrained(tmp_path / "model", Int8WeightOnlyConfig())


# `ao-lab quantize --sparsity 2:4`: pruned, quantized, compressed, and read again.

__all__ = ["folder"]


def is_block(module, path):
    return isinstance(module, torch.nn.Linear) and path != "lm_head"


def test_a_folder_with_compressed_weights(capsys, folder, tmp_path):
    target = tmp_path / "out"
    command = [
        "quantize",
        str(folder),
        str(target),
        "--config",
        "Int8WeightOnlyConfig",
        "--sparsity",
        "2:4",
        "--json",
    ]
    assert main(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["layout"] == "ao_lab"
    assert "pruned to 2:4 by magnitude" in told["changes"][0]
    layers = {row["layer"]: row for row in told["layers"]}
    one = layers["model.layers.0.mlp.down_proj.weight"]
    assert (one["sparsity"], one["storage"]) == ("2:4 by magnitude", "compressed")
    assert one["bytes"] == 128 * 256 // 2 + 128 * 256 // 8 + 128 * 4
    assert layers["lm_head.weight"]["storage"] == "dense"
    found = load_pretrained(target)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    sparsify_(model, SparsityConfig(), is_block)
    quantize_(model, Int8WeightOnlyConfig(sparsity="2:4"), is_block)
    for (name, a), (_, b) in zip(found.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert isinstance(found.model.layers[0].mlp.down_proj.weight, SparseQuantizedTensor)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "int8_rowwise", "--sparsity", "1:4"], "sparsity"),
        (["--config", "nf4", "--sparsity", "2:4"], "flattened"),
        (
            ["--config", "int8_rowwise", "--sparsity", "2:4", "--layout", "compressed-tensors"],
            "no format for 2:4 weights",
        ),
        (["--config", "int8_rowwise", "--option", "sparsity=2:4"], "use --sparsity 2:4, which prunes them"),
    ],
)
def test_wrong_input(capsys, folder, tmp_path, arguments, message):
    code, err = complaint(capsys, folder, tmp_path / "out", *arguments)
    assert code == 2
    assert message in err
    assert not (tmp_path / "out").exists()


def test_bits_of_a_parameter_are_over_those_of_the_dense_model():
    """Factors of low-rank residuals are bytes of the files, and no parameters of the model."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False))
    quantize_(model, Int8WeightOnlyConfig())
    add_residual(model[0], (torch.zeros(64, 8), torch.zeros(8, 64)))
    assert bits_per_parameter(SimpleNamespace(bytes=64 * 64 + 2 * 2 * 8 * 64), model) == 12
