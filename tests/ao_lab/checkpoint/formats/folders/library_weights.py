"""Weights that other libraries packed (tests/checkpoint/formats/data), and folders that hold them."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import reference
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


# Random layers of unsigned integers, as other libraries' checkpoints hold them, and the codes of what was read.


def random_layer(bits, inputs, outputs, group, seed, lowest=0):
    """Unsigned codes, zero points and float16 scales (positive, negative, subnormal, infinite, NaN)."""
    rng = np.random.default_rng(seed)
    groups = 1 if group == -1 else -(-inputs // group)
    codes = rng.integers(0, 1 << bits, (outputs, inputs))
    zeros = rng.integers(lowest, 1 << bits, (outputs, groups))
    scales = torch.from_numpy(rng.integers(0, 1 << 16, (outputs, groups)).astype(np.uint16)).view(
        torch.float16
    )
    return codes, zeros, scales


def stored_codes(weight):
    """Unsigned codes of a stored weight of integers, as its file had them."""
    fmt = weight.scheme.format
    signed = reference.unpack(weight.codes.numpy(), fmt, tuple(weight.shape)).astype(int)
    return (signed + (1 << (fmt.bits - 1))) % (1 << fmt.bits)
