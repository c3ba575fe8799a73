"""Which layers are selected, and everything that is refused before a weight changes."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import reference
from ao_lab import (
    Int8WeightOnlyConfig,
    LowBitWeightOnlyConfig,
    QATConfig,
    QuantizedTensor,
    SparseLayer,
    SparseTrainingConfig,
    SparsityConfig,
    SparsityReport,
    explain,
    linear_and_experts,
    quantize_,
    sparsify_,
)
from ao_lab.quantization.report import stores_zero
from ao_lab.sparsity import plan
from ao_lab.sparsity.plan import planned, prune_weight
from ao_lab.transforms.report import remember_pruned
from experiments.models.llama import LanguageModel, ModelSettings

# One weight: masks of the reference, bits of what is kept, pieces that change nothing.

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weight(dtype=torch.float32, rows=16, columns=32):
    torch.manual_seed(0)
    return torch.randn(rows, columns).to(dtype)


def sums(columns=32):
    return reference.square_sums(torch.randn(50, columns) * torch.logspace(-2, 2, columns))


def reference_mask(w, config, value):
    scores = {
        "magnitude": lambda: None,
        "wanda": lambda: reference.wanda_scores(w, value),
        "ria": lambda: reference.ria_scores(w, value),
    }[config.score]()
    if config.transposable:
        return reference.prune_transposable(w, scores=scores)
    return torch.as_tensor(reference.prune(w, pattern=config.pattern, scores=scores))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("score", ["magnitude", "wanda", "ria"])
@pytest.mark.parametrize("kind", [{}, {"pattern": "1:4"}, {"pattern": "3:8"}, {"transposable": True}])
def test_masks_are_those_of_the_reference(score, kind, dtype, monkeypatch):
    monkeypatch.setattr(plan, "PIECE", 256)  # pieces of eight rows
    config, w, value = SparsityConfig(score=score, **kind), weight(dtype), sums()
    before = w.clone()
    found = prune_weight(w, config, None if score == "magnitude" else value)
    mask = reference_mask(w, config, value)
    assert torch.equal(found.weights, torch.where(mask, w, torch.zeros((), dtype=dtype)))
    assert torch.equal(w, before)
    assert not found.weights[~mask].signbit().any()
    assert found.score == score
    if score != "magnitude":
        assert not torch.equal(mask, reference_mask(w, SparsityConfig(**kind), None))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sparsegpt_is_that_of_the_reference(dtype):
    w, x = weight(dtype), torch.randn(64, 32, dtype=torch.float64)
    hessian = x.T @ x
    config = SparsityConfig(score="sparsegpt", damping=0.02, block=16)
    found = prune_weight(w, config, hessian)
    array = reference.arrays.bridges.to_numpy(w)
    expected = reference.sparsegpt(array, hessian.numpy(), damping=0.02, block=16)
    assert found.weights.dtype == dtype
    assert np.array_equal(found.weights.float().numpy(), expected.weights.astype(np.float32))
    assert found.facts == {"loss": expected.loss, "damping": 0.02, "floor": 0.0}
    assert not torch.equal(found.weights, prune_weight(w, SparsityConfig(), None).weights)


@pytest.mark.parametrize("score", ["wanda", "ria", "sparsegpt"])
@pytest.mark.parametrize("value", [None, torch.zeros(32)])
def test_inputs_of_zeros_leave_it_to_magnitude(score, value):
    value = value if value is None or score != "sparsegpt" else torch.zeros(32, 32)
    found = prune_weight(weight(), SparsityConfig(score=score), value)
    assert found.score == "magnitude"
    assert torch.equal(found.weights, prune_weight(weight(), SparsityConfig(), None).weights)


def test_infinite_weights_make_no_nan():
    w = torch.tensor([[torch.inf, torch.inf, -torch.inf, 1.0]])
    assert prune_weight(w, SparsityConfig(), None).weights.tolist() == [[torch.inf, torch.inf, 0.0, 0.0]]


# What the report says in text.


def test_lines():
    report = SparsityReport((
        SparseLayer("a.weight", "Linear", (8, 8), "Linear", "2:4", "sparsegpt", 0.5, 40, 1.5, 0.02, 1e-6),
        SparseLayer("head.weight", "Linear", (8, 8), "refused by filter_fn"),
    ))  # fmt: skip
    assert [layer.name for layer in report.changed] == ["a.weight"]
    assert [layer.name for layer in report.left] == ["head.weight"]
    assert str(report).splitlines() == [
        "1 of 2 layers pruned",
        "  a.weight     2:4 by sparsegpt, 50.0 % zeros, loss 1.5, damping 0.02, floor 1e-06: Linear",
        "  head.weight  left: refused by filter_fn",
    ]


def test_layers_of_all_blocks_are_one_line_of_a_report():
    layers = [SparseLayer(f"blocks.{i}.{n}.weight", "Linear", (8, 8), why)
              for i, n, why in ((0, "a", "x"), (0, "b", "x"), (1, "a", "x"), (1, "b", "y"))]  # fmt: skip
    assert str(SparsityReport(tuple(layers))).splitlines()[1:] == [
        "  blocks.*.a.weight (2)  left: x",
        "  blocks.0.b.weight      left: x",
        "  blocks.1.b.weight      left: y",
    ]


def test_explain_says_how_a_layer_was_pruned():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    remember_pruned(model, "0.weight", "2:4 by wanda")
    assert [layer.sparsity for layer in explain(model).layers] == ["2:4 by wanda", ""]
    assert "0.weight  left, 2:4 by wanda: quantize_ was not called for it" in str(explain(model))


@pytest.mark.parametrize("scheme", ["int8_rowwise", "int4_g128_asymmetric", "torchao.int4_g128_tinygemm", "nf4", "fp8_rowwise",
                                    "ternary_rowwise", "stretched2_rowwise"])  # fmt: skip
def test_which_schemes_store_a_zero(scheme):
    """As quantizing says, of blocks whose values lie on one side."""
    x = np.random.default_rng(0).standard_normal((4, 256), dtype=np.float32) + 1
    x[:, ::3] = 0
    kept = bool((np.asarray(reference.fake_quantize(x, scheme))[:, ::3] == 0).all())
    assert stores_zero(reference.SCHEMES[scheme]) == kept
    assert kept == (scheme not in ("stretched2_rowwise", "torchao.int4_g128_tinygemm"))


def test_the_report_names_a_scheme_without_a_zero():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8))
    sparsify_(model, SparsityConfig())
    report = quantize_(model, LowBitWeightOnlyConfig(bits=2))
    assert report.layers[0].sparsity.startswith("2:4 by magnitude, whose zeros stretched2")
    assert explain(model).layers[0].sparsity == report.layers[0].sparsity


@pytest.mark.parametrize("config", [SparsityConfig(), SparseTrainingConfig()])
def test_what_a_filter_accepts_and_is_no_linear_layer_is_listed(config):
    kinds = {
        "conv": nn.Conv2d(4, 4, 1), "lstm": nn.LSTM(8, 8), "cell": nn.GRUCell(8, 8), "pair": nn.Bilinear(4, 4, 4),
        "bag": nn.EmbeddingBag(8, 8), "heads": nn.MultiheadAttention(8, 2),
    }  # fmt: skip
    model = nn.ModuleDict({"fc": nn.Linear(8, 8), **kinds, "norm": nn.LayerNorm(8)})
    report = sparsify_(model, config, lambda module, name: name != "heads.out_proj")
    left = {layer.name.partition(".")[0]: layer.reason for layer in report.left}
    assert left == {
        name: f"{type(module).__name__}: only linear layers are pruned" for name, module in kinds.items()
    }
    assert [layer.name for layer in report.changed] == ["fc.weight"]
    assert not [
        layer for layer in sparsify_(nn.ModuleDict({"fc": nn.Linear(8, 8), **kinds}), config, linear).left
        if layer.name.startswith("conv")
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"conv\.weight: Conv2d: only linear layers are pruned"):
        sparsify_(
            nn.ModuleDict({"fc": nn.Linear(8, 8), **kinds}), config, lambda module, name: name == "conv"
        )


def linear(module, name):
    """A filter that asks for what a linear layer has."""
    return module.in_features == 8


@pytest.mark.parametrize("config", [SparsityConfig(), SparseTrainingConfig()])
def test_a_layer_without_a_shape_is_named(config):
    model = nn.ModuleDict({"fc": nn.Linear(8, 8), "late": nn.LazyLinear(4)})
    with pytest.raises(ValueError, match=r"late\.weight of a LazyLinear has no shape yet; run one forward"):
        sparsify_(model, config)
    assert (model["fc"].weight != 0).all()


# What a `SparsityConfig` refuses, and what it says of itself.


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"score": "norm"}, r"score is one of magnitude, wanda, ria, sparsegpt; got 'norm'"),
        ({"pattern": "4:2"}, r"1 <= N <= M.*got '4:2'"),
        ({"pattern": "4:4"}, r"'4:4' keeps every weight"),
        ({"transposable": True, "pattern": "1:4"}, r"transposable masks are 2:4.*got '1:4' by 'magnitude'"),
        ({"transposable": True, "score": "sparsegpt"}, r"transposable masks are 2:4.*by 'sparsegpt'"),
        ({"damping": -0.1}, r"damping is a share.*got -0.1"),
        ({"damping": float("nan")}, r"damping is a share.*got nan"),
        ({"damping": "a"}, "damping is a share of the mean diagonal, 0 to 1, got 'a'"),
        ({"damping": None}, "damping is a share of the mean diagonal, 0 to 1, got None"),
        ({"block": 6}, r"block is a positive multiple of the 4 of '2:4', got 6"),
        ({"block": 0}, r"block is a positive multiple.*got 0"),
        ({"block": True}, r"block is a positive multiple.*got True"),
    ],
)
def test_values_outside_of_the_rules(given, said):
    with pytest.raises(ValueError, match=said):
        SparsityConfig(**given)


def test_config_types():
    with pytest.raises(TypeError, match="got tuple"):
        SparsityConfig((2, 4))
    with pytest.raises(TypeError, match="transposable is True or False, got 1"):
        SparsityConfig(transposable=1)


def test_columns_of_sparsegpt_are_a_multiple_of_the_group():
    assert SparsityConfig().columns == 128
    assert SparsityConfig("3:5").columns == 130
    assert SparsityConfig(block=8).columns == 8


def test_text():
    assert str(SparsityConfig(score="wanda", transposable=True)) == "2:4 by wanda, transposable"


TOKENS = [torch.arange(24).reshape(2, 12)]
CONFIG, WANDA, GPT = (SparsityConfig(score=score) for score in ("magnitude", "wanda", "sparsegpt"))


def language_model(layers=2):
    torch.manual_seed(0)
    return LanguageModel(ModelSettings(layers=layers, width=64, feed_forward=128))


def selected(model, filter_fn=None, blocks=None):
    return [name for t in planned(model, CONFIG, filter_fn, blocks).changes.values() for name in t.places]


def values(parameter):
    """Dense and comparable, NaN included."""
    dense = parameter.dequantize() if isinstance(parameter, QuantizedTensor) else parameter.detach()
    return dense.nan_to_num(12345.0)


def assert_refused(model, said, config=CONFIG, error=ValueError, **options):
    """With nothing changed."""
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    keys, hooks = set(vars(model)), [len(m._forward_pre_hooks) for m in model.modules()]
    with pytest.raises(error, match=said):
        sparsify_(model, config, **options)
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(values(parameter), values(before[name][1]))
    assert set(vars(model)) == keys
    assert [len(m._forward_pre_hooks) for m in model.modules()] == hooks


def test_blocks_are_selected_and_the_head_is_not():
    model = language_model()
    names = selected(model)
    assert len(names) == 14
    assert all(name.startswith("model.layers.") for name in names)
    assert selected(model, lambda module, name: True) == [*names, "lm_head.weight"]
    reasons = planned(model, CONFIG, None).reasons
    assert reasons["lm_head.weight"] == "outside of the blocks (model.layers)"
    assert reasons["model.embed_tokens.weight"] == "Embedding: only linear layers are pruned"


def test_models_without_blocks_are_selected_whole():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Embedding(8, 8), nn.Linear(8, 8))
    assert selected(model) == ["0.weight", "3.weight"]
    assert selected(model, lambda module, name: name == "3") == ["3.weight"]
    assert (
        planned(model, CONFIG, lambda module, name: name == "3").reasons["0.weight"] == "refused by filter_fn"
    )


def test_only_blocks_that_are_walked():
    model = nn.ModuleDict({
        name: nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(2)) for name in ("encoder", "decoder")
    })  # fmt: skip
    assert len(selected(model)) == 4
    assert selected(model, blocks=["decoder.0", "decoder.1"]) == ["decoder.0.0.weight", "decoder.1.0.weight"]


def test_nothing_selected():
    assert_refused(nn.Sequential(nn.ReLU()), "the model has no linear layers")
    assert_refused(nn.Sequential(nn.Embedding(8, 8)), r"no linear layer is selected.*0\.weight: Embedding")
    assert_refused(
        language_model(), "no linear layer is selected.*refused by filter_fn", filter_fn=lambda m, name: False
    )


def test_types():
    with pytest.raises(TypeError, match=r"the model is a torch\.nn\.Module, got int"):
        sparsify_(3, CONFIG)
    assert_refused(
        nn.Linear(8, 8), "takes a SparsityConfig, got Int8WeightOnlyConfig", Int8WeightOnlyConfig(), TypeError
    )


def test_scores_and_data_belong_together():
    assert_refused(language_model(), "score 'wanda' needs calibration data: give calibration=", WANDA)
    assert_refused(language_model(), "score 'magnitude' reads weights alone", calibration=TOKENS)
    assert_refused(language_model(), "score 'magnitude' reads weights alone", blocks="model.layers")


def test_lengths_that_the_pattern_does_not_divide():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 6), nn.Linear(6, 8))
    said = r"2\.weight: 2:4 needs a last axis that is a multiple of 4, got shape \(8, 6\).*filter_fn"
    assert_refused(model, said)
    said = r"1\.weight: transposable masks need rows and columns in multiples of 4, got shape \(6, 8\)"
    assert_refused(model, said, SparsityConfig(transposable=True), filter_fn=lambda m, name: name != "2")
    empty = nn.Linear(8, 8)
    empty.weight = nn.Parameter(torch.empty(8, 0))
    assert_refused(empty, r"shape \(8, 0\) has no elements")


def test_weights_that_are_sparse_already():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    sparsify_(model, CONFIG, lambda m, name: name == "1")
    assert_refused(model, r"1\.weight: it is 2:4 sparse already, with at most 2 of 4 weights")
    sparsify_(model, SparsityConfig("1:4"), lambda m, name: name == "1")  # a sparser pattern is another one
    zeros = nn.Linear(8, 8)
    nn.init.zeros_(zeros.weight)
    assert len(sparsify_(zeros, CONFIG).changed) == 1


def test_weights_that_are_no_plain_tensors():
    model = nn.Sequential(nn.Linear(64, 64))
    quantize_(model, Int8WeightOnlyConfig())
    assert_refused(model, r"0\.weight: it is quantized already; prune first, then quantize")
    assert_refused(nn.Linear(8, 8, dtype=torch.float64), "float64 is not float32, bfloat16 or float16")
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="on the meta device there are no values to prune"):
        sparsify_(model, CONFIG)
    model = nn.Sequential(nn.Linear(64, 64))
    quantize_(model, QATConfig(Int8WeightOnlyConfig(), step="prepare"))
    assert_refused(model, r"sparsify_ changed nothing\. 0\.weight: ")


@pytest.mark.parametrize("config", [GPT, SparsityConfig(score="ria")], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_a_score_would_spread(config, value):
    model = language_model()
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = value
    said = r"layers\.1\.mlp\.up_proj\.weight: it holds NaN or infinity, which (SparseGPT|RIA) would spread"
    assert_refused(model, said, config, calibration=TOKENS)


@pytest.mark.parametrize("config", [CONFIG, WANDA], ids=str)
def test_values_that_masks_keep_are_said(config):
    layer, data = nn.Linear(8, 8), {"calibration": [torch.ones(2, 8)], "blocks": ""}
    layer.weight.data[0, 1] = torch.nan
    report = sparsify_(layer, config, **({} if config is CONFIG else data))
    assert report.changed[0].reason == "Linear; it holds NaN or infinity, which rank above finite weights"
    assert layer.weight[0, 1].isnan()


def made_in_inference_mode():
    with torch.inference_mode():
        return nn.Parameter(torch.randn(8, 8))


#: Parameters that cannot be written where they are.
UNWRITABLE = {
    "was expanded.*contiguous": lambda: nn.Parameter(torch.randn(1, 8).expand(8, 8)),
    "was made under torch.inference_mode.*clone": made_in_inference_mode,
    "layout torch.sparse_csr.*to_dense": lambda: nn.Parameter(torch.eye(8).to_sparse_csr()),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("said", UNWRITABLE)
@pytest.mark.parametrize("config", [CONFIG, SparseTrainingConfig()], ids=str)
def test_weights_that_cannot_be_written(config, said):
    """Before the one in front of them is pruned."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = UNWRITABLE[said]()
    with pytest.raises(ValueError, match=rf"sparsify_ changed nothing\. 1\.weight: (it )?{said}"):
        sparsify_(model, config)
    assert (model[0].weight != 0).all()
    assert [type(layer) for layer in model] == [nn.Linear] * 2


