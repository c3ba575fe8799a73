"""`ao-lab quantize`: a folder in, a folder out."""

import json
import shutil

import pytest
import torch

from ao_lab import QuantizedTensor, load_pretrained
from ao_lab.cli import main

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
                "Int4WeightOnlyConfig",
                "--option",
                "group_size=32",
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "int4_g32_asymmetric" in shown
    assert "--skip lm_head" in shown
    assert "Embedding: only linear layers are quantized" in shown
    assert "filter_fn" not in shown
    names = sorted(path.name for path in target.iterdir())
    assert names == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert "int4_g32_asymmetric" in (target / "README.md").read_text()
    config = transformers.CompressedTensorsConfig(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        target, quantization_config=config, dtype=torch.bfloat16
    )
    ours = load_pretrained(target)
    for name, parameter in ours.named_parameters():
        value = parameter.dequantize() if isinstance(parameter, QuantizedTensor) else parameter
        assert torch.equal(theirs.get_parameter(name), value)
    assert not isinstance(ours.lm_head.weight, QuantizedTensor)
    assert torch.equal(theirs(TOKENS).logits, ours(TOKENS).logits)


def test_json_and_our_layout(capsys, folder, tmp_path):
    arguments = [
        "quantize",
        str(folder),
        str(tmp_path / "out"),
        "--config",
        "nf4",
        "--skip",
        "q_proj",
        "--json",
    ]
    assert main(arguments) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["layout"] == "ao_lab"
    assert made["bytes"] < made["bytes_before"]
    schemes = {row["layer"]: row["scheme"] for row in made["layers"]}
    assert schemes["model.layers.0.self_attn.q_proj.weight"] == ""
    assert schemes["lm_head.weight"] == "nf4"
    assert "Only `ao_lab.load_pretrained" in (tmp_path / "out" / "README.md").read_text()


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
        (["--config", "int44"], "a scheme (ao-lab schemes lists them) or one of"),
        (["--config", "Int4WeightOnlyConfig", "--option", "group=3"], "group"),
        (["--config", "Int4WeightOnlyConfig", "--option", "group"], "key=value"),
        (["--config", "FqnToConfig"], "a scheme (ao-lab schemes lists them) or one of"),
        (["--config", "nf4", "--option", 'axis="x"'], "axis is an integer"),
        (["--config", "nf4", "--skip", "nowhere"], "--skip nowhere: no layer is called that"),
        (["--config", "Int8WeightOnlyConfig", "--option", "granularity=PerGroup"], "PerGroup(64)"),
        (["--config", "Int4WeightOnlyConfig", "--option", "group_size=96"], "none of them can be changed"),
        (["--config", "nf4", "--layout", "compressed-tensors"], "compressed-tensors has no format"),
    ],
)
def test_wrong_input_is_one_line(capsys, folder, tmp_path, arguments, message):
    code, err = complaint(capsys, folder, tmp_path / "out", *arguments)
    assert code == 2
    assert message in err


def test_folders_are_looked_at_first(capsys, folder, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("")
    assert "not an empty folder" in complaint(capsys, folder, tmp_path / "full", "--config", "nf4")[1]
    assert "no config.json" in complaint(capsys, tmp_path, tmp_path / "out", "--config", "nf4")[1]
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
    assert layers["model.layers.0.self_attn.q_proj.weight"]["scheme"] == "int8_g64"
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
    more = [str(tmp_path / "out"), "--config", "nf4"] if command == "quantize" else ["--limit", "1"]
    code = main([command, str(tmp_path / "in"), *more])
    err = capsys.readouterr().err
    assert code in ((1, 2) if content is None else (2,))
    assert err.count("\n") == 1
    assert message in err


def test_progress_is_for_terminals(capsys, folder, tmp_path, monkeypatch):
    """On stderr, and neither beside JSON nor in a file."""
    for number, (terminal, flags) in enumerate([(True, []), (True, ["--json"]), (False, [])]):
        monkeypatch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal, raising=False)
        assert (
            main(["quantize", str(folder), str(tmp_path / str(number)), "--config", "int8_rowwise", *flags])
            == 0
        )
        out, err = capsys.readouterr()
        assert ("7/7" in err) == (terminal and not flags)
        assert "7/7" not in out
