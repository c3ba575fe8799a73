"""Mods: what each matches and computes, reports, and models that are again what they were."""

import copy

import pytest
import torch
from torch import nn

import ao_lab
from ao_lab.mods import MODS, BlockNorm, Mod, apply_mods_, in_low_precision, register, undo_mods_
from ao_lab.mods.modules import HardSwish, JoinedLinear, PaddedLinear


class Three(nn.Module):
    """Query, key and value of one input, a norm, an activation, a head."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(30, 24, mode="sum")
        self.q, self.k, self.v = nn.Linear(24, 24), nn.Linear(24, 8, bias=False), nn.Linear(24, 512)
        self.wide = nn.Linear(512, 512)
        self.rms = nn.RMSNorm(512, eps=1e-6)
        self.norm, self.odd = nn.LayerNorm(512), nn.LayerNorm(24)
        self.act = nn.SiLU()
        self.head = nn.Linear(512, 1)

    def forward(self, ids):
        x = self.odd(self.table(ids))
        y = self.v(x) + self.q(x).sum(-1, keepdim=True) + self.k(x).sum(-1, keepdim=True)
        return self.head(self.act(self.norm(self.wide(self.rms(y)))))


IDS = torch.arange(24).reshape(6, 4)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Three()


def outcome(model):
    """Outputs, and gradients of what trains."""
    model.zero_grad()
    y = model(IDS)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def close(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def changed_by(model, mod, **options):
    return {line.name for line in apply_mods_(model, mod, **options).changed}


WANTED = {
    "no_bias": {"q", "v", "wide"},
    "block_norm": {"norm", "rms"},
    "fused_norm": {"rms"},
    "hard_swish": {"act"},
    "pad": {"q", "k", "v", "head"},
    "join_siblings": {"q", "k", "v"},
    "ends_in_16_bits": {"q", "head"},
    "small_in_16_bits": {"q", "k", "v"},
    "tables_in_8_bits": {"table"},
}


@pytest.mark.parametrize("name", MODS)
def test_each_matches_its_modules_and_undoes(model, name):
    before, names = outcome(model), list(model.state_dict())
    assert changed_by(model, name, example=(IDS,)) == WANTED[name]
    if MODS[name].exact:
        close(outcome(model), before)
        assert list(model.state_dict()) == names
    elif name != "tables_in_8_bits":
        assert not torch.equal(model(IDS), before[0])
    copied = copy.deepcopy(model)
    for one in (model, copied):
        assert {*undo_mods_(one)} == WANTED[name]
        assert list(one.state_dict()) == names
        if name != "tables_in_8_bits":
            close(outcome(one), before)
    with torch.no_grad():
        copied.q.weight.fill_(0)
    assert model.q.weight.any()


def test_reports_say_why_others_stay(model):
    report = apply_mods_(model, ["no_bias", "block_norm", "hard_swish"])
    assert str(report).startswith(
        "6 of 8 modules changed by mods; the function is another one: train with them"
    )
    reasons = {line.name: line.reason for line in report.left}
    assert reasons == {
        "head": "the last layer's bias sets the mean prediction",
        "odd": "it normalises (24,), no whole blocks of 256 columns",
    }
    assert apply_mods_(model, "pad", lambda module, name: name == "q").exact
    assert (
        apply_mods_(model, "ends_in_16_bits").left[0].reason
        == "it is neither the first nor the last linear layer"
    )


def test_a_layer_norm_is_one_kernel_already(model):
    left = apply_mods_(model, "fused_norm").left
    assert {line.name: "fast.layer_norm_quantize" in line.reason for line in left} == {
        "norm": True,
        "odd": True,
    }


def test_block_norm_and_hard_swish():
    norm, x = BlockNorm(512, eps=0.0), torch.randn(3, 512)
    blocks = x.reshape(3, 2, 256)
    expected = (blocks / blocks.square().mean(-1, keepdim=True).sqrt()).reshape(3, 512)
    torch.testing.assert_close(norm(x), expected)
    torch.testing.assert_close(HardSwish()(x), x * (x + 3).clamp(0, 6) / 6)
    with pytest.raises(ValueError, match="300 columns are no whole blocks of 256"):
        BlockNorm(300)


def test_a_norms_gain_and_epsilon_stay(model):
    with torch.no_grad():
        model.norm.weight.copy_(torch.rand(512))
    model.norm.eps = 0.25
    gain = model.norm.weight.clone()
    apply_mods_(model, "block_norm")
    assert model.norm.weight.equal(gain)
    assert model.norm.eps == 0.25


def test_siblings_are_multiplied_once(model, monkeypatch):
    apply_mods_(model, "join_siblings", example=(IDS,))
    assert {type(one) for one in (model.q, model.k, model.v)} == {JoinedLinear}
    calls = []
    linear = nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda *args: calls.append(args[1].shape) or linear(*args))
    model(IDS)
    assert calls == [(544, 24), (512, 512), (1, 512)]
    x = torch.randn(2, 24)
    first = model.q(x)
    assert torch.equal(first, linear(x, model.q.weight, model.q.bias)) or torch.allclose(
        first, linear(x, model.q.weight, model.q.bias), atol=1e-6
    )
    x.add_(1.0)  # the same memory, another input: what waits for k is of no use
    torch.testing.assert_close(model.k(x), linear(x, model.k.weight))
    torch.testing.assert_close(model.q(x), linear(x, model.q.weight, model.q.bias))


def test_marks_are_a_filter(model):
    apply_mods_(model, ["ends_in_16_bits", "small_in_16_bits"])
    report = ao_lab.convert_for_training_(model, "rowwise", in_low_precision)
    assert report.changed == ("wide",)


def test_padded_layers_multiply_whole_tiles(model):
    apply_mods_(model, "pad", lambda module, name: name == "k")
    assert type(model.k) is PaddedLinear
    x = torch.randn(5, 24)
    torch.testing.assert_close(model.k(x), x @ model.k.weight.T)


def test_an_error_leaves_the_model_as_it_was(model):
    def fail(place):
        raise RuntimeError("no")

    broken = Mod("broken", True, "", "", lambda m: isinstance(m, nn.LayerNorm), fail, fail, lambda m: False)
    before = str(model)
    with pytest.raises(RuntimeError, match="no"):
        apply_mods_(model, ["no_bias", "hard_swish", "pad", broken])
    assert str(model) == before
    assert model.q.bias is not None


@pytest.mark.parametrize(
    ("mods", "message"),
    [
        ("none", "unknown mod 'none'; the mods are no_bias"),
        ([], "no mod is named"),
        ("join_siblings", "stay: no example ran: give apply_mods_ example="),
    ],
)
def test_what_is_refused(model, mods, message):
    with pytest.raises(ValueError, match=message):
        apply_mods_(model, mods)


def test_a_mod_is_applied_once_and_matches_something(model):
    apply_mods_(model, "no_bias")
    with pytest.raises(ValueError, match="no_bias has been applied to this model"):
        apply_mods_(model, "no_bias")
    with pytest.raises(ValueError, match="hard_swish: the model has no module of the kind"):
        apply_mods_(nn.Sequential(nn.Linear(8, 8)), "hard_swish")
    with pytest.raises(ValueError, match="a mod is called 'pad' already"):
        register(copy.copy(MODS["no_bias"]).__class__(**{**vars(MODS["no_bias"]), "name": "pad"}))
    with pytest.raises(TypeError, match="the model is a torch"):
        apply_mods_(3, "pad")


def stale_weight(q, k, x):
    with torch.no_grad():
        q(x)
        k.weight.zero_()
    return k(x)


def stale_mode(q, k, x):
    with torch.no_grad():
        q(x)
    return k(x)


def stale_autocast(q, k, x):
    with torch.autocast("cpu", torch.bfloat16):
        q(x)
    return k(x)


def inference(q, k, x):
    with torch.inference_mode():
        return q(x + 0), k(x + 0)


@pytest.mark.parametrize("call", [stale_weight, stale_mode, stale_autocast, inference])
def test_a_sibling_sees_what_has_changed_since(model, call):
    plain, x = copy.deepcopy(model), torch.randn(3, 24)
    apply_mods_(model, "join_siblings", example=IDS)
    found, wanted = call(model.q, model.k, x), call(plain.q, plain.k, x)
    for one, two in zip(
        torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(wanted), strict=True
    ):
        assert (one.dtype, one.requires_grad) == (two.dtype, two.requires_grad)
        close(one, two)


def test_marks_of_two_mods_are_apart(model):
    apply_mods_(model, "ends_in_16_bits")
    apply_mods_(model, "small_in_16_bits")
    assert not in_low_precision(model.q, "q")
    assert "q" in undo_mods_(model, "small_in_16_bits")
    names = [
        name
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear) and not in_low_precision(m, name)
    ]
    assert names == ["q", "head"]


def test_a_shared_module_is_replaced_under_all_its_names():
    act = nn.SiLU()
    model = nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act)
    apply_mods_(model, "hard_swish")
    assert isinstance(model[1], HardSwish)
    assert model[3] is model[1]
    undo_mods_(model)
    assert model[1] is model[3] is act


def test_a_norm_without_a_gain_and_a_frozen_one():
    model = nn.Sequential(nn.LayerNorm(256, elementwise_affine=False), nn.LayerNorm(256)).bfloat16()
    model.requires_grad_(False)
    apply_mods_(model, "block_norm")
    assert model[0].weight is None
    assert not model[1].weight.requires_grad
    assert model(torch.ones(2, 256, dtype=torch.bfloat16)).dtype is torch.bfloat16


def test_padded_layers_are_quantized_afterwards(model):
    x = torch.randn(3, 24)
    apply_mods_(model, "pad")
    wanted = ao_lab.dequantize(ao_lab.quantize(model.k.weight.detach(), "int8_rowwise"))
    ao_lab.quantize_(model, ao_lab.Int8WeightOnlyConfig(), lambda m, name: name == "k")
    close(model.k(x), nn.functional.linear(x, wanted))
