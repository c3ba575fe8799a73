"""`fast.dequantize` of CPU tensors: the bits of the reference, for every scheme, dtype and storage."""

from dataclasses import replace

import pytest
import torch

import fast
import reference
from ao_lab.config.recipe import named
from fast.cpu import dequantize as tiled
from fast.cpu import threads
from fast.cpu.dequantize import Decoder, multiplies_bfloat16
from fast.cpu.elements import Element, numbers, pair_table
from fast.cpu.scales import _loaded as loaded
from reference import SCHEMES
from reference.formats.formats import FORMATS
from tests.support.record_samples import STRUCTURES, sampled

# Decoded rows have the reference's bits, tails included; products are exact on integers and the same on any threads.

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
DECODER_SHAPES = ((64, 256), (7, 250), (5, 66), (1, 320))
PRODUCTS = ("int8_rowwise", "int4_g32")
DECODER_DTYPES = (torch.float32, torch.bfloat16)


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


@pytest.mark.parametrize("dtype", DECODER_DTYPES)
@pytest.mark.parametrize("scheme", [*SOME, *(pytest.param(one, marks=pytest.mark.nightly) for one in OTHERS)])
def test_rows_have_the_bits_of_the_reference(scheme, dtype):
    seen = 0
    for shape in DECODER_SHAPES:
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
    for dtype in DECODER_DTYPES:
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


@pytest.mark.parametrize("dtype", DECODER_DTYPES)
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


DTYPES = {"float32": torch.int32, "bfloat16": torch.int16, "float16": torch.int16}
SHAPES = ((6, 256), (3, 768), (2, 3, 256), (7, 250), (64, 256))


def weight(shape, *, edges=True):
    """Normal numbers of many sizes; with edges: zeros, infinities, NaN, subnormals and the ends of float32."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x = x * torch.logspace(-4, 4, shape[-2])[:, None]
    if edges:
        flat = x.view(-1)
        flat[:7] = torch.tensor([0.0, -0.0, 1e-42, 3.4e38, -3.4e38, 1e-38, 65504.0])
        flat[300], flat[301] = float("inf"), float("nan")
        x[-1] = 0
    return x


def quantized(scheme, shape, packed, *, edges=True):
    try:
        return reference.quantize(weight(shape, edges=edges), scheme, packed=packed)
    except ValueError:
        return None  # blocks that do not divide this shape


@pytest.mark.parametrize("scheme", sampled(STRUCTURES))
def test_bits_are_those_of_the_reference(scheme):
    seen = 0
    for shape in SHAPES:
        for packed in (True, False):
            for edges in (True, False):
                q = quantized(scheme, shape, packed, edges=edges)
                if q is None:
                    continue
                for dtype, bits in DTYPES.items():
                    got, want = fast.dequantize(q, dtype), reference.dequantize(q, dtype)
                    assert (got.shape, got.dtype) == (want.shape, want.dtype)
                    assert torch.equal(got.view(bits), want.view(bits)), (shape, packed, edges, dtype)
                    seen += 1
    assert seen


@pytest.mark.parametrize(
    "scheme", ["int8_rowwise", "int4_g32_asymmetric", "mxfp4", "nvfp4", "int3_g32", "fp8_128x128"]
)
def test_ordinary_weights_take_the_tables(scheme, monkeypatch):
    """Without this the reference might answer for everything, and bits would prove nothing."""
    q = quantized(scheme, (128, 256), True, edges=False)
    want = reference.dequantize(q)
    monkeypatch.setattr(reference, "dequantize", lambda *_: pytest.fail("the reference ran"))
    assert torch.equal(fast.dequantize(q), want)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_tiles_of_any_height(rows, monkeypatch):
    monkeypatch.setattr(tiled, "TILE", rows * 256)
    for scheme in ("int5_g32_asymmetric", "mxfp6_e2m3", "fp8_rowwise"):
        q = quantized(scheme, (6, 256), True, edges=False)
        assert torch.equal(fast.dequantize(q), reference.dequantize(q))


@pytest.mark.parametrize("scheme", ["int4_g32", "nvfp4", "mxfp8_e4m3", "int8_rowwise"])
def test_views_that_are_not_contiguous(scheme):
    """Codes of every other row, and of rows that begin at an odd byte."""
    q = quantized(scheme, (6, 256), False, edges=False)
    room = torch.full((6, 517), 0x55, dtype=torch.uint8)
    for codes in (room[:, 1:513:2], room[:, 1:257]):
        codes.copy_(q.codes)
        assert torch.equal(fast.dequantize(replace(q, codes=codes)), reference.dequantize(q))


def test_bits_above_a_code_are_ignored():
    q = quantized("mxfp4", (6, 256), False, edges=False)
    dirty = replace(q, codes=q.codes | 0xA0)
    assert torch.equal(fast.dequantize(dirty), reference.dequantize(q))


def test_codes_may_lie_along_the_other_axis():
    x = weight((64, 32), edges=False)
    q = reference.quantize(x, "mxfp8_e4m3", axis=0)
    assert torch.equal(fast.dequantize(q), reference.dequantize(q))


@pytest.mark.parametrize("shape", [(0, 256), (4, 0), (0,), (256,), ()])
def test_other_shapes_are_left_to_the_reference(shape):
    q = reference.quantize(torch.ones(shape), "int8_rowwise")
    assert torch.equal(fast.dequantize(q), reference.dequantize(q))


def test_errors_are_those_of_the_reference():
    q = quantized("int4_g32", (6, 256), True)
    for broken in (
        replace(q, scale=None),
        replace(q, codes=q.codes.to(torch.int16)),
        replace(q, shape=(6, 250)),
    ):
        with pytest.raises((TypeError, ValueError)) as ours:
            fast.dequantize(broken)
        with pytest.raises(type(ours.value)) as theirs:
            reference.dequantize(broken)
        assert str(ours.value) == str(theirs.value)


def test_nothing_beyond_the_tensor_is_written():
    """A table's rows are pairs: of an odd length the last pair is half used."""
    q = reference.quantize(torch.randn(3, 251), named("int6_rowwise"), packed=True)
    room = torch.full((3 * 251 + 4,), 7.0)
    out = room[: 3 * 251].view(3, 251)
    numbers(q.codes, Element.of(q.scheme), True, out)
    assert (room[3 * 251 :] == 7).all()


@pytest.mark.parametrize("storage", ["float8_e4m3fn", "float8_e8m0fnu", "float8_e5m2"])
@pytest.mark.parametrize("codes", [slice(0, 127), slice(0, 256), slice(120, 130)])
def test_codes_of_scales_are_the_numbers_of_the_format(storage, codes):
    """Those that need no table too; a NaN is one, whatever its bits."""
    kept = torch.arange(256, dtype=torch.uint8)[codes]
    got, want = loaded(kept, storage), torch.from_numpy(FORMATS[storage].values[kept.numpy()].copy())
    assert torch.equal(got.nan_to_num(-7.0).view(torch.int32), want.nan_to_num(-7.0).view(torch.int32))


def test_tables_are_small():
    """What stays between calls: 512 KiB at most, for each kind of element."""
    assert max(pair_table(Element.of(SCHEMES[name]), 8).nbytes for name in ("fp8_rowwise", "mxint8")) == 2**19
