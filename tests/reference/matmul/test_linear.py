"""`reference.linear_error_bound` holds for what kernels compute in float32, in orders that are bad, and is not empty."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from ao_lab.config.recipe import integer_scheme, named
from reference import SCHEMES
from tests.support.refusals import refused

F32 = np.float32
KINDS = ("int8_rowwise", "int4_g32", "int4_g64_asymmetric", "mxfp8_e4m3", "fp8_128x128", "nvfp4", "nf4")


def truth(x, w, bias=None):
    """T in float64; its own rounding is 2**-29 of the bound's unit."""
    result = x.astype(np.float64) @ reference.dequantize(w).astype(np.float64).T
    return result if bias is None else result + bias.astype(np.float64)


def elements(part, w):
    """A part with a number for every block along K, for each element."""
    return np.repeat(part, w.shape[1] // part.shape[1], axis=1).astype(F32)


def left_to_right(x, w, codes, zeros):
    """s (sum of c x) - s z (sum of x), block by block, every sum from left to right in float32."""
    scale, blocks = w.scale.astype(F32), w.scale.shape[1]
    size = w.shape[1] // blocks
    total = np.zeros((x.shape[0], w.shape[0]), F32)
    for b in range(blocks):
        products, inputs = np.zeros_like(total), np.zeros_like(total)
        for k in range(b * size, (b + 1) * size):
            products = products + x[:, k : k + 1] * codes[:, k]
            inputs = inputs + x[:, k : k + 1]
        total = total + (products - zeros[:, b] * inputs) * scale[:, b]
    return total


def signed(w):
    """Codes of int8 or int4 as numbers."""
    return (
        (w.codes.astype(np.int32) & 15 ^ 8) - 8 if w.scheme.format.bits == 4 else w.codes.view(np.int8)
    ).astype(F32)


def factored(x, w, bias):
    zeros = np.zeros_like(w.scale) if w.zero is None else w.zero
    total = left_to_right(x, w, signed(w), zeros.astype(F32))
    return total if bias is None else total + bias


def offset(x, w):
    """With 24 added to codes, and taken off block by block."""
    return left_to_right(x, w, signed(w) + 24, np.full(w.scale.shape, 24, F32))


def far(shape, seed, spread=6):
    """Numbers of all sizes."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread, shape)).astype(F32)


@pytest.mark.parametrize("name", ["int8_rowwise", "int4_g32", "int4_g64_asymmetric"])
@given(seed=st.integers(0, 2**16), biased=st.booleans())
def test_sums_from_left_to_right_are_inside(name, seed, biased):
    w = reference.quantize(far((5, 256), seed), SCHEMES[name])
    x, bias = far((3, 256), seed + 1), far(5, seed + 2) if biased else None
    bound = reference.linear_error_bound(x, w, bias)
    assert (np.abs(factored(x, w, bias) - truth(x, w, bias)) <= bound).all()


def test_codes_with_something_added_are_inside():
    """Codes of 0 in the rows' larger part: all that is lost is lost of what was added."""
    weight = np.zeros((2, 64), F32)
    weight[:, 0] = 7
    w = reference.quantize(weight, SCHEMES["int4_g32"])
    x = far((64, 64), 11, 1)
    x[:, 0] = 0
    error, bound = np.abs(offset(x, w) - truth(x, w)), reference.linear_error_bound(x, w)
    assert (error <= bound).all()
    assert (error > 0).any()
    # 85 roundings of 48, as the module derives them for parts of 32 on tensor cores, and two of
    # the scale; the second block's scale is nothing.
    unit = 2.0**-24 * 48 * np.abs(x[:, :32].astype(np.float64)).sum(1)[:, None]
    assert (87 * unit <= bound).all()
    assert (bound < 87.01 * unit).all()


def test_a_zero_point_far_from_the_codes_counts():
    """c - z is 1 throughout, c and z are 100: what is lost is lost of 100 x, beside which x is little."""
    scheme = integer_scheme(8, 256, True)
    codes = np.full((1, 256), 101, np.uint8)
    w = replace(
        reference.quantize(np.ones((1, 256), F32), scheme), codes=codes, zero=np.full((1, 1), 100, np.int8)
    )
    x = np.full((1, 256), F32(1 / 3))
    x[:, 1::2] *= -1 + 2.0**-10
    error = np.abs(factored(x, w, None) - truth(x, w))
    bound = reference.linear_error_bound(x, w)
    narrow = reference.linear_error_bound(x, replace(w, codes=codes - 100, zero=np.zeros((1, 1), np.int8)))
    assert (error <= bound).all()
    assert (bound > 50 * narrow).all()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "float16"])
