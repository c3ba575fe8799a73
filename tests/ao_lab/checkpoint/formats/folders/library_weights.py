"""Weights that other libraries packed (tests/checkpoint/formats/data), and folders that hold them."""

import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from ao_lab.checkpoint.formats import third_party_records
from ao_lab.checkpoint.io.shards import look_at
from ao_lab.checkpoint.records import whole_weights

DATA = Path(__file__).parents[1] / "data"


def cases(method):
    """The names of a method's cases."""
    return list(_configs(method))


def _configs(method):
    with safe_open(DATA / f"{method}.safetensors", "pt") as file:
        return json.loads(file.metadata()["cases"])


def case(method, name):
    """quantization_config of a case, its tensors by name, and the dense weight that the library made of them."""
    with safe_open(DATA / f"{method}.safetensors", "pt") as file:
        keys = [key for key in file.offset_keys() if key.startswith(f"{name}|")]
        tensors = {key.partition("|")[2]: file.get_tensor(key) for key in keys}
    return _configs(method)[name], tensors, tensors.pop("expected")


def grids(prefix):
    """Weights that a library has rounded, with its scales and zero points, by name."""
    with safe_open(DATA / "grids.safetensors", "pt") as file:
        keys = [key for key in file.offset_keys() if key.startswith(f"{prefix}|")]
        return {key.partition("|")[2]: file.get_tensor(key) for key in keys}


def folder_of(path, config, tensors, prefix="layer."):
    """A folder of these tensors, all of one layer."""
    path.mkdir(exist_ok=True)
    named = {prefix + name: part.contiguous() for name, part in tensors.items()}
    save_file(named, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return path


def read(path, name="layer.weight"):
    """The weight that load_pretrained would put into a model."""
    folder = look_at(path)
    return whole_weights(folder, third_party_records(folder))[name]
