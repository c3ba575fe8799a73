"""Scales that are kept in float16, below 2**-17: blocks by hand, in multiples of 2**-24, and the rule against exact errors."""

from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ao_lab.config.recipe import named
from ao_lab.testing.strategies import assert_same_quantized
from reference import Quantized, Scales, dequantize, quantize
from reference.quantize.least_error import refine_float16_scales
from reference.quantize.scales import rounds_scales_to_float16

STEP = 2.0**-24


def matrix(*rows, length=32):
    """Multiples of 2**-24 in float16, rows filled up with zeros."""
    x = np.zeros((len(rows), length), np.float16)
    for row, values in zip(x, rows, strict=True):
        row[: len(values)] = np.array(values) * STEP
    return x


def refined(x, name, **settings):
    scheme = named(name)
    return refine_float16_scales(x, quantize(x, scheme, **settings))


#: Codes go to 7. Values of a block, its exact scale and the one that is taken, both in multiples of 2**-24.
BLOCKS = [
    ([8], 8 / 7, 2),  # 7 under 1, 8 under 2
    ([8, 1, 1, 1], 8 / 7, 1),  # three errors of 1 under 2, where 0.5 is a tie and becomes 0
    ([8, 1], 8 / 7, 2),  # as good as under 1
    ([2], 2 / 7, 1),  # never 0
    ([14], 2, 2),
    ([890, *[384] * 10], 890 / 7, 128),  # 127 would be nearer
    ([889, *[387] * 10], 127, 127),
    ([897, *[387] * 10], 897 / 7, 128),  # not below 2**-17: 129 had the smaller error
]


@pytest.mark.parametrize(("block", "exact", "taken"), BLOCKS)
def test_blocks_by_hand(block, exact, taken):
    q = refined(matrix(block), "int4_g32_cast")
    largest = float(np.float32(max(block)) / np.float32(7))
    assert largest == pytest.approx(exact)
    assert (q.scale / STEP).tolist() == [[taken]]
    assert dequantize(q)[0, 0] / STEP == min(np.rint(block[0] / taken), 7) * taken


@pytest.mark.parametrize("kind", ["axis 0", "batch", "tensor"])
def test_blocks_that_are_not_of_the_rows_of_a_matrix_take_the_larger_scale(kind):
    x = matrix([8, 1, 1, 1])
    if kind == "tensor":
        assert refined(x, "int4_tensorwise_cast").scale == 2 * STEP
    elif kind == "batch":
        assert refined(x[None], "int4_g32_cast").scale.tolist() == [[[2 * STEP]]]
    else:
        assert refined(x.T.copy(), "int4_g32_cast", axis=0).scale.tolist() == [[2 * STEP]]


def test_the_smallest_number_of_float16_is_kept():
    assert refined(matrix([1]), "fp8_rowwise_cast").scale == STEP  # 2**-24 / 448
    assert dequantize(refined(matrix([1]), "fp8_rowwise_cast"))[0, 0] == STEP


def test_zeros_nan_and_ordinary_blocks_keep_scale_and_codes():
    x = matrix([0], [8], [2.0**20, 3], [8, np.nan], [np.inf])
    plain, q = quantize(x, named("int4_g32_cast")), refined(x, "int4_g32_cast")
    others = [0, 2, 3, 4]
    assert q.scale[others].tobytes() == plain.scale[others].tobytes()
    assert q.codes[others].tobytes() == plain.codes[others].tobytes()
    assert np.isnan(q.scale[3:]).all()


@pytest.mark.parametrize(("name", "dtype"), [("int4_g32", "float16"), ("int4_g32_cast", "float32")])
def test_scales_in_other_dtypes_are_left_alone(name, dtype):
    x = matrix([8, 1, 1, 1]).astype(dtype)
    q = quantize(x, named(name))
    assert refine_float16_scales(x, q) is q
    assert not rounds_scales_to_float16(named(name), dtype)


def test_what_it_does_not_take():
    x = matrix([8])
    q = quantize(x, named("int4_g32_cast"))
    with pytest.raises(
        ValueError, match=r"x of shape \(2, 32\) is not the tensor of q, whose shape is \(1, 32\)"
    ):
        refine_float16_scales(np.concatenate([x, x]), q)
    with pytest.raises(ValueError, match="takes scale"):
        refine_float16_scales(x, Quantized(**{**vars(q), "scale": q.scale[0]}))


def exact_error(x, scheme, scale):
    values = dequantize(quantize(x, scheme, scales=Scales(np.array([[scale]], np.float32))))
    pairs = zip(values.ravel().tolist(), x.ravel().tolist(), strict=True)
    return sum(Fraction(value - given) ** 2 for value, given in pairs)  # both are multiples of 2**-33


@settings(max_examples=40)
@given(
    st.lists(st.integers(-500, 500), min_size=32, max_size=32),
    st.sampled_from(["int4_g32_cast", "int8_rowwise_cast", "fp8_rowwise_cast"]),
)
def test_no_neighbour_is_better(counts, name):
    x = matrix(counts)
    scheme, q = named(name), refined(x, name)
    exact = Fraction(float(np.abs(x).max())) / Fraction(scheme.scale.target) / Fraction(STEP)
    if exact == 0:
        return
    got = Fraction(float(q.scale[0, 0])) / Fraction(STEP)
    assert got in (max(exact.__floor__(), 1), exact.__ceil__())
    errors = {n: exact_error(x, scheme, n * STEP) for n in {max(exact.__floor__(), 1), exact.__ceil__()}}
    assert errors[int(got)] <= min(errors.values()) * Fraction(1 + 2.0**-20)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["int4_g32_cast", "fp8_rowwise_cast", "fp8_128x128_cast"])
def test_jax(name):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((128, 128)) * 2.0 ** rng.integers(-26, -8, (128, 1))).astype(np.float16)
    assert_same_quantized(
        refine_float16_scales(jnp.asarray(x), quantize(jnp.asarray(x), named(name))), refined(x, name)
    )
