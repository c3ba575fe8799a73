"""What is stored: the tiled layout of block scales, `packed=True`, and a `Quantized` made by hand, in every library."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ao_lab
import ao_lab.jax
import fast
import reference
from ao_lab.testing.strategies import assert_same_bits, assert_same_quantized, fill
from reference import (
    SCHEMES,
    Quantized,
    dequantize,
    matmul,
    pack,
    quantize,
    quantize_both,
    tile_scales,
    untile_scales,
)
from reference.arrays.bridges import to_torch
from reference.quantize.quantize import with_plain_scales, with_tiled_scales
from reference.quantize.stored import tiled_size
from tests.support.record_samples import sampled
from tests.support.refusals import refused

SHAPES = [(1, 1), (32, 4), (128, 4), (129, 5), (256, 8), (300, 17), (16, 64), (640, 3)]


def test_numpy_makes_no_array_of_one_object():
    for convert in (np.asarray, np.array):
        refused(
            TypeError,
            r"a Quantized is no array: dequantize\(q\)",
            convert,
            quantize(np.ones((4, 96), "f4"), "mxfp8_e4m3"),
        )


def test_what_is_printed_is_no_values():
    x = np.ones((4, 96), np.float32)
    said = "Quantized(mxfp8_e4m3, shape (4, 96), codes uint8, scale (4, 3) uint8, 8.25 bits/element)"
    assert repr(quantize(x, "mxfp8_e4m3")) == repr(quantize(torch.from_numpy(x), "mxfp8_e4m3")) == said
    assert repr(quantize(x[:, :0], "int8_rowwise")).startswith(
        "Quantized(int8_rowwise, shape (4, 0), codes uint8, scale "
    )
    packed = repr(quantize(x.T, "int4_g32_asymmetric", axis=0, packed=True))
    assert packed.startswith("Quantized(int4_g32_asymmetric, shape (96, 4), axis 0, codes (96, 2) uint8")
    assert packed.endswith("packed, 5.25 bits/element)")


def codes(shape, seed=0):
    return np.random.default_rng(seed).integers(1, 256, shape).astype(np.uint8)


def tiled_one_by_one(scale):
    """cuBLAS's formula, a scale at a time: tiles of 512 bytes, row by row of tiles."""
    row_tiles, column_tiles = -(-scale.shape[0] // 128), -(-scale.shape[1] // 4)
    tiled = np.zeros(row_tiles * column_tiles * 512, np.uint8)
    for (row, column), code in np.ndenumerate(scale):
        tile = (row // 128) * column_tiles + column // 4
        tiled[tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + column % 4] = code
    return tiled


@given(rows=st.integers(0, 300), columns=st.integers(0, 10), seed=st.integers(0, 2**32 - 1))
def test_every_scale_lies_where_the_formula_says(rows, columns, seed):
    scale = codes((rows, columns), seed)
    tiled = tile_scales(scale)
    assert tiled.shape == (tiled_size((rows, columns)),)
    assert_same_bits(tiled, tiled_one_by_one(scale))
    assert_same_bits(untile_scales(tiled, (rows, columns)), scale)


@pytest.mark.parametrize("shape", SHAPES)
def test_torchao_makes_the_same(shape):
    from torchao.prototype.mx_formats.utils import from_blocked, to_blocked

    scale = torch.from_numpy(codes(shape))
    tiled = tile_scales(scale)
    assert torch.equal(tiled, to_blocked(scale))
    assert torch.equal(untile_scales(tiled, shape), from_blocked(tiled, *shape))


@pytest.mark.parametrize(("name", "blocks"), [("mxfp8_e4m3", 8), ("mxfp4", 8), ("nvfp4", 16)])
def test_scales_as_quantize_keeps_them(name, blocks):
    q = quantize(np.random.default_rng(0).standard_normal((160, 256)).astype(np.float32), name)
    assert q.scale.shape == (160, blocks)
    tiled = tile_scales(q.scale)
    assert tiled.shape == (2 * blocks // 4 * 512,)
    assert_same_bits(tiled, tiled_one_by_one(q.scale))
    assert_same_bits(untile_scales(tiled, q.scale.shape), q.scale)


@pytest.mark.parametrize("shape", SHAPES)
def test_libraries(shape):
    scale = codes(shape)
    expected, tensor, array = tile_scales(scale), torch.from_numpy(scale), jnp.asarray(scale)
    jitted, batched = jax.jit(tile_scales)(array), jax.vmap(tile_scales)(array[None])[0]
    for result in (tile_scales(tensor), tile_scales.__wrapped__(tensor), tile_scales(array), jitted, batched):
        assert_same_bits(result, expected)
    back = jax.jit(lambda tiled: untile_scales(tiled, shape))(jitted)
    for result in (untile_scales.__wrapped__(torch.from_numpy(expected), shape), back):
        assert_same_bits(result, scale)


NAMES = ["mxfp8_e4m3", "mxfp4", "nvfp4", "torchao.nvfp4"]
X = np.random.default_rng(1).standard_normal((96, 96)).astype(np.float32)


def same_but_tiled(result, plain):
    """Tiled scales of a `Quantized` that has plain ones; everything else as it is."""
    assert (result.tiled, plain.tiled) == (True, False)
    assert_same_bits(result, replace(plain, scale=tile_scales(plain.scale), tiled=True))
    assert_same_bits(with_plain_scales(result).scale, plain.scale)
    assert_same_bits(result.scales, plain.scales)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("packed", [False, True])
def test_quantize_tiled(name, packed):
    plain, result = quantize(X, name, packed=packed), quantize(X, name, packed=packed, tiled=True)
    same_but_tiled(result, plain)
    assert_same_bits(dequantize(result), dequantize(plain))
    assert_same_bits(dequantize(result, "bfloat16"), dequantize(plain, "bfloat16"))
    assert_same_bits(quantize(X, name, scales=result.scales, tiled=True).scale, result.scale)
    assert_same_bits(with_tiled_scales(plain), result)
    assert with_tiled_scales(result) is result
    assert_same_bits(matmul(result, with_plain_scales(result)), matmul(plain, plain))


@pytest.mark.parametrize("name", NAMES)
def test_both_copies_tiled(name):
    for result, plain in zip(
        quantize_both(X[:64], name, tiled=True), quantize_both(X[:64], name), strict=True
    ):
        same_but_tiled(result, plain)


@pytest.mark.parametrize("name", sampled({"mxfp4", "nvfp4"}, NAMES))
def test_tiled_in_every_library(name):
    expected = quantize(X, name, tiled=True)
    tensor, array = torch.from_numpy(X.copy()), jnp.asarray(X)
    jitted = jax.jit(lambda x: quantize(x, name, tiled=True))(array)
    for result in (fast.quantize(tensor, name, tiled=True), quantize(array, name, tiled=True), jitted):
        assert result.tiled
        assert_same_bits(result, expected)
    assert_same_bits(fast.dequantize(fast.quantize(tensor, name, tiled=True)), dequantize(expected))
    assert_same_bits(jax.jit(dequantize)(jitted), dequantize(expected))
    assert_same_bits(fast.quantize_both(tensor, name, tiled=True)[1], quantize_both(X, name, tiled=True)[1])


def test_tiled_under_a_tracer():
    tensor = torch.from_numpy(X.copy())
    compiled = torch.compile(
        lambda x: fast.quantize(x, "mxfp4", tiled=True).scale, backend="eager", fullgraph=True
    )
    assert_same_bits(compiled(tensor), quantize(X, "mxfp4", tiled=True).scale)
    back = torch.compile(
        lambda x: fast.dequantize(fast.quantize(x, "nvfp4", tiled=True)), backend="eager", fullgraph=True
    )
    assert_same_bits(back(tensor), dequantize(quantize(X, "nvfp4")))


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
def test_empty_tiled(shape):
    q = quantize(np.zeros(shape, np.float32), "mxfp4", tiled=True)
    assert q.scale.shape == (0,)
    assert dequantize(q).shape == shape


@pytest.mark.parametrize("run", [quantize, fast.quantize])
@pytest.mark.parametrize(
    ("name", "shape", "axis", "words"),
    [
        ("fp8_rowwise", (32, 32), -1, "blocks along one axis .* leave tiled out"),
        ("fp8_1x128", (32, 128), -1, "scales in float32"),
        ("te.nvfp4_16x16", (32, 32), -1, r"blocks \(16, 16\)"),
        ("mxfp4", (32, 32), 0, "along its last axis, got shape .* and axis 0"),
        ("mxfp4", (2, 32, 32), -1, r"a matrix \(M, K\)"),
        ("mxfp4", (32,), -1, r"shape \(32,\)"),
    ],
)  # fmt: skip
def test_what_has_no_tiles(run, name, shape, axis, words):
    x = np.ones(shape, np.float32) if run is quantize else torch.ones(shape)
    refused(ValueError, words, run, x, name, axis=axis, tiled=True)


def test_tiled_scales_of_another_shape():
    q = quantize(X, "mxfp4", tiled=True)
    with pytest.raises(ValueError, match=r"\(512,\), got uint8 of shape \(96, 3\)"):
        dequantize(replace(q, scale=quantize(X, "mxfp4").scale))
    with pytest.raises(ValueError, match="float32"):
        dequantize(Quantized(q.codes, q.scale, None, None, q.shape, 1, SCHEMES["fp8_1x128"], tiled=True))


def test_padding_is_zero_and_is_dropped():
    tiled = tile_scales(np.full((1, 1), 127, np.uint8))
    assert tiled.nonzero()[0].tolist() == [0]
    assert untile_scales(np.full(512, 9, np.uint8), (2, 3)).tolist() == [[9] * 3] * 2


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: tile_scales(np.ones((2, 2), np.float32)), TypeError, "uint8, got float32"),
        (lambda: tile_scales(np.ones(4, np.uint8)), ValueError, r"\(M, blocks\), got shape \(4,\)"),
        (lambda: untile_scales(np.ones(512, np.int8), (2, 2)), TypeError, "uint8, got int8"),
        (lambda: untile_scales(np.ones(512, np.uint8), (2, 5)), ValueError, r"\(1024,\), got \(512,\)"),
        (lambda: untile_scales(np.ones((32, 16), np.uint8), (2, 2)), ValueError, r"got \(32, 16\)"),
        (lambda: untile_scales(np.ones(512, np.uint8), (2,)), ValueError, r"got \(2,\)"),
    ],
)
def test_what_is_refused(call, error, words):
    refused(error, words, call)


