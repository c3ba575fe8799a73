"""Ways to a quantized model: AutoRound is held against training at 2 and 3 bits, where the paper asks it."""

from functools import partial

import pytest
import torch

from experiments.models.causal_lm import linears, load, of_folder
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
