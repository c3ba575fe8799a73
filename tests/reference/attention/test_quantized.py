"""Attention with operands in 8 bits: against torch's own casts, exact identities, and its bound."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import reference
from reference.attention.attention import attention
from reference.attention.quantized import (
    ATTENTION_RECIPES,
    AttentionRecipe,
    attention_recipe_of,
    quantize_operands,
    quantized_attention,
    quantized_attention_error_bound,
)

PLAIN = AttentionRecipe(rotate=False, center=False)


def operands(queries=20, keys=24, heads=4, kv=2, width=32, seed=0):
    """q, k and v in float32."""
    draw = np.random.default_rng(seed).standard_normal
    sizes = (2, heads, queries, width), (2, kv, keys, width), (2, kv, keys, width)
    return tuple(draw(size).astype(np.float32) for size in sizes)


def hadamard_matrix(length):
    """Sylvester's, with the signs of `reference.layers.hadamard`."""
    from reference.layers.hadamard import signs

    h = np.ones((1, 1))
    while len(h) < length:
        h = np.block([[h, h], [h, -h]])
    return np.diag(signs(length)) @ h / math.sqrt(length)


def by_torch(q, k, v, integer, rotate, center, seen):
    """The rule with torch's rounding and casts, in float64, of whole tensors."""
    q, k, v = (torch.from_numpy(x).double() for x in (q, k, v))
    if center:
        k = k - k.mean(2, keepdim=True)
    if rotate:
        h = torch.from_numpy(hadamard_matrix(q.shape[-1]))
        q, k = q @ h, k @ h

    def e4m3(x):
        return x.float().to(torch.float8_e4m3fn).double()

    def rounded(x, axis, as_integer):
        scale = x.abs().amax(axis, keepdim=True) / (127 if as_integer else 448)
        return (x / scale).round() * scale if as_integer else e4m3(x / scale) * scale

    q, k, v = rounded(q, -1, integer), rounded(k, -1, integer), rounded(v, -2, False)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT / math.sqrt(q.shape[-1]) / math.log(2)).masked_fill(~seen, -math.inf)
    weights = e4m3(256 * torch.exp2(scores - scores.amax(-1, keepdim=True).ceil()))
    return (weights @ v / weights.sum(-1, keepdim=True)).numpy()


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("integer", [False, True])
def test_values(integer, rotate):
    """By torch's casts: what rounds the other way is a few codes at ties of float32."""
    q, k, v = operands()
    name = "int8_rowwise" if integer else "fp8_rowwise"
    recipe = AttentionRecipe(query=name, key=name, rotate=rotate, center=rotate)
    seen = torch.arange(24) <= torch.arange(20)[:, None] + 4
    y = quantized_attention(q, k, v, recipe, causal=True, out_dtype="float64")
    expected = by_torch(q, k, v, integer, rotate, rotate, seen)
    assert (np.abs(y - expected) > 1e-5).mean() < 0.02
    assert np.abs(y - expected).max() < 0.05
    assert np.linalg.norm(y - attention(q, k, v, causal=True)) < 0.08 * np.linalg.norm(y)


def test_constant_of_all_keys():
    """Removing the mean makes what is added to every key disappear, bit for bit where the mean is exact; else it does not."""
    draw = np.random.default_rng(0).integers
    q, k, v = (
        draw(-8, 9, size).astype(np.float32) for size in ((1, 2, 5, 16), (1, 1, 32, 16), (1, 1, 32, 16))
    )
    shifted = k + np.float32(64) * draw(1, 5, 16).astype(np.float32)
    same = quantized_attention(q, shifted, v), quantized_attention(q, k, v)
    np.testing.assert_array_equal(*same)
    other = replace(PLAIN, rotate=True)
    assert np.abs(quantized_attention(q, shifted, v, other) - quantized_attention(q, k, v, other)).max() > 0.1


def test_edges_are_masks():
    """Causal, offset and window see what a mask says; keys that nobody sees do not count in means and scales."""
    q, k, v = operands(queries=6, keys=10)
    t, s = np.arange(6)[:, None], np.arange(10)
    cases = [({}, s <= t + 4), ({"offset": 0}, s <= t), ({"window": 3}, (s <= t + 4) & (s > t + 1)),
             ({"offset": 2, "window": 1}, s == t + 2)]  # fmt: skip
    for options, mask in cases:
        hidden = ~mask.any(0)
        k[:, :, hidden], v[:, :, hidden] = np.nan, np.nan
        y = quantized_attention(q, k, v, causal=True, **options)
        np.testing.assert_array_equal(y, quantized_attention(q, k, v, mask=mask))
        assert np.isfinite(y).all()
        if "window" not in options:
            used = quantized_attention(q, k[:, :, ~hidden], v[:, :, ~hidden], mask=mask[:, ~hidden])
            np.testing.assert_array_equal(y, used)
        _, k, v = operands(queries=6, keys=10)


