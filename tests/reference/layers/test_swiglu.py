"""`swiglu`: silu correctly rounded for all 65,536 numbers, the product rounded once, torch's own, every library."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
import torch

from ao_lab.testing.strategies import assert_same_bits, assert_same_quantized, fill
from reference import FORMATS, quantize, swiglu, swiglu_quantize
from reference.layers.swiglu import TINY, silu_codes, silu_float64
from tests.support.bits import tensor_of
from tests.support.oracles import every_pattern
from tests.support.record_samples import sampled
from tests.support.refusals import refused

DTYPES = ("bfloat16", "float16")
KINDS = ("normals", "wide", "subnormals", "largest", "bits", "specials")


def finite_values(dtype):
    """(values in float64, what the table says they become, in float64)."""
    x = every_pattern(dtype)
    result = silu_codes(dtype).view(x.dtype)
    wide = x.astype(np.float32)
    keep = np.isfinite(wide) & (wide != 0)
    return x[keep].astype(np.float64), result[keep]


def ties_around(code, fmt):
    """The exact ties below and above the magnitude of a 16-bit code; the one above the largest number is its overflow."""
    grid = lambda c: Fraction(float(fmt.values[c]))  # noqa: E731
    magnitude = int(code) & 0x7FFF
    value = grid(magnitude)
    below = (value + grid(magnitude - 1)) / 2 if magnitude else None
    above = (
        (value + grid(magnitude + 1)) / 2
        if magnitude < fmt.max_code
        else 2 * value - (value + grid(magnitude - 1)) / 2
    )
    return below, above


# One number in 7 by day, all of them at night.
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_silu_is_correctly_rounded(dtype, step):
    """Against silu with 400 bits: the exact value lies strictly between the ties around the code; and float64 could not have
    said otherwise: from TINY on, the ties are farther away than 64 units in the last place of float64."""
    fmt = FORMATS[dtype]
    ties = {}
    with mpmath.workprec(400):
        for v, result in zip(*(values[::step] for values in finite_values(dtype)), strict=True):
            truth = abs(mpmath.mpf(v) / (1 + mpmath.exp(-mpmath.mpf(v))))
            code = int(result.view(np.uint16))
            assert (code >> 15) == (v < 0)
            if code not in ties:
                ties[code] = [
                    None if t is None else mpmath.mpf(t.numerator) / t.denominator
                    for t in ties_around(code, fmt)
                ]
            below, above = ties[code]
            margin = truth * 2.0**-47 if abs(v) >= TINY else 0
            assert truth + margin < above, float(v)
            assert below is None or below < truth - margin, float(v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_float64_is_as_exact_as_the_margin_needs(dtype):
    """This machine's exponential: silu in float64 within 8 units of the true value; one in 16 numbers."""
    values, _ = finite_values(dtype)
    values = values[(np.abs(values) >= TINY) & (values > -700)][::16]
    with mpmath.workprec(200):
        for v, got in zip(values, silu_float64(values), strict=True):
            truth = mpmath.mpf(v) / (1 + mpmath.exp(-mpmath.mpf(v)))
            assert abs(mpmath.mpf(got) - truth) <= abs(truth) * 2.0**-50


@pytest.mark.parametrize("dtype", DTYPES)
def test_edges(dtype):
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan], np.float32).astype(every_pattern(dtype).dtype)
    result = swiglu(x, np.ones_like(x)).view(np.uint16).tolist()
    fmt = FORMATS[dtype]
    assert result == [0, 0x8000, fmt.infinity_code, 0x8000, fmt.nan_code, fmt.nan_code]
    tiny = np.array([1, 3, 0x8001, 0x8003], np.uint16).view(x.dtype)
    # Halves of odd subnormals, tilted upward: 1/2 -> 1, 3/2 -> 2, -1/2 -> -0, -3/2 -> -1.
    assert swiglu(tiny, np.ones_like(tiny)).view(np.uint16).tolist() == [1, 2, 0x8000, 0x8001]


def once_rounded(gate, up):
    """silu times up, exact in float64, rounded once by ml_dtypes or NumPy; NaN canonical."""
    s = silu_codes(str(gate.dtype)).view(gate.dtype)[gate.view(np.uint16)]
    with np.errstate(all="ignore"):
        product = (s.astype(np.float64) * up.astype(np.float64)).astype(gate.dtype)
    return np.where(np.isnan(product), np.array(np.nan, gate.dtype), product)


