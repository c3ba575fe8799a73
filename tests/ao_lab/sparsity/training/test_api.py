"""`step_sparsity_` and `finish_sparsity_` over whole trainings, beside the same by hand."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import ao_lab
import reference
from ao_lab import (
    QATConfig,
    SparseTrainingConfig,
    SparsityConfig,
    finish_sparsity_,
    quantize_,
    sparsify_,
    step_sparsity_,
)
from ao_lab.sparsity.training.config import finds_masks, phase
from ao_lab.sparsity.training.layers import SparseLinear

# Configurations of sparse training, and the phases that they describe.


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"masks": "renewed"}, "masks"),
        ({"gradient": "ste"}, "gradient"),
        ({"weight_gradient": "sparse"}, "weight_gradient"),
        ({"products": "cutlass"}, "products"),
        ({"pattern": "4:2"}, "keep N of every M"),
        ({"pattern": "4:4"}, "keeps every weight"),
        ({"pattern": "1:4", "transposable": True}, "transposable masks are 2:4"),
        ({"pattern": "1:4", "products": "cusparselt"}, "products='cusparselt' needs 2:4"),
        ({"pattern": "1:4", "products": "sparse_wgmma"}, "products='sparse_wgmma' needs 2:4"),
        ({"decay": -1e-4}, r"0 to 2\*\*127"),
        ({"decay": float("inf")}, r"0 to 2\*\*127"),
        ({"decay": float("nan")}, r"0 to 2\*\*127"),
        ({"decay": "a"}, r"0 to 2\*\*127, got 'a'"),
        ({"decay": True}, r"0 to 2\*\*127"),
        ({"every": 0}, "every is a number of steps, 1 or more"),
        ({"every": 2}, "fixed masks are found once"),
        ({"warmup": -1}, "warmup is a number of steps"),
        ({"warmup": 1.0}, "warmup is a number of steps"),
        ({"cooldown": 1}, "give steps"),
        ({"steps": 3, "warmup": 2, "cooldown": 2}, "number of all steps"),
        ({"steps": 3.0}, "number of all steps"),
    ],
)
def test_values_that_mean_nothing(values, said):
    with pytest.raises(ValueError, match=said):
        SparseTrainingConfig(**values)


def test_what_is_no_pattern():
    with pytest.raises(TypeError, match="pattern is a string"):
        SparseTrainingConfig(pattern=2)
    with pytest.raises(TypeError, match="transposable is True or False"):
        SparseTrainingConfig(transposable=1)


def test_it_scores_as_one_shot_pruning_by_magnitude():
    assert SparseTrainingConfig(pattern="1:8").scoring() == SparsityConfig("1:8", "magnitude")
    assert SparseTrainingConfig(transposable=True).scoring() == SparsityConfig(transposable=True)


def test_phases():
    config = SparseTrainingConfig(masks="recomputed", every=2, warmup=2, cooldown=2, steps=9)
    assert [phase(config, done) for done in range(11)] == ["warm-up"] * 2 + ["sparse"] * 5 + ["cool-down"] * 4
    assert [done for done in range(11) if finds_masks(config, done)] == [2, 4, 6]


def test_fixed_masks_are_found_once():
    assert [n for n in range(9) if finds_masks(SparseTrainingConfig(warmup=3), n)] == [3]
    assert [n for n in range(9) if finds_masks(SparseTrainingConfig(), n)] == [0]
    every_step = SparseTrainingConfig(masks="recomputed")
    assert [n for n in range(4) if finds_masks(every_step, n)] == [0, 1, 2, 3]


def test_without_steps_it_stays_sparse():
    config = SparseTrainingConfig(warmup=1, steps=5)
    assert [phase(config, n) for n in (0, 1, 4, 5, 99)] == ["warm-up", "sparse", "sparse", "sparse", "sparse"]


def test_text():
    assert str(SparseTrainingConfig()) == "2:4, masks fixed, gradient masked"
    config = SparseTrainingConfig(masks="recomputed", every=40, transposable=True, gradient="sr-ste")
    assert str(config) == "2:4, masks recomputed every 40 steps, transposable, gradient sr-ste"


# Which layers train sparse; what cannot is refused before anything changes.

CONFIG = SparseTrainingConfig()


def plan_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


def refused(net, said, config=CONFIG, filter_fn=None, error=ValueError, **keywords):
    before = copy.deepcopy(net.state_dict())
    kinds = [type(module) for module in net.modules()]
    with pytest.raises(error, match=said):
        sparsify_(net, config, filter_fn, **keywords)
    assert kinds == [type(module) for module in net.modules()]
    after = net.state_dict()
    assert list(after) == list(before)
    same = (torch.equal(a, b) for a, b in zip(after.values(), before.values(), strict=True) if not a.is_meta)
    assert all(same)


def test_the_report():
    net = plan_model()
    report = sparsify_(net, CONFIG, lambda module, name: name == "0")
    assert [(one.name, one.kind, one.pattern, one.zeros) for one in report.layers] == [
        ("0.weight", "Linear", "2:4", 0.5),
        ("2.weight", "Linear", "", 0.0),
    ]
    assert "refused by filter_fn" in str(report)
    assert type(net[0]) is SparseLinear
    assert type(net[2]) is nn.Linear
    assert ao_lab.explain(net).layers[0].reason == "trains 2:4, masks fixed, gradient masked"
    assert "trains" not in ao_lab.explain(net).layers[1].reason


def test_blocks_are_selected_as_for_one_shot_pruning():
    from experiments.models.llama import LanguageModel, ModelSettings

    net = LanguageModel(ModelSettings(layers=2, width=32, feed_forward=64))
    once = sparsify_(copy.deepcopy(net), SparsityConfig())
    assert [x.name for x in sparsify_(net, CONFIG).changed] == [x.name for x in once.changed]


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (nn.Linear(6, 8), r"multiple of 4, got shape \(8, 6\)"),
        (nn.Linear(8, 8, dtype=torch.float64), r"torch.float64 is not float32, bfloat16 or float16"),
        (nn.Linear(8, 8, device="meta"), "load the weights first"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), "no linear layer is selected"),
        (type("Scaled", (nn.Linear,), {})(8, 8), "a Scaled may compute otherwise"),
        (nn.ReLU(), "no linear layer is selected"),
    ],
)
def test_layers_that_cannot(layer, said):
    refused(nn.Sequential(layer), said)


def test_options_that_a_layer_cannot_take():
    odd = nn.Sequential(nn.Linear(8, 6))
    refused(odd, "rows and columns in multiples of 4", SparseTrainingConfig(transposable=True))
    refused(plan_model(), "needs weights on CUDA, got cpu", SparseTrainingConfig(products="cusparselt"))
    refused(plan_model(), "nothing would change", filter_fn=lambda module, name: False)
    refused(plan_model(), "leave calibration, offload out", calibration=[1], offload=True)


def test_nothing_changes_where_one_layer_cannot():
    refused(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(6, 8)), r"2\.weight: 2:4 needs")


def test_states_of_other_training():
    for change in (
        lambda net: sparsify_(net, CONFIG),
        lambda net: quantize_(net, QATConfig(ao_lab.Int8WeightOnlyConfig(), lora=ao_lab.LoRA(rank=4))),
        lambda net: ao_lab.convert_to_float8_training(net),
        lambda net: quantize_(net, ao_lab.Int8WeightOnlyConfig()),
    ):
        net = nn.Sequential(nn.Linear(32, 32))
        change(net)
        with pytest.raises(
            ValueError, match=r"sparsify_ changed nothing\. 0\.weight: (it trains|it is|LoRA)"
        ):
            sparsify_(net, CONFIG)


def test_weights_in_2_4_storage():
    """The way out is named, and is one."""
    net = nn.Sequential(nn.Linear(16, 16)).bfloat16()
    sparsify_(net, SparsityConfig(storage="compressed"))
    stored = net[0].weight
    with pytest.raises(ValueError, match=r"it is in 2:4 storage, for inference; .*weight\.dequantize\(\)"):
        sparsify_(net, CONFIG)
    assert net[0].weight is stored
    net[0].weight = nn.Parameter(stored.dequantize())
    sparsify_(net, CONFIG)
    assert torch.equal(net[0].sparse_mask, stored.dequantize() != 0)


def test_what_comes_after_says_so():
    """Recipes, QAT and quantization of layers that train sparse: errors, none of which changes a layer."""
    net = nn.Sequential(nn.Linear(32, 32))
    sparsify_(net, CONFIG)
    with pytest.raises(ValueError, match="a SparseLinear may compute otherwise"):
        ao_lab.convert_to_float8_training(net)
    for config in (QATConfig(ao_lab.Int8WeightOnlyConfig()), ao_lab.Int8WeightOnlyConfig()):
        with pytest.raises(ValueError, match=r"finish_sparsity_\(model\)"):
            quantize_(net, config)
    with pytest.raises(ValueError, match=r"sparse already|finish_sparsity_"):
        sparsify_(net, SparsityConfig())
    assert type(net[0]) is SparseLinear
    ao_lab.finish_sparsity_(net)
    quantize_(net, QATConfig(ao_lab.Int8WeightOnlyConfig()))


def test_a_weight_that_something_dense_shares():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(8, 16), nn.Linear(16, 8, bias=False)
            self.head.weight = self.embedding.weight

    refused(Tied(), r"head.weight: embedding.weight has the same weight")


def test_layers_that_share_a_weight_are_selected_together():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    net[1].weight = net[0].weight
    refused(net, r"1\.weight has the same weight", filter_fn=lambda module, name: name == "0")
    sparsify_(net, CONFIG)
    assert net[0].sparse_mask is net[1].sparse_mask is not net[2].sparse_mask
    assert net[0].sparse_step is net[1].sparse_step


def test_torchs_fast_path_of_encoders():
    def made():
        return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    recomputed = SparseTrainingConfig(masks="recomputed")
    refused(made(), "set_fastpath_enabled", recomputed)
    sparsify_(made(), CONFIG)  # its pruned weights are zeros, for whoever reads them
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        sparsify_(made(), recomputed)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_dtypes_of_configurations():
    refused(plan_model(), "takes a SparsityConfig, got str", "2:4", error=TypeError)


#: What weights were pruned to, what they are to train as, and what is said, ways out among it.
AGAIN = [
    (
        ("2:4",),
        {"transposable": True},
        r"2:4 sparse already.* both directions.*SparseTrainingConfig\('2:4'\)",
    ),
    (("2:4",), {"pattern": "1:4"}, r"2:4 sparse already.* 1:4 masks.*SparsityConfig\('1:4'\) first"),
    (("2:4",), {"pattern": "2:8"}, r"4:8 sparse already.* 2:8 masks.*SparseTrainingConfig\('4:8'\)"),
    (("2:4",), {"pattern": "1:2"}, r"2:4 sparse already.* 1:2 masks"),
    (("4:8",), {}, r"4:8 sparse already.* 2:4 masks.*SparseTrainingConfig\('4:8'\)"),
    (
        ("3:4",),
        {"transposable": True},
        r"3:4 sparse already.*SparsityConfig\('2:4', transposable=True\) first",
    ),
    (("7:16",), {"pattern": "3:16"}, r"7:16 sparse already"),
]


def pruned(*config):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))
    sparsify_(net, SparsityConfig(*config))
    return net


@pytest.mark.parametrize(("was", "asked", "said"), AGAIN)
def test_fixed_masks_prune_no_pruned_weight_again(was, asked, said):
    net, config = pruned(*was), SparseTrainingConfig(**asked)
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(ValueError, match=rf"changed nothing\. 0\.weight, 1\.weight: it is {said}"):
        sparsify_(net, config)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before, strict=True))
    # A dense checkpoint that is loaded later is such a weight too.
    layers = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))
    sparsify_(layers, config)
    kept = copy.deepcopy(layers.state_dict())
    with pytest.raises(RuntimeError, match=r"0\.weight: it is"):
        layers.load_state_dict(net.state_dict())
    assert torch.equal(layers[0].weight, kept["0.weight"])
    assert torch.equal(layers[0].weight != 0, layers[0].sparse_mask)


def test_ways_out_of_another_pattern():
    assert sparsify_(pruned("2:4"), SparseTrainingConfig("4:8")).changed  # which 2:4 is
    assert sparsify_(pruned("2:4"), SparseTrainingConfig("1:4", masks="recomputed")).changed
    assert sparsify_(pruned("2:4"), SparseTrainingConfig("1:4", warmup=1)).changed
    net = pruned("2:4")
    sparsify_(net, SparsityConfig("1:4"))
    for config in (SparseTrainingConfig("1:4"), SparseTrainingConfig("2:4")):
        kept = net[0].weight != 0
        sparsify_(net, config)
        assert torch.equal(net[0].sparse_mask, kept)
        finish_sparsity_(net)
        assert torch.equal(net[0].weight != 0, kept)
    both = pruned("2:4", "magnitude", True)
    assert sparsify_(both, SparseTrainingConfig(transposable=True)).changed[0].zeros == 0.5


def test_zeros_here_and_there_are_no_pattern():
    """Nor are those of a weight that is zero."""
    net = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))
    net[0].weight.data[:, ::8] = 0
    net[0].weight.data[0, 0] = 1
    net[1].weight.data.zero_()
    assert len(sparsify_(net, SparseTrainingConfig("1:4")).changed) == 2


@pytest.mark.parametrize("share", [0.5, 0.7, 0.8, 0.9, 0.97])
def test_zeros_of_small_weights_anywhere_are_no_pattern(share):
    """Whatever the largest group holds."""
    net = nn.Sequential(nn.Linear(512, 64))
    w = net[0].weight.data
    w[w.abs() < w.abs().quantile(share)] = 0
    assert len(sparsify_(net, SparseTrainingConfig()).changed) == 1


@pytest.mark.parametrize("width", [4, 8])
def test_channels_of_zeros_are_no_pattern(width):
    """A padded channel of an image, say: rows have one group."""
    net = nn.Sequential(nn.Linear(width, 32))
    net[0].weight.data[:, -1] = 0
    assert len(sparsify_(net, SparseTrainingConfig()).changed) == 1


def test_the_report_counts_zeros_of_weights():
    """Not those of masks alone; and it says whose the masks are."""
    net = pruned("1:4")
    told = sparsify_(net, SparseTrainingConfig()).changed[0]
    assert (told.zeros, told.score) == (0.75, "its own zeros")
    assert float((net[0].weight == 0).float().mean()) == 0.75
    told = finish_sparsity_(net).changed[0]
    assert (told.zeros, told.score) == (0.75, "training")
    told = sparsify_(net, SparseTrainingConfig(masks="recomputed")).changed[0]
    assert (told.zeros, told.score) == (0.75, "magnitude")
    assert sparsify_(nn.Linear(8, 8), SparseTrainingConfig()).changed[0].score == "magnitude"


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    "adam with coupled decay": lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.1),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True),
}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def batch(step):
    random = torch.Generator().manual_seed(step)
    return torch.randn(8, 16, generator=random), torch.randn(8, 8, generator=random)


def one_step(net, optimizer, step):
    x, y = batch(step)
    F.mse_loss(net(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    return step_sparsity_(net)


def mask_of(w, transposable=False):
    find = reference.prune_transposable if transposable else reference.prune
    return torch.as_tensor(find(w.detach()))


@pytest.mark.parametrize("gradient", ["masked", "straight-through", "sr-ste"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pruned_weights_stay_zero_where_masks_are_fixed(name, gradient):
    """Also with moments from steps before; kept weights move."""
    net = model()
    optimizer = OPTIMIZERS[name](net.parameters())
    for step in range(3):
        F.mse_loss(net(batch(step)[0]), batch(step)[1]).backward()
        optimizer.step()
    mask, start = mask_of(net[0].weight), net[0].weight.detach().clone()
    sparsify_(net, SparseTrainingConfig(gradient=gradient))
    for step in range(5):
        assert one_step(net, optimizer, step).renewed == 0
        pruned = net[0].weight.detach()[~mask]
        assert pruned.view(torch.int32).eq(0).all()
        assert torch.equal(net[0].sparse_mask, mask)
    assert (net[0].weight.detach()[mask] != start[mask]).all()


def test_masked_models_are_tuned_with_their_masks():
    """A mask of Wanda, which magnitude would not have found."""
    net = model()
    sparsify_(
        net, SparsityConfig(score="wanda"), lambda m, n: n == "0", calibration=[batch(0)[0] ** 3], blocks=""
    )
    zeros = net[0].weight == 0
    assert not torch.equal(~zeros, mask_of(model()[0].weight))
    sparsify_(net, SparseTrainingConfig())
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    for step in range(3):
        one_step(net, optimizer, step)
    assert torch.equal(net[0].weight == 0, zeros)


@pytest.mark.parametrize("gradient", ["masked", "straight-through", "sr-ste"])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("transposable", [False, True])
def test_recomputed_masks_by_hand(every, transposable, gradient):
    """Six steps, two of them warm-up and one cool-down, by torch alone: the same bits."""
    config = SparseTrainingConfig(
        "2:4", "recomputed", every, transposable, gradient, 0.05, warmup=2, cooldown=1, steps=7
    )
    net, dense = model(), model()
    sparsify_(net, config)
    optimizer, other = OPTIMIZERS["adamw"](net.parameters()), OPTIMIZERS["adamw"](dense.parameters())
    layers = (dense[0], dense[2])
    masks = [torch.ones_like(layer.weight, dtype=torch.bool) for layer in layers]
    for step in range(7):
        if 2 <= step < 6 and (step - 2) % every == 0:
            masks = [mask_of(layer.weight, transposable) for layer in layers]
        if step == 6:
            masks = [torch.ones_like(mask) for mask in masks]
        assert torch.equal(net[0].sparse_mask, masks[0])
        said = one_step(net, optimizer, step)
        _by_hand(layers, masks, other, step, config)
        assert said.step == step + 1
        assert said.phase == ["warm-up", *["sparse"] * 4, *["cool-down"] * 2][step]
        assert said.renewed == (2 if 1 <= step < 5 and (step - 1) % every == 0 else 0)
        for a, b in zip(net.parameters(), dense.parameters(), strict=True):
            assert torch.equal(a, b)


def _by_hand(layers, masks, optimizer, step, config):
    (x, y), kept = batch(step), []
    for layer, mask in zip(layers, masks, strict=True):
        kept.append(torch.where(mask, layer.weight, 0).detach().requires_grad_())
    hidden = F.linear(x, kept[0], layers[0].bias).relu()
    F.mse_loss(F.linear(hidden, kept[1], layers[1].bias), y).backward()
    for layer, w, mask in zip(layers, kept, masks, strict=True):
        layer.weight.grad = {
            "masked": lambda w=w, mask=mask: torch.where(mask, w.grad, 0),
            "straight-through": lambda w=w: w.grad,
            "sr-ste": lambda w=w, mask=mask, layer=layer: torch.as_tensor(
                reference.sr_ste_gradient(w.grad, layer.weight.detach(), mask, decay=config.decay)
            ),
        }[config.gradient]()
    optimizer.step()
    optimizer.zero_grad()


def test_fixed_masks_after_a_warm_up():
    """They are those of the weights that the warm-up leaves; the cool-down lets zeros grow."""
    net = model()
    start = net[0].weight.detach().clone()
    report = sparsify_(net, SparseTrainingConfig(warmup=2, cooldown=2, steps=6))
    assert "layers are to train sparse, dense until warm-up ends" in str(report)
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    assert torch.equal(net[0].weight, start)
    one_step(net, optimizer, 0)
    assert (net[0].weight != 0).all()
    one_step(net, optimizer, 1)
    mask = net[0].sparse_mask.clone()
    assert torch.equal(net[0].weight != 0, mask)
    one_step(net, optimizer, 2)
    assert torch.equal(net[0].weight != 0, mask)
    assert one_step(net, optimizer, 3).phase == "cool-down"
    assert net[0].sparse_mask.all()
    one_step(net, optimizer, 4)
    assert (net[0].weight != 0).float().mean() > 0.9
    report = finish_sparsity_(net)
    assert [one.reason for one in report.left] == ["dense in its cool-down"] * 2
    assert type(net[0]) is nn.Linear


@pytest.mark.parametrize("transposable", [False, True])
@pytest.mark.parametrize("masks", ["fixed", "recomputed"])
def test_finished_models(masks, transposable):
    net = model()
    sparsify_(net, SparseTrainingConfig(masks=masks, gradient="sr-ste", transposable=transposable))
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    for step in range(3):
        one_step(net, optimizer, step)
    x = batch(9)[0]
    expected, mask, trained = net(x).detach(), net[0].sparse_mask.clone(), net[0].weight.detach().clone()
    report = finish_sparsity_(net)
    assert torch.equal(net(x), expected)
    assert torch.equal(net[0].weight, torch.where(mask, trained, 0))
    assert [(one.name, one.pattern, one.zeros) for one in report.changed] == [
        ("0.weight", "2:4", 0.5),
        ("2.weight", "2:4", 0.5),
    ]
    reference.compress(net[0].weight.detach())  # 2:4, or a ValueError
    if transposable:
        reference.compress(net[0].weight.detach().T.contiguous())
    ao_lab.quantize_(net, ao_lab.Int8WeightOnlyConfig())
    assert ao_lab.explain(net).layers[0].sparsity == "2:4 by training"


def test_several_configurations():
    net = model()
    sparsify_(net, SparseTrainingConfig(), lambda m, n: n == "0")
    sparsify_(net, SparseTrainingConfig(masks="recomputed", warmup=2), lambda m, n: n == "2")
    assert step_sparsity_(net) == (1, "mixed", 0)
    with pytest.raises(ValueError, match=r"2 has not begun to train sparse: step 1 of warmup=2"):
        finish_sparsity_(net)
    assert type(net[0]) is not nn.Linear
    assert step_sparsity_(net) == (2, "sparse", 1)
    finish_sparsity_(net)


def test_nothing_to_step_or_finish():
    for call in (step_sparsity_, finish_sparsity_):
        with pytest.raises(ValueError, match="no layer trains sparse"):
            call(model())


def test_one_layer_alone():
    layer = nn.Linear(8, 8)
    report = sparsify_(layer, SparseTrainingConfig())
    assert [one.name for one in report.changed] == ["weight"]
    step_sparsity_(layer)
    finish_sparsity_(layer)
    assert type(layer) is nn.Linear


def task(step):
    """Noise through a fixed network, which a wider one learns."""
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
    return x, teacher(x).detach()


def loss(net):
    with torch.no_grad():
        return float(sum(F.mse_loss(net(x), y) for x, y in map(task, range(1000, 1004))))


def fit(net, after=None, steps=200, rate=1e-2):
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        x, y = task(step)
        F.mse_loss(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after(net)
    return net


@pytest.mark.parametrize(
    "config",
    [
        SparseTrainingConfig(),
        SparseTrainingConfig(masks="recomputed"),
        SparseTrainingConfig(masks="recomputed", gradient="sr-ste"),
    ],
    ids=str,
)
def test_what_pruning_loses_training_brings_back(config):
    """Losses: dense < trained sparse << pruned once. The same weights, data and number of steps; how far below depends on the
    order of a processor's sums."""
    torch.manual_seed(0)
    dense = fit(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8)))
    pruned, trained = copy.deepcopy(dense), copy.deepcopy(dense)
    sparsify_(pruned, SparsityConfig())
    sparsify_(trained, config)
    fit(trained, step_sparsity_)
    finish_sparsity_(trained)
    assert loss(dense) < loss(trained) < 0.6 * loss(pruned)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils:FutureWarning")
@pytest.mark.parametrize("named", ["_WeightNorm", "_Orthogonal", "WeightNorm", "L1Unstructured"])
def test_a_weight_that_something_computes_is_refused(named):
    """Neither a step nor the end changes anything; both name what computes the weight."""
    norms = {
        "_WeightNorm": torch.nn.utils.parametrizations.weight_norm,
        "_Orthogonal": torch.nn.utils.parametrizations.orthogonal,
        "WeightNorm": torch.nn.utils.weight_norm,
        "L1Unstructured": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    }
    net = model()
    sparsify_(net, SparseTrainingConfig())
    norms[named](net[0])
    for call in (step_sparsity_, finish_sparsity_):
        with pytest.raises(
            ValueError, match=rf"{call.__name__} changed nothing. 0\.weight: .*{named}.* computes its"
        ):
            call(net)
    if named.startswith("_"):
        torch.nn.utils.parametrize.remove_parametrizations(net[0], "weight")
        finish_sparsity_(net)
        assert type(net[0]) is nn.Linear
