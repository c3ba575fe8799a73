"""Rules by hand of a budget's size, and what a choice is held against between sizes."""

import math

import pytest
from torch import nn

from ao_lab.choose.result import Trial
from experiments.calibration import choice

#: Of SmolLM2-135M, by layer: channels out and in.
SHAPES = {"q": (576, 576), "k": (192, 576), "up": (1536, 576), "down": (576, 1536)}


@pytest.fixture(scope="module")
def layers():
    return {
        f"model.layers.{block}.{name}": nn.Linear(inputs, outputs, bias=False, device="meta")
        for block in range(30)
        for name, (outputs, inputs) in SHAPES.items()
    }


def bits(layers, schemes):
    """Stored bits a weight, scales and all."""
    stored = sum(choice.weight_size(layers[name].weight.shape, one).bytes for name, one in schemes.items())
    return 8 * stored / sum(layer.weight.numel() for layer in layers.values())


@pytest.mark.parametrize("budget", [3.0, 4.25])
def test_rules_fill_a_budget(layers, budget):
    """A block more of the better scheme would be over it; layers in 8 bits beside one scheme of 4 bits are."""
    filled = choice.filled(layers, budget)
    assert filled
    rules = choice.by_hand(layers)
    for rule, blocks in filled.items():
        better, lower, *others = dict.fromkeys(blocks.values())
        assert not others
        assert f", {better}, {lower} in the middle {[*blocks.values()].count(lower)} blocks" in rule
        schemes = rules[rule]
        assert {schemes[f"model.layers.{end}.q"] for end in (0, 29)} == {"int8_rowwise"}
        assert bits(layers, schemes) <= budget
        changed = next(block for block, one in blocks.items() if one == lower)
        more = {name: better if choice.block_of(name) == changed else one for name, one in schemes.items()}
        assert bits(layers, more) > budget
    assert bits(layers, rules[f"{choice.BY_HAND}, int4_g64_bf16"]) > 4.25


def test_the_middle_is_the_middle():
    assert (
        list(choice.with_middle("abcdef", "high", "low", 2).values())
        == ["high"] * 2 + ["low"] * 2 + ["high"] * 2
    )


def test_no_rule_fills_a_budget_that_the_least_is_over(layers):
    assert choice.filled(layers, 2.5) == {}


def test_a_size_between_trials_has_the_least_divergence_of_all_pairs():
    """A trial that is worse than what lies between its neighbours makes no size easier."""
    trials = [
        Trial(name, cost, 0.0, kl, True) for name, cost, kl in (("a", 2, 1.0), ("b", 3, 0.9), ("c", 4, 0.01))
    ]
    assert choice.interpolated(trials, 3) == pytest.approx(0.1)
    assert choice.interpolated(trials, 2) == pytest.approx(1.0)
    assert math.isnan(choice.interpolated(trials, 4.5))
