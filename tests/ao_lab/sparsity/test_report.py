"""What the report says in text."""

import numpy as np
import pytest
import torch
from torch import nn

import reference
from ao_lab import (
    LowBitWeightOnlyConfig,
    SparseLayer,
    SparseTrainingConfig,
    SparsityConfig,
    SparsityReport,
    explain,
    quantize_,
    sparsify_,
)
from ao_lab.quantization.report import stores_zero
from ao_lab.sparsity.report import remember


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


def test_explain_says_how_a_layer_was_pruned():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    remember(model, "0.weight", "2:4 by wanda")
    assert [layer.sparsity for layer in explain(model).layers] == ["2:4 by wanda", ""]
    assert "0.weight  left, 2:4 by wanda: never given to quantize_" in str(explain(model))


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
