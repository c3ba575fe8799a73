"""2:4 storage against loops and against torch's, every pattern of four; of codes by `quantize_compressed`, where zero has a
code."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch.sparse import _semi_structured_conversions as conversions

import reference
from ao_lab.testing.strategies import assert_same_bits, fill
from reference import SCHEMES, Scale, Scheme, dequantize, quantize
from reference.sparsity.compress import (
    FROM_ZERO_POINT,
    PLAIN_ELEMENTS,
    compress,
    decompress,
    is_plain,
    quantize_compressed,
    unit_scales,
    unsupported_reason,
    zero_code,
)
from reference.sparsity.prune import prune
from tests.support.record_samples import sampled
from tests.support.refusals import refused

UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
DTYPES = [np.uint8, np.int8, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.float16, ml_dtypes.bfloat16, np.float32,
          np.int32, np.float64]  # fmt: skip


def slow_compress(bits, mask):
    """The layout, element by element: (values, metadata) of 2-d bit patterns."""
    rows, k = bits.shape
    values, metadata = np.zeros((rows, k // 2), bits.dtype), np.zeros((rows, -(-k // 8)), np.uint8)
    for row, group in itertools.product(range(rows), range(k // 4)):
        kept = [i for i in range(4) if mask[row, 4 * group + i]]
        indices = sorted(kept + [i for i in (2, 3) if i not in kept][: 2 - len(kept)])
        for place, index in enumerate(indices):
            if index in kept:
                values[row, 2 * group + place] = bits[row, 4 * group + index]
            metadata[row, group // 2] |= index << (4 * (group % 2) + 2 * place)
    return values, metadata


def random_mask(rng, shape):
    """At most two kept in each group."""
    counts = rng.integers(0, 3, (*shape[:-1], shape[-1] // 4, 1))
    order = rng.permuted(np.broadcast_to(np.arange(4), (*shape[:-1], shape[-1] // 4, 4)), axis=-1)
    return (order < counts).reshape(shape)


def bits_of(x):
    return np.asarray(x).view(UINT[np.asarray(x).dtype.itemsize])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [0, 4, 8, 12, 40])
def test_layout_and_round_trip_on_bits(dtype, k):
    rng = np.random.default_rng(k)
    w = rng.integers(0, 256, (7, k * np.dtype(dtype).itemsize), dtype=np.uint8).view(dtype)
    mask = random_mask(rng, w.shape)
    stored = compress(w, mask)
    values, metadata = slow_compress(bits_of(w), mask)
    assert stored.values.dtype == w.dtype
    np.testing.assert_array_equal(bits_of(stored.values), values)
    np.testing.assert_array_equal(stored.metadata, metadata)
    back = decompress(*stored, shape=w.shape)
    assert back.dtype == w.dtype
    np.testing.assert_array_equal(bits_of(back), np.where(mask, bits_of(w), 0))


def test_all_masks_of_a_group():
    """All 11 masks with at most two kept; the codes of the metadata are written out."""
    codes = {(): 0b1110, (0,): 0b1000, (1,): 0b1001, (2,): 0b1110, (3,): 0b1110, (0, 1): 0b0100, (0, 2): 0b1000,
             (1, 2): 0b1001, (0, 3): 0b1100, (1, 3): 0b1101, (2, 3): 0b1110}  # fmt: skip
    w = np.array([[1, 2, 3, 4]], np.uint8)
    for kept, code in codes.items():
        mask = np.isin(np.arange(4), kept)[None]
        stored = compress(w, mask)
        assert stored.metadata.tolist() == [[code]]
        np.testing.assert_array_equal(decompress(*stored), np.where(mask, w, 0))


@pytest.mark.parametrize("kept", [(0, 1, 2), (0, 2, 3), (1, 2, 3), (0, 1, 3), (0, 1, 2, 3)])
def test_more_than_two_kept(kept):
    w = np.arange(1, 9, dtype=np.float32)[None]
    mask = np.isin(np.arange(8), kept)[None]
    refused(ValueError, "1 of 2 groups have more that are kept; make the mask", compress, w, mask)
    with pytest.raises(ValueError, match="1 of 2 groups have more that are kept; make the mask"):
        compress(torch.from_numpy(w), torch.from_numpy(mask))
    with pytest.raises(ValueError, match="1 of 2 groups have more that are kept; make the mask"):
        compress(jnp.asarray(w), jnp.asarray(mask))
    # Under jit it cannot be checked: the first two stay.
    values, _ = jax.jit(compress)(jnp.asarray(w), jnp.asarray(mask))
    np.testing.assert_array_equal(values[0, :2], w[0, list(kept[:2])])


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(
        np.uint32,
        st.tuples(st.integers(1, 3), st.sampled_from([4, 8, 12, 16])),
        elements=st.integers(0, 2**32 - 1),
    )
)
def test_pattern_means_prune_and_round_trips(bits):
    w = bits.view(np.float32)
    back = decompress(*compress(w, "2:4"))
    np.testing.assert_array_equal(back.view(np.uint32), np.where(prune(w), bits, 0))
    # What was pruned is 2:4 and needs no mask: the same bits again, but for -0.
    sparse = np.where(prune(w), bits, 0)
    again = decompress(*compress(sparse.view(np.float32))).view(np.uint32)
    np.testing.assert_array_equal(again, np.where(sparse == 0x80000000, 0, sparse))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
def test_equals_torch_before_its_reordering(dtype):
    """torch.sparse's own converter: the same values, and the same metadata once its reordering is undone."""
    rng = np.random.default_rng(5)
    m, k = 64, 128
    w = torch.from_numpy(rng.integers(1, 100, (m, k))).to(dtype)
    mask = torch.from_numpy(random_mask(rng, (m, k)))
    stored = compress(w, mask)
    values, reordered = conversions.sparse_semi_structured_from_dense_cutlass(w * mask)
    offsets = conversions._calculate_meta_reordering_scatter_offsets(
        m, reordered.shape[1], reordered.dtype, "cpu"
    )
    plain = torch.gather(reordered.reshape(-1), 0, offsets).view(m, -1)
    assert torch.equal(stored.values, values)
    assert torch.equal(stored.metadata, plain.contiguous().view(torch.uint8))
    dense = conversions.sparse_semi_structured_to_dense_cutlass(values, reordered)
    assert torch.equal(decompress(*stored), dense)


