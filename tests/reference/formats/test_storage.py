"""`pack` and `unpack` against a bit stream kept as one Python integer per row; stored scales times a power of two against exact
fractions."""

from fractions import Fraction

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from ao_lab.testing.strategies import assert_same_bits
from reference import FORMATS
from reference.arrays.namespace import namespace_of
from reference.formats.storage import SCALED, load, times_power_of_two
from tests.support.refusals import refused

SUBBYTE = [name for name, fmt in FORMATS.items() if fmt.bits < 8]


def stream(row, bits):
    """Bytes of a row: code i at bits [i * b, (i + 1) * b) of a little-endian integer."""
    total = sum(int(code) << (bits * index) for index, code in enumerate(row))
    return list(total.to_bytes(-(-len(row) * bits // 8), "little"))


@given(name=st.sampled_from(SUBBYTE), length=st.integers(0, 40), seed=st.integers(0, 2**32 - 1))
def test_layout_is_a_little_endian_bit_stream(name, length, seed):
    bits = FORMATS[name].bits
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (3, length)).astype(np.uint8)
    packed = reference.pack(codes, name)
    assert packed.tolist() == [stream(row, bits) for row in codes]
    assert packed.shape == reference.packed_shape(codes.shape, name)
    assert reference.unpack(packed, name, codes.shape).tolist() == codes.tolist()


def test_even_index_is_in_the_low_nibble():
    codes = np.array([0x1, 0x2, 0xF], np.uint8)
    assert reference.pack(codes, "float4_e2m1fn").tolist() == [0x21, 0x0F]


def test_four_bits_as_torchao_packs_them():
    from torchao.prototype.mx_formats.kernels import pack_uint4

    codes = torch.randint(0, 16, (5, 64), dtype=torch.uint8)
    assert torch.equal(reference.pack(codes, "float4_e2m1fn"), pack_uint4(codes))


@pytest.mark.parametrize("name", ["int2", "int3", "float4_e2m1fn", "float6_e3m2fn"])
def test_jax_and_torch_pack_the_same(name):
    import jax
    import jax.numpy as jnp

    codes = np.random.default_rng(0).integers(0, 1 << FORMATS[name].bits, (2, 5, 23)).astype(np.uint8)
    expected = reference.pack(codes, name)
    jitted = jax.jit(lambda c: reference.pack(c, name))(jnp.asarray(codes))
    native = reference.pack.__wrapped__(torch.from_numpy(codes), name)
    assert np.array_equal(np.asarray(jitted), expected)
    assert np.array_equal(native.numpy(), expected)
    assert np.array_equal(np.asarray(reference.unpack(jitted, name, codes.shape)), codes)
    assert np.array_equal(reference.unpack.__wrapped__(native, name, codes.shape).numpy(), codes)


def test_wide_codes_are_their_own_storage():
    codes = np.arange(6, dtype=np.uint8).reshape(2, 3)
    assert reference.pack(codes, "float8_e4m3fn") is codes
    wide = codes.astype(np.uint16)
    assert reference.unpack(wide, "bfloat16", (2, 3)) is wide


def test_bits_above_the_format_are_ignored():
    assert reference.pack(np.array([0xF1, 0x32], np.uint8), "int4").tolist() == [0x21]


def test_rows_of_other_layouts():
    codes = np.random.default_rng(1).integers(0, 16, (6, 8)).astype(np.uint8)
    expected = reference.pack(np.ascontiguousarray(codes.T[::-1]), "int4")
    assert np.array_equal(reference.pack(codes.T[::-1], "int4"), expected)
    assert reference.pack(np.zeros((0, 5), np.uint8), "int3").shape == (0, 2)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: reference.pack(np.zeros(4, np.int8), "int4"), TypeError, "uint8"),
        (lambda: reference.pack(np.uint8(3), "int4"), ValueError, "0-d"),
        (lambda: reference.pack(np.zeros(4, np.uint8), "in4"), ValueError, "int4"),
        (lambda: reference.unpack(np.zeros((2, 3), np.uint8), "int4", (2, 7)), ValueError, r"\(2, 4\)"),
        (lambda: reference.unpack(np.zeros(4, ml_dtypes.int4), "int4", (8,)), TypeError, "int4"),
    ],
)
def test_wrong_input_says_what_to_do(call, error, words):
    refused(error, words, call)


NUMPY = namespace_of(np.zeros(1))
WIDTHS = {"float32": 32, "bfloat16": 16, "float16": 16, "float8_e8m0fnu": 8}


def values(stored, storage):
    return load(NUMPY, stored, storage).view(np.float32)


@pytest.mark.parametrize("storage", SCALED)
def test_products_are_exact_or_said_not_to_be(storage):
    carrier = f"uint{WIDTHS[storage]}"
    smallest = 2.0**-126 if storage == "float32" else max(FORMATS[storage].smallest_normal, 2.0**-126)
    largest = np.finfo(np.float32).max if storage == "float32" else FORMATS[storage].max

    @settings(max_examples=60)
    @given(st.integers(0, 2 ** WIDTHS[storage] - 1), st.integers(-300, 300) | st.integers(-3, 3))
    def check(code, exponent):
        stored = np.array([code], carrier)
        stored = stored.view(np.float32) if storage == "float32" else stored
        made, exact = times_power_of_two(stored, storage, exponent)
        old, new = float(values(stored, storage)[0]), float(values(made, storage)[0])
        assert made.dtype == stored.dtype
        if not np.isfinite(old) or old == 0:
            assert exact[0]
            np.testing.assert_array_equal(new, old)
            return
        wanted = Fraction(old) * Fraction(2) ** exponent
        assert exact[0] == (Fraction(smallest) <= abs(wanted) <= Fraction(float(largest)))
        assert not exact[0] or Fraction(new) == wanted

    check()


def test_by_hand():
    made, exact = times_power_of_two(np.array([0, 1, 127, 254, 255], np.uint8), "float8_e8m0fnu", 1)
    assert made[exact].tolist() == [1, 2, 128, 255]
    assert exact.tolist() == [True, True, True, False, True]
    made, exact = times_power_of_two(np.array([1, -3, 0, np.inf, 2.0**-126], np.float32), "float32", -2)
    assert made[exact].tolist() == [0.25, -0.75, 0, np.inf]
    assert exact.tolist() == [True, True, True, True, False]


@pytest.mark.nightly
@pytest.mark.parametrize("storage", ["float16", "bfloat16", "float8_e8m0fnu"])
def test_jax(storage):
    codes = np.arange(2 ** WIDTHS[storage]).astype(f"uint{WIDTHS[storage]}")
    for exponent in (-3, 3):
        ours = times_power_of_two(jnp.asarray(codes), storage, exponent)
        assert_same_bits(ours, times_power_of_two(codes, storage, exponent))


def test_storages_that_are_not_exact():
    with pytest.raises(ValueError, match="float8_e4m3fn times a power of two are not exact"):
        times_power_of_two(np.zeros(1, np.uint8), "float8_e4m3fn", 1)
