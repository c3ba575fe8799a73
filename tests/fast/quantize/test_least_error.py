"""`refine_float16_scales`: codes and scales of the reference, of any blocks, with zeros, subnormals, NaN and infinities."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fast
import reference
from ao_lab.config.recipe import named
from ao_lab.testing.strategies import assert_same_bits, assert_same_quantized, blocks, fill
from fast.quantize.least_error import refine_float16_scales
from reference.arrays.namespace import namespace_of
from reference.calibration.inputs import tree_sum
from reference.quantize import least_error, scales

# Sums in the order of `reference.quantize.scales`, along any axis.

NUMPY = namespace_of(np.zeros(1))


@pytest.mark.parametrize("length", [1, 2, 3, 5, 64, 100])
@pytest.mark.parametrize("kind", ["normals", "subnormals", "zeros", "specials"])
def test_sums_are_those_of_the_reference(kind, length):
    x = fill(kind, (3, length), seed=length)
    wanted = one_nan(scales.tree_sum(NUMPY, x.view(np.int32))[:, 0].view(np.float32))
    for made in (tree_sum(torch.from_numpy(x)), tree_sum(torch.from_numpy(x.T.copy()), 0)):
        assert_same_bits(one_nan(made.numpy()), wanted)


def one_nan(x):
    """A sum of NaN has the payload that the processor gives it."""
    return np.where(np.isnan(x), np.float32(np.nan), x)


def test_an_empty_axis():
    assert tree_sum(torch.ones(3, 0)).tolist() == [0, 0, 0]


#: Groups, rows, the tensor, blocks of several rows; a short last block, an odd length.
CASES = {
    "int4_g32_cast": (5, 96),
    "int3_g32_cast": (3, 64),
    "int8_rowwise_cast": (6, 33),
    "fp8_rowwise_cast": (6, 48),
    "fp8_tensorwise_cast": (3, 16),
    "fp8_128x128_cast": (128, 256),
}


@pytest.mark.parametrize("name", CASES)
def test_codes_and_scales_are_those_of_the_reference(name):
    scheme, shape = named(name), CASES[name]
    kinds = ("subnormal", "zero", "nan", "infinity", "wide")

    @settings(max_examples=30 if shape[0] < 128 else 4)
    @given(
        blocks(scheme, dtype="float16", shape=shape, maxima=kinds), st.booleans(), st.sampled_from([0, 4, 8])
    )
    def check(x, packed, exponent):
        with np.errstate(over="ignore", invalid="ignore"):
            x = x * np.float16(2.0**exponent)  # subnormal maxima reach 2**-17 times the target
        q = reference.quantize(x, scheme, packed=packed)
        tensor = torch.from_numpy(x)
        ours = refine_float16_scales(tensor, fast.quantize(tensor, scheme, packed=packed))
        assert_same_quantized(ours, least_error.refine_float16_scales(x, q), inputs=None)

    check()


@pytest.mark.parametrize("elements", [2, 32])
def test_multiples_of_the_smallest_number(elements):
    """Scales on both sides of 2**-17 and of each neighbour, in rows of their own and beside others; many errors are equal."""
    rng = np.random.default_rng(elements)
    largest = np.concatenate([np.arange(1, 257), rng.integers(880, 910, 256)]).reshape(-1, 1)
    counts = np.concatenate([largest, rng.integers(-largest, largest + 1, (512, elements - 1))], 1)
    alone = np.zeros((512, 32))
    alone[:, :elements] = counts
    for x in (alone, rng.permutation(alone).reshape(128, 128)):
        x = (x * 2.0**-24).astype(np.float16)
        q = reference.quantize(x, named("int4_g32_cast"))
        tensor = torch.from_numpy(x)
        ours = refine_float16_scales(tensor, fast.quantize(tensor, named("int4_g32_cast")))
        wanted = least_error.refine_float16_scales(x, q)
        assert_same_quantized(ours, wanted)
        changed, whole = wanted.scale != q.scale, q.scale >= 2.0**-17
        assert changed.any()
        assert whole.any()
        assert not (changed & whole).any()


@pytest.mark.parametrize(("shape", "axis"), [((32, 6), 0), ((2, 3, 64), -1), ((0, 32), -1), ((3, 0), -1)])
def test_other_axes_and_ranks(shape, axis):
    scheme = named("int4_g32_cast" if shape[-1] else "int8_rowwise_cast")
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 2.0**-20).half()
    q = fast.quantize(x, scheme, axis=axis)
    made = refine_float16_scales(x, q)
    assert_same_quantized(made, least_error.refine_float16_scales(x, q))
    if x.numel():
        assert not torch.equal(made.scale, q.scale)


def test_only_small_scales_are_looked_at():
    x = torch.full((4, 32), 0.5, dtype=torch.float16)
    q = fast.quantize(x, named("int4_g32_cast"))
    assert refine_float16_scales(x, q) is q
    x[2] = 2.0**-21
    q = fast.quantize(x, named("int4_g32_cast"))
    before = q.scale.clone()
    made = refine_float16_scales(x, q)
    assert torch.equal(q.scale, before)
    assert (made.scale != before).flatten().tolist() == [False, False, True, False]


def test_what_it_does_not_take():
    x = torch.zeros(4, 32, dtype=torch.float16)
    q = fast.quantize(x, named("int4_g32_cast"))
    with pytest.raises(TypeError, match="takes torch tensors"):
        refine_float16_scales(x.numpy(), q)
    with pytest.raises(ValueError, match=r"x of shape \(2, 32\) is not the tensor of q"):
        refine_float16_scales(x[:2], q)
    other = replace(q, scheme=named("int4_g32"))
    assert refine_float16_scales(x, other) is other