@pytest.mark.parametrize("dtype", DTYPES)
def test_product_is_rounded_once(dtype):
    """Every gate with several ups; the float64 product of two 16-bit floats is exact."""
    gate = every_pattern(dtype)
    for seed, kind in enumerate((*KINDS, "bits", "wide")):
        up = fill(kind, gate.shape, dtype=dtype, seed=seed)
        assert_same_bits(swiglu(gate, up), once_rounded(gate, up), inputs=gate)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_rounds_the_same_but_near_ties(dtype):
    """torch computes silu in float32 (an exponential within 4 units, a sum, a quotient: under 8 units, 2**-21) and rounds it:
    the same number unless the exact value is within that of a tie. Where float32's exp(-v) is infinite, from -88 on, torch has
    zero, and at the ties of subnormals, where only v**2 / 4 decides, float32 sees a tie."""
    x = every_pattern(dtype)
    x = x[np.isfinite(x.astype(np.float32))]
    ours = swiglu(x, np.ones_like(x)).astype(np.float64)
    theirs = torch.nn.functional.silu(tensor_of(x)).double().numpy()
    fmt = FORMATS[dtype]
    wide = silu_float64(x.astype(np.float64))
    exponent = np.maximum(np.frexp(np.abs(wide))[1] - 1, fmt.emin)
    units = np.abs(wide) / np.exp2(exponent - fmt.mantissa_bits)
    near = np.abs(units - np.floor(units) - 0.5) <= units * 2.0**-21
    reached = x.astype(np.float32) > -88
    assert (ours == theirs)[~near & reached].all()
    # At a tie they are neighbours.
    assert (np.abs(ours - theirs) <= np.exp2(exponent - fmt.mantissa_bits))[reached].all()
    assert near[reached].mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
def test_libraries(dtype):
    batched = jax.jit(jax.vmap(swiglu))
    for kind in KINDS:
        gate, up = (fill(kind, (3, 5, 64), dtype=dtype, seed=seed) for seed in (0, 1))
        expected = swiglu(gate, up)
        tensors, arrays = ([convert(a) for a in (gate, up)] for convert in (tensor_of, jnp.asarray))
        result = [
            swiglu(*tensors),
            swiglu.__wrapped__(*tensors),
            swiglu(*arrays),
            swiglu.__wrapped__(*arrays),
            batched(*arrays),
        ]
        for got in result:
            assert_same_bits(got, expected, inputs=gate)


QUANTIZED = ("mxfp8_e4m3", "mxfp4", "nvfp4", "fp8_rowwise", "int4_g32_asymmetric")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_is_quantize_of_the_product(dtype, name):
    gate, up = (fill("normals", (4, 64), dtype=dtype, seed=seed) for seed in (0, 1))
    tensors = [tensor_of(a) for a in (gate, up)]
    for packed in (False, True):
        expected = quantize(swiglu(gate, up), name, packed=packed)
        for pair in ((gate, up), tensors):
            assert_same_quantized(swiglu_quantize(*pair, name, packed=packed), expected)
        assert_same_quantized(swiglu_quantize.__wrapped__(*tensors, name, packed=packed), expected)


@pytest.mark.parametrize("dtype", sampled({"bfloat16"}, DTYPES))
@pytest.mark.parametrize("name", sampled({"mxfp4"}, QUANTIZED))
def test_quantized_in_jax(dtype, name):
    gate, up = (fill("normals", (4, 64), dtype=dtype, seed=seed) for seed in (0, 1))
    for packed in (False, True):
        expected = quantize(swiglu(gate, up), name, packed=packed)
        got = swiglu_quantize(jnp.asarray(gate), jnp.asarray(up), name, packed=packed)
        assert_same_quantized(got, expected)


def test_empty_and_0d():
    one = np.ones((), np.float16)
    assert swiglu(one, one) == np.float16(0.731)
    assert swiglu(np.zeros((0, 4), np.float16), np.zeros((0, 4), np.float16)).shape == (0, 4)


X = np.ones((2, 4), np.float16)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: swiglu(X.astype(np.float32), X), TypeError, "bfloat16 or float16, got float32.*65,536"),
        (lambda: swiglu(X.astype(np.float64), X), TypeError, "got float64"),
        (lambda: swiglu(X.astype(np.int16), X), TypeError, "got int16"),
        (lambda: swiglu(X, X[0]), ValueError, r"up is float16 of shape \(2, 4\).*got float16 of shape \(4,\)"),
        (lambda: swiglu(X, X.astype(np.float32)), ValueError, "up is float16.*got float32"),
        (lambda: swiglu(jnp.asarray(X), X), ValueError, "in x's library"),
    ],
)  # fmt: skip
def test_what_is_refused(call, error, words):
    refused(error, words, call)
