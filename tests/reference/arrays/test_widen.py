"""Every input becomes float32 bit patterns: 16-bit floats exactly, float64 rounded to odd or to nearest, in each library."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference.arrays.namespace import Namespace, namespace_of
from reference.arrays.widen import float32_bits
from tests.support import oracles
from tests.support.oracles import SIXTEEN_BIT, Array

NUMPY = namespace_of(np.zeros(1))


def numpy_bits(x: Array) -> Array:
    """NumPy's own conversion to float32."""
    with np.errstate(all="ignore"):
        return x.astype(np.float32).view(np.int32)


def assert_widened(ns: Namespace, ours: Any, x: Array, name: str) -> None:
    """Equal to NumPy's conversion, except that a NaN keeps its bits (NumPy makes signalling float16 NaNs quiet)."""
    ours, truth = np.asarray(ours), numpy_bits(x)
    nan = np.isnan(x.astype(np.float32)) if name == "bfloat16" else (x.view(np.uint16) & 0x7FFF) > 0x7C00
    assert (ours == truth)[~nan].all(), (ns.name, oracles.first_mismatches(ours[~nan], truth[~nan], x[~nan]))
    assert ((ours & 0x7FFFFFFF) > 0x7F800000)[nan].all(), ns.name
    drop = 16 if name == "bfloat16" else 13
    payload = x.view(np.uint16).astype(np.int32) & (0x7F if name == "bfloat16" else 0x3FF)
    assert ((ours >> drop & (0x7F if name == "bfloat16" else 0x3FF)) == payload)[nan].all(), ns.name


@pytest.mark.parametrize("name", SIXTEEN_BIT)
def test_every_16_bit_float_widens_exactly(name: str) -> None:
    """All 65,536 patterns in NumPy, JAX eager and jit, and torch against NumPy's conversion; NaN payloads are kept."""
    x = oracles.every_pattern(name)
    assert_widened(NUMPY, float32_bits(NUMPY, x, name), x, name)
    there = jnp.asarray(x)
    ns = namespace_of(there)
    assert_widened(ns, float32_bits(ns, there, name), x, name)
    assert_widened(ns, jax.jit(lambda y: float32_bits(ns, y, name))(there), x, name)
    tensor = torch.from_numpy(x.view(np.int16)).view(getattr(torch, name))
    ns = namespace_of(tensor)
    assert_widened(ns, float32_bits(ns, tensor, name), x, name)


def test_float32_passes_through() -> None:
    """float32 patterns are left as they are, signalling NaN and subnormals included."""
    bits = np.array([0, 1, 0x7F800001, -1, -0x80000000, 0x00400000], np.int32)
    assert (float32_bits(NUMPY, bits.view(np.float32), "float32") == bits).all()


def float64_samples() -> Array:
    """float64 around every kind of float32: on it, one unit beside, at the half and at the limits; both signs."""
    rng = np.random.default_rng(2)
    bits = rng.integers(0, 0x7F7FFFFF, 4096, dtype=np.uint32)
    bits[:1024] &= 0x007FFFFF
    base = np.concatenate([bits.view(np.float32), np.float32([0, 1e-45, 2.0**-126, 1, 3.4028235e38])]).astype(
        np.float64
    )
    with np.errstate(over="ignore"):
        step = np.spacing(base.astype(np.float32)).astype(np.float64)
        marks = np.concatenate([base, base + step / 2, base + step / 4])
    near = np.concatenate([marks, np.nextafter(marks, np.inf), np.nextafter(marks, -np.inf)])
    anything = rng.integers(0, 1 << 64, 4096, dtype=np.uint64).view(np.float64)
    limits = np.array(
        [5e-324, 2.0**-150, 2.0**-149 * 0.75, 1e-300, 3.4028236e38, 2.0**128, 1e300, np.inf, np.nan]
    )
    x = np.concatenate([near, anything, limits])
    return np.concatenate([x, -x])


SAMPLES = float64_samples()


def odd_bits(x: Array) -> Array:
    """Rounding to odd, one number at a time (`oracles.odd_float32`)."""
    return numpy_bits(np.array([oracles.odd_float32(float(v)) for v in x]))


def nearest_bits(x: Array) -> Array:
    """NumPy's nearest even, but a finite number beyond float32 becomes its largest one."""
    bits = numpy_bits(x)
    beyond = np.isfinite(x) & (bits & 0x7FFFFFFF == 0x7F800000)
    return np.where(beyond, bits & -0x80000000 | 0x7F7FFFFF, bits)


def assert_same_numbers(ours: Array, truth: Array, x: Array) -> None:
    nan = np.isnan(x)
    assert (ours == truth)[~nan].all(), oracles.first_mismatches(ours[~nan], truth[~nan], x[~nan])
    assert ((ours & 0x7FFFFFFF) > 0x7F800000)[nan].all()


@pytest.mark.parametrize("to_odd", [False, True])
def test_float64_is_reduced(to_odd: bool) -> None:
    """To odd and to nearest in NumPy and torch, with overflow, subnormals and underflow to nothing."""
    truth = (odd_bits if to_odd else nearest_bits)(SAMPLES)
    assert_same_numbers(float32_bits(NUMPY, SAMPLES, "float64", to_odd=to_odd), truth, SAMPLES)
    tensor = torch.from_numpy(SAMPLES)
    ours = float32_bits(namespace_of(tensor), tensor, "float64", to_odd=to_odd)
    assert_same_numbers(ours.numpy(), truth, SAMPLES)


@pytest.mark.parametrize("to_odd", [False, True])
def test_float64_is_reduced_under_jax_with_x64(to_odd: bool) -> None:
    """JAX with 64-bit types, eager and jit: XLA's flushing of float32 subnormals must not show."""
    truth = (odd_bits if to_odd else nearest_bits)(SAMPLES)
    with jax.enable_x64(True):
        x = jnp.asarray(SAMPLES)
        ns = namespace_of(x)
        assert_same_numbers(np.asarray(float32_bits(ns, x, "float64", to_odd=to_odd)), truth, SAMPLES)
        ours = jax.jit(lambda y: float32_bits(ns, y, "float64", to_odd=to_odd))(x)
        assert_same_numbers(np.asarray(ours), truth, SAMPLES)


@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=20))
def test_random_float64_is_reduced_to_odd(patterns: list[int]) -> None:
    """Rounding to odd of any bit pattern; the exponents are drawn near float32's half of the time."""
    bits = np.array(patterns, np.uint64)
    bits[::2] = bits[::2] & np.uint64(0x81FFFFFFFFFFFFFF) | np.uint64(0x3800000000000000)
    x = bits.view(np.float64)
    assert_same_numbers(float32_bits(NUMPY, x, "float64", to_odd=True), odd_bits(x), x)
