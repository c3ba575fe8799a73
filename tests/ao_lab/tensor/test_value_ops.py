"""Weights changed in place are quantized again by their own scheme, as `copy_` does."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import ao_lab
from ao_lab import QuantizedTensor, quantized
from ao_lab.tensor.value_ops import READS
from reference import Scales
from tests.support.quantized_weights import KINDS, SPARSE_KINDS, pair, same, weight

# Operations that read a weight's values have the dense results of the dequantized weight.

aten = torch.ops.aten
OTHER, ROW, ROWS = weight(32, 64, seed=2), weight(1, 64, seed=3), torch.tensor([3, 1])
#: The arguments after the weight, where they are not none, one number or one matrix.
ARGUMENTS = {
    aten.addcmul.default: (OTHER, OTHER),
    aten.lerp.Scalar: (OTHER, 0.5),
    aten.lerp.Tensor: (OTHER, OTHER),
    aten.pow.Tensor_Scalar: (2,),
    aten.sum.dim_IntList: ([0],),
    aten.mean.dim: ([0], True),
    aten.norm.ScalarOpt_dim: (2, [1]),
    aten.norm.Scalar: (),
    aten._linalg_svd.default: (),
    aten.index_copy.default: (0, ROWS, OTHER[:2]),
    aten.index_add.default: (0, ROWS, OTHER[:2]),
    aten.index_put.default: ([ROWS], OTHER[:2]),
    aten.scatter.src: (0, ROWS[:, None], OTHER[:2]),
    aten.scatter_add.default: (0, ROWS[:, None], OTHER[:2]),
    aten.flip.default: ([0],),
    aten.roll.default: ([1],),
    aten.repeat.default: ([2, 1],),
}


def called(op, t):
    if op is aten.where.self:
        return op(OTHER > 0, t, OTHER)
    if op is aten.dot.default:
        return op(t.view(-1), t.view(-1))
    given = ARGUMENTS.get(op)
    if given is None:
        needed = [a for a in op._schema.arguments[1:] if not a.has_default_value() and not a.kwarg_only]
        given = tuple(OTHER if str(a.type) == "Tensor" else 0.5 for a in needed)
    return op(t, *given)


@pytest.mark.parametrize("op", READS, ids=str)
def test_results_are_those_of_the_dense_weight(op):
    t = quantized(weight(32, 64).abs(), "int4_g32")
    made, wanted = called(op, t), called(op, t.dequantize())
    pairs = zip(made, wanted, strict=True) if isinstance(made, tuple) else [(made, wanted)]
    assert all(type(one) is torch.Tensor and same(one, other) for one, other in pairs)


def test_either_side_and_either_storage():
    t, dense = pair("int8_rowwise", 32, 64)
    assert same(OTHER.bfloat16() + t, OTHER.bfloat16() + dense)
    assert same(t.norm(dim=1), dense.norm(dim=1))
    assert torch.isfinite(t).all()
    half = t.float()
    assert same(torch.linalg.qr(half).R, torch.linalg.qr(half.dequantize()).R)


# Weights times a power of two in place: scales change and codes stay.

SCHEMES = (
    "int8_rowwise", "int4_g32_asymmetric", "int4_g32_bf16", "mxfp4", "nvfp4", "nf4", "ternary_g32",
    "torchao.fp8_rowwise_training", "torchao.int4_g32_tinygemm", "compressed_tensors.nvfp4",
)  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES)
def test_powers_of_two(scheme):
    t = quantized(weight(128, 256, seed=1), scheme)
    dense, codes = t.dequantize(), t.codes.clone()
    t.div_(4)
    assert same(t.dequantize(), dense / 4)
    t.mul_(torch.tensor(8.0)).mul_(0.5)
    assert same(t.dequantize(), dense)
    assert torch.equal(t.codes, codes)


def test_scales_stay_in_their_range():
    for scheme in ("int8_rowwise", "mxfp8_e4m3", "int4_g32_bf16", "nvfp4"):
        t = quantized(weight(4, 256), scheme)
        dense = t.dequantize()
        for factor in (2.0**-140, 2.0**140, 2.0**300):
            with pytest.raises(ValueError, match="leave the range of their storage"):
                t.mul_(factor)
        assert same(t.dequantize(), dense)


@pytest.mark.parametrize("factor", [3, 0, -2, float("inf"), torch.ones(256) * 1.5])
def test_other_factors_quantize_again(factor):
    t = quantized(weight(4, 256), "int8_rowwise")
    wanted = quantized(t.dequantize() * factor, "int8_rowwise")
    assert t.mul_(factor) is t
    assert torch.equal(t.codes, wanted.codes)
    assert torch.equal(t.scale.nan_to_num(), wanted.scale.nan_to_num())


# Moving averages of models with quantized weights: what is frozen stays, what differs is quantized again.


@pytest.mark.parametrize("function", [get_ema_multi_avg_fn(0.5), get_swa_multi_avg_fn()], ids=["ema", "swa"])
def test_averaged_models(function):
    """A frozen base, and what trains beside it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32))
    ao_lab.quantize_(net, ao_lab.Int4WeightOnlyConfig(group_size=32))
    averaged = AveragedModel(net, multi_avg_fn=function)
    averaged.update_parameters(net)
    with torch.no_grad():
        net[1].weight.mul_(3)
    averaged.update_parameters(net)
    assert torch.equal(averaged.module[0].weight, net[0].weight)
    assert torch.equal(averaged.module[1].weight, torch.full((32,), 2.0))


