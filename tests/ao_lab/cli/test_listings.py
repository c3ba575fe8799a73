"""Configurations by name: what there is, what they take, and the nearest to a wrong name."""

import json

import pytest

from ao_lab.cli.app import main
from ao_lab.cli.listings import WITHOUT_EFFECT, config_classes, options_of


def test_every_configuration_is_listed(capsys):
    assert main(["configs", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == list(config_classes())
    assert rows["NVFP4DynamicActivationNVFP4WeightConfig"]["activation"] == "nvfp4"
    assert main(["configs"]) == 0
    out = capsys.readouterr().out
    assert all(f" {name} " in out for name in rows)


@pytest.mark.parametrize("name", config_classes())
def test_options_of_a_configuration_are_those_that_change_something(capsys, name):
    assert main(["configs", name, "--json"]) == 0
    options = json.loads(capsys.readouterr().out)["options"]
    assert list(options) == list(options_of(config_classes()[name]))
    assert not {*WITHOUT_EFFECT, "scheme", "activation_scheme", "sparsity"} & set(options)
    assert main(["configs", name]) == 0
    out = capsys.readouterr().out
    assert all(f" {option} " in out for option in options)


def test_defaults_are_what_the_command_takes(capsys):
    """A granularity by its name, as --option reads it."""
    assert main(["configs", "Int8DynamicActivationIntxWeightConfig", "--json"]) == 0
    options = json.loads(capsys.readouterr().out)["options"]
    assert options["weight_granularity"] == "PerGroup(32)"
    assert list(options)[-2:] == ["kernel", "axis"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["configs", "Int4WeightOnly"], "the nearest are Int4WeightOnlyConfig"),
        (
            ["quantize", "{folder}", "{out}", "--config", "Int4WeightOnly"],
            "the nearest are Int4WeightOnlyConfig",
        ),
        (["quantize", "{folder}", "{out}", "--config", "mxpf4"], "mxfp4"),
        (["quantize", "{folder}", "{out}", "--config", "qqqq"], "`ao-lab configs` lists them"),
        (
            ["quantize", "{folder}", "{out}", "--config", "Int4WeightOnlyConfig", "--option", "x=1"],
            "no option x; it has group_size, kernel, axis (ao-lab configs shows",
        ),
        (
            ["quantize", "meta-llama/Llama-3.2-1B", "{out}", "--config", "mxfp4"],
            "not fetched: hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B does",
        ),
        (["eval", "meta-llama/Llama-3.2-1B"], "hf download meta-llama/Llama-3.2-1B"),
        (["tune", "meta-llama/Llama-3.2-1B", "--recipe", "rowwise"], "hf download meta-llama/Llama-3.2-1B"),
        (["eval", "{out}/a"], "has no config.json; give a folder that ao-lab quantize or transformers wrote"),
        (
            ["quantize", "{folder}", "{out}", "--config", "nf4", "--layout", "compressed-tensors"],
            "compressed-tensors has no format for nf4",
        ),
    ],
)
def test_wrong_names_are_one_line_before_any_work(capsys, tmp_path, monkeypatch, arguments, words):
    """Before transformers is imported, and a line says that work goes on."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr("ao_lab.cli.quantize.needed", lambda name: pytest.fail(f"{name} was imported"))
    assert main([one.format(folder=folder, out=tmp_path / "out") for one in arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err
