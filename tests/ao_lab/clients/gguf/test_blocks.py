"""Blocks of GGUF: the bits that the package `gguf` reads, both ways, and what no block holds."""

import numpy as np
import pytest
import torch

import reference
from ao_lab.clients.gguf.blocks import Blocks, from_blocks, to_blocks, values_of
from ao_lab.config.recipe import named

gguf = pytest.importorskip("gguf")
TYPES = ("Q8_0", "Q5_0", "Q4_0", "Q5_1", "Q4_1", "MXFP4")
#: Schemes, the type that holds them, and bits of an element.
HELD = {
    "int8_g32_f16": "Q8_0", "int6_rowwise_f16": "Q8_0", "int5_g32_f16": "Q5_0", "int4_g32_f16": "Q4_0",
    "int4_g128_f16": "Q4_0", "int3_g64_f16": "Q4_0", "int4_tensorwise_f16": "Q4_0", "mxfp4": "MXFP4", "mxfp4_rceil": "MXFP4",
}  # fmt: skip
#: Schemes that no block has, and the reason that is said.
REFUSED = {
    "int8_g32": "scales \\(float32\\) are no float16",
    "int8_rowwise": "scales \\(float32\\) are no float16",
    "int4_g32_asymmetric_f16": "the minimum of a block",
    "int8_g32_asymmetric_f16": "no 8-bit block with a minimum",
    "int4_g16_f16": "no multiples of 32",
    "nf4": "nf4 is in no block of GGUF; GGUF holds integers with float16 scales",
    "nvfp4": "nvfp4 is in no block of GGUF",
    "mxfp8_e4m3": "mxfp8_e4m3 is in no block of GGUF",
    "fp8_rowwise": "fp8_rowwise is in no block of GGUF",
}


def matrix(rows=6, length=256):
    """Numbers of several sizes, a block of zeros among them."""
    x = np.random.default_rng(0).normal(size=(rows, length)).astype(np.float32)
    x[:, 32:64] *= 2.0**-6
    x[1, 64:96] = 0
    return x


def kind(name):
    return gguf.GGMLQuantizationType[name]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", HELD)
def test_values_are_those_of_the_client(name, packed):
    """gguf's own function on our bytes gives what `dequantize` gives; so do the parts that are read back."""
    scheme = named(name)
    q = reference.quantize(torch.from_numpy(matrix()), scheme, packed=packed and scheme.format.bits < 8)
    blocks, values = to_blocks(q), reference.dequantize(q).numpy()
    assert blocks.type == HELD[name]
    assert np.array_equal(gguf.quants.dequantize(blocks.data, kind(blocks.type)), values)
    assert np.array_equal(reference.dequantize(from_blocks(blocks)), values)


@pytest.mark.parametrize("name", TYPES)
def test_bytes_of_the_client_come_back(name):
    """What gguf's own quantizer writes is read as a scheme, with its values, and written again with its bytes."""
    data = gguf.quants.quantize(matrix(), kind(name))
    q = from_blocks(Blocks(name, data))
    assert np.array_equal(reference.dequantize(q), gguf.quants.dequantize(data, kind(name)))
    assert np.array_equal(to_blocks(q).data, data)


def test_codes_and_scales_stand_where_the_format_has_them():
    """By hand: byte j has element j low and element j + 16 high, counted from 8, behind a float16 scale."""
    x = np.zeros((1, 32), np.float32)
    x[0, 1], x[0, 17] = 7, -3
    (row,) = to_blocks(reference.quantize(x, named("int4_g32_f16"))).data
    assert row[:2].view(np.float16) == 1
    assert row[2:].tolist() == [0x88, 0x5F, *[0x88] * 14]


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_block_holds_is_named(name):
    scheme = named(name)
    with pytest.raises(ValueError, match=REFUSED[name]) as caught:
        to_blocks(reference.quantize(matrix(), scheme))
    assert scheme.name in str(caught.value)


def test_zero_points_go_where_their_minimum_is_a_float16():
    """Steps of an eighth from -5 to 10: the scale is a power of two, the zero point five steps above the smallest code."""
    x = np.random.default_rng(0).integers(-5, 11, (6, 256)).astype(np.float32) / 8
    x[:, ::32], x[:, 1::32] = -5 / 8, 10 / 8
    q = reference.quantize(x, "int4_g32_asymmetric")
    blocks = to_blocks(q)
    assert blocks.type == "Q4_1"
    assert (blocks.data.reshape(-1, 20)[:, 2:4].copy().view(np.float16) == -5 / 8).all()
    assert np.array_equal(values_of(blocks), x)


def test_a_block_that_is_nan_is_not_written():
    """e8m0's NaN is a finite scale in MXFP4."""
    x = matrix()
    x[2, 5] = np.nan
    with pytest.raises(ValueError, match="mxfp4: MXFP4 would hold other values"):
        to_blocks(reference.quantize(x, "mxfp4"))


@pytest.mark.parametrize(("shape", "axis"), [((4, 48), -1), ((64, 4), 0), ((2, 2, 32), -1)])
def test_rows_are_whole_blocks(shape, axis):
    q = reference.quantize(
        np.ones(shape, np.float32), named("int4_g16_f16" if shape == (4, 48) else "int4_g32_f16"), axis=axis
    )
    with pytest.raises(ValueError, match="blocks of GGUF are 32 elements of a matrix's row"):
        to_blocks(q)


def test_types_without_a_scheme_are_values():
    assert from_blocks(Blocks("Q4_K", np.zeros((1, 144), np.uint8))) is None
