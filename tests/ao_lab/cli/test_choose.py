"""`ao-lab choose` and `ao-lab quantize --plan`: a plan, and the folder that it makes."""

import json

import pytest
import torch

from ao_lab import Choice, load_pretrained
from ao_lab.cli.app import main
from tests.support.quantized_weights import same

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:You passed `quantization_config`"
)
WORDS = "Which configuration each layer gets, under a budget of bits or bytes or time. " * 40
OPTIONS = ["--config", "Int4WeightOnlyConfig group_size=32", "--config", "Int8WeightOnlyConfig"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Llama that reads bytes, and a text."""
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    transformers.utils.logging.disable_progress_bar()
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    (path / "words.txt").write_text(WORDS)
    return path


def text(folder):
    return ["--calibration", str(folder / "words.txt"), "--windows", "16", "--length", "24"]


@pytest.mark.parametrize(
    "methods", [[], ["--method", "clip", "--method", "gptq damping=0.01"]], ids=["rounding", "gptq"]
)
def test_a_plan_makes_a_mixed_folder_that_plain_transformers_reads(methods, folder, tmp_path, capsys):
    plan, target = tmp_path / "plan.json", tmp_path / "out"
    command = ["choose", str(folder), "-o", str(plan), *OPTIONS, *text(folder), *methods, "--bits", "6.5"]
    assert main([*command, "--layout", "compressed-tensors", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    choice = Choice.from_json(plan)
    assert told["measured"] == choice.measured
    assert {row["option"] for row in told["layers"]} == {OPTIONS[1], OPTIONS[3]}
    assert [one.text for one in choice.methods] == methods[1::2]
    data = text(folder) if methods else []
    assert main(["quantize", str(folder), str(target), "--plan", str(plan), *data, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["layout"] == "compressed-tensors"
    schemes = {row["layer"]: row["scheme"] for row in told["layers"]}
    for layer in choice.layers:
        config = choice.options[layer.option]
        assert schemes[layer.names[0]] == str(config.recipe())
    ids = torch.tensor(list(WORDS.encode()[:48]))[None]
    ours, theirs = load_pretrained(target), transformers.AutoModelForCausalLM.from_pretrained(target)
    assert torch.equal(ours(ids).logits, theirs(ids).logits)
    assert "--plan plan.json" in (target / "README.md").read_text()
    groups = json.loads((target / "config.json").read_text())["quantization_config"]["config_groups"]
    assert {group["weights"]["num_bits"] for group in groups.values()} == {4, 8}
    if not methods:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        from ao_lab import quantize_

        quantize_(model, choice.plan)
        for name, parameter in model.named_parameters():
            assert same(parameter, ours.get_parameter(name)), name


def test_the_choice_as_tables(folder, tmp_path, capsys):
    plan = tmp_path / "plan.json"
    command = ["choose", str(folder), "-o", str(plan), "--config", "nf4", "--config", "dense"]
    assert main([*command, *text(folder), "--bytes", "60000", "--skip", "lm_head"]) == 0
    out = capsys.readouterr().out
    assert "model.layers.1.mlp.down_proj.weight" in out
    assert "lm_head.weight" not in out
    assert f"--plan {plan}" in out.replace("\n", "")
    target = tmp_path / "out"
    assert main(["quantize", str(folder), str(target), "--plan", str(plan)]) == 0
    assert "layout: ao_lab" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (OPTIONS, "give one budget, --bits or --bytes or --microseconds; got none"),
        ([*OPTIONS, "--bits", "6", "--bytes", "10"], "got --bits and --bytes"),
        ([*OPTIONS, "--bits", "6", "--rows", "4"], "--rows applies to --microseconds only"),
        ([*OPTIONS, "--bits", "-1"], "Bits is a positive number, got -1"),
        ([*OPTIONS, "--bits", "20"], "the budget is 20 bits"),
        ([*OPTIONS[:2], "--bits", "4"], "give --config at least twice"),
        (["--config", "int4_g32", "--config", "'int4", "--bits", "4"], "--config 'int4: write NAME"),
        (["--config", "int4_g32", "--config", "int9", "--bits", "4"], "int9"),
        ([*OPTIONS, "--bits", "6", "--method", "awq"], "awq change more than a layer's weight"),
        ([*OPTIONS, "--bits", "6", "--calibration", "nowhere.txt"], "nowhere.txt is no file"),
        (
            ["--config", "nf4", "--config", "int8_rowwise", "--bits", "6", "--layout", "compressed-tensors"],
            "--config nf4: ",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(arguments, said, folder, tmp_path, capsys):
    plan = tmp_path / "plan.json"
    assert main(["choose", str(folder), "-o", str(plan), *text(folder), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not plan.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give --config NAME"),
        (["--plan", "nowhere.json"], "--plan nowhere.json is no file"),
        (["--plan", "WORDS"], "this is no choice as Choice.to_json writes it"),
        (["--plan", "WORDS", "--config", "nf4"], "give only one of them"),
        (["--plan", "WORDS", "--skip", "lm_head"], "already assigns a configuration to each layer"),
    ],
)
def test_plans_that_are_refused(arguments, said, folder, tmp_path, capsys):
    given = [str(folder / "words.txt") if one == "WORDS" else one for one in arguments]
    assert main(["quantize", str(folder), str(tmp_path / "out"), *given]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