def test_rows_that_see_nothing():
    q, k, v = operands(queries=6, keys=4)
    y = quantized_attention(q, k, v, causal=True)
    assert not y[:, :, :2].any()
    assert y[:, :, 2:].any()
    assert quantized_attention(q[:, :, :0], k, v).shape == (*q.shape[:2], 0, v.shape[-1])


@pytest.mark.parametrize("recipe", ATTENTION_RECIPES)
def test_error_bound(recipe):
    """A computation in float32, by tiles, stays within it; one that forgets a token does not."""
    q, k, v = operands(keys=96, seed=3)
    recipe = ATTENTION_RECIPES[recipe]
    codes = quantize_operands(q, k, v, recipe)
    left, right = (np.asarray(reference.dequantize(x, "float32")) for x in codes[:2])
    right = np.repeat(right, 2, 1)
    values = np.repeat(np.asarray(reference.decode(codes.v.codes, "float8_e4m3fn")), 2, 1)
    factor = np.float32(1.4426950408889634 / math.sqrt(32))

    def tiled(keys):
        top = np.full((*q.shape[:3], 1), -np.inf, np.float32)
        total, sums = np.zeros_like(top), np.zeros(q.shape, np.float32)
        for at in range(0, keys, 32):
            s = (
                np.matmul(left, right[:, :, at : at + 32].swapaxes(-1, -2)).astype(np.float32)[
                    ..., : keys - at
                ]
                * factor
            )
            new = np.maximum(top, np.ceil(s.max(-1, keepdims=True)))
            p = torch.from_numpy(np.exp2(s - new + 8)).to(torch.float8_e4m3fn).float().numpy()
            shrink = np.exp2(top - new)
            sums = sums * shrink + np.matmul(p, values[:, :, at : min(at + 32, keys)])
            total, top = total * shrink + p.sum(-1, keepdims=True), new
        return sums / total * np.repeat(codes.v.scale, 2, 1)

    y = quantized_attention(q, k, v, recipe, out_dtype="float64")
    bound = quantized_attention_error_bound(q, k, v, recipe, out_dtype="float32", accumulation="exact")
    assert (np.abs(tiled(96) - y) <= bound).all()
    assert (np.abs(tiled(95) - y) > bound).any()


def test_sums_of_the_tensor_core():
    """14-bit sums in chains of 128 tokens are within the bound, and away from exact ones; a chain over all loses more."""
    q, k, v = operands(queries=2, keys=512, heads=1, kv=1, width=16)
    v += np.float32(2)
    exact = quantized_attention(q, k, v, out_dtype="float64")
    y = quantized_attention(q, k, v, out_dtype="float64", accumulation="hopper_fp8")
    bound = quantized_attention_error_bound(q, k, v, out_dtype="float32")
    error = np.abs(y - exact)
    assert error.max() > 0
    assert (error <= bound).all()
    one = AttentionRecipe(chain=512)
    lost = np.abs(quantized_attention(q, k, v, one, out_dtype="float64", accumulation="hopper_fp8") - exact)
    assert lost.mean() > 2 * error.mean()


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"scale": -1.0}, ValueError, "positive number"),
        ({"window": 3}, ValueError, "beside causal=True"),
        ({"offset": 3}, ValueError, "beside causal=True"),
        ({"causal": True, "window": 0}, ValueError, "1 or more"),
        ({"mask": np.zeros((20, 24), np.float32)}, ValueError, "biases are not taken"),
        ({"mask": np.ones((3, 3), bool)}, ValueError, "mask broadcasts"),
        ({"recipe": "int4"}, ValueError, "names are int8, int8_block, fp8"),
        ({"recipe": 8}, TypeError, "AttentionRecipe or a name"),
    ],
)
def test_refused(options, error, said):
    with pytest.raises(error, match=said):
        quantized_attention(*operands(), **options)


def test_refused_recipes():
    for fields in (
        {"key": "fp8_rowwise"},
        {"value": "int8_rowwise"},
        {"query": "int4_g32", "key": "int4_g32"},
    ):
        with pytest.raises(ValueError, match="queries and keys are both int8 or both float8_e4m3fn"):
            AttentionRecipe(**fields)
    with pytest.raises(ValueError, match="float32 scales alone"):
        AttentionRecipe(query="int8_rowwise_asymmetric")
    with pytest.raises(ValueError, match="multiple of 32"):
        AttentionRecipe(chain=48)
    assert str(attention_recipe_of("fp8")).startswith("queries fp8_rowwise, keys fp8_rowwise")


def test_largest_floats():
    """Keys whose distance from their mean is no float32 are the largest one."""
    q, k, v = operands(queries=4, keys=8)
    k = np.where(k > 0, np.float32(3e38), np.float32(-3e38))
    y = quantized_attention(q * np.float32(1e-38), k, v, replace(PLAIN, center=True))
    assert np.isfinite(y).all()