@pytest.mark.parametrize(
    "name",
    sampled(
        {"float32", "bfloat16", "int8"}, ["float32", "bfloat16", "float16", "int8", "uint8", "float8_e4m3fn"]
    ),
)
def test_libraries_agree_bit_for_bit(name):
    rng = np.random.default_rng(6)
    dtype = (
        np.dtype(name)
        if name in ("float32", "float16", "int8", "uint8")
        else np.dtype(getattr(ml_dtypes, name))
    )
    w = rng.integers(0, 256, (3, 5, 24 * dtype.itemsize), dtype=np.uint8).view(dtype)
    mask = random_mask(rng, w.shape)
    values, metadata = compress(w, mask)
    on_torch = compress(
        torch.from_numpy(bits_of(w).copy()).view(getattr(torch, name)), torch.from_numpy(mask)
    )
    assert on_torch.values.dtype == getattr(torch, name)
    np.testing.assert_array_equal(on_torch.values.view(torch.uint8).numpy(), values.view(np.uint8))
    np.testing.assert_array_equal(on_torch.metadata.numpy(), metadata)
    np.testing.assert_array_equal(
        decompress(*on_torch).view(torch.uint8).numpy(), decompress(values, metadata).view(np.uint8)
    )
    for wrap in (lambda f: f, jax.jit, jax.vmap):
        on_jax = wrap(compress)(jnp.asarray(w), jnp.asarray(mask))
        np.testing.assert_array_equal(bits_of(on_jax.values), bits_of(values))
        np.testing.assert_array_equal(on_jax.metadata, metadata)
        np.testing.assert_array_equal(
            bits_of(wrap(decompress)(*on_jax)), bits_of(decompress(values, metadata))
        )


FLOAT_DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
                ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e3m4, ml_dtypes.float8_e8m0fnu, ml_dtypes.float6_e3m2fn,
                ml_dtypes.float4_e2m1fn]  # fmt: skip


