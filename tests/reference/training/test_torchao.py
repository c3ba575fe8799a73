"""Recipes with torchao's schemes in them against the installed torchao: operands bit for bit, products within their bound.

`Float8Linear` with `emulate=True` and `mx_mm` with emulated kernels run on a CPU; torchao's NVFP4 training is made of GPU
kernels alone. What torchao quantizes is recorded as it does so. The recipes as they are differ from it by their schemes' rules:
how often is counted here.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torchao.float8 import float8_linear
from torchao.float8.config import Float8LinearConfig
from torchao.prototype.moe_training import mxfp8_linear
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from ao_lab.testing.strategies import assert_same_bits
from reference import SCHEMES, Quantized, dequantize, matmul, matmul_error_bound
from reference.training.linear import operands
from reference.training.recipe import PRODUCTS, RECIPES, Recipe

M, N, K = 64, 96, 128
FLOAT8 = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
#: Our scheme: torchao's.
THEIRS = {
    "fp8_tensorwise": "fp8_tensorwise_training",
    "fp8_tensorwise_e5m2": "fp8_tensorwise_training_e5m2",
    "fp8_rowwise_pow2": "fp8_rowwise_training_pow2",
    "fp8_tensorwise_pow2": "fp8_tensorwise_training_pow2",
    "mxfp8_e4m3_rceil": "mxfp8_e4m3_rceil",
}


def as_theirs(recipe: Recipe) -> Recipe:
    """The recipe with torchao's schemes in the place of ours."""
    products = {}
    for which in PRODUCTS:
        record = getattr(recipe, which)
        pair = {
            side: replace(one, scheme=SCHEMES[f"torchao.{THEIRS[one.scheme.name]}"])
            for side, one in (("a", record.a), ("b", record.b))
            if one.scheme is not None
        }
        products[which] = replace(record, **pair)
    return replace(recipe, name=f"torchao.{recipe.name}", **products)


def tensors(kind="normals", dtype=torch.bfloat16):
    """x, w, g; some small, some with rows of zeros."""
    made = {}
    for seed, (name, shape) in enumerate((("x", (M, K)), ("w", (N, K)), ("g", (M, N)))):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        if kind == "spread":
            x = x * torch.exp2(
                8 * torch.randn(shape[0], 1, generator=torch.Generator().manual_seed(seed + 9))
            )
        if kind == "zeros":
            x[::3], x[:, ::5] = 0, 0
        if kind == "small":
            x = (
                x * 2.0**-45
            )  # below torchao's floor of 1e-12; products are no subnormals, which oneDNN flushes
        made[name] = x.to(dtype)
    return made


@pytest.fixture
def float8(monkeypatch):
    """Codes and encoding scales of all that `Float8Linear` quantizes."""
    made, plain = [], float8_linear.hp_tensor_to_float8_dynamic

    def recording(*args, **kwargs):
        result = plain(*args, **kwargs)
        made.append((result._data.view(torch.uint8), result._scale))
        return result

    monkeypatch.setattr(float8_linear, "hp_tensor_to_float8_dynamic", recording)
    return made


def train_float8(name, given):
    """(y, dx, dw) of torchao's linear layer."""
    config = replace(Float8LinearConfig.from_recipe_name(name), emulate=True)
    dense = torch.nn.Linear(K, N, bias=False, dtype=given["x"].dtype)
    dense.weight = torch.nn.Parameter(given["w"].clone())
    layer = float8_linear.Float8Linear.from_float(dense, config=config)
    x = given["x"].clone().requires_grad_()
    y = layer(x)
    y.backward(given["g"])
    return y.detach(), x.grad, layer.weight.grad


#: Of the operands in the order of the products: whether torchao holds it the other way round.
TURNED = (False, True, False, False, True, True)


def in_order(recipe, given):
    """(whether torchao turns it, operand) of what is quantized."""
    flat = [q for which in PRODUCTS for q in operands(which, recipe, **given)]
    return [(turned, q) for turned, q in zip(TURNED, flat, strict=True) if isinstance(q, Quantized)]


