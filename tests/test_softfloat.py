"""Integer float32 arithmetic equals IEEE arithmetic, in every library: random patterns, cancellations, ties, subnormals."""

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ao_lab.testing import KINDS, assert_same_bits, fill, float_arrays
from reference import softfloat
from reference.arrays import namespace_of

OPERATIONS = ["multiply", "divide", "add", "subtract"]
N = 1 << 14
JAX = namespace_of(jax.numpy.zeros(1))
NUMPY = namespace_of(np.zeros(1))
EDGES = np.array(
    [0, 1, 0x7FFFFF, 0x800000, 0x800001, 0xFFFFFF, 0x1000000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x7F7FFFFF, 0x7F800000,
     0x7F800001, 0x7FC00000, 0x7FFFFFFF], np.uint32,
)  # fmt: skip


def native(operation, a, b):
    """NumPy's IEEE arithmetic, every NaN canonical."""
    ufunc = {"multiply": np.multiply, "divide": np.divide, "add": np.add, "subtract": np.subtract}[operation]
    with np.errstate(all="ignore"):
        result = ufunc(a.view(np.float32), b.view(np.float32))
    return np.where(np.isnan(result), np.uint32(0x7FC00000), result.view(np.uint32)).view(np.int32)


def integer(operation, ns, a, b):
    """The integer rule itself, which JAX uses."""
    if operation == "subtract":
        return softfloat._add(ns, a, b ^ np.int32(-(2**31)))
    return getattr(softfloat, f"_{operation}")(ns, a, b)


def pairs():
    """Every kind against every kind, close significands (short remainders, cancellations), and all pairs of edges."""
    made = [
        (fill(one, (N,), seed=i).view(np.int32), fill(two, (N,), seed=50 + j).view(np.int32))
        for i, one in enumerate(KINDS)
        for j, two in enumerate(KINDS)
    ]
    wide = fill("wide", (N,), seed=9).view(np.int32)
    steps = np.random.default_rng(3).integers(-3, 4, N).astype(np.int32)
    edges = np.concatenate([EDGES, EDGES | np.uint32(1 << 31)]).view(np.int32)
    a, b = np.meshgrid(edges, edges)
    filler = (N - a.size) * [0x3F800000]
    last = [np.concatenate([e.reshape(-1), np.array(filler, np.int32)]) for e in (a, b)]
    return [*made, (wide, wide + steps), (wide, (wide + steps) ^ np.int32(-(2**31))), tuple(last)]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_integer_rules_equal_ieee(operation):
    jitted = jax.jit(lambda a, b: getattr(softfloat, operation)(JAX, a, b))
    for a, b in pairs():
        want = native(operation, a, b)
        assert_same_bits(integer(operation, NUMPY, a, b), want, inputs=a)
        assert_same_bits(jitted(a, b), want, inputs=a)
        assert_same_bits(getattr(softfloat, operation)(NUMPY, a, b), want, inputs=a)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_torch(operation):
    ns = namespace_of(torch.zeros(1))
    for a, b in pairs():
        got = getattr(softfloat, operation)(ns, torch.from_numpy(a), torch.from_numpy(b))
        assert_same_bits(got, native(operation, a, b), inputs=a)


@settings(max_examples=200)
@given(st.sampled_from(OPERATIONS), float_arrays("float32", (8,)), float_arrays("float32", (8,)))
def test_drawn_pairs(operation, a, b):
    a, b = a.view(np.int32), b.view(np.int32)
    assert_same_bits(integer(operation, NUMPY, a, b), native(operation, a, b), inputs=a)


@given(float_arrays("float32", (64,)))
def test_order_key_sorts_as_floats_do(x):
    x = x[~np.isnan(x)]
    keys = softfloat.order_key(NUMPY, x.view(np.int32))
    assert_same_bits(softfloat.order_key(NUMPY, keys), x.view(np.int32))
    ranked = x[np.argsort(keys, kind="stable")].astype(np.float64)
    assert (ranked[1:] >= ranked[:-1]).all()
    assert (keys[x.view(np.int32) == -(2**31)] == -1).all()
