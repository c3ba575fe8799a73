"""Gradients of RMSNorm and SwiGLU, and `rotary` both ways: slopes and orders of sums, float64 and torch, every edge."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from ao_lab.testing.strategies import assert_same_bits
from experiments.models.llama import apply_rotary
from reference import encode
from reference.layers.normalize import PIECE, rms_norm_vjp
from reference.layers.rotary import rotary
from reference.layers.swiglu import silu_slope_codes, silu_slope_float64, swiglu_vjp
from tests.support.oracles import every_pattern
from tests.support.refusals import refused

DTYPES = ("bfloat16", "float16")


def numbers(shape, dtype, seed):
    x = np.random.default_rng(seed).standard_normal(shape)
    return x.astype(np.float32) if dtype == "float32" else x.astype(every_pattern(dtype).dtype)


def patterns(dtype):
    """Every number of a dtype, and in float64."""
    x = every_pattern(dtype)
    with np.errstate(invalid="ignore"):
        return x, x.astype(np.float64)


def wide_slope(v):
    """silu' with 64 bits of precision, and Taylor's series around 0, where the tie at 1/2 + v/2 is near."""
    v = v.astype(np.longdouble)
    e = np.exp(-np.abs(v))
    right, left = (1 + e * (1 + v)) / (1 + e) ** 2, e * (e + (1 + v)) / (1 + e) ** 2
    return np.where(v >= 0, right, left)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_slope_is_correctly_rounded(dtype):
    """No tie lies between float64 and the exact value: moved by 16 units each way, float64 rounds to the same code."""
    _, v = patterns(dtype)
    keep = np.isfinite(v) & (np.abs(v) >= 2.0**-6) & (v > -700)
    v, codes = v[keep], silu_slope_codes(dtype)[keep]
    exact = silu_slope_float64(v)
    # A unit of float64 in the last place of the numerator, which cancels near the root -1.278.
    error = 16 * 2.0**-53 * np.maximum(np.abs(exact), np.minimum(np.exp(np.minimum(v, 0)), 1))
    assert np.all(np.abs(wide_slope(v) - exact) <= error / 2)
    for moved in (exact - error, exact + error):
        assert_same_bits(encode(moved, dtype), codes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_slopes_near_zero_lie_on_the_side_of_one_half(dtype):
    """1/2 + v/2 - v**3/12: a tie of 1/2 + v/2 goes toward 1/2, and zero has 1/2."""
    x, v = patterns(dtype)
    near = (np.abs(v) < 2.0**-6) & (v != 0)
    line = np.nextafter(0.5 + v[near] / 2, 0.5)
    assert_same_bits(silu_slope_codes(dtype)[near], encode(line, dtype))
    assert set(silu_slope_codes(dtype)[v == 0].view(x.dtype).astype(float)) == {0.5}


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_against_float64(dtype):
    """dgate: three roundings to the dtype or finer (slope, products in float32, result); dup: two."""
    g, gate, up = (numbers((64, 96), dtype, seed) for seed in range(3))
    unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    made = [part.astype(np.float64) for part in swiglu_vjp(g, gate, up)]
    d, v, u = (t.astype(np.float64) for t in (g, gate, up))
    s = 1 / (1 + np.exp(-v))
    wanted = d * u * (s + v * s * (1 - s)), d * v * s
    for got, exact in zip(made, wanted, strict=True):
        assert np.all(np.abs(got - exact) <= (2 * unit + unit**2 + 2.0**-22) * np.abs(exact) + 2.0**-24)


def test_swiglu_at_the_edges():
    inf, nan = np.inf, np.nan
    gate = np.array([inf, -inf, nan, 0, -0.0, -2000, 2, 1], np.float16)
    dgate, dup = swiglu_vjp(
        np.ones(8, np.float16), gate, np.array([1, 1, 1, 1, 1, 1, inf, 65504], np.float16)
    )
    assert_same_bits(dgate[:7], np.array([1, -0.0, nan, 0.5, 0.5, -0.0, inf], np.float16))
    assert np.isfinite(dgate[7])
    assert dup[0] == inf
    zero = swiglu_vjp(np.zeros(8, np.float16), np.ones(8, np.float16), np.ones(8, np.float16))
    assert not any(part.any() for part in zero)
    # The largest numbers: a product beyond the range is infinite, and no finite input becomes NaN.
    top = np.array([65504, -65504], np.float16)
    assert not any(np.isnan(part).any() for part in swiglu_vjp(top, top, top))


@pytest.mark.parametrize("dtype", ["float32", *DTYPES])
def test_rms_norm_against_float64(dtype):
    """Every step rounds by 2**-24 or, at the end, by the dtype; a tree over 300 elements adds 9 roundings, a piece 16."""
    x, g, more = (numbers((5, 7, 300), dtype, seed) for seed in range(3))
    weight = numbers((300,), dtype, 3)
    dx, dweight = rms_norm_vjp(g, x, weight, eps=1e-5, residual_grad=more)
    h, d, m, w = (t.astype(np.float64) for t in (x, g, more, weight))
    r = 1 / np.sqrt((h**2).mean(-1, keepdims=True) + 1e-5)
    n, s = h * r, d * w
    share = (s * n).mean(-1, keepdims=True)
    unit = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    exact, terms = (
        r * (s - n * share) + m,
        r * (abs(s) + abs(n) * abs(s * n).mean(-1, keepdims=True)) + abs(m),
    )
    assert np.all(np.abs(dx.astype(np.float64) - exact) <= unit * abs(exact) + 32 * 2.0**-24 * terms)
    total, sizes = (d * n).sum((0, 1)), abs(d * n).sum((0, 1))
    assert np.all(np.abs(dweight.astype(np.float64) - total) <= unit * abs(total) + 48 * 2.0**-24 * sizes)


def test_rows_are_added_in_pieces():
    """A number that vanishes beside a larger one in its piece, and does not where pieces are added."""
    g = np.zeros((2 * PIECE, 4), np.float32)
    x, weight = np.ones((2 * PIECE, 4), np.float32), np.ones(4, np.float32)
    g[0], g[1:3], g[PIECE : PIECE + 2] = 2.0**24, 1, 1
    _, dweight = rms_norm_vjp(g, x, weight, eps=0.0)
    assert dweight.tolist() == [2.0**24 + 2] * 4


def both(g, x, weight):
    return *rms_norm_vjp(g, x, weight), *swiglu_vjp(g, x, g)


INPUTS = [numbers(shape, "bfloat16", seed) for seed, shape in enumerate(((20, 48), (20, 48), (48,)))]


@pytest.mark.nightly
def test_jax_agrees():
    for one, two in zip(both(*INPUTS), both(*map(jnp.asarray, INPUTS)), strict=True):
        assert_same_bits(one, np.asarray(two))


def test_torch_agrees():
    made = both(*INPUTS)
    g, x, weight = (torch.from_numpy(t.view(np.int16)).view(torch.bfloat16) for t in INPUTS)
    for one, two in zip(made, both(g, x, weight), strict=True):
        assert_same_bits(one.view(np.int16), two.view(torch.int16).numpy())


def test_wrong_arguments():
    x, weight = np.ones((3, 4), np.float32), np.ones(4, np.float32)
    refused(ValueError, "g", rms_norm_vjp, x[:2], x, weight)
    refused(TypeError, "swiglu takes bfloat16 or float16", swiglu_vjp, x, x, x)
    half = x.astype(np.float16)
    refused(ValueError, "up", swiglu_vjp, half, half, half[:2])
    assert [t.shape for t in rms_norm_vjp(x[:0], x[:0], weight)] == [(0, 4), (4,)]


def tensors(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rotary_has_the_bits_of_torch_both_ways(dtype):
    """Also where the halves of the tables differ."""
    x, g = (tensors(2, 3, 5, 12, dtype=dtype, seed=seed) for seed in (0, 1))
    c, s = (tensors(5, 12, dtype=dtype, seed=seed) for seed in (2, 3))
    leaf = x.clone().requires_grad_()
    y = apply_rotary(leaf, c, s)
    assert_same_bits(rotary(x, c, s), y.detach())
    y.backward(g)
    assert_same_bits(rotary(g, c, s, inverse=True), leaf.grad)


def test_rotary_tables_of_batches():
    x, c, s = tensors(2, 3, 5, 12), tensors(2, 5, 12, seed=1), tensors(2, 5, 12, seed=2)
    parts = [rotary(x[i : i + 1], c[i], s[i : i + 1]) for i in range(2)]
    assert_same_bits(rotary(x, c, s), torch.cat(parts))


def test_rotary_one_half_turns_the_other():
    x = np.arange(4, dtype=np.float32).reshape(1, 1, 1, 4)
    zeros, ones = np.zeros((1, 4), np.float32), np.ones((1, 4), np.float32)
    assert rotary(x, zeros, ones).ravel().tolist() == [-2, -3, 0, 1]
    assert rotary(x, zeros, ones, inverse=True).ravel().tolist() == [2, 3, 0, -1]


def test_what_rotary_refuses():
    x, table = np.ones((1, 2, 3, 4), np.float32), np.ones((3, 4), np.float32)
    refused(ValueError, r"even D, got \(1, 2, 3, 3\)", rotary, x[..., :3], table, table)
    with pytest.raises(ValueError, match=r"cosine is float32 of shape \(3, 4\).*got float32 of \(2, 4\)"):
        rotary(x, table[:2], table)
    refused(ValueError, r"sine is float32.*got float16", rotary, x, table, table.astype(np.float16))
    refused(TypeError, "got float64", rotary, x.astype(np.float64), table, table)
