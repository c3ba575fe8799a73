"""QAT composed with training recipes: rounded operands, then the recipe's products; either part ends by its own call."""

import copy

import pytest
import torch
from torch import nn

import ao_lab
import fast
import reference
from ao_lab import QATConfig, SparseTrainingConfig, finish_sparsity_, quantize_, sparsify_, step_sparsity_
from ao_lab.qat.layers import QATLinear
from ao_lab.qat.low_precision import LowPrecisionQATLinear
from ao_lab.training.autograd import training_linear
from reference.training import RECIPES
from tests.support.models.qat_models import same

# QAT with sparse weights: masked, then rounded; finished and converted, codes keep the pattern.

BASES = {
    "int4": ao_lab.Int4WeightOnlyConfig(group_size=32),
    "int8 x int4": ao_lab.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4),
    "float8": ao_lab.Float8DynamicActivationFloat8WeightConfig(),
}
RECOMPUTED = SparseTrainingConfig(masks="recomputed", gradient="sr-ste", decay=0.1)
X = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))


def sparse_prepared(base, sparse=None, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))
    quantize_(net, QATConfig(base, **options))
    if sparse is not None:
        sparsify_(net, sparse)
    return net


def gradients(net, run=None):
    x = X.clone().requires_grad_()
    y = (run or net)(x)
    y.square().sum().backward()
    found = [y.detach(), x.grad, *(p.grad.clone() for p in net.parameters())]
    net.zero_grad()
    return found


@pytest.mark.parametrize("name", BASES)
def test_it_is_qat_of_the_masked_weight(name):
    net, dense = sparse_prepared(BASES[name], RECOMPUTED), sparse_prepared(BASES[name])
    assert isinstance(net[0], QATLinear)
    with torch.no_grad():
        for ours, theirs in ((net[0], dense[0]), (net[2], dense[2])):
            theirs.weight.copy_(torch.where(ours.sparse_mask, ours.weight, 0))
    expected = gradients(dense)
    for i, layer in ((2, net[0]), (4, net[2])):
        mask, w = layer.sparse_mask, layer.weight.detach()
        expected[i] = torch.as_tensor(reference.sr_ste_gradient(expected[i], w, mask, decay=0.1))
    assert all(same(a, b) for a, b in zip(gradients(net), expected, strict=True))


@pytest.mark.parametrize("sparse", [RECOMPUTED, SparseTrainingConfig()], ids=str)
@pytest.mark.parametrize("name", BASES)
def test_prepare_train_finish_convert(name, sparse):
    net = sparse_prepared(BASES[name], sparse)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(3):
        net(X).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        step_sparsity_(net)
    expected, mask = net(X).detach(), net[0].sparse_mask.clone()
    with pytest.raises(ValueError, match=r"0\.weight trains 2:4 sparse; call ao_lab\.finish_sparsity_"):
        quantize_(net, QATConfig(BASES[name], step="convert"))
    report = finish_sparsity_(net)
    assert [one.kind for one in report.changed] == ["QATLinear"] * 2
    assert same(net(X).detach(), expected)
    quantize_(net, QATConfig(BASES[name], step="convert"))
    assert type(net[0]) is nn.Linear
    assert not net[0].weight.dequantize()[~mask].any()
    assert net[0].weight.dequantize()[mask].count_nonzero() > 0.7 * mask.sum()


def test_learned_scales_and_files():
    net = sparse_prepared(BASES["int4"], RECOMPUTED, learn_scales=True)
    other = copy.deepcopy(net)
    step_sparsity_(net)
    other.load_state_dict(net.state_dict(), strict=True)
    assert all(same(a, b) for a, b in zip(gradients(net), gradients(other), strict=True))
    assert {"0.qat_scale", "0.sparse_mask", "0.sparse_step"} <= set(net.state_dict())
    finish_sparsity_(net)
    assert set(net.state_dict()) == set(sparse_prepared(BASES["int4"], learn_scales=True).state_dict())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_compiled():
    net = sparse_prepared(BASES["int8 x int4"], RECOMPUTED)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    assert all(same(a, b) for a, b in zip(gradients(net, compiled), gradients(net), strict=True))
    torch.compiler.reset()


def test_what_does_not_go_together():
    with pytest.raises(ValueError, match="take products='dense'"):
        sparse_prepared(BASES["int4"], SparseTrainingConfig(products="cusparselt"))
    net = sparse_prepared(BASES["int4"], RECOMPUTED)
    with pytest.raises(ValueError, match="a SparseQATLinear may compute otherwise"):
        ao_lab.convert_for_training_(net, "rowwise")
    reason = ao_lab.explain(net).layers[0].reason
    assert reason.startswith("trains 2:4, masks recomputed, gradient sr-ste; QAT: trained as")


