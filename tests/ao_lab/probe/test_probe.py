"""`probe_`: errors by site, what they cost the outputs, what is safe, and that the model stays as it is."""

import copy
from dataclasses import replace
from math import inf

import pytest
import torch
import transformers
from torch import nn

import ao_lab
from ao_lab import ProbeReport, probe_
from ao_lab.probe.candidates import candidates_of, output_error
from reference.probe import errors
from reference.training.recipe import RECIPES


class Cross(nn.Module):
    """A deep and cross network: x0 * (U V x + b) + x, then an MLP to a logit."""

    def __init__(self, width=64, rank=32):
        super().__init__()
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 128), nn.SiLU(), nn.Linear(128, 64), nn.SiLU(), nn.Linear(64, 1)
        )

    def forward(self, x):
        return self.mlp(x * self.up(self.down(x)) + x).squeeze(-1)


def network(seed=0):
    torch.manual_seed(seed)
    return Cross()


def data(count=4, size=512, seed=0):
    """Inputs with means, correlations and zeros, as concatenated embeddings have."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(24, 64, generator=torch.Generator().manual_seed(99))
    return [(torch.randn(size, 24, generator=generator) @ mix / 5 + 0.3).relu() for _ in range(count)]


CANDIDATES = [
    "rowwise",
    "tensorwise",
    "int8_rowwise x int8_rowwise",
    "mxfp8_e4m3 x mxfp8_e4m3",
    "nf4",
    "int4_g32",
]


def test_the_logits_change_is_predicted_within_ten_percent():
    """One backward pass predicts what running the model in a candidate measures, for weights and inputs alike."""
    report = probe_(network(), data(8), CANDIDATES, tokens=512)
    for name, model in report.models.items():
        assert model.predicted == pytest.approx(model.measured, rel=0.1), name
        assert 0 < model.error < 0.1 * model.predicted
        shares = [line.candidates[name].variance.value for line in report.sites]
        assert sum(shares) == pytest.approx(model.independent**2, rel=1e-9)


def test_errors_on_later_batches_are_predicted_within_five_percent():
    """The bar: of all sites and candidates 95 % within 5 %, all within 10 %."""
    model = network()
    report = probe_(model, data(4), CANDIDATES, measure=False)
    seen = {}

    def keep(name):
        return lambda module, args: seen.setdefault(name, args[0].detach())

    for line in report.sites:
        model.get_submodule(line.name).register_forward_pre_hook(keep(line.name))
    with torch.no_grad():
        model(torch.cat(data(4, seed=1)))
    off = []
    for line in report.sites:
        w = model.get_submodule(line.name).weight.detach()
        for name, recipe in candidates_of(CANDIDATES).items():
            e = output_error(recipe, seen[line.name], w).numpy()
            y = (seen[line.name].double() @ w.double().T).numpy()
            off.append(abs(line.candidates[name].norm_ratio.value / errors.norm_ratio(e, y).value - 1))
    assert sorted(off)[int(0.95 * len(off)) - 1] < 0.05
    assert max(off) < 0.1


def test_a_part_of_the_error_is_that_of_its_operand():
    report = probe_(network(), data(2), ["nf4", "rowwise"], measure=False)
    for line in report.sites:
        alone, both = line.candidates["nf4"], line.candidates["rowwise"]
        assert alone.inputs == 0
        assert alone.weights == pytest.approx(alone.norm_ratio.value, rel=1e-6)
        assert (both.inputs**2 + both.weights**2) ** 0.5 == pytest.approx(both.norm_ratio.value, rel=0.1)


def test_the_smallest_variances_are_safe_within_the_budget():
    report = probe_(network(), data(4), "rowwise", budget=0.02)
    model = report.models["rowwise"]
    lines = sorted(report.sites, key=lambda line: line.candidates["rowwise"].variance.value)
    spent, safe = 0.0, []
    for line in lines:
        spent += line.candidates["rowwise"].variance.value
        if spent <= (0.02 * model.outputs) ** 2:
            safe.append(line.name)
    assert sorted(report.safe("rowwise")) == sorted(safe)
    assert 0 < len(safe) < len(lines)
    assert "beyond the budget" in str(report)
    with pytest.raises(KeyError, match="is no candidate of this report; there are rowwise"):
        report.safe("nf4")


def test_the_report_is_read_back():
    report = probe_(network(), data(2), ["rowwise", "int4_g48"])
    again = ProbeReport.from_json(report.to_json())
    assert again.to_json() == report.to_json()
    assert str(again) == str(report)
    line = report.site("up")
    endless = replace(line, peak=inf, candidates={"rowwise": replace(line.candidates["rowwise"], inputs=inf)})
    models = {"rowwise": replace(report.models["rowwise"], error=inf)}
    odd = ProbeReport((endless,), models)
    assert str(ProbeReport.from_json(odd.to_json())) == str(odd)
    left = report.site("mlp.0").candidates["int4_g48"]
    assert (left.safe, left.norm_ratio) == (False, None)
    assert "not a multiple of 48" in left.why
    many = [
        replace(line, candidates={f"{i}": line.candidates["rowwise"] for i in range(12)})
        for line in report.sites
    ]
    drawn = ProbeReport(tuple(many)).plot()
    assert drawn.images[0].get_array().shape == (12, len(report.sites))
    assert drawn.get_legend() is None
    with pytest.raises(ValueError, match="this is no report"):
        ProbeReport.from_json("{}")
    with pytest.raises(ValueError, match=r"nowhere\.json is no file of a report"):
        ProbeReport.from_json("nowhere.json")
    with pytest.raises(KeyError, match="sites are down, up"):
        report.site("nowhere")


def test_what_has_moved():
    """Of one layer's inputs a channel grows: its errors move, those of layers before do not."""
    model = network()
    before = probe_(model, data(2), ["int8_rowwise x int8_rowwise"], measure=False)
    assert probe_(model, data(1, seed=1), ["int8_rowwise x int8_rowwise"], measure=False).moved(before) == {}
    with torch.no_grad():
        model.mlp[0].bias[3] += 30
    moved = probe_(model, data(2), ["int8_rowwise x int8_rowwise"], measure=False).moved(before)
    names = {site for site, _ in moved}
    assert "mlp.2" in names
    assert not names & {"down", "up", "mlp.0"}
    with pytest.raises(ValueError, match="other sites"):
        probe_(model.mlp, [torch.randn(64, 64)], "rowwise").moved(before)
    with pytest.raises(ValueError, match="int8_rowwise x int8_rowwise there, nf4 here"):
        probe_(model, data(1), ["nf4"], measure=False).moved(before)


