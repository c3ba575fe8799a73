"""Recipes of llm-compressor and torchao: their signatures, what they are translated to, what is refused."""

import ast
import inspect
from dataclasses import fields, make_dataclass
from pathlib import Path

import pytest
from torch import nn

import ao_lab
from ao_lab.calibration.methods import AWQ, GPTQ, Smooth, StaticKV
from ao_lab.quantization import aliases
from ao_lab.quantization.aliases import (
    AWQConfig,
    AWQModifier,
    GPTQConfig,
    GPTQModifier,
    QuantizationModifier,
    SmoothQuantConfig,
    SmoothQuantModifier,
    oneshot,
    translated,
)
from tests.ao_lab.calibration.test_run import assert_same, inputs, stack

#: Where the source of llm-compressor may lie, for its signatures (it needs an older transformers to be imported).
SOURCES = {
    "GPTQModifier": ("gptq/base.py", "quantization/quantization/mixin.py"),
    "AWQModifier": ("transform/awq/base.py",),
    "SmoothQuantModifier": ("transform/smoothquant/base.py",),
}


def fields_of(path, names):
    """Annotated public fields of classes of a source file, as pydantic takes them."""
    tree = ast.parse(path.read_text())
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in names]
    return {
        item.target.id
        for node in found
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        and not item.target.id.startswith("_")
        and not item.target.id.endswith("_")
    } - {"requires_calibration_data", "model_config"}


@pytest.mark.parametrize("name", SOURCES)
def test_arguments_are_those_of_llm_compressor(name):
    spec = pytest.importorskip("importlib.util").find_spec("llmcompressor")
    if spec is None:
        pytest.skip("llmcompressor is not installed")
    root = Path(spec.submodule_search_locations[0]) / "modifiers"
    theirs = set().union(*(fields_of(root / file, (name, "QuantizationMixin")) for file in SOURCES[name]))
    assert {one.name for one in fields(getattr(aliases, name))} == theirs


@pytest.mark.parametrize("name", ["GPTQConfig", "AWQConfig", "SmoothQuantConfig"])
def test_arguments_are_those_of_torchao(name):
    package = {"GPTQConfig": "gptq", "AWQConfig": "awq", "SmoothQuantConfig": "smoothquant"}[name]
    theirs = getattr(pytest.importorskip(f"torchao.prototype.{package}"), name)
    wanted, ours = inspect.signature(theirs).parameters, inspect.signature(getattr(aliases, name)).parameters
    assert list(wanted) == list(ours)
    for key, one in wanted.items():
        if key not in ("step", "base_config"):
            assert one.default == ours[key].default


def test_arguments_of_later_torchao_are_refused_unless_at_their_defaults():
    later = make_dataclass("Int8WeightOnlyConfig", [("group_size", object, None), ("later", bool, False)])
    assert translated(AWQConfig(later())).config == ao_lab.Int8WeightOnlyConfig()
    with pytest.raises(ValueError, match="Int8WeightOnlyConfig: later=True is not supported"):
        translated(AWQConfig(later(later=True)))


def test_objects_of_torchao_are_taken():
    quantization, awq = (
        pytest.importorskip("torchao.quantization"),
        pytest.importorskip("torchao.prototype.awq"),
    )
    theirs = awq.AWQConfig(quantization.Int8WeightOnlyConfig(), step="convert", scale_search_space_size=7)
    found = translated(theirs)
    assert found.methods == (AWQ(7),)
    assert found.config == ao_lab.Int8WeightOnlyConfig()
    with pytest.raises(ValueError, match="give batches to one call, without step"):
        translated(awq.AWQConfig(quantization.Int8WeightOnlyConfig(), step="prepare"))


class Sentinel:
    """What llm-compressor's defaults are, so that they can be told from None."""


@pytest.mark.parametrize("ours", [GPTQModifier(scheme="W4A16"), AWQModifier()])
def test_objects_of_llm_compressor_have_its_defaults(ours):
    theirs = type(
        type(ours).__name__, (), {**vars(ours), "actorder": Sentinel(), "offload_device": Sentinel()}
    )
    assert aliases._ours(theirs()) == ours


def test_a_recipe_is_one_call_of_quantize_():
    one, two = stack(), stack()
    recipe = [
        SmoothQuantModifier(0.8),
        GPTQModifier(scheme="W8A8", ignore=["re:.*three", "head"], dampening_frac=None),
    ]
    report = oneshot(one, inputs(), recipe, num_calibration_samples=2)
    config = ao_lab.Int8DynamicActivationInt8WeightConfig().for_layout("compressed-tensors")
    ao_lab.quantize_(
        two,
        config,
        lambda m, n: n[-3:] in ("one", "two"),
        calibration=inputs()[:2],
        methods=(Smooth(0.8), GPTQ()),
    )
    assert_same(one, two)
    assert {layer.name[9:] for layer in report.changed} == {"one.weight", "two.weight"}