def test_on_the_way_to_2_4_storage_each_error_names_what_comes_next():
    base, stored = (ao_lab.Int8DynamicActivationInt8WeightConfig(sparsity=s) for s in (None, "2:4"))
    net = nn.Sequential(nn.Linear(64, 32))
    quantize_(net, QATConfig(base))
    sparsify_(net, SparseTrainingConfig())
    with pytest.raises(ValueError, match=r"finish_sparsity_\(model\) makes it QATLinear again"):
        quantize_(net, stored)
    finish_sparsity_(net)
    with pytest.raises(
        ValueError, match=r"finish_sparsity_\(model\), quantize_\(model, QATConfig\(step='convert'\)\)"
    ):
        quantize_(net, QATConfig(stored, step="convert"))
    for call in (
        lambda: quantize_(net, stored),
        lambda: sparsify_(net, ao_lab.SparsityConfig(storage="compressed")),
    ):
        with pytest.raises(
            ValueError, match=r"QATConfig\(step='convert'\) makes it dense again, which 2:4 storage"
        ):
            call()
    trained = net[0].weight.detach().clone()
    quantize_(net, QATConfig(step="convert"))
    assert quantize_(net, stored).changed[0].storage == "compressed"
    dense = nn.Sequential(nn.Linear(64, 32))
    dense[0].weight.data.copy_(trained)
    quantize_(dense, base)
    assert torch.equal(net[0].weight.dequantize(), dense[0].weight.dequantize())


K, N = 128, 64
CONFIGS = {
    "weights alone": ao_lab.Int4WeightOnlyConfig(group_size=32),
    "inputs too": ao_lab.Int8DynamicActivationIntxWeightConfig(weight_dtype="int4"),
}


def model(**options):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(K, N, dtype=torch.bfloat16), nn.SiLU(), nn.Linear(N, K, dtype=torch.bfloat16)
    )


def prepared(config, **options):
    made = model()
    ao_lab.quantize_(made, ao_lab.QATConfig(config, step="prepare", **options))
    return made


def rows(count=32):
    return torch.randn(count, K, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
@pytest.mark.parametrize("name", CONFIGS)
def test_operands_are_rounded_then_cast(name, recipe):
    made = prepared(CONFIGS[name])
    layer = made[0]
    qat = layer.qat.recipe
    ao_lab.convert_for_training_(made, recipe)
    assert type(layer) is LowPrecisionQATLinear
    x, g = rows().requires_grad_(), torch.randn(32, N).bfloat16()
    found = torch.autograd.grad(layer(x), (x, layer.weight, layer.bias), g)
    w = fast.fake_quantize(layer.weight, qat.weight)
    rounded = x if qat.activation is None else fast.fake_quantize(x, qat.activation)
    y = training_linear(rounded, w, layer.bias, RECIPES[recipe])
    assert torch.equal(layer(x), y)
    expected = torch.autograd.grad(y, (x, layer.weight, layer.bias), g)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    plain = training_linear(x, layer.weight, layer.bias, RECIPES[recipe])
    assert not torch.equal(y, plain)  # it is rounded


def test_either_part_ends_by_its_own_call():
    made, alone = (prepared(CONFIGS["weights alone"]) for _ in range(2))
    names = list(made.state_dict())
    converted = ao_lab.convert_for_training_(made, "rowwise")
    assert converted.changed == ("0", "2")
    assert list(made.state_dict()) == names == list(model().state_dict())
    assert "rowwise" in str(ao_lab.explain(made))
    ao_lab.convert_from_training_(made)
    assert type(made[0]) is QATLinear
    ao_lab.convert_for_training_(made, "rowwise")
    for one in (made, alone):
        ao_lab.quantize_(one, ao_lab.QATConfig(CONFIGS["weights alone"], step="convert"))
    assert type(made[0]) is nn.Linear
    assert not hasattr(made[0], "low_precision")
    assert torch.equal(made[0].weight.quantized.codes, alone[0].weight.quantized.codes)


def test_learned_scales_stay_as_they_are():
    made = prepared(CONFIGS["weights alone"], learn_scales=True)
    with pytest.raises(ValueError, match="learned or static scales"):
        ao_lab.convert_for_training_(made, "rowwise")
    assert type(made[0]) is QATLinear


def test_converted_twice_says_so():
    made = prepared(CONFIGS["weights alone"])
    ao_lab.convert_for_training_(made, "rowwise")
    with pytest.raises(ValueError, match=r"trains by recipe .rowwise. already"):
        ao_lab.convert_for_training_(made, "tensorwise")


def test_their_weights_are_gathered_whole():
    made = prepared(CONFIGS["weights alone"])
    converted = ao_lab.convert_for_training_(made, "rowwise", fsdp_float8_all_gather=True)
    assert set(converted.gathered_whole) == {"0", "2"}
    assert "rounds its weight" in str(converted)


def test_under_autocast_inputs_are_cast_and_then_rounded(monkeypatch):
    """As QAT alone does, and the served layer: what is rounded is what it will get."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(K, N))
    ao_lab.quantize_(made, ao_lab.QATConfig(CONFIGS["inputs too"], step="prepare"))
    ao_lab.convert_for_training_(made, "rowwise")
    x = torch.randn(32, K)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, weight = made[0].operands(x)
    assert torch.equal(rounded, fast.fake_quantize(x.bfloat16(), made[0].qat.recipe.activation))
    assert torch.equal(weight, fast.fake_quantize(made[0].weight, made[0].qat.recipe.weight))


def test_tune_measures_what_the_layer_multiplies():
    from ao_lab.tuning.samples import _training_recorder

    made = prepared(CONFIGS["weights alone"])
    ao_lab.convert_for_training_(made, "rowwise")
    found = {}
    made[0].register_forward_hook(_training_recorder("0", found))
    made(rows())
    (sample,) = found.values()
    assert torch.equal(sample.w, fast.fake_quantize(made[0].weight, made[0].qat.recipe.weight))
