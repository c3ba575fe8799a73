"""The seam that watches a layer changes no bit; each fault is what it says, and counters show it."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import fast
from ao_lab import convert_for_training_
from experiments.fp8_training.convergence import BAD, LOST, SATURATED, SCALE_STEP, SQNR, counted
from experiments.fp8_training.faults import FAULTS, Fault, Watcher, plant
from reference.training import RECIPES


def layer(recipe, seed=0):
    """A converted layer and its output, input gradient and weight gradient."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(128, 128, bias=False))
    x, g = torch.randn(128, 128).requires_grad_(), torch.randn(128, 128)
    convert_for_training_(model, recipe)

    def step(size=1.0):
        y = model(x)
        return [y.detach(), *torch.autograd.grad(y, (x, model[0].weight), g * size)]

    return model[0], step


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8", "rowwise_with_gw_hp"])
def test_a_watched_layer_without_a_fault_is_the_layer(recipe):
    module, step = layer(recipe)
    expected, watcher = step(), Watcher()
    undo = plant(module, watcher)
    assert all(torch.equal(a, b) for a, b in zip(step(), expected, strict=True))
    undo()
    places = ["output.a", "output.b", "input_grad.a", "input_grad.b"]
    dense = recipe == "rowwise_with_gw_hp"
    assert list(watcher.counters.values) == places + ([] if dense else ["weight_grad.a", "weight_grad.b"])
    step()
    assert {len(found) for place in watcher.counters.values.values() for found in place.values()} == {1}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda one: one.place)
def test_a_fault_reaches_the_product_of_its_place_alone(fault):
    module, step = layer("tensorwise")
    expected = step()
    plant(module, Watcher(replace(fault, stale=min(fault.stale, 1))))
    step(1e-3)
    changed = [not torch.equal(a, b) for a, b in zip(step(), expected, strict=True)]
    assert changed == [fault.place.startswith(name) for name in ("output", "input_grad", "weight_grad")]


def test_counters_of_a_known_operand():
    scheme = RECIPES["tensorwise"].output.a.scheme
    x = torch.full((16, 16), 448.0)
    x[0, 0], x[0, 1], x[1] = 1e-9, 0.0, -448.0
    found = counted(x, fast.quantize(x, scheme))
    assert found[LOST] == pytest.approx(100 / 255)
    assert found[SATURATED] == pytest.approx(100 * 254 / 256)
    assert found[BAD] == 0
    half = fast.quantize(x, scheme)
    half = replace(half, scale=half.scale * 0.5)
    assert counted(x, half)[SQNR] == pytest.approx(10 * math.log10(4), rel=1e-5)
    x[3, 3] = math.nan
    assert counted(x, fast.quantize(x, scheme))[BAD] == 100


def test_e8m0_scales_are_counted_and_spoiled_by_powers_of_two():
    x, operand = torch.randn(32, 64), RECIPES["mxfp8"].output.a
    fine = Watcher(Fault(name="", place="output.a"))
    q, small = (
        one("output.a", x, operand) for one in (fine, Watcher(Fault(name="", place="output.a", scale_power=-4)))
    )  # fmt: skip
    assert torch.equal(small.scale.int(), q.scale.int() - 4)
    x[0, 0] = math.nan
    assert fine("output.a", x, operand) is not None
    assert fine.counters.values["output.a"][BAD] == [0.0, 100 / 64]


def test_stale_scales_are_those_of_earlier_steps():
    watcher = Watcher(Fault(name="", place="output.a", stale=2))
    operand = RECIPES["tensorwise"].output.a
    scales = [float(watcher("output.a", torch.full((16, 16), 2.0**n), operand).scale) for n in range(5)]
    assert [one / scales[0] for one in scales] == [1, 1, 1, 2, 4]
    assert watcher.counters.values["output.a"][SCALE_STEP][1:] == pytest.approx([0, 0, 1, 1])


def test_what_cannot_be_watched_is_refused():
    module, step = layer("nvfp4")
    plant(module, Watcher())
    with pytest.raises(ValueError, match="drawn"):
        step()
    with pytest.raises(ValueError, match="converted layers without bias"):
        plant(nn.Linear(2, 2), Watcher())
    with pytest.raises(ValueError, match="place is one of"):
        plant(module, Watcher(Fault(name="", place="x")))
