"""Ways to a quantized model: AutoRound is held against training at 2 and 3 bits, where the paper asks it."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from experiments.models.causal_lm import linears, load, of_folder
from experiments.models.fine_tuning import Tuning, fine_tune, optimizer_of, trainable
from experiments.qat import arms

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("name", "there"), [("int2_g32", True), ("int3_g32", True), ("int4_g32", False), ("nvfp4", False)]
)
def test_autoround_is_an_arm_of_few_bits(name, there):
    (method,) = arms.methods_named([name])
    assert (arms.WITH_AUTOROUND in method.arms) is there


def test_autoround_loses_less_than_rounding(folder, monkeypatch):
    monkeypatch.setattr(arms, "AutoRound", partial(arms.AutoRound, steps=10))
    model, (method,) = of_folder(folder), arms.methods_named(["int2_g32"])
    ids = torch.randint(0, 256, (8, 32), generator=torch.Generator().manual_seed(0))
    dense = load(model, "cpu")
    errors = {}
    for arm in (arms.PTQ, arms.WITH_AUTOROUND):
        made = arms.quantized(load(model, "cpu"), method, arm, list(ids.split(2)))
        assert all(type(layer.weight).__name__ == "QuantizedTensor" for layer in linears(made).values())
        with torch.no_grad():
            errors[arm] = float((made(ids).logits - dense(ids).logits).float().square().mean())
    assert errors[arms.WITH_AUTOROUND] < 0.9 * errors[arms.PTQ]


@pytest.mark.parametrize(("name", "levels"), [("int2_g32", "stretched2_g32"), ("int3_g32", "int3_g32")])
def test_paretoq_trains_its_levels_by_its_authors_optimizer(folder, name, levels):
    """Scales start at the largest magnitude of a group, take part in each step, and are those of the weights after it."""
    (method,) = arms.methods_named([name])
    assert arms.PARETOQ in method.arms
    tuning = arms.tuning_of(arms.PARETOQ, Tuning(steps=40, batch=1, length=16, rate=1e-4, scale_rate=5e-3))
    assert (tuning.factor(0), tuning.factor(20)) == (1.0, pytest.approx(0.5))
    tuning = replace(tuning, steps=2)
    model = trainable(load(of_folder(folder), "cpu"), torch.float32)
    arms.prepare(model, method, arms.PARETOQ, [])
    first = next(iter(linears(model).values()))
    started, reach = first.qat_scale.detach().clone(), 2.0 if name == "int2_g32" else 3.0
    amax = first.weight.detach().unflatten(1, (-1, 32)).abs().amax(-1)
    assert torch.allclose(started.flatten(), (amax / reach).flatten())
    (group,) = optimizer_of(model, tuning).param_groups
    assert (group["full_rate"], group["betas"], group["weight_decay"]) == (2e-5, (0.9, 0.999), 0.0)
    fine_tune(model, torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0)), tuning)
    assert not torch.equal(first.qat_scale, started)
    made = arms.convert(model, method, arms.PARETOQ)
    assert {layer.weight.plain.quantized.scheme.name for layer in linears(made).values()} == {levels}


def test_paretoq_is_an_arm_of_weights_of_few_bits_alone():
    there = {one.name for one in arms.METHODS if arms.PARETOQ in one.arms}
    assert there == {"int2_g32", "int3_g32"}
