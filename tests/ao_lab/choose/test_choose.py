"""`choose_`: scores, budgets, what is measured, and the model that stays as it was."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ao_lab
import reference
from ao_lab import Bits, Choice, SchemeConfig, choose_
from ao_lab.choose import api
from ao_lab.choose.items import Item, checked_candidates, items_of, labels
from ao_lab.choose.scores import Scoring, divergences
from ao_lab.choose.weights import Weights

transformers = pytest.importorskip("transformers")
OPTIONS = {f"int{bits}": SchemeConfig(scheme=f"int{bits}_g32_asymmetric") for bits in (2, 3, 4)}
VOCABULARY = 96


def tiny(layers=2, scale=4.0, **fields):
    """A random Llama whose predictions are not flat."""
    config = transformers.LlamaConfig(
        **{
            "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, **fields,
        }
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(scale)
    return model


def batches(count=4, shape=(2, 16), seed=1):
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, shape, generator=generator) for _ in range(count)]


class Classifier(nn.Module):
    """Two linear layers; logits of each row."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 10)
        self.unused = nn.Linear(32, 32)

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


def used(module, name):
    return name in ("first", "second")


def rows(count=512):
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def chosen():
    """A model and what is chosen for it."""
    model = tiny()
    return model, choose_(model, batches(), OPTIONS, Bits(3.9))


def scored(model, x, options, filter_fn, seed=0):
    """A pass over one batch."""
    items = items_of(model, options, filter_fn)
    scoring = Scoring(items, list(options), Weights(items), torch.Generator().manual_seed(seed))
    with api.frozen(model):
        scoring.run(model, ((x,), {}))
    return scoring


def test_scores_are_those_of_the_gradient_at_labels_drawn_from_the_model(monkeypatch):
    model, x, drawn = Classifier().eval(), rows(), []
    plain = Scoring._gradient

    def gradient(self, logits, which):
        drawn.append(plain(self, logits, which))
        return drawn[-1]

    monkeypatch.setattr(Scoring, "_gradient", gradient)
    found = scored(model, x, OPTIONS, used).means()
    labels = drawn[0].argmin(-1)
    inputs = F.gelu(model.first(x)).detach()
    hidden = model.first(x)
    logits = model.second(F.gelu(hidden))
    loss = F.cross_entropy(logits, labels, reduction="sum")
    g_first, g_second = torch.autograd.grad(loss, (hidden, logits))
    for option, config in OPTIONS.items():
        for layer, read, g in ((model.first, x, g_first), (model.second, inputs, g_second)):
            w = layer.weight.detach()
            d = reference.dequantize(reference.quantize(w.numpy(), config.recipe().weight)) - w.numpy()
            expected = reference.layer_score(d, read.numpy(), g.numpy())
            name = "first.weight" if layer is model.first else "second.weight"
            assert found[name][option] == pytest.approx(expected, rel=1e-4)


def test_labels_are_drawn_by_the_models_probabilities():
    """Of the last layer: the mean of (g . Dx)^2 over labels is the variance of D x under the model's probabilities."""
    model, x = Classifier().eval(), rows(4096)
    with torch.no_grad():
        model.second.weight.mul_(8)
    found = scored(model, x, {"int2": OPTIONS["int2"]}, used).means()["second.weight"]["int2"]
    w, inputs = model.second.weight.detach(), F.gelu(model.first(x)).detach()
    d = ao_lab.quantized(w, OPTIONS["int2"].recipe()).dequantize() - w
    p = (inputs @ w.T + model.second.bias).softmax(-1).detach()
    moved = inputs @ d.T
    variance = (p * moved.square()).sum(-1) - (p * moved).sum(-1).square()
    assert found == pytest.approx(float(variance.mean()) / 2, rel=0.1)


