"""`ao-lab quantize --calibration TEXT --method NAME`: a folder whose codes plain transformers reads, and what is refused."""

import json
import re

import pytest
import torch

import ao_lab.quantization.api
from ao_lab import GPTQ, Int4WeightOnlyConfig, QuantizedTensor, load_pretrained, quantize_
from ao_lab.cli.app import main
from tests.support.quantized_weights import same

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:You passed `quantization_config`"
)
CONFIG = ["--config", "Int4WeightOnlyConfig", "--option", "group_size=32"]
WORDS = "Scales are chosen first, and codes afterwards, for these scales. " * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Llama that reads bytes, and a text."""
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    transformers.utils.logging.disable_progress_bar()
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    (path / "words.txt").write_text(WORDS)
    return path


def text(folder):
    return ["--calibration", str(folder / "words.txt"), "--windows", "12", "--length", "32"]


def test_what_calibration_will_not_do_is_said_before_it_begins(folder, tmp_path, capsys, monkeypatch):
    """Layers that groups do not divide, and a text that is shorter than what was asked for."""
    fields = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 96}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).to(torch.bfloat16).save_pretrained(
        tmp_path / "odd"
    )
    monkeypatch.setattr(
        "ao_lab.quantization.api.quantize_", stopped_after_the_first(ao_lab.quantization.api.quantize_)
    )
    options = [
        "--config",
        "Int4WeightOnlyConfig group_size=64",
        "--method",
        "gptq",
        *text(folder)[:2],
        "--length",
        "32",
    ]
    assert main(["quantize", str(tmp_path / "odd"), str(tmp_path / "out"), *options]) == 130
    said = capsys.readouterr().err
    assert (
        "1 of 8 layers stay unquantized: groups of 64 do not divide their inputs (96); --option group_size=32"
        in said
    )
    assert (
        "the calibration text fills 81 sequences of 32 tokens, 2,592 tokens, and --windows asks for 128"
        in said
    )


def stopped_after_the_first(real):
    """quantize_ of the model without weights, and then nothing."""
    calls = []

    def once(*given, **more):
        calls.append(0)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return real(*given, **more)

    return once


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_a_calibrated_folder_has_the_bits_of_the_library_and_plain_transformers_reads_it(
    folder, tmp_path, capsys, stream
):
    target = tmp_path / "out"
    command = [
        "quantize",
        str(folder),
        str(target),
        *CONFIG,
        *text(folder),
        *("--method", "gptq damping=0.01", "--method", "clip"),
        *stream,
    ]
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    reasons = {row["layer"]: row["reason"] for row in told["layers"]}
    assert "clip + gptq, 0." in reasons["model.layers.0.self_attn.q_proj.weight"]
    assert told["layout"] == "compressed-tensors"
    ours = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    ids = torch.tensor(list(WORDS.encode()[: 12 * 32])).reshape(12, 32)
    config = Int4WeightOnlyConfig(group_size=32).for_layout("compressed-tensors")
    quantize_(
        ours,
        config,
        calibration=[{"input_ids": x} for x in ids.split(8)],
        methods=("clip", GPTQ(damping=0.01)),
    )
    read = load_pretrained(target)
    for name, parameter in ours.named_parameters():
        assert same(parameter, read.get_parameter(name)), name
    theirs = transformers.AutoModelForCausalLM.from_pretrained(target)
    assert torch.equal(theirs(ids).logits, read(ids).logits)
    for name, parameter in ours.named_parameters():
        value = parameter.dequantize() if isinstance(parameter, QuantizedTensor) else parameter
        assert torch.equal(theirs.get_parameter(name), value), name
    # Lines are as long as the paths in them allow.
    card = " ".join((target / "README.md").read_text().replace("\\\n", " ").split())
    assert (
        "--method 'gptq damping=0.01' --method clip " + " ".join(["--windows 12 --length 32", *stream])
        in card
    )
    assert re.search(
        r"quantized by gptq damping=0\.01, clip on [\d,]+ tokens of calibration data, kept: ", card
    )
    assert "kept: clip + gptq (7 layers), but `lm_head.weight` rounded to nearest." in card


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--method", "gptq"], "--method gptq needs calibration data; give --calibration TEXT"),
        (["--method", "gtpq"], "gptq"),
        (["--method", "gptq dampng=0.1"], 'no option dampng; the nearest is damping; it has order="activation", damping='),
        (["--method", "gptq damping=2"], "GPTQ: damping is 'held out' or a share"),
        (["--method", "bias alpha=1"], "method bias takes no options"),
        (["--method", "gptq", "--method", "gptq"], "GPTQ twice"),
        (["--calibration", "WORDS"], "give --method"),
        (["--calibration", "nowhere.txt", "--method", "gptq"], "--calibration nowhere.txt is no file"),
        (["--calibration", "WORDS", "--method", "gptq", "--windows", "0"], "--windows is at least 1"),
        (["--calibration", "WORDS", "--method", "gptq", "--length", "16", "--windows", "1"], "the least"),
        (["--method", "hqq", "--option", "group_size=32", "--layout", "ao_lab"], "int4_g32_asymmetric"),
        (["--method", "clip", "--sparsity", "2:4", "--calibration", "WORDS"], "overwrite the zeros"),
        (["--resume", "somewhere", "--method", "hqq"], "give --calibration"),
        (["--stream", "--method", "hqq"], "give --calibration"),
    ],
)  # fmt: skip
def test_what_is_refused(arguments, said, folder, tmp_path, capsys):
    given = [str(folder / "words.txt") if one == "WORDS" else one for one in arguments]
    assert main(["quantize", str(folder), str(tmp_path / "out"), *CONFIG, *given]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