def test_the_model_stays_as_it_is():
    model = network().train()
    before = copy.deepcopy(model.state_dict())
    parameters = dict(model.named_parameters())
    probe_(model, data(2), ["rowwise"])
    assert model.training
    assert all(p.requires_grad and p.grad is None and p is parameters[n] for n, p in model.named_parameters())
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


class Half(Cross):
    """One layer that no data reach."""

    def __init__(self):
        super().__init__()
        self.idle = nn.Linear(64, 64)


@pytest.mark.parametrize(
    ("model", "batches", "said"),
    [
        (Half(), data(1), "no input reached idle"),
        (network(), [data(1)[0] * torch.nan], "NaN or infinite"),
        (network(), [], "batches has no batch"),
        (nn.Identity(), data(1), "no linear layer"),
    ],
    ids=["unreached", "nan", "no batch", "no layer"],
)
def test_bad_input(model, batches, said):
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=said):
        probe_(model, batches, "rowwise")
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())
    assert all(not m._forward_hooks for m in model.modules())


def test_candidates():
    config = ao_lab.Int8DynamicActivationInt8WeightConfig()
    found = candidates_of({"a": "rowwise", "b": config, "c": ao_lab.SCHEMES["mxfp4"], "d": "int3_g48"})
    assert found["a"] is RECIPES["rowwise"]
    assert found["b"].output.a.scheme == config.recipe().activation
    assert found["c"].output.a.scheme is None
    for wrong, kind in (("fp9", ValueError), ([], ValueError), (3, TypeError)):
        with pytest.raises(kind, match=r"candidate|unknown"):
            candidates_of(wrong)


