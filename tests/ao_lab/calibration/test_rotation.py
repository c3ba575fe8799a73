"""Weights whose inputs are rotated in front of every product: the same function before anything is rounded."""

import copy
import io
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import fast
from ao_lab import Recipe, SchemeConfig, load_pretrained, quantize_, quantized, save_pretrained
from ao_lab.calibration.methods import GPTQ, Rotate
from ao_lab.checkpoint.plain_readers import check_recipe
from ao_lab.config.recipe import changed_recipe
from ao_lab.tensor.quantized_tensor import from_quantized
from fast.layers.hadamard import hadamard, rotated_back
from reference import SCHEMES
from tests.ao_lab.calibration.test_run import assert_same, inputs, stack, weights
from tests.support.quantized_weights import same

F = nn.functional


def recipe(scheme="int8_g32", activation=None, rotation=32, **options):
    inputs = None if activation is None else SCHEMES[activation]
    return Recipe(weight=SCHEMES[scheme], activation=inputs, rotation=rotation, **options)


def rotated(w, how):
    """A weight of a rotated recipe, as calibration makes it."""
    q = fast.quantize(
        fast.rotate(w, how.rotation, dtype=torch.float32), how.weight, packed=how.weight.format.bits < 8
    )
    return from_quantized(q, how, w.dtype)


