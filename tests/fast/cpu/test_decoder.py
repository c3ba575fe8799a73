"""Decoded rows have the reference's bits, tails included; products are exact on integers and the same on any threads."""

import pytest
import torch

import reference
from fast.cpu import threads
from fast.cpu.decoder import Decoder, multiplies_bfloat16
from tests.support.record_samples import STRUCTURES

#: A record of every kind of decoding: bytes, nibbles, codes across bytes, tables, zero points, blocks within a step.
SOME = (
    "int8_rowwise",
    "int8_g32_asymmetric",
    "int4_g32",
    "int4_g128_asymmetric",
    "int3_g32",
    "fp8_rowwise",
    "nvfp4",
    "nf4",
)
OTHERS = tuple(name for name in STRUCTURES if name not in SOME)
#: Lengths that end within a step, within a block, within a group of bytes; fewer rows than the loop takes at a time.
SHAPES = ((64, 256), (7, 250), (5, 66), (1, 320))
PRODUCTS = ("int8_rowwise", "int4_g32")
DTYPES = (torch.float32, torch.bfloat16)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored(scheme, shape, packed=True):
    try:
        return reference.quantize(normal(*shape), scheme, packed=packed)
    except ValueError:
        return None  # blocks that do not divide this shape


def same_bits(got, want):
    return torch.equal(got, want) and torch.equal(got.signbit(), want.signbit())


def decoded(w, dtype):
    """All rows, by the loop; None where the record is left to others."""
    decoder = Decoder.of(w, dtype)
    if decoder is None:
        return None
    out = torch.full((decoder.rows, decoder.width), float("nan"), dtype=dtype)
    decoder.write(0, decoder.rows, out)
    return out[:, : decoder.length].reshape(w.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", [*SOME, *(pytest.param(one, marks=pytest.mark.nightly) for one in OTHERS)])
def test_rows_have_the_bits_of_the_reference(scheme, dtype):
    seen = 0
    for shape in SHAPES:
        w = stored(scheme, shape)
        got = None if w is None else decoded(w, dtype)
        if got is not None:
            assert same_bits(got, reference.dequantize(w, str(dtype).removeprefix("torch."))), shape
            seen += 1
    assert seen


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", ["torchao.mxfp8_e4m3_floor", "torchao.int4_g32_asymmetric", "mxint8"])
def test_records_that_round_every_operation(scheme):
    if scheme not in reference.SCHEMES:
        pytest.skip("no such record")
    w = stored(scheme, (9, 256))
    for dtype in DTYPES:
        assert same_bits(decoded(w, dtype), reference.dequantize(w, str(dtype).removeprefix("torch.")))


def test_every_code_of_8_bits():
    """Infinities, NaN and subnormals of both formats of 8 bits, and all integers, under scales of many sizes."""
    for scheme in ("fp8_rowwise", "int8_rowwise"):
        w = stored(scheme, (16, 256))
        w.codes.copy_(torch.arange(256, dtype=torch.uint8))
        w.scale.copy_((2.0 ** torch.arange(-120, 40, 10)).view(16, 1) * 1.7)
        want = reference.dequantize(w)
        got = decoded(w, torch.float32)
        assert torch.equal(got.isnan(), want.isnan())
        assert same_bits(got.nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", PRODUCTS)
def test_products_of_integers_are_exact(scheme, dtype):
    """Scales that are powers of two, sums below 2**24: every order of summation gives one result, and a row beside others the
    same."""
    if dtype == torch.bfloat16 and not multiplies_bfloat16():
        pytest.skip("this CPU has no products of bfloat16")
    for shape in ((64, 256), (7, 250), (3, 96), (1, 66)):
        w = stored(scheme, shape)
        if w is None:
            continue
        w.scale.copy_(2.0 ** torch.arange(w.scale.numel()).remainder(4).reshape(w.scale.shape))
        decoder, x = Decoder.of(w, dtype), normal(9, shape[1], seed=3).mul(2).round()
        want = x.double() @ reference.dequantize(w).double().t()
        for count in (2, 3, 4, 9):
            assert torch.equal(decoder.multiply(x[:count].to(dtype)).double(), want[:count]), (shape, count)


@pytest.mark.parametrize("scheme", PRODUCTS)
def test_a_row_has_its_bits_beside_any_others_on_any_threads(scheme, monkeypatch):
    w, x = stored(scheme, (37, 256)), normal(7, 256, seed=4)
    decoder = Decoder.of(w, torch.float32)
    alone = decoder.multiply(x)
    assert torch.equal(decoder.multiply(x[3:5]), alone[3:5])
    assert torch.equal(decoder.multiply(x.t().contiguous().t()), alone)
    assert torch.equal(decoder.multiply(torch._neg_view(x)), -alone)
    monkeypatch.setattr(threads, "WORTH", 1)
    for count in (2, 37):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        assert torch.equal(decoder.multiply(x), alone)


def test_parts_of_different_weights_are_refused():
    """Loops look at no lengths: what they would read beyond is refused before."""
    w = stored("int8_rowwise", (4, 64))
    for part, cut in (("codes", w.codes[:2]), ("codes", w.codes[:, :32]), ("scale", w.scale[:2])):
        with pytest.raises(ValueError, match=r"shape|rows"):
            Decoder.of(reference.Quantized(**{**vars(w), part: cut}), torch.float32)


def test_what_is_left_to_the_reference():
    w = stored("int8_rowwise", (4, 64))
    assert Decoder.of(w, torch.float16) is None
    w.scale[1] = float("nan")
    assert Decoder.of(w, torch.float32) is None