# `packed=True`: the codes that `pack` makes, in every library, back through `dequantize` and into `matmul`.

# 2, 3, 4, 6 and 8 bits; two levels, zero points, a codebook.
PACKED_NAMES = [
    "int2_g32",
    "int3_g32",
    "mxfp4",
    "nvfp4",
    "int4_g32_asymmetric",
    "mxfp6_e2m3",
    "mxfp8_e4m3",
    "nf4",
]
PACKED_X = fill("normals", (2, 32, 96))


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("name", PACKED_NAMES)
def test_packed_is_pack_of_the_codes(name, axis):
    x = np.moveaxis(PACKED_X, -1, axis)
    q, plain = quantize(x, name, axis=axis, packed=True), quantize(x, name, axis=axis)
    assert q.packed is True
    assert plain.packed is False
    assert_same_quantized(q, replace(plain, codes=pack(plain.codes, SCHEMES[name].element), packed=True))
    assert_same_bits(dequantize(q), dequantize(plain))


def assert_packed(q, expected):
    assert q.packed is True
    assert_same_quantized(q, expected)
    assert_same_bits(dequantize(q), dequantize(expected))


@pytest.mark.parametrize("name", PACKED_NAMES)
def test_torch(name):
    """torch shares NumPy's memory and by `__wrapped__` runs its own."""
    expected, tensor = quantize(PACKED_X, name, packed=True), torch.from_numpy(PACKED_X.copy())
    for function in (quantize, quantize.__wrapped__):
        assert_packed(function(tensor, name, packed=True), expected)


