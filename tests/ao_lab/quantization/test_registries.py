"""What one file adds: a configuration, a transform, a calibration method, a checkpoint format. Each is defined here alone."""

import json
from dataclasses import dataclass, field, replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ao_lab
from ao_lab import SCHEMES, QuantizedTensor, calibrate, explain, load_pretrained, quantize_, quantized
from ao_lab.checkpoint.formats import reader, readers
from ao_lab.checkpoint.io.shards import Spec
from ao_lab.checkpoint.records import Records, Weight
from ao_lab.checkpoint.transformers.config import config_from, config_values
from ao_lab.cli.listings import config_classes
from ao_lab.config.base import CONFIGS, Config
from ao_lab.config.recipe import Recipe
from ao_lab.quantization.api import Call, quantize_weights, transform
from ao_lab.tensor.chunked import quantized_by_rows
from ao_lab.tensor.metadata import Meta
from tests.support.quantized_weights import same, weight

METHOD = "halves_and_bytes"


# A configuration: a class with its scheme.


@dataclass(frozen=True)
class ThreeBitConfig(Config):
    """Integers of 3 bits in groups, with scales in bfloat16."""

    group_size: int = 64

    def _weight(self):
        model = SCHEMES["int4_g32"]
        scale = replace(model.scale, block=self.group_size, target=3.0, storage="bfloat16")
        return replace(model, name=f"three_bits_g{self.group_size}", element="int3", scale=scale)


# A transform: what quantize_ does for a class of configurations, here more than quantizing.


@dataclass(frozen=True)
class FrozenThreeBitConfig(ThreeBitConfig):
    """The same; biases are frozen too."""


@transform(FrozenThreeBitConfig)
def quantize_and_freeze(call: Call):
    report = quantize_weights(call)
    for parameter in call.model.parameters():
        parameter.requires_grad_(False)
    return report


# A calibration method: an observer, which a configuration names.


@dataclass
class WeightedRounding:
    """Weights' columns that inputs are zero in are stored as zero."""

    used: list = field(default_factory=list)

    def observe(self, name, module, x):
        self.used.append(x.abs().reshape(-1, x.shape[-1]).amax(0) > 0)

    def unsupported_reason(self):
        return None if self.used else "no input was seen"

    def weight(self, dense, recipe, axis):
        return quantized_by_rows(dense * torch.stack(self.used).any(0), recipe, axis=axis)


@dataclass(frozen=True)
class WeightedRoundingConfig(ThreeBitConfig):
    def observer(self):
        return WeightedRounding()


# A checkpoint format: a reader under the name that config.json has.


@reader(METHOD)
def read_bytes(folder, given):
    """NAME.bytes and NAME.row_scale: int8 codes and a float32 scale for each row."""
    weights = {}
    for full in [name for name in folder.specs if name.endswith(".bytes")]:
        name, shape = full.removesuffix(".bytes"), folder.specs[full].shape
        meta = Meta(Recipe(weight=SCHEMES["int8_rowwise"]), -1, torch.float32)
        specs = {"codes": Spec(torch.uint8, shape), "scale": Spec(torch.float32, (shape[0], 1))}
        names = {"codes": full, "scale": f"{name}.row_scale"}

        def made(parts, meta=meta, shape=shape):
            return QuantizedTensor(parts, meta, shape)

        weights[name] = Weight(meta, shape, names, specs, made, METHOD)
    return Records(weights, (), {})


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 32))


def test_a_configuration_is_one_class():
    model, expected = layers(), quantized(layers()[0].weight.detach(), ThreeBitConfig().recipe())
    report = quantize_(model, ThreeBitConfig())
    assert [layer.scheme for layer in report.changed] == ["three_bits_g64"] * 2
    assert same(model[0].weight.dequantize(), expected.dequantize())
    assert model[0].bias.requires_grad


def test_files_and_the_command_line_know_it():
    assert CONFIGS["ThreeBitConfig"] is config_classes()["ThreeBitConfig"] is ThreeBitConfig
    values = json.loads(json.dumps(config_values(ThreeBitConfig(group_size=32))))
    assert config_from(values) == ThreeBitConfig(group_size=32)


def test_a_class_of_a_name_that_is_taken_leaves_the_first():
    class Int8WeightOnlyConfig(ao_lab.Int8WeightOnlyConfig):
        """A user's own."""

    assert CONFIGS["Int8WeightOnlyConfig"] is ao_lab.Int8WeightOnlyConfig
    with pytest.raises(ValueError, match="is no configuration that ao_lab can name"):
        config_values(Int8WeightOnlyConfig())


def test_a_transform_is_one_function():
    model = layers()
    quantize_(model, FrozenThreeBitConfig())
    assert isinstance(model[0].weight, QuantizedTensor)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ValueError, match="has a transform already"):
        transform(FrozenThreeBitConfig)(lambda call: None)


def test_transforms_are_not_mixed():
    mixed = {"0": ThreeBitConfig(), "1": FrozenThreeBitConfig()}
    with pytest.raises(ValueError, match=r"ThreeBitConfig and .*do different things to a model"):
        quantize_(layers(), ao_lab.FqnToConfig(mixed))


def test_a_calibration_method_is_one_observer():
    model, x = layers(), torch.randn(4, 128)
    x[:, :64] = 0
    dense = model[0].weight.detach().clone()
    dense[:, :64] = 0
    observers = calibrate(model, WeightedRoundingConfig(), lambda net: net(x))
    quantize_(model, WeightedRoundingConfig(), observers=observers)
    assert same(model[0].weight.dequantize(), quantized(dense, ThreeBitConfig().recipe()).dequantize())
    with pytest.raises(ValueError, match="needs calibration"):
        quantize_(layers(), WeightedRoundingConfig())


def test_a_checkpoint_format_is_one_reader(tmp_path):
    stored = quantized(weight(64, 128), "int8_rowwise")
    tensors = {"0.weight.bytes": stored.codes, "0.weight.row_scale": stored.scale, "0.bias": torch.zeros(64)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": METHOD}}))
    model = load_pretrained(tmp_path, nn.Sequential(nn.Linear(128, 64)))
    assert same(model[0].weight.dequantize(), stored.dequantize())
    assert explain(model).changed[0].reason == f"loaded, as {METHOD} stored it"
    assert METHOD in readers()