def test_it_is_small_and_holds_for_the_result(name, out_dtype):
    w, x = reference.quantize(far((9, 256), 1, 1), SCHEMES[name]), far((4, 256), 2, 1)
    got = reference.linear(x, w, out_dtype=out_dtype).astype(np.float64)
    bound = reference.linear_error_bound(x, w, out_dtype=out_dtype)
    assert (np.abs(got - truth(x, w)) <= bound).all()
    # Of the module: 2 K roundings, 10 of factors and zero points; of 48 more in each block of 4-bit integers; the result's.
    inputs, unit = np.abs(x).astype(np.float64), 2.0**-24
    size = np.abs(reference.dequantize(w)).astype(np.float64)
    plain = 0 if w.zero is None else np.abs(reference.dequantize(replace(w, zero=np.zeros_like(w.zero))))
    limit = (2 * 256 + 10) * unit * (inputs @ (size + 2.0 * plain).T)
    if name.startswith("int4"):
        block = 256 // w.scale.shape[1]
        limit += (max(2 * block, 81) + 4 + 2) * unit * (inputs @ (48.0 * elements(w.scale, w)).T)
    narrow = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}[out_dtype]
    assert (bound <= (limit + narrow * (inputs @ size.T + limit)) * (1 + 2.0**-10)).all()


def test_a_result_is_rounded_once_more_where_it_is_narrow():
    w, x = reference.quantize(np.eye(32, dtype=F32), SCHEMES["int8_rowwise"]), np.zeros((1, 32), F32)
    x[0, 0] = 1 + 2.0**-9
    wide, narrow = (reference.linear_error_bound(x, w, out_dtype=d)[0, 0] for d in ("float32", "bfloat16"))
    assert wide < 2.0**-16
    assert 2.0**-8 <= narrow < 2.0**-8 + 2.0**-16


def test_vectors_libraries_and_specials():
    import torch

    w, x = reference.quantize(far((4, 64), 1), SCHEMES["int4_g32"]), far((2, 64), 3)
    bound = reference.linear_error_bound(x, w)
    # float64 sums of a vector may be taken in another order.
    assert (np.abs(reference.linear_error_bound(x[0], w) - bound[0]) <= 2.0**-40 * bound[0]).all()
    parts = {name: torch.from_numpy(getattr(w, name)) for name in ("codes", "scale")}
    result = reference.linear_error_bound(torch.from_numpy(x), replace(w, **parts))
    assert result.dtype == torch.float64
    assert (result.numpy() == bound).all()
    x[0, 5] = np.inf
    bound = reference.linear_error_bound(x, w)
    assert np.isinf(bound[0]).all()
    assert np.isfinite(bound[1]).all()


def test_errors_are_those_of_linear():
    w = reference.quantize(np.ones((4, 64), F32), SCHEMES["int4_g32"])
    refused(ValueError, "last axes", reference.linear_error_bound, np.ones((2, 63), F32), w)
    with pytest.raises(TypeError, match="quantize it first"):
        reference.linear_error_bound(np.ones((2, 64), F32), np.ones((4, 64), F32))
    with pytest.raises(ValueError, match="out_dtype"):
        reference.linear_error_bound(np.ones((2, 64), F32), w, out_dtype="float8_e4m3fn")


@pytest.mark.parametrize("name", ["torchao.int4_g32_tinygemm", "torchao.int4_g64_tinygemm"])
def test_sums_that_overflow_before_their_scale_have_no_bound(name):
    """24 x leaves float32 though the weight is small: a kernel may make NaN of it."""
    w = reference.quantize(np.full((4, 64), 0.01, F32), named(name))
    x = np.zeros((2, 64), F32)
    x[0, 3], x[1, 3] = 2e37, 1e33
    assert np.isfinite(truth(x, w)).all()
    bound = reference.linear_error_bound(x, w)
    assert np.isinf(bound[0]).all()
    assert np.isfinite(bound[1]).all()