@pytest.mark.parametrize("kind", ["normals", "spread", "zeros", "small"])
@pytest.mark.parametrize("name", FLOAT8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float8_linear(name, kind, dtype, float8):
    given = tensors(kind, dtype)
    results = train_float8(name, given)
    recipe = as_theirs(RECIPES[name])
    wanted = in_order(recipe, given)
    assert len(float8) == len(wanted) == (6 if name != "rowwise_with_gw_hp" else 4)
    for (codes, scale), (turned, q) in zip(float8, wanted, strict=True):
        assert_same_bits((codes.T if turned else codes).contiguous(), q.codes)
        assert_same_bits(scale.reshape(q.scale.shape), q.scale)
    for which, got in zip(PRODUCTS, results, strict=True):
        within_float32_sums(got, operands(which, recipe, **given))


def within_float32_sums(got, pair):
    """torchao's emulation multiplies dequantized operands, in float32 or, where not quantized, as they are."""
    a, b = (dequantize(q) if isinstance(q, Quantized) else q.float() for q in pair)
    dtype = str(got.dtype).removeprefix("torch.")
    bound = matmul_error_bound(a, b.T, accumulation="blocked", out_dtype=dtype) + matmul_error_bound(a, b.T)
    assert torch.all((got.double() - matmul(a, b.T).double()).abs() <= bound)


@pytest.mark.parametrize("kind", ["normals", "spread", "zeros"])
@pytest.mark.parametrize("name", FLOAT8)
def test_the_recipe_as_it_is_differs_seldom(name, kind, float8):
    """Powers of two: never. Other scales: torchao multiplies by 448 / a, `tensorwise` by 1 / (a / 448), so that an element in
    the middle of two codes may round to the other one: 2 of 53248 of the bfloat16 elements with rows spread apart."""
    for dtype in (torch.bfloat16, torch.float32):
        given, differ = tensors(kind, dtype), 0
        float8.clear()
        train_float8(name, given)
        for (codes, scale), (turned, q) in zip(float8, in_order(name, given), strict=True):
            distance = np.abs((codes.T if turned else codes).numpy().astype(int) - q.codes.numpy())
            assert distance.max() <= 1
            differ += np.count_nonzero(distance)
            product = scale.double().reshape(q.scale.shape) * q.scale.double()
            filled = (q.codes & 0x7F).amax(-1, keepdim=True).reshape(-1)[: product.numel()] > 0
            product = product if product.ndim == 0 else product[filled.reshape(product.shape)]
            assert (product - 1).abs().max() <= (0 if q.scheme.name.endswith("pow2") else 2.0**-23)
        assert differ <= (2 if (name, kind, dtype) == ("tensorwise", "spread", torch.bfloat16) else 0)


@pytest.mark.parametrize("name", FLOAT8)
def test_torchao_loses_what_lies_below_its_floor(name, float8):
    """A largest magnitude below 1e-12 does not reach the largest code."""
    given = tensors("small")
    train_float8(name, given)
    for (codes, _), (turned, q) in zip(float8, in_order(name, given), strict=True):
        theirs = (codes.T if turned else codes).numpy() & 0x7F
        largest = (q.codes & 0x7F).numpy().max()
        assert theirs.max() < largest


@pytest.fixture
def mx(monkeypatch):
    """Codes and scales of all that `mx_mm` quantizes."""
    made, plain = [], MXTensor.to_mx

    def recording(*args, **kwargs):
        result = plain(*args, **kwargs)
        made.append((result.qdata.view(torch.uint8), result.scale.view(torch.uint8)))
        return result

    monkeypatch.setattr(MXTensor, "to_mx", staticmethod(recording))
    return made


@pytest.mark.parametrize("kind", ["normals", "spread", "zeros", "small"])
@pytest.mark.parametrize("ours", [False, True])
def test_mxfp8(kind, ours, mx):
    """Here torchao's operands are all stored along the sum; the recipe as it is has the same bits on these tensors."""
    given = tensors(kind)
    x, w = given["x"].clone().requires_grad_(), given["w"].clone().requires_grad_()
    elements, casts = (
        (torch.float8_e4m3fn,) * 3,
        (MXFP8Dim0CastKernelChoice.TORCH, MXFP8Dim1CastKernelChoice.TORCH),
    )
    y = mxfp8_linear.mx_mm.apply(
        x, w, *elements, 32, KernelPreference.EMULATED, *casts, ScaleCalculationMode.RCEIL, False
    )
    y.backward(given["g"])
    recipe = RECIPES["mxfp8"] if ours else as_theirs(RECIPES["mxfp8"])
    wanted = [q for which in PRODUCTS for q in operands(which, recipe, **given)]
    assert len(mx) == 6
    for (codes, scale), q in zip(mx, wanted, strict=True):
        assert_same_bits(codes.reshape(q.shape), q.codes)
        assert_same_bits(scale.reshape(q.scale.shape), q.scale)
    for which, got in zip(PRODUCTS, (y.detach(), x.grad, w.grad), strict=True):
        pair = operands(which, recipe, **given)
        a, b = (dequantize(q, "bfloat16").float() for q in pair)
        bound = matmul_error_bound(a, b.T, accumulation="blocked", out_dtype="bfloat16")
        bound = bound + matmul_error_bound(a, b.T)
        assert torch.all((got.double() - matmul(a, b.T).double()).abs() <= bound)