def test_inputs_that_an_option_quantizes_are_part_of_its_score():
    """In the last layer, whose gradient is p minus one at the label: Q q(x) - W x in place of D x."""
    model, x = Classifier().eval(), rows(4096)
    with torch.no_grad():
        model.second.weight.mul_(8)
    config = SchemeConfig(scheme="int8_rowwise", activation_scheme="int4_g32")
    found = scored(model, x, {"one": config}, used).means()["second.weight"]["one"]
    w, inputs = model.second.weight.detach(), F.gelu(model.first(x)).detach()
    p = (inputs @ w.T + model.second.bias).softmax(-1).detach()
    seen = reference.fake_quantize(inputs, "int4_g32")
    moved = seen @ ao_lab.quantized(w, config.recipe()).dequantize().T - inputs @ w.T
    variance = (p * moved.square()).sum(-1) - (p * moved).sum(-1).square()
    assert found == pytest.approx(float(variance.mean()) / 2, rel=0.1)


def test_padding_does_not_count():
    model, whole = tiny(layers=1), batches(1, (2, 12))[0]
    padded = F.pad(whole, (0, 4), value=3)
    mask = F.pad(torch.ones_like(whole), (0, 4))
    items = items_of(model, OPTIONS, None)
    found = []
    for call in (((whole,), {}), ((), {"input_ids": padded, "attention_mask": mask})):
        scoring = Scoring(items, list(OPTIONS), Weights(items), torch.Generator().manual_seed(0))
        with api.frozen(model):
            scoring.run(model, call)
        assert scoring.tokens == whole.numel()
        found.append(scoring.means())
    for name, one in found[0].items():
        assert found[1][name] == pytest.approx(one, rel=1e-3)


def test_scores_rank_layers_as_their_divergence_does_and_sums_predict_it():
    model, data = tiny(), batches(6, (4, 24))
    choice = choose_(model, data, OPTIONS, Bits(3.9), measure=data)
    items = items_of(model, OPTIONS, None)
    alone = [{item.name: "int3" if item is one else None for item in items} for one in items]
    with api.calibrating(model):
        calls = [((x,), {}) for x in data]
        found = torch.tensor(
            divergences(model, calls, Weights(items), alone, lambda: None), dtype=torch.float64
        )
    predicted = torch.tensor([layer.scores["int3"] for layer in choice.layers], dtype=torch.float64)
    ranks = [x.argsort().argsort().double() for x in (found, predicted)]
    assert float(torch.corrcoef(torch.stack(ranks))[0, 1]) >= 0.9
    assert 1 / 1.5 < float(found.sum() / predicted.sum()) < 1.5


def test_the_choice_keeps_the_budget_and_is_no_worse_than_uniform_options(chosen):
    model, choice = chosen
    fitting = [one for one in choice.trials if one.fits]
    assert choice.measured == min(one.measured for one in fitting)
    assert {one.name for one in choice.trials} >= {"mixed", *OPTIONS}
    copied = copy.deepcopy(model)
    report = ao_lab.quantize_(copied, choice.plan)
    quantized = [layer for layer in report.layers if layer.scheme]
    assert sum(layer.bytes for layer in quantized) == choice.trial.cost
    elements = sum(model.get_parameter(layer.name).numel() for layer in quantized)
    assert choice.trial.cost * 8 <= 3.9 * elements < choice.trial.cost * 8 + 0.2 * elements
    assert {layer.scheme for layer in quantized} <= {f"int{bits}_g32_asymmetric" for bits in (2, 3, 4)}


def test_what_is_measured_is_the_divergence_of_the_quantized_model(chosen):
    model, choice = chosen
    held = batches()[-1]
    quantized = copy.deepcopy(model)
    ao_lab.quantize_(quantized, choice.plan)
    with torch.no_grad():
        base, other = (one(held).logits.double().log_softmax(-1) for one in (model, quantized))
    expected = float((base.exp() * (base - other)).sum(-1).mean())
    assert choice.measured == pytest.approx(expected, rel=1e-4)


