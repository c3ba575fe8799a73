"""What `choose_` refuses, and that a model is the same afterwards, whatever happened."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import ao_lab
import reference
from ao_lab import Bits, Bytes, Microseconds, SchemeConfig, choose_
from ao_lab.calibration.methods import GPTQ, BiasCorrection, Clip, Smooth
from tests.ao_lab.choose.test_choose import OPTIONS, Classifier, batches, rows, tiny, used

INT4, INT8 = SchemeConfig(scheme="int4_g32_asymmetric"), SchemeConfig(scheme="int8_rowwise")
DATA = [rows(32), rows(16)]


class Broken(Classifier):
    """Its gradient is infinite times zero."""

    def forward(self, x):
        hidden = self.first(x)
        return self.second(hidden + (hidden * 0).abs().sqrt())


class Rooms(nn.Module):
    """Batched weights beside a linear layer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.experts = nn.Parameter(torch.randn(2, 32, 32))
        self.is_transposed = False

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([("int4", INT4)], "mapping of names"),
        ({}, "no configuration to choose"),
        ({"dense": None}, "no configuration to choose"),
        ({4: INT4}, "strings, got 4"),
        ({"": INT4}, "strings, got ''"),
        ({"int4": "int4_g32"}, "options\\['int4'\\] is a configuration of ao_lab"),
        ({"plan": ao_lab.FqnToConfig({"first": INT4})}, "got .*FqnToConfig"),
        ({"int4": (INT4, (Clip(), GPTQ())), "int8": INT8}, "int4, int8 have different methods"),
        ({"int4": (INT4, (Smooth(),))}, "'int4'.*smooth change more than a layer's weight"),
        ({"int4": (INT4, (BiasCorrection(),))}, "bias change more"),
        ({"big": SchemeConfig(scheme="int4_g128"), "int8": INT8}, "options\\['big'\\] is for none of these layers"),
        ({"qat": ao_lab.QATConfig(INT8, step="prepare")}, "'qat'.*QATConfig prepares training"),
        ({"static": ao_lab.Int8StaticActivationInt8WeightConfig()}, "'static'.*give it act_quant_scale"),
    ],
)  # fmt: skip
def test_options(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        choose_(Classifier(), DATA, options, Bits(6), filter_fn=used)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"calibration": []}, "calibration has no batch"),
        ({"calibration": rows(8)}, "put a single batch into a list"),
        ({"measure": []}, "measure has no batch"),
        ({"budget": 4.25}, r"budget is Bits\(4.25\)"),
        ({"budget": Bits(2)}, "the budget is 2 bits, and these options take 3.25 bits to 5.25 bits of 2 layers; .*smaller"),
        ({"budget": Bits(9)}, "the budget is 9 bits, and these options take 3.25 bits to 5.25 bits of 2 layers; .*larger"),
        ({"budget": Bytes(10)}, "the budget is 10 bytes, and these options take 1,092 bytes to 1,764 bytes"),
        ({"score": "labels"}, "score is 'fisher' or an earlier Choice, got 'labels'"),
        ({"filter_fn": lambda module, name: isinstance(module, nn.Linear)}, "no gradient, reached unused.weight"),
        ({"calibration": [rows(8) * float("inf")]}, "logits are NaN or infinite"),
        ({"model": Broken()}, "first.weight: the gradient at its outputs is NaN"),
        ({"model": Rooms(), "filter_fn": lambda module, name: True}, "experts: Rooms is no linear layer"),
    ],
)  # fmt: skip
def test_arguments(arguments, message):
    given = {
        "model": Classifier(),
        "calibration": DATA,
        "options": OPTIONS,
        "budget": Bits(4),
        "filter_fn": used,
        **arguments,
    }
    with pytest.raises((TypeError, ValueError), match=message):
        choose_(**given)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bits(0), "Bits is a positive number, got 0"),
        (lambda: Bits("4"), "got '4'"),
        (lambda: Bytes(float("nan")), "Bytes is a positive number"),
        (lambda: Microseconds(True), "got True"),
        (lambda: Microseconds(5, rows=0), "rows is an integer of at least 1, got 0"),
        (lambda: Microseconds(5, launches="never"), "never"),
    ],
)
def test_budgets(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_tied_layers_without_a_common_option():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(32, 64), nn.Linear(32, 48)

        def forward(self, x):
            return self.left(x).sum(-1, keepdim=True) * self.right(x)

    plain = reference.SCHEMES["int4_g32"]
    options = {
        str(size): SchemeConfig(
            scheme=replace(plain, name=f"tall{size}", scale=replace(plain.scale, block=(size, 32)))
        )
        for size in (64, 48)
    }
    with pytest.raises(
        ValueError, match=r"left.weight, right.weight are tied and no option is for all of them"
    ):
        choose_(Fork(), DATA, options, Bytes(1800))


def state(model):
    """All that may not change: parameters as objects, bits and settings, hooks, modes."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return (
        {
            name: (id(p), p.detach().clone(), p.requires_grad, p.grad is None)
            for name, p in parameters.items()
        },
        {
            name: (m.training, len(m._forward_hooks), len(m._forward_pre_hooks))
            for name, m in model.named_modules()
        },
        model.config.use_cache,
    )


def assert_same(one, two):
    assert one[1:] == two[1:]
    for name, (number, bits, *rest) in one[0].items():
        assert two[0][name][0] == number
        assert two[0][name][2:] == tuple(rest)
        assert torch.equal(two[0][name][1].view(torch.int32), bits.view(torch.int32))


@pytest.mark.parametrize("when", ["never", "scores", "measured", "inside"])
def test_the_model_is_as_it_was(when):
    model = tiny(layers=1)
    model.train()
    model.lm_head.weight.requires_grad_(False)
    before, random = state(model), torch.get_rng_state()
    calls = []

    def progress(what, done, total):
        calls.append((what, done, total))
        if what == when:
            raise KeyboardInterrupt

    def inside(module, args, output):
        if isinstance(module.weight, ao_lab.QuantizedTensor) and when == "inside":
            raise KeyboardInterrupt

    handle = model.lm_head.register_forward_hook(inside)
    before = state(model)
    try:
        choose_(model, batches(), OPTIONS, Bits(3.9), progress=progress)
    except KeyboardInterrupt:
        assert when != "never"
    else:
        assert when == "never"
        assert calls[:4] == [("scores", 1, 4), ("scores", 2, 4), ("scores", 3, 4), ("measured", 4, 4)]
    assert_same(before, state(model))
    assert torch.equal(random, torch.get_rng_state())
    handle.remove()


def test_a_model_of_methods_is_as_it_was_too():
    model = tiny(layers=1)
    before, whole = state(model), copy.deepcopy(model)
    options = {name: (config, ("clip", "gptq")) for name, config in OPTIONS.items()}
    layers = {id(module) for module in model.modules() if isinstance(module, nn.Linear)}
    words = []
    choice = choose_(
        model,
        batches(),
        options,
        Bits(3.9),
        filter_fn=lambda module, name: id(module) in layers,
        progress=lambda what, done, total: words.append((what, done)),
    )
    assert_same(before, state(model))
    # Before the first batch it is told what methods do.
    begins = [what for what, done in words if not done]
    assert all(any(word.startswith(f"{name}: inputs of the blocks") for word in begins) for name in OPTIONS)
    assert [type(one) for one in choice.methods] == [Clip, GPTQ]
    rounding = choose_(whole, batches(), OPTIONS, Bits(3.9))
    assert choice.measured < rounding.measured
    assert {one.name for one in choice.trials} >= set(OPTIONS)
    report = ao_lab.quantize_(model, choice.plan, calibration=batches()[:3], methods=choice.methods)
    assert any("gptq" in layer.reason for layer in report.layers)
