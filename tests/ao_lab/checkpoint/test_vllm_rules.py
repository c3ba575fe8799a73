"""vLLM's loader rules as a table: what it serves of the configurations that we write, and what it refuses."""

import re

import pytest
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

import ao_lab
from ao_lab.checkpoint.export import export_of, quantization_config
from ao_lab.checkpoint.vllm_rules import RULES, refused_by_vllm, vllm_rule
from ao_lab.config.recipe import Recipe, named
from tests.ao_lab.config.test_every_config import ARGUMENTS

W4, W8, FP4, MX4, MX8 = "WNA16", "WNA16", "W4A16Fp4", "W4A4Mxfp4", "W8A8Mxfp8"
#: Of each configuration that compressed-tensors can say, with the arguments of test_every_config: vLLM's scheme, None: refused.
SERVED = {
    "Float8DynamicActivationFloat8WeightConfig": ["W8A8Fp8", "W8A8Fp8", "W8A8Fp8"],
    "Float8StaticActivationFloat8WeightConfig": ["W8A8Fp8", "W8A8Fp8"],
    "Float8WeightOnlyConfig": ["W8A16Fp8"],
    "Int4WeightOnlyConfig": [W4, W4],
    "Int8DynamicActivationInt8WeightConfig": ["W8A8Int8", "W8A8Int8"],
    "Int8DynamicActivationIntxWeightConfig": [None],
    "Int8StaticActivationInt8WeightConfig": ["W8A8Int8", "W8A8Int8"],
    "Int8WeightOnlyConfig": [W8],
    "IntxWeightOnlyConfig": [None, None, W4, None, None, None, W8, None, None],
    "LowBitWeightOnlyConfig": [None],
    "MXDynamicActivationMXWeightConfig": [MX8, MX4],
    "MXWeightOnlyConfig": [MX8, MX4],
    "NVFP4WeightOnlyConfig": [FP4],
}


def written(name):
    """The configurations of a class's examples that compressed-tensors can say, as they are written."""
    made = []
    for given in ARGUMENTS[name]:
        try:
            config = getattr(ao_lab, name)(**given).for_layout("compressed-tensors")
        except ValueError:
            continue
        recipe, static = config.recipe(), "Static" in name
        made.append(quantization_config({"a.b": (export_of(recipe).name, recipe, static)}, ["lm_head"]))
    return made


def served(config):
    (group,) = config["config_groups"].values()
    found = None if refused_by_vllm(config) else vllm_rule(group, config["format"])
    return found and found.scheme.removeprefix("CompressedTensors")


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_configuration_that_is_written(name):
    configs = written(name)
    assert [served(config) for config in configs] == SERVED.get(name, [])
    for config in configs:
        assert [bool(line) for line in refused_by_vllm(config)] == ([] if served(config) else [True])
        # The client's own schema takes what was written and says it the same way.
        client = QuantizationConfig.model_validate(config)
        assert client.format == config["format"]
        assert client.config_groups["group_0"].weights.strategy is not None


def test_refusals_are_told():
    (config,) = written("LowBitWeightOnlyConfig")
    assert refused_by_vllm(config) == [
        "group_0: vLLM has no scheme for weights of 3-bit int, channel in pack-quantized"
    ]
    (config,) = written("Int8DynamicActivationIntxWeightConfig")
    assert "beside inputs of 8-bit int, token in pack-quantized" in refused_by_vllm(config)[0]


def test_presets_of_the_client_are_served():
    """llm-compressor's own names, in the formats that compressed-tensors infers for them."""
    formats = {
        "W4A16": ("pack-quantized", "WNA16"), "W8A16": ("pack-quantized", "WNA16"), "W8A8": ("int-quantized", "W8A8Int8"),
        "FP8": ("float-quantized", "W8A8Fp8"), "FP8_DYNAMIC": ("float-quantized", "W8A8Fp8"),
        "FP8_BLOCK": ("float-quantized", "W8A8Fp8"), "NVFP4A16": ("nvfp4-pack-quantized", "W4A16Fp4"),
        "MXFP4": ("mxfp4-pack-quantized", "W4A4Mxfp4"), "W4A8": ("int-quantized", "W4A8Fp8"),
    }  # fmt: skip
    for preset, (fmt, wanted) in formats.items():
        group = {
            part: None if args is None else args.model_dump(mode="json")
            for part, args in PRESET_SCHEMES[preset].items()
        }
        found = vllm_rule(group, fmt)
        assert found is not None
        assert found.scheme == f"CompressedTensors{wanted}", preset


def test_one_table():
    assert len(RULES) == 12
    assert vllm_rule({"weights": None, "input_activations": None}, "int-quantized") is None


@pytest.mark.parametrize("several", [False, True])
def test_a_quantized_head_is_named(several):
    """vLLM's head (ParallelLMHead) is no `Linear` to it: a group has it by name, wherever a model for text lies."""
    head = ("pack-quantized", Recipe(weight=named("int8_rowwise")), False)
    other = ("pack-quantized", Recipe(weight=named("int4_g32")), False) if several else head
    made = quantization_config({"model.a": other, "lm_head": head}, [], ["lm_head"])
    named_in = [
        group
        for group in made["config_groups"].values()
        if any(t.startswith("re:") and re.match(t[3:], "language_model.lm_head") for t in group["targets"])
    ]
    assert [group["weights"]["num_bits"] for group in named_in] == [8]
    without = quantization_config({"model.a": other}, ["lm_head"], ["lm_head"])
    assert not any("re:" in t for group in without["config_groups"].values() for t in group["targets"])
