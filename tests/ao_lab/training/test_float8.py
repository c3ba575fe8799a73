"""torchao's configurations mean the recipes of these names."""

from dataclasses import fields

import pytest
import torch
from torch import nn

import ao_lab
from ao_lab.training.float8 import (
    CastConfig,
    Float8GemmConfig,
    Float8LinearConfig,
    ScalingGranularity,
    ScalingType,
)
from ao_lab.training.layers import LowPrecisionLinear
from reference.training import RECIPES


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_recipes_by_name(name):
    assert Float8LinearConfig.from_recipe_name(name).recipe() is RECIPES[name]


def test_defaults_are_tensorwise():
    assert Float8LinearConfig().recipe() is RECIPES["tensorwise"]
    net = ao_lab.convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)))
    assert isinstance(net[0], LowPrecisionLinear)


def test_fields_reach_the_recipe():
    row = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=torch.float8_e5m2)
    config = Float8LinearConfig(
        cast_config_weight=row, gemm_config_grad_weight=Float8GemmConfig(use_fast_accum=True)
    )
    recipe = config.recipe()
    assert recipe.output.b.scheme.name == "fp8_rowwise_e5m2"
    assert recipe.input_grad.b.scheme.name == "fp8_rowwise_e5m2"
    assert recipe.output.a.scheme.name == "fp8_tensorwise"
    assert [p.accumulation for p in (recipe.output, recipe.input_grad, recipe.weight_grad)] == [
        "fast",
        "precise",
        "fast",
    ]
    assert (
        Float8LinearConfig(round_scales_to_power_of_2=True).recipe().output.a.scheme.scale.rule
        == "ratio_pow2"
    )


def test_one_cast_for_two_tensors_keeps_its_dtype_apart():
    """torchao fills the dtype in place, so that an instance for inputs and gradients makes gradients e4m3."""
    shared = CastConfig()
    recipe = Float8LinearConfig(cast_config_input=shared, cast_config_grad_output=shared).recipe()
    assert (recipe.output.a.scheme.element, recipe.input_grad.a.scheme.element) == (
        "float8_e4m3fn",
        "float8_e5m2",
    )
    assert shared.target_dtype is None


def test_wrong_configurations():
    with pytest.raises(ValueError, match="tensorwise, rowwise, rowwise_with_gw_hp"):
        Float8LinearConfig.from_recipe_name("blockwise")
    with pytest.raises(ValueError, match="target_dtype"):
        CastConfig(target_dtype=torch.float16)
    with pytest.raises(ValueError, match="both operands of output"):
        Float8LinearConfig(cast_config_input=CastConfig(ScalingType.DISABLED))
    with pytest.raises(TypeError, match="Float8LinearConfig"):
        ao_lab.convert_to_float8_training(nn.Linear(32, 32), config="rowwise")


def test_padding_and_emulation():
    net = nn.Sequential(nn.Linear(20, 30))
    config = Float8LinearConfig(pad_inner_dim=True, emulate=True)
    ao_lab.convert_to_float8_training(net, config=config)
    assert net(torch.randn(3, 20)).shape == (3, 30)


@pytest.mark.parametrize("name", ["CastConfig", "Float8GemmConfig", "Float8LinearConfig"])
def test_fields_and_defaults_are_those_of_torchao(name):
    """Same names in the same order, so that a user switches by changing the import."""
    theirs = getattr(pytest.importorskip("torchao.float8.config"), name)
    ours = getattr(ao_lab, name)
    assert [field.name for field in fields(ours)] == [field.name for field in fields(theirs)]
    for mine, other in zip(fields(ours), fields(theirs), strict=True):
        if isinstance(mine.default, bool | None):
            assert mine.default == other.default, mine.name
