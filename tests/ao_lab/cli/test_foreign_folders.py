"""Folders that somebody made to be read otherwise than they were checked: one line, before any work."""

import json
import os
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from ao_lab.cli.app import main
from tests.support.models.small_llama import save_llama

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("sound") / "model"
    save_llama(path)
    return path


@pytest.fixture
def folder(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "model")


def edit(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def complaints(capsys, folder):
    """What `quantize` and `eval` say, a line each."""
    target = folder.parent / "out"
    for arguments in (["quantize", str(folder), str(target), "--config", "mxfp4"], ["eval", str(folder)]):
        assert main(arguments) == 2
        yield capsys.readouterr().err
    assert not target.exists()


def by_night(*cases):
    """Further cases of a rule."""
    return [pytest.param(case, marks=pytest.mark.nightly, id=f"night{at}") for at, case in enumerate(cases)]


@pytest.mark.parametrize("name", ["other.safetensors.index.json", *by_night("other.safetensors", 5)])
def test_a_configuration_does_not_choose_the_file_of_weights(capsys, folder, name):
    """transformers would read it, and no index of another name is looked at."""
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder.parent / "outside.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "../outside.safetensors")}
    (folder / "other.safetensors.index.json").write_text(json.dumps(index))
    edit(folder, transformers_weights=name)
    for line in complaints(capsys, folder):
        assert f"transformers_weights names {name}" in line


class Runs:
    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("content", [pickle.dumps({"x": Runs()}), *by_night(b"no archive", b"")])
def test_pickles_that_are_not_tensors_alone(capsys, folder, monkeypatch, content):
    monkeypatch.chdir(folder.parent)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    for line in complaints(capsys, folder):
        assert "pytorch_model.bin cannot be read as tensors alone" in line
    assert not (folder.parent / "ran").exists()


def test_pickles_outside_of_the_folder_are_not_read(capsys, folder):
    torch.save(load_file(folder / "model.safetensors"), folder.parent / "outside.bin")
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "../outside.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for line in complaints(capsys, folder):
        assert "plain name of a .bin file in the same folder, got ../outside.bin" in line


@pytest.mark.parametrize(
    "text", ['{"to_dict": 1}', *by_night('{"a":', "[]", '{"watermarking_config": 5}', "[" * 10**5)]
)
def test_settings_of_generation_that_are_none(capsys, folder, text):
    (folder / "generation_config.json").write_text(text)
    for line in complaints(capsys, folder):
        assert "generation_config.json" in line


@pytest.mark.parametrize(
    "name", ["part/config.json", *by_night("notes.json", "modules.json", "generation_config.json")]
)
def test_links_in_a_circle_are_left_out(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to((folder / name).name)
    target = folder.parent / "out"
    assert main(["quantize", str(folder), str(target), "--config", "mxfp4"]) == 0
    assert not any(path.is_symlink() for path in target.rglob("*"))


def test_no_text_of_a_link_out_goes_into_a_card(capsys, folder):
    """A card may be published: of the folder's README.md its licence is taken over, and results are put into it."""
    (folder.parent / "secret").write_text("---\nlicense: key\n---\n")
    (folder / "README.md").symlink_to("../secret")
    assert main(["eval", str(folder), "--save"]) == 2
    assert "README.md is a link out of the model's folder" in capsys.readouterr().err
    assert (folder / "README.md").is_symlink()
    target = folder.parent / "out"
    assert main(["quantize", str(folder), str(target), "--config", "mxfp4"]) == 0
    assert "key" not in (target / "README.md").read_text()


@pytest.mark.parametrize("value", [{"quant_method": "\x1b[31mred"}, *by_night("gptq", [], 5)])
def test_a_quantization_that_is_none(capsys, folder, value):
    edit(folder, quantization_config=value)
    for line in complaints(capsys, folder):
        assert "quant" in line
        assert line.removesuffix("\n").isprintable()


def test_adapters_beside_a_model_are_not_merged_silently(capsys, folder):
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    for line in complaints(capsys, folder):
        assert "adapter_config.json describes adapters of peft" in line


@pytest.mark.parametrize("value", ["9" * 5000, *by_night("[" * 10**5, f"PerGroup({'9' * 5000})")])
def test_values_of_options_that_no_number_is(capsys, folder, value):
    command = ["quantize", str(folder), str(folder.parent / "out"), "--config", "Int8WeightOnlyConfig"]
    assert main([*command, "--option", f"granularity={value}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
