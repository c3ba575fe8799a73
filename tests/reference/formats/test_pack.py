"""pack and unpack against a bit stream kept as one Python integer per row."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference
from reference import FORMATS

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
    with pytest.raises(error, match=words):
        call()