def test_what_is_predicted_is_the_sum_of_scores_and_no_less_than_the_bound(chosen):
    _, choice = chosen
    assert choice.predicted == pytest.approx(sum(layer.predicted for layer in choice.layers), rel=1e-12)
    mixed = next(one for one in choice.trials if one.name == "mixed")
    assert choice.bound <= mixed.predicted * (1 + 1e-12)
    costs, sums = zip(*choice.frontier, strict=True)
    assert list(costs) == sorted(costs)
    assert list(sums) == sorted(sums, reverse=True)


def test_joined_layers_take_one_option(chosen):
    _, choice = chosen
    options = {layer.names[0].removesuffix(".weight"): layer.option for layer in choice.layers}
    for block in range(2):
        for part, names in (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj"))):
            assert len({options[f"model.layers.{block}.{part}.{name}"] for name in names}) == 1
    assert len({layer.group for layer in choice.layers}) == 2 * 4 + 1


def test_layers_that_read_one_tensor_are_tied_whatever_their_names():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.left, self.right, self.last = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 10)

        def forward(self, x):
            return self.last(self.left(x) * self.right(x))

    choice = choose_(Fork(), [rows(64), rows(64)], OPTIONS, Bits(4))
    assert [layer.group for layer in choice.layers] == [0, 0, 1]
    choice = choose_(Fork(), [rows(64), rows(64)], OPTIONS, Bits(4), groups={})
    assert [layer.group for layer in choice.layers] == [0, 1, 2]
    labels = {"left.weight": 1, "last.weight": 1}
    choice = choose_(Fork(), [rows(64), rows(64)], OPTIONS, Bits(4), groups=labels)
    assert [layer.group for layer in choice.layers] == [0, 1, 0]
    with pytest.raises(ValueError, match="groups names middle"):
        choose_(Fork(), [rows(64), rows(64)], OPTIONS, Bits(4), groups={"middle": 1})


def test_the_seed_decides():
    model = tiny(layers=1)
    one, again, other = (choose_(model, batches(2), OPTIONS, Bits(3.9), seed=seed) for seed in (3, 3, 4))
    assert one == again
    assert [layer.scores for layer in one.layers] != [layer.scores for layer in other.layers]


def test_an_earlier_choice_has_the_scores_of_another_budget(monkeypatch):
    model = tiny(layers=1)
    first = choose_(model, batches(2), OPTIONS, Bits(3.9))
    fresh = choose_(model, batches(2), OPTIONS, Bits(4.1))
    monkeypatch.setattr(Scoring, "run", None)
    assert choose_(model, batches(2), OPTIONS, Bits(4.1), score=first) == fresh
    with pytest.raises(ValueError, match=r"no score of .*q_proj.weight for int8"):
        choose_(
            model,
            batches(2),
            {**OPTIONS, "int8": SchemeConfig(scheme="int8_rowwise")},
            Bits(4.1),
            score=first,
        )


def misleading(choice, values):
    """An earlier choice with other scores."""
    layers = tuple(
        ao_lab.choose.result.ChosenLayer(layer.names, layer.option, layer.cost, dict(zip(OPTIONS, one, strict=True)), i)
        for i, (layer, one) in enumerate(zip(choice.layers, values, strict=True))
    )  # fmt: skip
    return Choice(choice.options, layers, "mixed", "", "", 0.0, (), ())


def test_several_budgets_share_scores_and_what_is_measured(chosen, monkeypatch):
    model, choice = chosen
    runs, settings = [], []
    run, measured = Scoring.run, api.divergences
    monkeypatch.setattr(Scoring, "run", lambda *a: runs.append(a) or run(*a))
    monkeypatch.setattr(api, "divergences", lambda *a: settings.extend(a[3]) or measured(*a))
    both = choose_(model, batches(), OPTIONS, [Bits(3.9), Bits(3.5)])
    assert len(runs) == 3, "one pass over three of four batches"
    assert len(settings) == len({tuple(one.values()) for one in settings}), "no setting is measured twice"
    assert both[0] == choice
    assert both[1] == choose_(model, batches(), OPTIONS, Bits(3.5))
    for message, budget in (("has no element", []), (r"several of them, got .*float", [Bits(4), 4.0])):
        with pytest.raises((ValueError, TypeError), match=message):
            choose_(model, batches(), OPTIONS, budget)


