"""Which layers train sparse; what cannot is refused before anything changes."""

import copy

import pytest
import torch
from torch import nn

import ao_lab
from ao_lab import QATConfig, SparseTrainingConfig, SparsityConfig, finish_sparsity_, quantize_, sparsify_
from ao_lab.sparsity.training.layers import SparseLinear

CONFIG = SparseTrainingConfig()


def model():
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
    net = model()
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
    from experiments.models.language_model import LanguageModel, ModelSettings

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
    refused(model(), "needs weights on CUDA, got cpu", SparseTrainingConfig(products="cusparselt"))
    refused(model(), "nothing would change", filter_fn=lambda module, name: False)
    refused(model(), "leave calibration, offload out", calibration=[1], offload=True)


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
    refused(model(), "takes a SparsityConfig, got str", "2:4", error=TypeError)


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
