"""`matmul_error_bound` holds for every tier of accumulation, against rational sums, and is not empty."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from reference.formats.formats import FORMATS
from reference.matmul.error_bound import gamma, matmul_error_bound
from reference.matmul.exact import RESULTS
from reference.matmul.matmul import matmul
from reference.quantize.quantize import dequantize, quantize
from tests.support.refusals import refused

E4M3, E5M2 = FORMATS["float8_e4m3fn"].values, FORMATS["float8_e5m2"].values
TIERS = [
    {"accumulation": "exact"},
    {"accumulation": "blocked", "block": 1},
    {"accumulation": "blocked", "block": 3},
    {"accumulation": "blocked", "block": 128},
]


def fractions(x):
    return [Fraction(float(v)) for v in np.ravel(x)]


def exact(a, b, bias=0.0):
    """Rational dot product of two vectors."""
    return sum((x * y for x, y in zip(fractions(a), fractions(b), strict=True)), Fraction(float(bias)))


def violation(got, a, b, bound, bias=0.0):
    """|got - exact| / bound in rationals; at most 1 where the bound holds."""
    if np.isinf(bound):
        return 0.0
    error = abs(Fraction(float(got)) - exact(a, b, bias))
    return 0.0 if error == 0 else (float(error / Fraction(float(bound))) if bound > 0 else np.inf)


def tree_sum(terms, choose):
    """Add float32 terms in a random order and tree; `choose(n)` picks a number below n."""
    terms = list(terms)
    with np.errstate(over="ignore", invalid="ignore"):
        while len(terms) > 1:
            x, y = terms.pop(choose(len(terms))), terms.pop(choose(len(terms)))
            terms.append(np.float32(x + y))
    return terms[0]


bits = st.integers(0, 2**32 - 1).filter(lambda v: v & 0x7F800000 != 0x7F800000)
mild = st.integers(0x30000000, 0x4F000000).flatmap(lambda v: st.sampled_from([v, v | 0x80000000]))
edge = st.sampled_from(
    [0, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x3F800000, 0xBF800000, 0x3F7FFFFF]
)


def vector(data, k, elements):
    return data.draw(hnp.arrays(np.uint32, k, elements=elements)).view(np.float32)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 12), st.sampled_from([bits, mild, edge]))
def test_any_float32_order_and_tree(data, k, elements):
    a, b = vector(data, k, elements), vector(data, k, elements)
    with np.errstate(all="ignore"):
        got = tree_sum(a * b, lambda n: data.draw(st.integers(0, n - 1)))
    bound = matmul_error_bound(a[None], b[:, None], accumulation="blocked")[0, 0]
    assert violation(got, a, b, bound) <= 1


@pytest.mark.parametrize("seed", range(4))
def test_long_random_trees_and_sequences(seed):
    rng = np.random.default_rng(seed)
    a, b = (np.ldexp(rng.standard_normal(400), rng.integers(-8, 8, 400)).astype(np.float32) for _ in range(2))
    bound = matmul_error_bound(a[None], b[:, None], accumulation="blocked")[0, 0]
    for choose in (lambda n: int(rng.integers(n)), lambda n: n - 1, lambda n: 0):
        assert violation(tree_sum(a * b, choose), a, b, bound) <= 1


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(0, 10), st.sampled_from([bits, mild, edge]), st.sampled_from(TIERS),
       st.sampled_from(list(RESULTS)), st.booleans())  # fmt: skip
def test_exact_and_blocked_tiers(data, k, elements, tier, out, biased):
    a, b = vector(data, k, elements), vector(data, k, elements)
    bias = vector(data, 1, elements) if biased else None
    got = matmul(a[None], b[:, None], out_dtype=out, bias=bias, **tier)[0, 0]
    for order in ("declared", "any"):
        bound = matmul_error_bound(a[None], b[:, None], out_dtype=out, bias=bias, order=order, **tier)[0, 0]
        assert violation(got, a, b, bound, 0.0 if bias is None else bias[0]) <= 1


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 90), st.sampled_from([None, 32, 40]), st.sampled_from([(32, 13), (16, 25), (4, 3)]),
       st.sampled_from(list(RESULTS)), st.booleans())  # fmt: skip
def test_tensor_core(data, k, promote, core, out, wide):
    codes = hnp.arrays(np.uint8, k, elements=st.integers(0, 255))
    table, name = (E5M2, "float8_e5m2") if wide else (E4M3, "float8_e4m3fn")
    a, b = (np.nan_to_num(table[data.draw(codes)], nan=0.0, posinf=1.0, neginf=-1.0) for _ in range(2))
    keywords = {"accumulation": "hopper_fp8", "promote": promote, "k_step": core[0], "frac_bits": core[1], "out_dtype": out,
                "operand_formats": (name, name)}  # fmt: skip
    got = matmul(a[None], b[:, None], **keywords)[0, 0]
    assert violation(got, a, b, matmul_error_bound(a[None], b[:, None], **keywords)[0, 0]) <= 1


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_tensor_core_with_16_bit_inputs(dtype):
    rng = np.random.default_rng(1)
    name = np.dtype(dtype).name
    bits16 = rng.integers(0, 65536, (2, 20, 40), dtype=np.uint16).view(dtype).astype(np.float32)
    a, b = np.where(np.isfinite(bits16) & (abs(bits16) < 1e18), bits16, 1).astype(np.float32)
    keywords = {"accumulation": "hopper_fp8", "k_step": 16, "frac_bits": 25, "operand_formats": (name, name)}
    got, bound = matmul(a, b.T, **keywords), matmul_error_bound(a, b.T, **keywords)
    ratios = [violation(got[i, j], a[i], b[j], bound[i, j]) for i, j in np.ndindex(20, 20)]
    assert max(ratios) <= 1


def one_step(pairs):
    a, b = np.float32([[x for x, _ in pairs]]), np.float32([[y] for _, y in pairs])
    got = matmul(a, b, accumulation="hopper_fp8")[0, 0]
    bound = matmul_error_bound(a, b, accumulation="hopper_fp8")[0, 0]
    return float(abs(Fraction(float(got)) - exact(a, b))), float(bound), float((np.abs(a) @ np.abs(b))[0, 0])


def test_the_tensor_core_bound_is_nearly_reached():
    """31 products just below the last fractional bit vanish: 84 % of the bound."""
    error, bound, _ = one_step([(1, 1)] + [(1.875 * 2.0**-6, 2.0**-8)] * 31)
    assert 0.8 < error / bound <= 1


def test_subnormal_operands_need_the_larger_sum():
    """2**-9 * 448 is aligned as if it were 4: the bound with S = sum |a||b| alone is broken, ours is not."""
    error, bound, total = one_step([(2.0**-9, 448)] + [(1.875 * 2.0**-6, 2.0**-6)] * 31)
    assert error > 34 * 2.0**-13 * total
    assert error <= bound


def test_float32_bound_is_sharp_to_a_factor():
    """All errors of one sign: 1 + many terms just under half a unit, added in order, lose each of them."""
    k = 500
    a, b = np.full(k, 2.0**-24 * 0.999, np.float32), np.ones(k, np.float32)
    a[0] = 1
    bound = matmul_error_bound(a[None], b[:, None], accumulation="blocked")[0, 0]
    total = np.float32(0)
    for x in a:
        total = np.float32(total + x)
    assert 0.9 < violation(total, a, b, bound) <= 1


@pytest.mark.parametrize(
    ("name", "mantissa", "top"), [("float32", 23, 128), ("bfloat16", 7, 128), ("float16", 10, 16)]
)
def test_rounding_of_the_output(name, mantissa, top):
    one = np.ones((1, 1), np.float32)
    for x in (1.0, 1.5, 1.999):
        bound = matmul_error_bound(np.float32([[x]]), one, out_dtype=name)[0, 0]
        assert 2.0 ** (-mantissa - 1) <= bound < 2.0 ** (-mantissa - 1) * (1 + 1e-9)
    half = 2.0 ** (top - 2)
    assert (
        matmul_error_bound(np.float32([[half, half]]), np.ones((2, 1), np.float32), out_dtype=name)[0, 0]
        < np.inf
    )
    assert matmul_error_bound(np.float32([[half]]), 4 * one, out_dtype=name)[0, 0] == np.inf
    smallest = 2.0 ** (RESULTS[name][1] - mantissa)
    tiny = matmul_error_bound(np.float32([[2.0**-60]]), np.float32([[2.0**-89]]), out_dtype=name)
    assert smallest / 2 <= tiny[0, 0] <= smallest


def test_infinite_where_nothing_is_promised():
    a = np.float32([[np.nan, 1], [np.inf, 1], [3e38, 3e38], [1, 1]])
    b = np.ones((2, 1), np.float32)
    for tier in TIERS:
        np.testing.assert_array_equal(
            np.isinf(matmul_error_bound(a, b, **tier))[:, 0], [True, True, True, False]
        )
    # The sum is finite but some orders overflow on the way.
    c = np.float32([[3e38, 3e38, -3e38]])
    assert matmul_error_bound(c, np.ones((3, 1), np.float32), accumulation="blocked")[0, 0] == np.inf
    assert matmul_error_bound(c, np.ones((3, 1), np.float32))[0, 0] < np.inf
    assert gamma(2**24) == np.inf


@pytest.mark.parametrize("name", ["fp8_rowwise", "fp8_1x128", "fp8_128x128", "mxfp8_e4m3", "mxfp4", "nvfp4", "te.nvfp4",
                                  "torchao.fp8_rowwise_training", "int8_rowwise_asymmetric", "int4_g32", "nf4"])  # fmt: skip
@pytest.mark.parametrize("magnitude", [1.0, 1e-30])
def test_quantized_operands(name, magnitude):
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((3, 256)) * magnitude).astype(np.float32)
    w = rng.standard_normal((256, 3)).astype(np.float32)
    a, b = quantize(x, name), quantize(w, name, axis=0)
    da, db = dequantize(a), dequantize(b)
    tiers = [
        {"accumulation": "blocked", "block": 64, "order": "declared"},
        {"accumulation": "blocked", "out_dtype": "bfloat16"},
    ]
    if name.startswith(("fp8", "mx", "nv", "te", "torchao.fp8")):
        tiers += [{"accumulation": "hopper_fp8"}, {"accumulation": "hopper_fp8", "promote": 64}]
    for tier in [*tiers, {"accumulation": "exact"}]:
        bound = matmul_error_bound(a, b, **tier)
        got = matmul(a, b, **{k: v for k, v in tier.items() if k != "order"})
        assert max(violation(got[i, j], da[i], db[:, j], bound[i, j]) for i, j in np.ndindex(3, 3)) <= 1


def test_other_scale_orders_are_covered():
    """A kernel may multiply the two scales first, and apply them to every product."""
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((2, 96)).astype(np.float32), rng.standard_normal((96, 2)).astype(np.float32)
    a, b = quantize(x, "fp8_rowwise"), quantize(w, "fp8_rowwise", axis=0)
    codes, other = E4M3[a.codes], E4M3[b.codes]
    bound = matmul_error_bound(a, b, accumulation="blocked")
    for i, j in np.ndindex(2, 2):
        scale = a.scale[i, 0] * b.scale[0, j]
        products = codes[i] * other[:, j]
        inside, outside = tree_sum(products * scale, lambda n: n - 1), tree_sum(products, lambda n: 0) * scale
        for got in (inside, outside):
            assert violation(got, dequantize(a)[i], dequantize(b)[:, j], bound[i, j]) <= 1


def test_libraries_shapes_and_refusals():
    rng = np.random.default_rng(4)
    a, b = (
        rng.standard_normal((3, 1, 2, 9)).astype(np.float32),
        rng.standard_normal((2, 9, 4)).astype(np.float32),
    )
    bound = matmul_error_bound(a, b, accumulation="blocked")
    assert bound.shape == (3, 2, 2, 4)
    assert bound.dtype == np.float64
    on_torch = matmul_error_bound(torch.from_numpy(a), torch.from_numpy(b), accumulation="blocked")
    assert on_torch.dtype == torch.float64
    np.testing.assert_array_equal(on_torch.numpy(), bound)
    on_jax = np.asarray(matmul_error_bound(jnp.asarray(a), jnp.asarray(b), accumulation="blocked"))
    assert on_jax.dtype == np.float32
    assert np.all(on_jax >= bound)
    assert np.all(on_jax <= bound * (1 + 2.0**-22))
    assert (
        matmul_error_bound(
            np.ones((2, 0), np.float32), np.ones((0, 3), np.float32), accumulation="blocked"
        ).max()
        < 1e-40
    )
    refused(ValueError, "order is one of", matmul_error_bound, a, b, order="all")
    refused(ValueError, "accumulation is one of", matmul_error_bound, a, b, accumulation="fast")


def test_overflow_is_seen_beside_scales_that_are_nan():
    """Sums of codes times one scale overflow before the other one comes, whatever other rows hold."""
    scale = np.uint8([[255], [248]])  # NaN, and 2**121
    left = quantize(np.float32([[1.0] * 32, [1.5 * 2.0**123] * 32]), "mxfp4")
    left = replace(left, scale=scale)
    right = quantize(np.full((32, 1), 2.0**-9, np.float32), "mxfp4", axis=0)
    for accumulation in ("blocked", "hopper_fp8"):
        got = matmul(left, right, accumulation=accumulation)
        bound = matmul_error_bound(left, right, accumulation=accumulation)
        assert np.isinf(bound).all() or np.isfinite(got[1]).all()
        assert np.isinf(bound[1]).all()