@pytest.mark.parametrize("scheme", KINDS)
def test_weights_that_differ_are_quantized_again(scheme):
    t, other = quantized(weight(64, 128), scheme), quantized(weight(64, 128, seed=1), scheme)
    wanted = quantized(t.dequantize().lerp(other.dequantize(), 0.5), scheme)
    lists = t.clone()
    assert t.lerp_(other, 0.5) is t
    torch._foreach_lerp_([lists], [other], [0.5])
    assert torch.equal(t, wanted)
    assert torch.equal(lists, wanted)
    dense = torch.zeros(64, 128)
    assert same(dense.lerp_(other, torch.tensor(0.5)), other.dequantize() / 2)


@pytest.mark.parametrize("scheme", SPARSE_KINDS)
def test_2_to_4_weights_stay(scheme):
    t, dense = pair(scheme, 16, 64)
    torch._foreach_lerp_([t, torch.zeros(4)], [t.clone(), torch.ones(4)], 0.5)
    assert same(t.dequantize(), dense)


def test_towards_dense_numbers_is_an_optimizers_step():
    t = quantized(weight(64, 128), "int8_rowwise")
    before = t.dequantize()
    with pytest.raises(NotImplementedError, match="towards dense numbers: it takes the average with another"):
        torch._foreach_lerp_([t], [torch.zeros(64, 128)], 0.1)
    assert same(t.dequantize(), before)


@pytest.mark.parametrize("scheme", KINDS)
def test_sums_are_those_of_a_copy(scheme):
    t, delta = quantized(weight(64, 128), scheme), weight(64, 128, seed=1)
    wanted = quantized(t.dequantize() + 2 * delta, scheme)
    held = t.codes.data_ptr()
    assert t.add_(delta, alpha=2) is t
    assert torch.equal(t, wanted)
    t -= delta
    assert torch.equal(t, quantized(wanted.dequantize() - delta, scheme))
    assert t.codes.data_ptr() == held


@pytest.mark.parametrize("scheme", SPARSE_KINDS)
def test_2_to_4_weights_take_what_leaves_them_2_to_4(scheme):
    t, dense = pair(scheme, 16, 64)
    t.data += dense / 2
    step = 0 if scheme == "bfloat16" else float(dense.abs().max()) / 3
    assert (t.dequantize() - dense * 1.5).abs().max() <= step
    kept = t.dequantize()
    with pytest.raises(ValueError, match="2:4 storage holds at most two elements of every four"):
        t.add_(1)
    assert same(t.dequantize(), kept)


def test_static_inputs_and_views():
    config = ao_lab.Int8StaticActivationInt8WeightConfig(act_quant_scale=torch.tensor(0.02))
    net = nn.Sequential(nn.Linear(64, 32))
    ao_lab.quantize_(net, config)
    t, recipe = net[0].weight, net[0].weight.recipe
    t.data += 0.01
    assert t.recipe == recipe
    assert float(t.input_scale) == pytest.approx(0.02)
    transposed, wanted = t.t(), quantized(t.dequantize() + 1, recipe, input_scales=Scales(t.input_scale))
    transposed += 1
    assert same(t.dequantize(), wanted.dequantize())


def test_data_of_dense_numbers_is_quantized():
    t = quantized(weight(32, 64), "int8_rowwise")
    view, before = t.detach(), t.dequantize()
    t.data = weight(48, 64, seed=1, dtype=torch.bfloat16)
    assert torch.equal(t, quantized(weight(48, 64, seed=1, dtype=torch.bfloat16), "int8_rowwise"))
    assert same(view.dequantize(), before)
    for other in (torch.ones(64), torch.ones(32, 64, dtype=torch.int32)):
        with pytest.raises(TypeError, match="axes of floating-point numbers to quantize"):
            t.data = other


def test_dense_numbers_take_quantized_ones():
    t, dense = quantized(weight(32, 64), "int4_g32"), torch.ones(32, 64)
    assert same(dense.add_(t), 1 + t.dequantize())
    assert not isinstance(dense.mul_(t), QuantizedTensor)


@pytest.mark.parametrize(
    ("optimizer", "error"),
    [(torch.optim.SGD, ValueError), (torch.optim.AdamW, ValueError), (torch.optim.Adam, NotImplementedError)],
)
def test_weights_that_require_gradients_are_refused(optimizer, error):
    layer = nn.Linear(64, 32)
    ao_lab.quantize_(nn.Sequential(layer), ao_lab.Int8WeightOnlyConfig())
    layer.weight.requires_grad_(True)
    layer(torch.randn(2, 64)).sum().backward()
    with pytest.raises(error, match=r"rounded away.* QATConfig"):
        optimizer([layer.weight], lr=0.01).step()


def test_what_rounding_takes_is_told():
    t = quantized(weight(32, 64), "int4_g32")
    with pytest.warns(
        UserWarning, match=r"int4_g32: more than half of the change .* next to the weight"
    ) as told:
        t += 1e-3 * weight(32, 64, seed=1)
    assert told[0].filename == __file__  # not the line of the library that merges