# A width that fills bytes evenly and one that does not; the others, a second level and zero points at night.
@pytest.mark.parametrize("name", sampled({"int3_g32", "mxfp4"}, PACKED_NAMES))
def test_jax(name):
    """JAX keeps the flag as a static part."""
    expected = quantize(PACKED_X, name, packed=True)
    result = quantize(jnp.asarray(PACKED_X), name, packed=True)
    assert_packed(result, expected)
    assert_packed(jax.jit(lambda x: quantize(x, name, packed=True))(PACKED_X), expected)
    assert_same_bits(jax.jit(dequantize)(expected), dequantize(expected))
    plain = jax.eval_shape(lambda x: quantize(x, name), PACKED_X)
    assert jax.tree.structure(result) != jax.tree.structure(plain)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int3_g32"])
def test_operands_of_matmul(name):
    other = fill("normals", (96, 4), seed=1)
    q = quantize(PACKED_X, name, packed=True)
    for accumulation in ("exact", "blocked"):
        expected = ao_lab.matmul(quantize(PACKED_X, name), other, accumulation=accumulation)
        assert_same_bits(ao_lab.matmul(q, other, accumulation=accumulation), expected)
    assert_same_bits(
        reference.matmul_error_bound(q, other), reference.matmul_error_bound(quantize(PACKED_X, name), other)
    )


