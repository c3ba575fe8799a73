"""`for_layout`: weights whose stored numbers survive the readers' own arithmetic, whatever the weights are."""

import torch

from ao_lab import NVFP4WeightOnlyConfig
from ao_lab.checkpoint.export.plain_reader import reading
from ao_lab.config.recipe import Recipe, named
from ao_lab.tensor.quantized_tensor import quantized
from reference import SCHEMES


def weights():
    for seed in range(40):
        torch.manual_seed(seed)
        yield (torch.randn(128, 128) * 10.0 ** (-3 * torch.rand(1))).to(torch.bfloat16)


def is_exact(weight, recipe):
    try:
        return reading(quantized(weight, recipe)).exact
    except ValueError:
        return False


def test_an_outer_scale_of_a_power_of_two_always_survives():
    recipe = NVFP4WeightOnlyConfig().for_layout("compressed-tensors").recipe()
    assert recipe.weight == named("nvfp4_pow2")
    assert all(is_exact(weight, recipe) for weight in weights())
    # The house's own does for most weights: what is tested here is no accident of one.
    assert not all(is_exact(weight, Recipe(weight=SCHEMES["nvfp4"])) for weight in weights())


def test_the_price_of_the_power_of_two():
    """The outer scale is at most twice as large, so block scales lose at most one of their 17 binades at the lower end."""
    for weight in weights():
        made = {name: quantized(weight, Recipe(weight=named(name))) for name in ("nvfp4", "nvfp4_pow2")}
        ratio = made["nvfp4_pow2"].outer / made["nvfp4"].outer
        assert 1 <= float(ratio) < 2
        assert float(made["nvfp4_pow2"].outer).hex().startswith("0x1.0000000000000p")
