"""Where learned scales start: block by block at the least squared error, found here by arithmetic on plain arrays."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import ao_lab
import fast
import reference
from ao_lab import QATConfig, SparseTrainingConfig, finish_sparsity_, quantize_, sparsify_, step_sparsity_
from ao_lab.config.base import SchemeConfig
from ao_lab.config.recipe import named
from ao_lab.qat.layers import PARTS, SMALLEST, LowPrecisionQATLinear, QATLinear, first_scales, squared_error
from ao_lab.training.autograd import training_linear
from reference import Scales
from reference.training.recipe import RECIPES
from tests.support.distributed.ranks import check_on_ranks
from tests.support.models.qat_models import same

# QAT composed with training recipes: rounded operands, then the recipe's products; either part ends by its own call.

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
    with pytest.raises(ValueError, match="use products='dense'"):
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


def kept(layer, x):
    """The output, and the tensors that a graph of the layer keeps."""
    tensors = []

    def pack(tensor):
        tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return layer(x), tensors


@pytest.mark.parametrize("name", CONFIGS)
def test_a_rounded_weight_is_rounded_again_and_not_kept(name):
    """Hooks that are set outside see all other tensors, and are not asked for this one."""
    made = prepared(CONFIGS[name])
    ao_lab.convert_for_training_(made, "rowwise")
    layer, x = made[0], rows().requires_grad_()
    y, tensors = kept(layer, x)
    # The inputs' codes, which the weight's gradient reads.
    assert any(one.element_size() == 1 for one in tensors)
    rounded = fast.fake_quantize(layer.weight.detach(), layer.qat.recipe.weight)
    assert not any(one.shape == (N, K) and torch.equal(one, rounded) for one in tensors)
    g = torch.randn(32, N).bfloat16()
    first = torch.autograd.grad(y, (x, layer.weight), g)
    assert all(
        torch.equal(a, b)
        for a, b in zip(first, torch.autograd.grad(layer(x), (x, layer.weight), g), strict=True)
    )
    y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(1.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, (x, layer.weight), g)


def test_dense_products_keep_no_transpose_of_a_rounded_weight_either():
    """Of a square weight, whose transpose has its shape and its memory."""
    made = nn.Sequential(nn.Linear(K, K, dtype=torch.bfloat16))
    ao_lab.quantize_(made, ao_lab.QATConfig(CONFIGS["weights alone"], step="prepare"))
    ao_lab.convert_for_training_(made, "bf16")
    layer, x, g = made[0], rows().requires_grad_(), torch.randn(32, K).bfloat16()
    rounded = fast.fake_quantize(layer.weight.detach(), layer.qat.recipe.weight)
    y, tensors = kept(layer, x)
    assert not any(torch.equal(one, held) for one in tensors for held in (rounded, rounded.t()))
    expected = torch.autograd.grad(nn.functional.linear(x, rounded, layer.bias), x, g)
    assert torch.equal(*torch.autograd.grad(y, x, g), *expected)


def test_rounding_again_under_checkpointing():
    made = prepared(CONFIGS["inputs too"])
    ao_lab.convert_for_training_(made, "rowwise")
    x, g = rows().requires_grad_(), torch.randn(32, K).bfloat16()
    expected = torch.autograd.grad(made(x), (x, *made.parameters()), g)
    y = torch.utils.checkpoint.checkpoint(made, x, use_reentrant=False)
    found = torch.autograd.grad(y, (x, *made.parameters()), g)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


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
    with pytest.raises(ValueError, match=r"trains with recipe .rowwise. already"):
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


# Layers in training under FSDP2: two ranks on this machine give the bits of one.


def test_two_ranks():
    """Outputs and gradients; weights that are distributed are not converted."""
    check_on_ranks("tensors.qat")


SCHEMES = ("int2_g32", "int3_g32", "int3_g64_asymmetric", "int4_rowwise", "int4_tensorwise", "fp8_128x128")


def weight(rows=256, columns=256, dtype=torch.float32):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(5), dtype=torch.float32)
    return (x * 0.05).to(dtype)


def blocks_of(x, scheme, axis):
    """(blocks, elements) of an array, in the order of its scales laid flat with the blocked axis last."""
    x = np.moveaxis(x, axis, -1)
    block = scheme.scale.block
    if block == "tensor":
        return x.reshape(1, -1)
    if isinstance(block, tuple):
        rows, columns = block
        x = x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
        return x.transpose(0, 2, 1, 3).reshape(-1, rows * columns)
    return x.reshape(-1, x.shape[-1] if block == -1 else block)


def errors(x, scheme, axis, scales):
    made = fast.fake_quantize(x, scheme, axis=axis, scales=scales)
    return (blocks_of((made.float() - x.float()).numpy().astype(np.float64), scheme, axis) ** 2).sum(axis=1)


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("name", SCHEMES)
def test_every_block_has_the_least_error(name, axis):
    x, scheme = weight(), named(name)
    rule = fast.choose_scales(x, scheme, axis=axis)
    found = first_scales(x, scheme, axis, "error")
    tried = np.array([errors(x, scheme, axis, Scales(rule.scale * part, None, rule.zero)) for part in PARTS])
    assert errors(x, scheme, axis, found) == pytest.approx(tried.min(axis=0), rel=1e-5)
    part = (found.scale / rule.scale).numpy()
    assert all(np.abs(np.array(PARTS) - one).min() < 1e-6 for one in part.flat)
    if scheme.format.bits < 4:
        # Clipping pays for most blocks of few bits, and the least part is never the best.
        assert (part < 1).mean() > 0.5
    assert part.min() > PARTS[-1]
    if rule.zero is not None:
        assert torch.equal(found.zero, rule.zero)


def test_the_error_by_hand():
    x = torch.tensor([[0.0, 1.0, 2.0, 3.4], [4.0, -4.0, 0.5, 0.0]])
    scheme = named("int3_g4")
    scales = Scales(torch.tensor([[1.0], [1.0]]))
    # 3.4 becomes 3, 4 becomes 3, -4 stays, 0.5 is a tie and becomes 0.
    assert squared_error(x, scheme, -1, scales) == pytest.approx(np.array([[0.16], [1.25]]))


def test_the_larger_of_two_as_good():
    # -3 is exact under 1 (code -3) and under 0.75 (code -4).
    x = torch.tensor([[-3.0, 0.0, 0.0, 0.0]])
    assert first_scales(x, named("int3_g4"), -1, "error").scale.tolist() == [[1.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_zeros_and_nan(dtype):
    x = weight(4, 128, dtype)
    x[0, :32] = 0
    x[1, :32] = torch.nan
    plain = first_scales(weight(4, 128, dtype), named("int3_g32"), -1, "error")
    found = first_scales(x, named("int3_g32"), -1, "error")
    kept = torch.ones_like(found.scale, dtype=torch.bool)
    kept[:2, 0] = False
    assert torch.equal(found.scale[kept], plain.scale[kept])
    zeros = weight(4, 128, dtype)
    zeros[0, :32] = 0
    found = first_scales(zeros, named("int3_g32"), -1, "error")
    assert found.scale[0, 0] == found.scale.flatten()[1:].max()


@pytest.mark.parametrize("start", ["rule", "error"])
@pytest.mark.parametrize("lost", [float("nan"), float("inf")])
def test_a_block_that_is_lost_stays_lost_and_spoils_no_other(start, lost):
    x = weight(4, 128)
    x[0, :32] = 0
    plain = first_scales(x, named("int3_g32"), -1, start)
    x[1, 5] = lost
    found = first_scales(x, named("int3_g32"), -1, start)
    assert found.scale[1, 0].isnan()
    others = torch.ones_like(found.scale, dtype=torch.bool)
    others[1, 0] = False
    assert torch.equal(found.scale[others], plain.scale[others])
    made = fast.fake_quantize(x, named("int3_g32"), scales=found)
    assert made[1, :32].isnan().all()
    assert made.isnan().sum() == 32


def test_empty_weights():
    assert first_scales(torch.empty(0, 32), named("int3_g32"), -1, "error").scale.numel() == 0


@pytest.mark.parametrize("start", ["rule", "error"])
def test_layers_begin_there_and_convert_to_what_they_train_with(start):
    net = nn.Sequential(nn.Linear(256, 256, bias=False))
    net[0].weight.data.copy_(weight())
    config = SchemeConfig(scheme="int3_g32", kernel="reference")
    quantize_(net, QATConfig(config, learn_scales=True, scale_start=start))
    found = first_scales(weight(), named("int3_g32"), -1, start)
    assert torch.equal(net[0].qat_scale, found.scale)
    assert net[0].qat_scale.requires_grad
    x = weight(4)
    y = net(x).detach()
    quantize_(net, QATConfig(config, step="convert"))
    assert torch.equal(net(x), y)
    assert torch.equal(net[0].weight.dequantize(), fast.fake_quantize(weight(), "int3_g32", scales=found))


def test_the_start_is_the_rule_unless_asked():
    x = weight()
    assert QATConfig(ao_lab.Int4WeightOnlyConfig(), learn_scales=True).scale_start == "rule"
    assert torch.equal(first_scales(x, named("int2_g32"), -1).scale, fast.choose_scales(x, "int2_g32").scale)


@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_a_scale_that_falls_to_zero_or_below_counts_as_the_smallest_and_comes_back(kind):
    """Without the floor a negative scale gives back what saturates with the wrong sign."""
    torch.manual_seed(0)
    module = nn.Linear(64, 4, bias=False) if kind == "linear" else nn.Embedding(4, 64)
    model, config = nn.Sequential(module), SchemeConfig(scheme="int4_g32", kernel="reference")
    chosen = lambda module, name: isinstance(module, (nn.Linear, nn.Embedding))  # noqa: E731
    quantize_(model, QATConfig(config, learn_scales=True), chosen)
    layer = model[0]
    x = torch.randn(64, 64) if kind == "linear" else torch.arange(4)
    target = model(x).detach()
    with torch.no_grad():
        layer.qat_scale[0] = torch.tensor([-0.01, 0.0])
        layer.qat_scale[1, 0] = float("nan")
    assert layer.given().scale[0].tolist() == [SMALLEST, SMALLEST]
    assert layer.given().scale[1, 0].isnan()
    with torch.no_grad():
        layer.qat_scale[1, 0] = SMALLEST / 2
    y = model(x).detach()
    twin = quantized_twin(model, config, chosen)
    assert torch.equal(twin(x), y)
    assert twin[0].weight.dequantize()[0].abs().max() < 1e-30
    optimizer = torch.optim.Adam([layer.qat_scale], lr=1e-3)
    for _ in range(60):
        optimizer.zero_grad()
        (model(x) - target).square().mean().backward()
        optimizer.step()
    assert (layer.qat_scale[:2] > 0.005).all()


def quantized_twin(model, config, chosen):
    twin = copy.deepcopy(model)
    quantize_(twin, QATConfig(config, step="convert"), chosen)
    return twin


def test_a_learned_scale_of_inputs_has_the_same_floor():
    layer = nn.Linear(64, 4)
    config = ao_lab.Int8StaticActivationInt8WeightConfig(act_quant_scale=0.01)
    quantize_(layer, QATConfig(config, learn_scales=True))
    with torch.no_grad():
        layer.qat_input_scale.fill_(-1.0)
    assert layer.given().input_scale.item() == SMALLEST
    layer(torch.randn(3, 64)).sum().backward()
    assert layer.qat_input_scale.grad.abs() > 0
    quantize_(layer, QATConfig(config, step="convert"))
    assert float(layer.weight.input_scale) == SMALLEST
