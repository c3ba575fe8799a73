"""`ao-lab tune`: a folder in, choices for this device out."""

import json
from types import SimpleNamespace

import pytest
import torch

import ao_lab
from ao_lab.cli.app import main
from ao_lab.cli.terminal import WrongInput
from ao_lab.cli.tune import sample_of
from ao_lab.gemm import choices

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("ao_lab.tuning.measure.SECONDS", 0.0)
    choices.forget()
    yield
    choices.forget()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Llama of 16 positions."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "little-llama"
    transformers.utils.logging.disable_progress_bar()
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def tuned(capsys, *arguments):
    """The document that the command prints."""
    assert main(["tune", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_recipe_whose_choices_a_model_follows(capsys, folder):
    """5 rows are padded to 16, as the recipe asks."""
    made = tuned(capsys, folder, "--recipe", "rowwise", "--rows", 32, "--rows", 5)
    assert (made["model"], made["recipe"], made["config"]) == ("little-llama", "rowwise", None)
    assert {(c["direction"], c["rows"]) for c in made["choices"]} == {
        (direction, rows)
        for direction in ("output", "input_grad", "weight_grad", "training")
        for rows in (16, 32)
    }
    assert "keeps the recipe" in made["notes"][0]
    kept = {c["chosen"] for c in made["choices"] if c["direction"] == "training"}
    assert kept == {"output+input_grad+weight_grad"}
    assert made["not_tuned"] == ["model.embed_tokens.weight", "lm_head.weight"]
    assert "model.layers.0.mlp.down_proj" in {name for c in made["choices"] for name in c["layers"]}
    choices.forget()
    saved = choices.choices_for(CPU)
    assert str(choices.path_of(CPU)) == made["saved"]
    assert {(c.problem.direction, c.problem.n, c.problem.rows, c.kernel) for c in saved} == {
        (c["direction"], c["n"], c["rows"], c["chosen"]) for c in made["choices"]
    }
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype="auto")
    ao_lab.convert_for_training_(model, "rowwise")
    listed = {layer.name: layer.tuned for layer in ao_lab.explain(model).layers}
    assert len(listed["model.layers.0.self_attn.q_proj.weight"]) == 8


def test_a_table(capsys, folder):
    assert (
        main(["tune", str(folder), "--config", "Int8DynamicActivationInt8WeightConfig", "--rows", "1"]) == 0
    )
    shown = capsys.readouterr().out
    assert "inference" in shown
    assert "128 x 64" in shown
    assert "not tuned: model.embed_tokens.weight" in shown
    assert f"saved in {choices.path_of(CPU)}" in shown.replace("\n", "")
    assert "keeps the recipe" not in shown  # a CPU's choices among kernels for quantized weights are choices


def test_a_quantized_folder_as_it_is(capsys, folder, tmp_path):
    target, config = tmp_path / "out", "Int8DynamicActivationInt8WeightConfig"
    assert main(["quantize", str(folder), str(target), "--config", config, "--layout", "ao_lab"]) == 0
    capsys.readouterr()
    made = tuned(capsys, target, "--rows", 1, "--launches", "graph", "--time", 1.5)
    assert (made["recipe"], made["config"], made["launches"]) == (None, None, "graph")
    served = {
        c.problem for layer in ao_lab.explain(ao_lab.load_pretrained(target)).layers for c in layer.tuned
    }
    assert len(served) == len(made["choices"]) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "holds no quantized weights; give --recipe NAME"),
        (["--recipe", "rowwize"], "unknown recipe 'rowwize'; the nearest is rowwise; there are"),
        (["--recipe", "rowwise", "--config", "nf4"], "give either --recipe"),
        (["--recipe", "rowwise", "--option", "group_size=32"], "--option belongs to --config"),
        (["--config", "mxfp4", "--pad"], "--pad belongs to --recipe"),
        (["--recipe", "rowwise", "--error", "0"], "--error is a positive number"),
        (["--recipe", "rowwise", "--time", "0.5"], "--time is a factor of the fastest time"),
        (["--recipe", "rowwise", "--rows", "0"], "greater than or equal to 1"),
        (["--recipe", "rowwise", "--launches", "cuda"], "--launches"),
        (["--recipe", "rowwise", "--skip", "nowhere"], "--skip nowhere: no layer or submodule has this name"),
        (["--recipe", "bf16", "--skip", "proj"], "no layer"),
        (["--config", "int44"], "no configuration (ao-lab configs lists them) and no scheme"),
    ],
)
def test_what_to_do(capsys, folder, arguments, message):
    assert main(["tune", str(folder), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ao-lab: ")
    assert message in err
    assert not choices.path_of(CPU).exists()


def test_samples_by_what_a_model_takes():
    table = torch.nn.Embedding(50, 8)
    config = SimpleNamespace(use_cache=True, is_encoder_decoder=False, image_size=6, num_channels=2)
    text = SimpleNamespace(main_input_name="input_ids", config=config, get_input_embeddings=lambda: table)
    shape = {rows: sample_of(text, rows, 16, CPU)["input_ids"].shape for rows in ((8,), (40, 1), (4096,))}
    assert shape == {(8,): (1, 8), (40, 1): (2, 16), (4096,): (128, 16)}
    assert config.use_cache is False
    image = SimpleNamespace(main_input_name="pixel_values", config=config, dtype=torch.bfloat16)
    found = sample_of(image, (1,), 16, CPU)["pixel_values"]
    assert (found.shape, found.dtype) == ((1, 2, 6, 6), torch.bfloat16)
    sound = SimpleNamespace(main_input_name="input_values", config=config)
    with pytest.raises(WrongInput, match=r"input_values.*ao_lab\.tune\(model, sample_input\) in Python"):
        sample_of(sound, (1,), 16, CPU)