@pytest.mark.parametrize("dtype", [*FLOAT_DTYPES, np.int8, np.uint8, np.int32])
def test_what_counts_as_nonzero(dtype):
    """Without a mask: what is no zero of the dtype, by its own comparison; e8m0 has none, so its code 0 is left out."""
    dtype = np.dtype(dtype)
    codes = np.arange(
        2 ** (4 if "float4" in dtype.name else 6 if "float6" in dtype.name else 8), dtype=np.uint8
    )
    one = np.zeros((len(codes), dtype.itemsize), np.uint8)
    one[:, -1] = codes  # the byte that holds the sign
    w = np.zeros((len(codes), 4 * dtype.itemsize), np.uint8)
    w[:, -dtype.itemsize :] = one
    kept = decompress(*compress(w.view(dtype))).view(dtype)[:, 3]
    zero = codes == 0 if dtype.name == "float8_e8m0fnu" else one.view(dtype)[:, 0] == 0
    np.testing.assert_array_equal(bits_of(kept), np.where(zero, 0, bits_of(one.view(dtype)[:, 0])))


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_a_dense_matrix_is_refused_and_counted(library):
    w = np.zeros((3, 8), np.float32)
    w[0, :4], w[2, 4:7], w[1, :2] = 1, np.nan, 2.0**-149
    convert = {"numpy": np.asarray, "torch": torch.from_numpy, "jax": jnp.asarray}[library]
    refused(ValueError, r"2 of 6 groups have more that are not zero; .*mask='2:4'", compress, convert(w))
    w[0, :4], w[2, 4:7] = [1, -0.0, -0.0, 2], [-0.0, 0, np.nan]
    values, metadata = compress(convert(w))
    expected = compress(w, w != 0)
    np.testing.assert_array_equal(bits_of(values), bits_of(expected.values))
    np.testing.assert_array_equal(np.asarray(metadata), expected.metadata)


def test_counts_are_unknown_under_jit():
    values, _ = jax.jit(compress)(jnp.asarray([[0.0, 5, 6, 7]]))
    np.testing.assert_array_equal(values, [[5, 6]])


def test_the_mask_decides_about_negative_zero():
    w = np.array([[-0.0, 1, -0.0, 3]], np.float32)
    kept = compress(w, np.array([[True, False, True, False]]))
    np.testing.assert_array_equal(bits_of(kept.values), [[0x80000000, 0x80000000]])
    np.testing.assert_array_equal(compress(w).values, [[1, 3]])


def test_not_contiguous():
    rng = np.random.default_rng(7)
    w = rng.standard_normal((32, 8)).astype(np.float32)
    for view in (w.T, w[::2, ::2], w[::-1]):
        mask = prune(view)
        expected = compress(view.copy(), mask.copy())
        for got in (
            compress(view, mask),
            compress(torch.from_numpy(w.copy()).T, prune(w.T)) if view is w.T else expected,
        ):
            np.testing.assert_array_equal(np.asarray(got.values), expected.values)
            np.testing.assert_array_equal(np.asarray(got.metadata), expected.metadata)
    values, metadata = compress(w, "2:4")
    np.testing.assert_array_equal(decompress(values[::2], metadata[::2]), decompress(values, metadata)[::2])


def test_refusals_name_the_way_out():
    w = np.zeros((2, 8), np.float32)
    refused(ValueError, r"multiple of 4, got shape \(2, 6\)", compress, w[:, :6])
    refused(ValueError, "'2:4' only", compress, w, "4:8")
    refused(TypeError, "mask is bool, got float32", compress, w, w)
    refused(ValueError, "one bool per element", compress, w, np.zeros((2, 4), bool))
    refused(TypeError, "store its codes as uint8", compress, w.astype(np.complex64), np.zeros((2, 8), bool))
    values, metadata = compress(w)
    refused(ValueError, r"metadata of shape \(2, 1\)", decompress, values, metadata[:, :0])
    refused(ValueError, "come in pairs", decompress, values[:, :3], metadata)
    refused(ValueError, r"decompress to \(2, 8\)", decompress, values, metadata, shape=(2, 16))
    refused(TypeError, "metadata is uint8", decompress, values, metadata.astype(np.int8))


# `quantize_compressed` is quantization and compression, whose mask is chosen before anything is rounded.


def weights():
    return fill("normals", (8, 64)).copy()


@pytest.mark.parametrize("name", ["fp8_rowwise", "fp8_tensorwise_e5m2", "int8_rowwise", "mxfp8_e4m3"])
def test_codes_are_those_of_kept_elements(name):
    w = weights()
    scales = reference.choose_scales(w, name)
    made = quantize_compressed(w, name, scales)
    wanted = np.where(reference.prune(w), reference.quantize(w, name, scales=scales).codes, 0)
    assert_same_bits(reference.decompress(*made), wanted)


@pytest.mark.parametrize("name", ["fp8_rowwise", "fp8_tensorwise", "mxfp8_e4m3"])
def test_scales_are_those_of_the_dense_tensor(name):
    """What is pruned is never the largest of its block."""
    w = weights()
    pruned = np.where(reference.prune(w), w, np.float32(0))
    assert_same_bits(reference.choose_scales(w, name).scale, reference.choose_scales(pruned, name).scale)