def test_vmap_of_packed():
    stacked = jax.jit(jax.vmap(lambda x: quantize(x, "mxfp4", packed=True)))(jnp.asarray(PACKED_X))
    assert stacked.codes.shape == (2, 32, 48)
    assert stacked.shape == PACKED_X.shape == (2, 32, 96)
    assert_same_bits(jax.jit(jax.vmap(dequantize))(stacked), dequantize(quantize(PACKED_X, "mxfp4")))


@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (0,)])
def test_empty(shape):
    q = quantize(np.zeros(shape, np.float32), "mxfp4", packed=True)
    assert q.codes.shape == (*shape[:-1], shape[-1] // 2)
    assert dequantize(q).shape == shape


def test_packed_what_is_refused():
    refused(ValueError, "pack needs at least one axis", quantize, np.float32(1), "nvfp4", packed=True)
    q = quantize(PACKED_X, "mxfp4", packed=True)
    with pytest.raises(ValueError, match=r"^codes .* \(2, 32, 96\), got \(2, 32, 48\);.*packed=True"):
        dequantize(replace(q, packed=False))
    with pytest.raises(ValueError, match=r"^packed codes .* \(2, 32, 48\), got \(2, 32, 96\);.*packed=False"):
        dequantize(replace(quantize(PACKED_X, "mxfp4"), packed=True))
    # A byte per code needs no packing, so 0-d stays possible.
    assert quantize(np.float32(1), "fp8_tensorwise", packed=True).codes.shape == ()


# A `Quantized` made by hand: what does not fit is refused by every library with one text; bits above a code are ignored.

FIELD_X = fill("normals", (4, 256), seed=3)
# name, what is replaced, the error, its text.
WRONG = {
    "no scale": ("fp8_rowwise", {"scale": None}, ValueError, r"scale = float32 of shape \(4, 1\).*got none"),
    "scale shape": ("fp8_rowwise", {"scale": np.ones(4, np.float32)}, ValueError, r"got float32 of shape \(4,\)"),
    "scale dtype": ("mxfp4", {"scale": np.ones((4, 8), np.int8)}, ValueError, r"uint8 of.*got int8 of"),
    "no outer": ("nvfp4", {"outer": None}, ValueError, r"outer = float32 of shape \(\).*got none"),
    "outer shape": ("nvfp4", {"outer": np.ones(4, np.float32)}, ValueError, r"outer = float32 of shape \(\), got"),
    "outer too many": ("mxfp4", {"outer": np.ones((), np.float32)}, ValueError, "outer = none"),
    "no center": ("nf4", {"zero": None}, ValueError, r"zero = float32 of shape \(\).*got none"),
    "groups": ("nf4", {"outer": np.ones(3, np.float32)}, ValueError, r"outer = float32 of shape \(1,\), got"),
    "zero shape": (
        "int4_g32_asymmetric", {"zero": np.ones((4, 1), np.int8)}, ValueError, r"zero = int8 of shape \(4, 8\), got",
    ),
    "zero dtype": ("int4_g32_asymmetric", {"zero": np.ones((4, 8), np.uint8)}, ValueError, "got uint8 of"),
    "codes dtype": ("mxfp4", {"codes": np.zeros((4, 256), np.int8)}, TypeError, "uint8 or uint16, got int8"),
    "codes width": ("mxfp4", {"codes": np.zeros((4, 256), np.uint16)}, TypeError, "float4_e2m1fn are uint8, got uint16"),
    "codes shape": ("mxfp4", {"codes": np.zeros((4, 128), np.uint8)}, ValueError, r"\(4, 256\), got \(4, 128\)"),
    "shape": ("mxfp4", {"shape": (2, 512)}, ValueError, r"have shape \(2, 512\), got \(4, 256\)"),
    "shape's type": ("mxfp4", {"shape": 1024}, TypeError, "tuple of integers, got 1024"),
    "lengths": ("mxfp4", {"shape": (4, 256.0)}, TypeError, r"tuple of integers, got \(4, 256.0\)"),
    "axis": ("fp8_rowwise", {"axis": 0}, ValueError, r"scale = float32 of shape \(1, 256\), got"),
    "axis outside": ("fp8_rowwise", {"axis": 2}, ValueError, "axis 2 is outside"),
    "axis type": ("fp8_rowwise", {"axis": 1.0}, TypeError, "axis is an integer, got float"),
    "scheme": ("fp8_rowwise", {"scheme": "fp8_rowwise"}, TypeError, "record, got str: 'fp8_rowwise'"),
    "tiled": ("mxfp4", {"tiled": True}, ValueError, r"uint8 of shape \(1024,\), got uint8 of shape \(4, 8\)"),
    "never tiled": ("fp8_rowwise", {"tiled": True}, ValueError, "tiled=True takes a scheme"),
}  # fmt: skip
LIBRARIES = {
    "numpy": (np.asarray, reference.dequantize),
    "torch's operations": (to_torch, reference.dequantize.__wrapped__),
    "fast": (to_torch, fast.dequantize),
    "jax": (jax.numpy.asarray, ao_lab.jax.dequantize),
}


def in_library(q, convert):
    """q with arrays of another library."""
    arrays = {part: getattr(q, part) for part in ("codes", "scale", "outer", "zero")}
    return replace(q, **{part: None if a is None else convert(a) for part, a in arrays.items()})


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused(library, case):
    name, wrong, error, said = WRONG[case]
    convert, dequantize = LIBRARIES[library]
    q = in_library(replace(quantize(FIELD_X, name), **wrong), convert)
    refused(error, said, dequantize, q)


@pytest.mark.parametrize("run", [reference.dequantize, jax.jit(reference.dequantize)], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("ternary_rowwise", {"packed": False}, r"have shape \(4, 256\), got \(4, 64\); .* packed=True"),
        ("ternary_rowwise", {"shape": (2, 256)}, r"of shape \(2, 256\) .* got \(4, 64\)"),
        ("fp8_tensorwise", {"shape": (256, 4)}, r"have shape \(256, 4\), got \(4, 256\)"),
        ("fp8_tensorwise", {"shape": None}, "tuple of integers, got None"),
    ],
)
def test_jax_refuses_another_shape_than_that_of_the_codes(run, name, wrong, said):
    """Shapes follow from codes where JAX takes a `Quantized` apart; one that did not fit before stays, and its scales fit."""
    q = replace(quantize(jnp.asarray(FIELD_X), name, packed=True), **wrong)
    refused((ValueError, TypeError), said, run, q)
    assert jax.tree.map(lambda leaf: leaf, q).shape == q.shape
    assert jax.tree.structure(q) != jax.tree.structure(replace(q, shape=(4, 256), packed=True))