def test_settings_by_hand_are_measured_and_taken_where_they_are_best(chosen):
    model, choice = chosen
    best = {layer.names[0]: layer.option for layer in choice.layers}
    by_hand = {"ours": best, "first dense": lambda name: None if ".0." in name else "int2"}
    wrong = misleading(choice, [(0.0, 0.2, 0.3)] * len(choice.layers))
    found = choose_(model, batches(), OPTIONS, Bits(3.9), score=wrong, candidates=by_hand)
    assert found.source == "ours"
    assert {layer.names[0]: layer.option for layer in found.layers} == best
    assert found.measured == choice.measured
    assert found.notes[-1].startswith("ours was no worse than what the scores chose")
    trial = next(one for one in found.trials if one.name == "first dense")
    assert not trial.fits, "dense layers cost 32 bits"
    items = items_of(model, OPTIONS, None)
    setting = {item.name: None if ".0." in item.name else "int2" for item in items}
    with api.calibrating(model):
        (kl,) = divergences(model, [((batches()[-1],), {})], Weights(items), [setting], lambda: None)
    assert trial.measured == pytest.approx(kl)
    for message, one in (
        ("gives model.layers.0.self_attn.q_proj.weight the option 'int9'", {"x": lambda name: "int9"}),
        ("has the name of an option", {"int3": best}),
        (r"candidates\['x'\] names middle, no weights", {"x": {"middle": "int3"}}),
        (r"candidates\['x'\] is a mapping from names", {"x": "int3"}),
        ("candidates is a mapping of names", ["x"]),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            choose_(model, batches(), OPTIONS, Bits(3.9), score=choice, candidates=one)


def test_a_tied_weight_is_known_by_each_of_its_names():
    item = Item({"table.weight": (nn.Embedding(4, 4), "weight"), "head.weight": (nn.Linear(4, 4), "weight")})
    item.changes["int3"] = None
    assert checked_candidates([item], {"x": {"head.weight": "int3"}}, {}) == {"x": {"table.weight": "int3"}}
    assert labels([item], {"head.weight": 7}, {}) == [("group", 7)]


def test_an_option_for_all_layers_is_the_result_where_it_is_better(chosen):
    model, choice = chosen
    # Scores that would spend the budget where it wins nothing.
    wrong = misleading(
        choice, [(0.3, 0.2, 0.1 if "q_proj" in layer.names[0] else 0.3) for layer in choice.layers]
    )
    exact = Bits(next(one.cost for one in choice.trials if one.name == "int3") * 8 / sum_of(model, choice))
    found = choose_(model, batches(), OPTIONS, exact, score=wrong)
    assert found.source == "int3"
    assert {layer.option for layer in found.layers} == {"int3"}
    assert "int3 for all layers was no worse" in found.notes[-1]


def sum_of(model, choice):
    """Parameters that were chosen for."""
    return sum(model.get_parameter(layer.names[0]).numel() for layer in choice.layers)


@settings(max_examples=5, deadline=None)
@given(st.data())
def test_the_result_is_never_worse_than_a_uniform_option_whatever_scores_say(data):
    model = Classifier().eval()
    base = misleading(
        choose_(model, [rows(32), rows(16)], OPTIONS, Bits(3.6), filter_fn=used),
        data.draw(st.lists(st.tuples(*[st.floats(0, 1)] * 3), min_size=2, max_size=2)),
    )
    bits = data.draw(st.floats(3.25, 5))
    found = choose_(model, [rows(32), rows(16)], OPTIONS, Bits(bits), filter_fn=used, score=base)
    assert found.trial.cost * 8 <= bits * (32 * 64 + 640) * (1 + 1e-9)
    assert all(found.measured <= one.measured for one in found.trials if one.fits)