@pytest.mark.parametrize(
    ("recipe", "methods"),
    [
        (QuantizationModifier(scheme="w4a16"), ()),
        (GPTQModifier(scheme="W4A16"), (GPTQ("activation", 0.01),)),
        (GPTQModifier(scheme="W4A16", actorder=None, dampening_frac=0.1), (GPTQ("stored", 0.1),)),
        ([AWQModifier(n_grid=5), QuantizationModifier(scheme="NVFP4A16")], (AWQ(5),)),
        (QuantizationModifier(scheme="FP8_DYNAMIC", kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor",
         "dynamic": False, "symmetric": True}), (StaticKV("tensor"),)),
        (GPTQConfig(base_config=ao_lab.Int8WeightOnlyConfig(), percdamp=0.05), (GPTQ("stored", 0.05),)),
        (AWQConfig(ao_lab.Int8WeightOnlyConfig(), scale_search_space_size=3), (AWQ(3),)),
        (SmoothQuantConfig(ao_lab.Int8DynamicActivationInt8WeightConfig(), alpha=0.7), (Smooth(0.7),)),
    ],
)  # fmt: skip
def test_methods_of_recipes(recipe, methods):
    assert translated(recipe).methods == methods


@pytest.mark.parametrize("name", list(aliases._presets()))
def test_presets_are_what_compressed_tensors_calls_so(name):
    """Bits, elements and granularity of weights and inputs, in its own table."""
    schemes = pytest.importorskip("compressed_tensors.quantization.quant_scheme")
    wanted = schemes.preset_name_to_scheme(name, ["Linear"])
    recipe = translated(QuantizationModifier(scheme=name)).config.recipe()
    from ao_lab.checkpoint.export import input_arguments, weight_arguments

    ours = weight_arguments(recipe.weight)
    for key in ("num_bits", "type", "strategy", "group_size", "symmetric"):
        assert plain(ours.get(key)) == plain(getattr(wanted.weights, key)), key
    assert (recipe.activation is None) == (wanted.input_activations is None)
    if recipe.activation is not None and name != "NVFP4":
        given = input_arguments(recipe.activation, False)
        for key in ("num_bits", "type", "strategy", "dynamic"):
            assert plain(given.get(key)) == plain(getattr(wanted.input_activations, key)), key


def plain(value):
    return getattr(value, "value", value)


@pytest.mark.parametrize(
    ("recipe", "error", "said"),
    [
        (GPTQModifier(scheme="W4A16", block_size=64), ValueError, "block_size=64 is not supported in ao_lab"),
        (GPTQModifier(scheme="W4A16", actorder="group"), ValueError, "actorder is 'static' or None"),
        (GPTQModifier(scheme="W4A8"), ValueError, "scheme"),
        (GPTQModifier(config_groups={}), ValueError, "config_groups={} is not supported.*FqnToConfig"),
        (QuantizationModifier(), ValueError, "scheme is the name of a preset"),
        (QuantizationModifier(scheme="W8A8", kv_cache_scheme={"num_bits": 4}), ValueError, "kv_cache_scheme is static"),
        (QuantizationModifier(scheme="W8A8", kv_cache_scheme={"num_bits": 8, "type": "int", "symmetric": False}), ValueError,
         "static and symmetric"),
        (QuantizationModifier(scheme="W8A8", kv_cache_scheme={"num_bits": 8, "type": "mx"}), ValueError, "float or int"),
        (QuantizationModifier(scheme="W8A8", kv_cache_scheme="fp8"), ValueError, "kv_cache_scheme is static"),
        (SmoothQuantConfig(ao_lab.Int8WeightOnlyConfig(), alpha=None), ValueError, "alpha=None is not supported"),
        ([AWQModifier(mappings=[]), GPTQModifier(scheme="W4A16")], ValueError, r"mappings=\[\] is not supported"),
        ([AWQModifier(offload_device="cpu"), GPTQModifier(scheme="W4A16")], ValueError, "offload_device='cpu'.*offload="),
        (QuantizationModifier(scheme="W8A8", ignore="re:("), ValueError, "'re:\\(' is no regular expression"),
        (AWQModifier(), ValueError, "one modifier of a recipe quantizes, .* got 0"),
        ([SmoothQuantModifier(algorithm="log_equalization"), GPTQModifier(scheme="W8A8")], ValueError, "algorithm"),
        (GPTQConfig(base_config=ao_lab.Int8WeightOnlyConfig(), gptq_quantize_block_size=64), ValueError, "block_size=64"),
        (AWQConfig("int8"), TypeError, "base_config is a configuration"),
        ([nn.Linear(2, 2)], TypeError, "a recipe holds QuantizationModifier"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused(recipe, error, said):
    with pytest.raises(error, match=said):
        translated(recipe)


@pytest.mark.parametrize("ignore", ["head", ["head"], "re:he", None])
def test_ignore_may_be_one_name(ignore):
    meant = translated(QuantizationModifier(scheme="W8A8", ignore=ignore)).filter_fn
    assert meant(nn.Linear(2, 2), "one")
    assert meant(nn.Linear(2, 2), "head") is (ignore is None)


def test_recipes_without_data():
    model, expected = stack(), stack()
    oneshot(model, None, QuantizationModifier(scheme="MXFP4A16", ignore=["head"]))
    config = translated(QuantizationModifier(scheme="MXFP4A16")).config
    ao_lab.quantize_(expected, config, lambda m, n: isinstance(m, nn.Linear) and n != "head")
    assert_same(model, expected)
    assert type(model.head.weight) is nn.Parameter