def problem(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(24, 64, dtype=dtype), torch.randn(5, 64, dtype=dtype), torch.randn(24, dtype=dtype)


def test_rotating_back():
    x = torch.randn(3, 64)
    assert torch.allclose(rotated_back(hadamard(x, 32), 32), x, atol=1e-6)


@pytest.mark.parametrize("activation", [None, "int8_rowwise", "mxfp4"])
@pytest.mark.parametrize("scheme", ["int8_g32", "mxfp4", "int8_rowwise", "fp8_rowwise"])
def test_a_product_is_that_of_the_rotated_input(scheme, activation):
    w, x, bias = problem()
    weight, plain = (rotated(w, recipe(scheme, activation)) for _ in range(2))
    plain = plain.without_rotation
    assert torch.equal(F.linear(x, weight, bias), F.linear(hadamard(x, 32), plain, bias))
    assert torch.equal(torch.mm(x, weight.t()), torch.mm(hadamard(x, 32), plain.t()))
    batch = x.reshape(5, 1, 64)
    assert torch.equal(F.linear(batch, weight), F.linear(hadamard(batch, 32), plain))


def test_it_stands_for_the_weight_of_inputs_as_they_are():
    w, x, _ = problem()
    weight = rotated(w, recipe("int8_g32"))
    dense = weight.dequantize()
    assert (dense - w).norm() < 0.01 * w.norm()
    assert torch.allclose(F.linear(x, weight), x @ dense.T, atol=1e-4)
    assert torch.allclose(weight.t().dequantize(), dense.T)
    # Along the outputs, as gradients of inputs are multiplied.
    g = torch.randn(5, 24)
    assert torch.allclose(g @ weight, g @ dense, atol=1e-4)
    assert torch.allclose(weight + 0, dense)


def test_gradients_and_compiled_programs():
    w, x, bias = problem()
    weight = rotated(w, recipe("int8_g32"))
    x = x.requires_grad_()
    F.linear(x, weight, bias).sum().backward()
    assert torch.allclose(x.grad, weight.dequantize().sum(0).expand(5, 64), atol=1e-3)
    layer = nn.Linear(64, 24)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    with torch.no_grad():
        expected = layer(x)
        assert torch.allclose(torch.compile(layer, backend="eager", fullgraph=True)(x), expected, atol=1e-5)


def test_pieces_are_cut_between_blocks():
    w, x, _ = problem()
    weight = rotated(w, recipe("int8_rowwise"))
    piece = weight[:, 32:]
    assert torch.allclose(piece.dequantize(), weight.dequantize()[:, 32:], atol=1e-6)
    assert torch.allclose(F.linear(x[:, 32:], piece), x[:, 32:] @ piece.dequantize().T, atol=1e-4)
    with pytest.raises(ValueError, match="32"):
        weight[:, 16:]
    assert torch.allclose(weight[3:7].dequantize(), weight.dequantize()[3:7])


def test_dense_values_are_rotated_before_they_are_stored():
    w, _, _ = problem()
    weight = rotated(w, recipe("int8_g32"))
    other = torch.randn_like(w)
    weight.copy_(other)
    assert (weight.dequantize() - other).norm() < 0.01 * other.norm()


def test_copies_files_and_states():
    w, _, _ = problem(torch.bfloat16)
    weight = rotated(w, recipe("mxfp4", "mxfp4"))
    assert same(copy.deepcopy(weight), weight)
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    assert same(torch.load(file, weights_only=True), weight)
    assert "rotated by 32" in str(weight.recipe)
    assert changed_recipe(weight.recipe, kernel="dequantize").rotation == 32


def test_readers_that_would_not_rotate_are_kept_from_it(tmp_path):
    with pytest.raises(ValueError, match="do not transform inputs"):
        check_recipe(recipe("mxfp4"))
    model = stack()
    quantize_(
        model,
        SchemeConfig(scheme="mxfp4", activation_scheme="mxfp4"),
        calibration=inputs(),
        methods=(Rotate(), GPTQ()),
    )
    assert any(weight.recipe.rotation for weight in weights(model).values())
    with pytest.warns(UserWarning, match="do not transform inputs"):
        saved = save_pretrained(model, tmp_path)
    assert saved.layout == "ao_lab"
    assert_same(load_pretrained(tmp_path, stack()), model)
    file = tmp_path / "ao_lab.safetensors"
    file.write_bytes(re.sub(rb'(rotation\\": ?)32', rb"\g<1>64", file.read_bytes()))
    with pytest.raises(ValueError, match="rotation mixes blocks of 64 inputs"):
        load_pretrained(tmp_path, stack())


@pytest.mark.parametrize("given", [3, -2, "32", 2.0])
def test_lengths_are_powers_of_two(given):
    with pytest.raises(ValueError, match="rotation is a power of two"):
        recipe(rotation=given)
    if given != "32":
        with pytest.raises(ValueError, match="Rotate: size is a power of two"):
            Rotate(size=given)
    with pytest.raises(ValueError, match="Rotate: kind"):
        Rotate(kind="global")


@pytest.mark.parametrize(
    ("scheme", "columns", "length"),
    [("mxfp4", 64, 32), ("nvfp4", 64, 16), ("int8_rowwise", 96, 32), ("int8_rowwise", 1024, 128), ("int8_rowwise", 33, None)],
)  # fmt: skip
def test_blocks_are_those_that_share_a_scale(scheme, columns, length):
    assert Rotate().length(SCHEMES[scheme], columns) == length


def outliers():
    """A layer whose inputs have a channel that is far larger than its neighbours."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 32))
    batches = [torch.randn(4, 16, 64) for _ in range(5)]
    for x in batches:
        x[..., 5] *= 30
    return layer, batches


def test_outliers_are_spread_and_reports_say_so():
    layer, batches = outliers()
    dense, plain = copy.deepcopy(layer), copy.deepcopy(layer)
    config = SchemeConfig(scheme="mxfp4", activation_scheme="mxfp4")
    report = quantize_(layer, config, calibration=batches, methods=(Rotate(), GPTQ()), blocks="")
    quantize_(plain, config, calibration=batches, methods=(GPTQ(),), blocks="")
    (result,) = (one.calibrated for one in report.changed)
    assert result.method == "rotate + gptq"
    test = torch.randn(200, 64)
    test[:, 5] *= 30
    with torch.no_grad():
        errors = [float((model(test) - dense(test)).norm()) for model in (layer, plain)]
    assert errors[0] < 0.8 * errors[1]
    assert result.held_out == 2 * 16


def test_what_is_worse_rotated_stays_as_it_is():
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 32, bias=False))
    layer[0].weight.data.copy_(torch.randint(-7, 8, (32, 64)) / 7)  # on the grid already
    layer[0].weight.data[:, ::32] = 1
    before = copy.deepcopy(layer)
    batches = [torch.randn(4, 16, 64)]
    report = quantize_(
        layer, SchemeConfig(scheme="int4_g32"), calibration=batches, methods=(Rotate(), GPTQ()), blocks=""
    )
    (one,) = report.changed
    assert layer[0].weight.recipe.rotation == 0
    assert "rotate + gptq would have" in one.reason or one.calibrated.rounding == 0
    assert torch.allclose(layer[0].weight.dequantize(), before[0].weight, atol=1e-6)


def test_shared_outer_scales_are_not_rotated():
    model = stack()
    scheme = replace(SCHEMES["nvfp4"], name="nvfp4_alone")
    report = quantize_(model, SchemeConfig(scheme=scheme), calibration=inputs(), methods=(Rotate(), GPTQ()))
    assert any(weight.recipe.rotation == 16 for weight in weights(model).values())
    assert all(layer.calibrated.ratio <= 1 for layer in report.changed if layer.calibrated)


def test_quantized_takes_no_rotation_by_itself():
    """`quantized` stores what it is given: a recipe that rotates is for weights that were rotated."""
    w, x, _ = problem()
    weight = quantized(hadamard(w, 32), recipe("int8_g32"))
    assert torch.allclose(F.linear(x, weight), x @ w.T, rtol=0, atol=0.5)