def test_blocks_that_divide_no_layer_are_a_reason():
    """Of a second level too, whose groups are of scales; other candidates of the same call are measured."""
    names = ["nf4", "torchao.nf4", "int4_g256", "nf4 x torchao.nf4"]
    report = ao_lab.probe_(network(), data(1, 37), names, filter_fn=lambda m, name: name == "down")
    told = report.site("down").candidates
    assert [bool(told[name].reason) for name in names] == [False, True, True, True]
    assert "second level takes them in full blocks of 256" in told["torchao.nf4"].reason


def vision():
    """A vision transformer and batches of images."""
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=16,
        patch_size=8, num_labels=5,
    )  # fmt: skip
    images = torch.randn(4, 128, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return transformers.ViTForImageClassification(config), list(images)


def language():
    """A Llama and batches of tokens, some of them padding."""
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    ids = torch.randint(0, 32, (4, 96, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(96, 8, dtype=torch.int64)
    mask[::2, 6:] = 0
    return transformers.LlamaForCausalLM(config), [{"input_ids": one, "attention_mask": mask} for one in ids]


@pytest.mark.parametrize("make", [vision, language])
def test_changes_of_classes_and_of_tokens_are_predicted(make):
    """Several outputs, tokens that attend to each other: within 10 %, over random signs of all outputs."""
    torch.manual_seed(0)
    model, batches = make()
    report = probe_(model, batches, ["rowwise", "mxfp8_e4m3 x mxfp8_e4m3"], tokens=64, directions=3)
    for name, found in report.models.items():
        assert found.predicted == pytest.approx(found.measured, rel=0.1), name
    assert not report.notes[1:]


class Branches(nn.Module):
    """A branch for some batches, an encoder without gradients, activations in place."""

    def __init__(self):
        super().__init__()
        self.encoder, self.first = nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True))
        self.branch, self.head = nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x):
        with torch.no_grad():
            x = x + self.encoder(x)
        y = self.first(x)
        return self.head(y + self.branch(y) if len(x) > 8 else y)


def test_branches_and_parts_without_gradients():
    """Batches that do not reach a layer count as 0 there; what no gradient reaches is not called safe."""
    torch.manual_seed(0)
    batches = [*data(2, 8), *data(2, 16, seed=1)]
    asking = [x.requires_grad_() for x in batches]
    report = probe_(Branches(), asking, "rowwise", measure=False, budget=10.0)
    lines = {line.name: line.candidates["rowwise"] for line in report.sites}
    assert lines["branch"].variance.samples == lines["head"].variance.samples == 48
    assert report.models["rowwise"].predicted > 0
    assert lines["encoder"].variance is None
    assert lines["encoder"].why.startswith("no gradient of the outputs reaches it")
    assert report.safe("rowwise") == ("first.0", "branch", "head")
    assert "no gradient of the outputs reaches encoder" in report.notes[0]
    assert all(x.grad is None for x in asking)


def test_a_compiled_model_is_measured():
    """A program that was compiled without the hooks of a candidate, or with those of the probe, would not change."""
    model = network()
    wanted, x = probe_(model, data(4, 64), "rowwise").models["rowwise"], data(1, 64)[0]
    y = model(x)
    compiled = torch.compile(model, backend="eager")
    found = probe_(compiled, data(4, 64), "rowwise").models["rowwise"]
    assert found.measured == pytest.approx(wanted.measured)
    assert found.predicted == pytest.approx(wanted.predicted)
    assert torch.equal(compiled(x), y)


class Residual(nn.Module):
    """A sum in place, in an input that was read before."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 1)

    def forward(self, x):
        h = x * 2
        h += self.one(h)
        return self.two(h)


def test_inference_mode_outside():
    """Its batches have no gradients, and the caller's mode stays."""
    model = network()
    with torch.inference_mode():
        found = probe_(model, [x + 0 for x in data(2, 64)], "rowwise")
        assert torch.is_inference_mode_enabled()
    assert str(found) == str(probe_(model, data(2, 64), "rowwise"))


def test_inputs_that_change_before_the_backward_are_refused():
    with pytest.raises(ValueError, match=r"one: its input was changed in place.*out of place"):
        probe_(Residual(), data(2, 8), "rowwise")
    with pytest.raises(ValueError, match=r"outputs are empty on a batch, of shape \(0, 1\)"):
        probe_(Residual(), data(2, 0), "rowwise")
