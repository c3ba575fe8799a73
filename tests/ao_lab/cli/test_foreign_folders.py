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


@pytest.mark.parametrize("name", ["other.safetensors.index.json", "other.safetensors", 5])
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


@pytest.mark.parametrize("content", [b"no archive", pickle.dumps({"x": Runs()}), b""])
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


@pytest.mark.parametrize("text", ['{"a":', "[]", '{"to_dict": 1}', '{"watermarking_config": 5}', "[" * 10**5])
def test_settings_of_generation_that_are_none(capsys, folder, text):
    (folder / "generation_config.json").write_text(text)
    for line in complaints(capsys, folder):
        assert "generation_config.json" in line
