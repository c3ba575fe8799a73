"""float32 multiplication, division, addition and square root in integers against IEEE 754 arithmetic, bit for bit.

The truth is NumPy's own float32 arithmetic, with every NaN as 0x7fc00000. The integer versions run with NumPy on a million
random pairs, on the product of all edge cases and on every kind of input against every other, and under JAX's jit, where they
are needed.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ao_lab.testing.strategies import KINDS, fill, float_arrays
from reference.arrays import softfloat
from reference.arrays.namespace import Namespace, NumpyNamespace, namespace_of
from reference.arrays.softfloat import float32_bits
from tests.support import oracles
from tests.support.oracles import SIXTEEN_BIT, Array

# Every input becomes float32 bit patterns: 16-bit floats exactly, float64 rounded to odd or to nearest, in each library.

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


NS = namespace_of(np.zeros(1))
Operation = Callable[[Array, Array], Array]
# name -> (integer version, public function, IEEE 754)
OPERATIONS: dict[str, tuple[Any, Any, Operation]] = {
    "multiply": (softfloat._multiply, softfloat.multiply, np.multiply),
    "divide": (softfloat._divide, softfloat.divide, np.divide),
    "add": (softfloat._add, softfloat.add, np.add),
    # There is one integer addition; subtraction flips a sign and adds.
    "subtract": (lambda ns, a, b: softfloat._add(ns, a, b ^ softfloat.SIGN), softfloat.subtract, np.subtract),
}
NAN = 0x7FC00000
N = 1 << 14


def ieee(name: str, a: Array, b: Array) -> Array:
    """NumPy's float32 result as a bit pattern."""
    with np.errstate(all="ignore"):
        result = OPERATIONS[name][2](a.view(np.float32), b.view(np.float32))
    return np.where(np.isnan(result), NAN, result.view(np.int32))


def assert_equal(name: str, ours: Any, a: Array, b: Array) -> None:
    ours, truth = np.asarray(ours), ieee(name, a, b)
    wrong = np.flatnonzero(ours != truth)
    unsigned = [
        np.asarray(column).view(np.uint32)[wrong[:5]] for column in (a, b, ours, truth.astype(np.int32))
    ]
    shown = [f"{name}({x:#010x}, {y:#010x}) = {got:#010x}, IEEE {want:#010x}"
             for x, y, got, want in zip(*(column.tolist() for column in unsigned), strict=True)]  # fmt: skip
    assert len(wrong) == 0, f"{len(wrong)} of {len(a)} differ: {shown}"