def test_weights_of_inference_mode_are_written_inside_it():
    """And replaced anywhere."""
    layer = nn.Linear(8, 8, bias=False)
    layer.weight = made_in_inference_mode()
    with torch.inference_mode():
        assert sparsify_(layer, CONFIG).changed
        assert int((layer.weight != 0).sum()) == 32
    layer.weight = nn.Parameter(torch.randn(1, 16).bfloat16().expand(16, 16))
    assert sparsify_(layer, SparsityConfig(storage="compressed")).changed


def test_layers_that_torch_prunes():
    """The way out is named, and is one."""
    model = nn.Sequential(nn.Linear(8, 8))
    prune.l1_unstructured(model[0], "weight", 0.5)
    for config in (CONFIG, SparseTrainingConfig()):
        with pytest.raises(ValueError, match=r"torch\.nn\.utils\.prune\.remove\(module, 'weight'\)"):
            sparsify_(model, config)
    prune.remove(model[0], "weight")
    assert sparsify_(model, CONFIG).changed


def test_layers_outside_of_the_walk():
    assert_refused(
        language_model(), r"lm_head\.weight: it is outside of the blocks \(model\.layers\.0 and on\)", WANDA,
        filter_fn=lambda m, name: True, calibration=TOKENS,
    )  # fmt: skip
    model = language_model()
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    assert_refused(model, r"blocks model\.layers\.0 and model\.layers\.1 share it", WANDA, calibration=TOKENS)


