"""Budgets, which layers are scored, and the record of a choice."""

import copy
import json

import pytest
import torch
from torch import nn

import ao_lab
from ao_lab import Bits, Bytes, Choice, Microseconds, SchemeConfig, choose_
from ao_lab.choose import budgets
from ao_lab.choose.items import items_of
from ao_lab.gemm.choices import Candidate, choices_for, problem_of
from ao_lab.gemm.choices import Choice as TunedChoice
from ao_lab.gemm.select import inference_keys
from tests.ao_lab.choose.test_choose import OPTIONS, Classifier, batches, rows, tiny, transformers, used

DATA = [rows(64), rows(32)]


@pytest.mark.parametrize("scheme", ["int4_g32_asymmetric", "nf4", "nvfp4", "mxfp6_e2m3", "int3_g32"])
def test_bytes_are_those_that_the_weight_stores(scheme):
    model, config = Classifier(), SchemeConfig(scheme=scheme)
    items = items_of(model, {"one": config, "dense": None}, used)
    found = [budgets.stored_bytes(item, item.changes["one"]) for item in items]
    assert [budgets.stored_bytes(item, None) for item in items] == [item.numel * 4 for item in items]
    report = ao_lab.quantize_(model, config, used)
    assert found == [layer.bytes for layer in report.layers if layer.scheme]


def test_a_budget_of_bytes_is_one_of_bits():
    model = Classifier()
    elements = 32 * 64 + 64 * 10
    one = choose_(model, DATA, OPTIONS, Bits(4.5), filter_fn=used)
    two = choose_(model, DATA, OPTIONS, Bytes(int(4.5 * elements / 8)), filter_fn=used)
    assert one.layers == two.layers
    least = sum(budgets.stored_bytes(item, item.changes["int2"]) for item in items_of(model, OPTIONS, used))
    assert {
        layer.option for layer in choose_(model, DATA, OPTIONS, Bytes(int(least)), filter_fn=used).layers
    } == {"int2"}


def test_dense_layers_are_an_option():
    options = {"int2": OPTIONS["int2"], "dense": None}
    choice = choose_(Classifier(), DATA, options, Bits(31), filter_fn=used)
    assert sorted(layer.option for layer in choice.layers) == ["dense", "int2"]
    assert sorted(config is None for config in choice.plan.fqn_to_config.values()) == [False, True]


def test_times_are_those_of_the_tuned_table_or_measured():
    model, config = Classifier(), SchemeConfig(scheme="int8_rowwise")
    item = items_of(model, {"one": config}, used)[0]
    weight = ao_lab.quantized(item.parameter.detach(), config.recipe())
    table = choices_for(torch.device("cpu"))
    problem = problem_of("inference", *inference_keys(weight), (1, 64, 32), torch.float32)
    assert problem not in table.found
    meter = Microseconds(100).meter()
    measured = meter(item, item.changes["one"])
    assert 0 < measured < 1e5
    assert meter(item, item.changes["one"]) == measured
    assert 0 < meter(item, None) < 1e5
    assert problem not in table.found
    table.add(
        TunedChoice(problem, "dequantize", (Candidate("dequantize", seconds=7e-6, spread=0.0, error=0.0),))
    )
    try:
        assert Microseconds(100).meter()(item, item.changes["one"]) == pytest.approx(7)
        assert Microseconds(100, rows=64).meter()(item, item.changes["one"]) != pytest.approx(7)
    finally:
        table.found.pop(problem)


def test_a_budget_of_time(monkeypatch):
    times = {"int2": 5.0, "int3": 2.0, "int4": 3.0}
    by_scheme = {OPTIONS[name].recipe().weight.name: time for name, time in times.items()}
    monkeypatch.setattr(
        Microseconds, "_measured", lambda self, shape, weight, change: by_scheme[change.recipe.weight.name]
    )
    choice = choose_(Classifier(), DATA, OPTIONS, Microseconds(5.5, rows=4), filter_fn=used)
    assert sorted(layer.option for layer in choice.layers) == ["int3", "int4"]
    assert choice.cost == "5.0 microseconds"


def test_layers_of_gpt2_are_stored_the_other_way_round():
    config = transformers.GPT2Config(
        vocab_size=96, n_positions=64, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    choice = choose_(model, batches(2), OPTIONS, Bits(3.9))
    assert {layer.names[0] for layer in choice.layers} == {
        f"transformer.h.0.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    quantized = copy.deepcopy(model)
    ao_lab.quantize_(quantized, choice.plan)
    with torch.no_grad():
        base, other = (one(batches(2)[1]).logits.double().log_softmax(-1) for one in (model, quantized))
    assert choice.measured == pytest.approx(float((base.exp() * (base - other)).sum(-1).mean()), rel=1e-3)


def test_a_table_and_the_head_that_is_tied_to_it_are_one_weight():
    model = tiny(layers=1, tie_word_embeddings=True)
    choice = choose_(
        model, batches(2), OPTIONS, Bits(3.9),
        filter_fn=lambda module, name: isinstance(module, (nn.Linear, nn.Embedding)),
    )  # fmt: skip
    both = next(layer for layer in choice.layers if len(layer.names) == 2)
    assert both.names == ("model.embed_tokens.weight", "lm_head.weight")
    assert all(score > 0 for score in both.scores.values())
    ao_lab.quantize_(model, choice.plan)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.fixture(scope="module")
def choice():
    options = {**{name: (config, ("clip",)) for name, config in OPTIONS.items()}, "dense": None}
    return choose_(tiny(layers=1), batches(2), options, Bits(3.9))


def test_a_choice_survives_json(choice, tmp_path):
    assert Choice.from_json(choice.to_json()) == choice
    text = choice.to_json(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_text() == text
    assert Choice.from_json(tmp_path / "plan.json").plan == choice.plan


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told.pop("layers"),
        lambda told: told.update(ao_lab_choice=2),
        lambda told: told.update(options={"int4": {"class": "Path"}}),
        lambda told: told.update(methods=[{"method": "gtpq"}]),
        lambda told: told.update(more=1),
        lambda told: told.update(frontier=[[1]]),
    ],
)
def test_other_json_is_no_choice(choice, change):
    told = json.loads(choice.to_json())
    change(told)
    with pytest.raises(ValueError, match=r"no choice as Choice.to_json writes it"):
        Choice.from_json(json.dumps(told))
    with pytest.raises(ValueError, match="no choice"):
        Choice.from_json("[]")


def test_a_choice_prints(choice):
    text = str(choice)
    assert text.startswith(f"{choice.source}: ")
    assert all(layer.names[0] in text for layer in choice.layers)
    assert "beyond the budget" in text
    console = pytest.importorskip("rich.console").Console(width=120)
    with console.capture() as captured:
        console.print(choice)
    assert "model.layers.0.mlp.down_proj.weight" in captured.get()


def test_a_choice_as_a_picture(choice):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    axes = choice.plot()
    assert axes.get_ylabel().startswith("KL")
    assert len(axes.get_lines()[0].get_xdata()) == len(choice.frontier)