@pytest.mark.parametrize("packed", [False, True])
def test_lengths_and_axes_are_numpy_s_integers_too(packed):
    q = quantize(FIELD_X, "int4_g32", packed=packed)
    mine = replace(q, shape=tuple(map(np.int64, q.shape)), axis=np.int64(1))
    assert_same_bits(reference.dequantize(mine), reference.dequantize(q))
    exported = jax.export.export(jax.jit(reference.dequantize))(in_library(mine, jnp.asarray))
    read = jax.export.deserialize(exported.serialize())
    assert_same_bits(read.call(in_library(q, jnp.asarray)), reference.dequantize(q))


def test_scales_of_another_library():
    q = quantize(FIELD_X, "fp8_rowwise")
    with pytest.raises(ValueError, match="in the codes' library, got a ArrayImpl"):
        reference.dequantize(replace(q, scale=jax.numpy.asarray(q.scale), codes=to_torch(q.codes)))


@pytest.mark.parametrize(
    "name", ["mxfp4", "int4_g32", "int4_g32_asymmetric", "torchao.int4_g32_tinygemm", "nf4"]
)
def test_bits_above_a_code_are_ignored(name):
    q = quantize(FIELD_X, name)
    more = replace(q, codes=q.codes | np.uint8(0xB0))
    assert_same_bits(reference.dequantize(more), reference.dequantize(q))
    if SCHEMES[name].zero is None or SCHEMES[name].zero.rule == "code":
        w = fill("normals", (256, 2), seed=4)
        assert_same_bits(reference.matmul(more, w), reference.matmul(q, w))


def test_matmul_refuses_as_well():
    q = quantize(FIELD_X, "fp8_rowwise")
    refused(ValueError, "takes scale = float32", reference.matmul, replace(q, scale=None), FIELD_X.T)