def test_layers_that_no_data_reach():
    model = language_model()
    model.model.layers[1].mlp.spare = nn.Linear(64, 64)
    said = r"changed nothing. No input was seen by model\.layers\.1\.mlp\.spare\.weight"
    assert_refused(model, said, WANDA, calibration=TOKENS)


def test_all_refused_layers_are_named_with_their_reasons():
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(6, 8))
    with pytest.raises(ValueError, match=r"0\.weight, 2\.weight: 2:4 needs a last axis"):
        sparsify_(model, CONFIG)


class Experts(nn.Module):
    """Batched experts and their router, as transformers has them."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.randn(4, 16, 8))
        self.experts.down_proj = nn.Parameter(torch.randn(4, 8, 8))
        self.out = nn.Linear(8, 8)


def test_a_filter_that_asks_for_what_linear_layers_have_accepts_no_experts():
    plan = planned(Experts(), CONFIG, lambda module, name: module.in_features >= 8)
    assert plan.reasons["experts.down_proj"]


def test_routers_and_batched_experts_stay():
    plan = planned(Experts(), CONFIG, None)
    assert [t.name for t in plan.changes.values()] == ["out.weight"]
    assert plan.reasons["gate.weight"].startswith("it routes tokens to experts and is left unquantized")
    assert plan.reasons["experts.down_proj"] == "Module: only linear layers are pruned"
    linear = selected(Experts(), lambda module, name: isinstance(module, nn.Linear))
    assert linear == ["gate.weight", "out.weight"]


@pytest.mark.parametrize("filter_fn", [linear_and_experts, lambda module, name: True])
def test_batched_experts_that_are_selected(filter_fn):
    said = r"experts\.gate_up_proj, experts\.down_proj: batched experts are not pruned.* without filter_fn leaves"
    assert_refused(Experts(), said, filter_fn=filter_fn)
    assert_refused(Experts(), said, SparseTrainingConfig(), filter_fn=filter_fn)