def test_ties_of_codes_do_not_choose():
    """15 and 15.5 have one code of e4m3; the larger one stays."""
    w = np.array([[15.0, 15.5, 200.0, 0.0]], np.float32)
    made = quantize_compressed(w, "fp8_tensorwise", np.float32(1))
    assert made.metadata.tolist() == [[1 | 2 << 2]]


def test_masks_are_those_of_compress():
    w = weights()
    mask = reference.prune(w, pattern="1:4")
    q = reference.quantize(w, "fp8_rowwise")
    made = quantize_compressed(w, "fp8_rowwise", q.scale, mask)
    assert_same_bits(made.values, reference.compress(q.codes, mask).values)
    assert_same_bits(quantize_compressed(w * mask, "fp8_rowwise", q.scale, None), made)
    refused(ValueError, "are not zero", quantize_compressed, w, "fp8_rowwise", q.scale, None)
    refused(ValueError, "pattern '2:4' only", quantize_compressed, w, "fp8_rowwise", q.scale, "1:4")


STORED = [name for name, scheme in SCHEMES.items() if unsupported_reason(scheme) is None]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nf4", "flattened"),
        ("torchao.int4_g32_tinygemm", "floating-point numbers"),
        ("stretched2_g32", "zeros as other values"),
        ("torchao.fp8_rowwise_inference", "zeros as other values"),
    ],
)
def test_schemes_that_refill_zeros_are_refused(name, reason):
    assert reason in unsupported_reason(SCHEMES[name])
    refused(ValueError, f"2:4 storage does not hold {name}.*int8_rowwise", zero_code, SCHEMES[name])


def test_what_is_stored():
    assert {
        "int8_rowwise",
        "int4_g128",
        "int4_g128_asymmetric",
        "fp8_rowwise",
        "mxfp4",
        "nvfp4",
        "ternary_g32",
    } <= set(STORED)
    assert zero_code(SCHEMES["int4_g32_asymmetric"]) == FROM_ZERO_POINT


@given(st.sampled_from(STORED), st.integers(0, 2**32 - 1), st.floats(-30, 30))
def test_a_zero_has_its_code_in_every_block(name, seed, exponent):
    scheme = SCHEMES[name]
    draw = np.random.default_rng(seed)
    x = (draw.standard_normal((256, 256)) * 2.0**exponent).astype(np.float32)
    zeros = draw.random(x.shape) < 0.5
    x[zeros] = 0
    q = reference.quantize(x, scheme)
    assert (reference.dequantize(q)[zeros] == 0).all()
    if zero_code(scheme) == FROM_ZERO_POINT:
        count = 256 // q.zero.shape[-1] if q.zero.ndim else 256
        expected = np.repeat(q.zero, count, -1) if q.zero.ndim else np.broadcast_to(q.zero, x.shape)
        expected = expected.view(np.uint8) & (2**scheme.format.bits - 1)
        assert (q.codes[zeros] == expected[zeros]).all()
    else:
        assert (q.codes[zeros] == zero_code(scheme)).all()


@pytest.mark.parametrize("element", PLAIN_ELEMENTS)
def test_plain_elements_are_the_bits_of_every_number(element):
    scheme = PLAIN_ELEMENTS[element]
    bits = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    x = bits.view(ml_dtypes.bfloat16 if element == "bfloat16" else np.float16)
    q = reference.quantize(x, scheme, scales=unit_scales())
    numbers = ~np.isnan(x.astype(np.float32))
    assert (q.codes == bits)[numbers].all()
    assert (reference.dequantize(q, element).view(np.uint16) == bits)[numbers].all()
    assert np.isnan(reference.dequantize(q)[~numbers]).all()
    assert zero_code(scheme) == 0
    assert is_plain(replace(scheme, name="another"))
    assert not is_plain(SCHEMES["int8_rowwise"])


def test_an_empty_block_has_the_code_of_zero_too():
    """0 / 0 becomes `nan_code` where IEEE arithmetic decides; times the scale 0 its value is 0, but its code is another."""
    scale = Scale(block=4, target=6.0)
    scheme = Scheme(name="x", element="float4_e2m1fn", scale=scale, nan="ieee", nan_code=5, dequantize="ieee")
    q = quantize(np.zeros((1, 4), np.float32), scheme)
    assert q.codes.tolist() == [[5] * 4]
    assert not dequantize(q).any()
    assert unsupported_reason(scheme) == "it stores zeros as other values"