def random_pairs(count: int, seed: int) -> tuple[Array, Array]:
    """Uniform patterns; in the second half exponents so close that sums cancel and quotients are near 1."""
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, 1 << 32, (2, count), dtype=np.uint32)
    half = slice(count // 2, None)
    close = (a[half] & 0x7F800000) + (rng.integers(-30, 3, count - count // 2) << 23)
    b[half] = (b[half] & 0x807FFFFF) | (np.clip(close, 0, 0x7F800000).astype(np.uint32) & 0x7F800000)
    return a.view(np.int32), b.view(np.int32)


def edges() -> Array:
    """Zeros, subnormals, powers of two, their neighbours, dense and sparse significands, limits, infinities, NaN."""
    exponents = np.array(
        [0, 1, 2, 23, 24, 25, 63, 64, 102, 103, 126, 127, 128, 150, 151, 190, 191, 252, 253, 254]
    )
    significands = np.array(
        [0, 1, 2, 3, 0x2AAAAA, 0x3FFFFF, 0x400000, 0x400001, 0x555555, 0x7FFFFE, 0x7FFFFF]
    )
    finite = (exponents[:, None] << 23 | significands).reshape(-1)
    special = np.array([0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF])
    positive = np.concatenate([finite, special])
    return np.concatenate([positive, positive | 1 << 31]).astype(np.uint32).view(np.int32)


def kind_pairs() -> list[tuple[Array, Array]]:
    """Every kind against every kind, and close significands: short remainders and cancellations."""
    output = [
        (fill(one, (N,), seed=i).view(np.int32), fill(two, (N,), seed=50 + j).view(np.int32))
        for i, one in enumerate(KINDS)
        for j, two in enumerate(KINDS)
    ]
    wide = fill("wide", (N,), seed=9).view(np.int32)
    near = wide + np.random.default_rng(3).integers(-3, 4, N).astype(np.int32)
    return [*output, (wide, near), (wide, near ^ np.int32(softfloat.SIGN))]


@pytest.mark.parametrize("name", OPERATIONS)
def test_integer_rules_equal_ieee(name: str) -> None:
    """All kinds of input: the integer version, the same under jit, and what NumPy and torch use."""
    integer, public, _ = OPERATIONS[name]
    ns, torch_ns = namespace_of(jnp.zeros(1)), namespace_of(torch.zeros(1))
    jitted = jax.jit(lambda x, y: public(ns, x, y))
    for a, b in kind_pairs():
        for output in (integer(NS, a, b), jitted(a, b), public(NS, a, b)):
            assert_equal(name, output, a, b)
        assert_equal(name, public(torch_ns, torch.from_numpy(a), torch.from_numpy(b)), a, b)


@pytest.mark.parametrize("name", OPERATIONS)
def test_random_bit_patterns(name: str) -> None:
    """2**20 pairs, uniform and with close exponents, through the integer version."""
    a, b = random_pairs(1 << 20, 6)
    assert_equal(name, OPERATIONS[name][0](NS, a, b), a, b)


@pytest.mark.parametrize("name", OPERATIONS)
def test_edge_cases(name: str) -> None:
    """All pairs of edge cases: subnormal operands and results, ties, overflow, cancellation, specials, zero signs."""
    one = edges()
    a, b = (axis.reshape(-1) for axis in np.meshgrid(one, one))
    assert_equal(name, OPERATIONS[name][0](NS, a, b), a, b)


def test_products_that_are_ties() -> None:
    """Products of 24-bit numbers halfway between two floats, normal and subnormal."""
    rng = np.random.default_rng(8)
    # An odd 13-bit times an odd 12-bit significand has 24 or 25 bits, the last one set; the exponents reach underflow.
    x, y = (2 * rng.integers(1 << 11, 1 << 12, 1 << 16) + 1, 2 * rng.integers(1 << 10, 1 << 11, 1 << 16) + 1)
    a = np.ldexp(x.astype(np.float32), rng.integers(-80, -50, 1 << 16)).astype(np.float32).view(np.int32)
    b = np.ldexp(y.astype(np.float32), rng.integers(-80, -50, 1 << 16)).astype(np.float32).view(np.int32)
    assert_equal("multiply", softfloat._multiply(NS, a, b), a, b)


def test_sums_that_are_ties_or_cancel() -> None:
    """x + y with y half a unit of x, one bit more or less, and x - y with neighbouring y."""
    rng = np.random.default_rng(9)
    a = (rng.integers(30, 254, 1 << 16) << 23 | rng.integers(0, 1 << 23, 1 << 16)).astype(np.int32)
    half = ((a >> 23) - 24) << 23
    for offset in (-1, 0, 1, 1 << 23):
        b = (half + offset).astype(np.int32)
        assert_equal("add", softfloat._add(NS, a, b), a, b)
        assert_equal("add", softfloat._add(NS, b, a ^ softfloat.SIGN), b, a ^ softfloat.SIGN)
    for offset in (-2, -1, 0, 1, 2, 1 << 22, 1 << 23):
        b = ((a + offset) ^ softfloat.SIGN).astype(np.int32)
        assert_equal("add", softfloat._add(NS, a, b), a, b)


def test_quotients_near_ties() -> None:
    """q * y moved by units, divided by y: quotients next to representable ones, also in the subnormal range."""
    rng = np.random.default_rng(10)
    q, y = rng.integers(1 << 11, 1 << 12, (2, 1 << 16))
    for scale in (0, -120, 100):
        product = (q * y).astype(np.float32)
        a = np.ldexp(product, scale).astype(np.float32).view(np.int32)
        b = y.astype(np.float32).view(np.int32)
        for offset in (-1, 0, 1):
            assert_equal(
                "divide",
                softfloat._divide(NS, (a + offset).astype(np.int32), b),
                (a + offset).astype(np.int32),
                b,
            )


@pytest.mark.parametrize("name", OPERATIONS)
def test_jax_computes_in_integers(name: str) -> None:
    """Under jit, where XLA flushes subnormals and divides by reciprocals: edge cases and random pairs, bit for bit."""
    one = edges()
    pairs = [axis.reshape(-1) for axis in np.meshgrid(one, one)]
    a, b = (np.concatenate(both) for both in zip(pairs, random_pairs(1 << 17, 12), strict=True))
    there = jnp.asarray(a)
    ns = namespace_of(there)
    compiled = jax.jit(lambda x, y: OPERATIONS[name][1](ns, x, y))
    assert_equal(name, compiled(there, jnp.asarray(b)), a, b)


class Sloppy(NumpyNamespace):
    """Conversions that are a few units off in either direction, as a library's approximate division would be."""

    def astype(self, x: Array, name: str) -> Array:
        wide = super().astype(x, name)
        noise = np.random.default_rng(16).integers(-1, 2, wide.shape) if name == "float32" else 0
        return wide * (1 + noise * np.float32(2.0**-22)).astype(wide.dtype) if name == "float32" else wide


def test_quotient_digits_survive_an_approximate_division() -> None:
    """`_digits` corrects a guess that is one too low or too high: exact digits and remainders of exact multiples too."""
    rng = np.random.default_rng(17)
    divisor = rng.integers(1 << 23, 1 << 24, 1 << 16)
    remainder = rng.integers(0, divisor)
    # The second half: multiples of divisor / 2**9, whose digits end exactly.
    divisor[1 << 15 :] &= ~0x1FF
    remainder[1 << 15 :] = (divisor >> 9)[1 << 15 :] * rng.integers(0, 1 << 9, 1 << 15)
    remainder = np.minimum(remainder, divisor - 1)
    ours, rest = softfloat._digits(Sloppy(), remainder.astype(np.int32), divisor.astype(np.int32))
    truth, left = np.divmod(remainder << softfloat.DIGIT_BITS, divisor)
    assert (ours == truth).all()
    assert (rest == left).all()


def test_jax_divides_by_a_broadcast_scale() -> None:
    """Under jit XLA may turn x / s[:, None] into x * (1 / s), which is off for multiples of s: it must not show."""
    rng = np.random.default_rng(15)
    scale = (rng.integers(1, 1 << 12, (256, 1)) * 2 + 1).astype(np.float32)
    multiples = (rng.integers(1, 1 << 11, (256, 512)) * scale).astype(np.float32)
    a, b = multiples.view(np.int32), scale.view(np.int32)
    for offset in (0, 1, -1):
        moved = (a + offset).astype(np.int32)
        there = jnp.asarray(moved)
        ns = namespace_of(there)
        ours = np.asarray(jax.jit(lambda x, y, ns=ns: softfloat.divide(ns, x, y))(there, jnp.asarray(b)))
        flat = moved.reshape(-1), np.broadcast_to(b, a.shape).reshape(-1)
        assert_equal("divide", ours.reshape(-1), *flat)


PATTERNS = st.lists(
    st.integers(0, 0xFFFFFFFF) | st.floats(width=32).map(lambda v: int(np.float32(v).view(np.uint32))),
    min_size=8,
    max_size=8,
).map(lambda column: np.array(column, np.uint32).view(np.int32))
DRAWN = PATTERNS | float_arrays("float32", (8,)).map(lambda x: x.view(np.int32))


@settings(max_examples=300)
@given(name=st.sampled_from(list(OPERATIONS)), a=DRAWN, b=DRAWN)
def test_any_bit_patterns(name: str, a: Array, b: Array) -> None:
    """Hypothesis looks for a pair on which the integers and IEEE 754 differ."""
    assert_equal(name, OPERATIONS[name][0](NS, a, b), a, b)


def test_broadcasting() -> None:
    """A column and a row make a matrix, as in NumPy; so does a constant."""
    one = edges()[::9]
    for name, (integer, _, _) in OPERATIONS.items():
        matrix = integer(NS, one[:, None], one[None, :])
        assert matrix.shape == (len(one), len(one))
        assert (matrix == ieee(name, *np.broadcast_arrays(one[:, None], one[None, :]))).all()
    three = softfloat.bits_of(3.0)
    assert (
        softfloat._divide(NS, one, np.int32(three)) == ieee("divide", one, np.full_like(one, three))
    ).all()


def test_normalized() -> None:
    """significand * 2**(exponent - 23) is the value, and the significand of any number but zero has 24 bits."""
    bits = edges() & softfloat.MAGNITUDE
    bits = np.concatenate([bits[bits < 0x7F800000], 1 << np.arange(23)]).astype(np.int32)
    exponent, significand = softfloat.normalized(NS, bits)
    assert (np.ldexp(significand.astype(np.float64), exponent - 23) == bits.view(np.float32)).all()
    assert ((significand >> 23 == 1) | (bits == 0)).all()


@given(float_arrays("float32", (64,)))
def test_order_key_sorts_as_floats(x: Array) -> None:
    """Sorted by key the values ascend, -0 is -1 and so right before +0, and the key is its own inverse."""
    bits = x[~np.isnan(x)].view(np.int32)
    key = softfloat.order_key(NS, bits)
    assert (softfloat.order_key(NS, key) == bits).all()
    ranked = bits[np.argsort(key, kind="stable")].view(np.float32).astype(np.float64)
    assert (ranked[1:] >= ranked[:-1]).all()
    assert (key[bits == softfloat.SIGN] == -1).all()
    assert (key[bits == 0] == 0).all()


def root(bits: Array) -> Array:
    """NumPy's square root, which IEEE 754 rounds correctly, as a bit pattern; and by way of float64.

    The second rounding of a float64 square root is harmless: 53 >= 2 * 24 + 2 (Figueroa 1995).
    """
    with np.errstate(all="ignore"):
        narrow, wide = np.sqrt(bits.view(np.float32)), np.sqrt(bits.view(np.float32).astype(np.float64))
    np.testing.assert_array_equal(narrow, wide.astype(np.float32))
    return np.where(np.isnan(narrow), NAN, narrow.view(np.int32))


def test_square_roots() -> None:
    """Edges, random patterns, all subnormals' lengths, squares and their neighbours, in every library."""
    squares = np.square(np.arange(1 << 11, 1 << 12, dtype=np.float32)).view(np.int32)
    parts = [
        edges(),
        random_pairs(1 << 16, 18)[0],
        1 << np.arange(31),
        *(squares + step for step in (-1, 0, 1)),
    ]
    # Both parities of the exponent with every 61st significand.
    parts += [np.arange(0, 1 << 23, 61) | exponent << 23 for exponent in (126, 127)]
    bits = np.concatenate(parts).astype(np.int32)
    truth = root(bits)
    assert (softfloat.square_root(NS, bits) == truth).all()
    tensor, array = torch.from_numpy(bits), jnp.asarray(bits)
    assert (softfloat.square_root(namespace_of(tensor), tensor).numpy() == truth).all()
    ns = namespace_of(array)
    assert (np.asarray(jax.jit(lambda x: softfloat.square_root(ns, x))(array)) == truth).all()


@given(DRAWN)
def test_square_root_of_any_bit_patterns(bits: Array) -> None:
    assert (softfloat.square_root(NS, bits) == root(bits)).all()


def test_constants_and_nan() -> None:
    assert softfloat.bits_of(1.0) == 0x3F800000
    assert softfloat.bits_of(-0.0) == -0x80000000
    bits = np.array([0x7F800000, 0x7F800001, -0x00800000, -1, 0], np.int32)
    assert softfloat.is_nan(bits).tolist() == [False, True, False, True, False]


def test_fused_multiply_add_is_that_of_the_c_library() -> None:
    """Random bit patterns, sums that cancel, and sums a hair beside a tie, where a second rounding would show."""
    fmaf = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
    fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    rng = np.random.default_rng(0)
    a, b, c = rng.integers(0, 1 << 32, (3, 3000), dtype=np.uint32).view(np.float32)
    a[:1000], b[:1000] = rng.standard_normal((2, 1000))
    c[:500] = -a[:500] * b[:500]
    # 2**-24 (1 - 2**-46) beside 1 + 2**-23: a tie in float64, less in truth.
    a[1000:1002], b[1000:1002], c[1000:1002] = 2.0**-24 * (1 + 2.0**-23), 1 - 2.0**-23, (1, 1 + 2.0**-23)
    ours = softfloat.fused_multiply_add(a, b, c)
    truth = np.array([fmaf(*map(float, numbers)) for numbers in zip(a, b, c, strict=True)], np.float32)
    nan = np.isnan(truth)
    assert np.array_equal(np.isnan(ours), nan)
    assert np.array_equal(ours[~nan].view(np.int32), truth[~nan].view(np.int32))
    twice = (a[1001].astype(np.float64) * b[1001] + c[1001]).astype(np.float32)
    assert twice != ours[1001]
