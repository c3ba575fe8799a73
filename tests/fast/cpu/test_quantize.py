"""What the compiled loop makes of activations has the reference's bits: codes, scales, zero points and numbers."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import fast
import reference
from fast.cpu import quantize
from fast.cpu import quantize as by_rows
from reference import SCHEMES
from reference.formats.formats import FORMATS, Format
from tests.fast.cpu.test_dequantize import normal, same_bits

# Rows that are quantized some at a time have the reference's bits.

FAKE_QUANTIZE_SOME = (
    "int8_rowwise",
    "int8_rowwise_asymmetric",
    "fp8_rowwise",
    "mxfp8_e4m3",
    "mxfp4",
    "nvfp4",
    "fp8_tensorwise",
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", FAKE_QUANTIZE_SOME)
def test_bits_are_the_reference_s(scheme, dtype, monkeypatch):
    monkeypatch.setattr(by_rows, "PART", 3 * 64)
    x = normal(2, 5, 64).to(dtype)
    x[0, 1, 3], x[1, 2, 5], x[1, 4] = float("nan"), float("inf"), 0.0
    x[0, 3, ::2] = -0.0
    want = reference.fake_quantize(x, scheme)
    got = by_rows.fake_quantize(x, SCHEMES[scheme], -1)
    assert torch.equal(got.isnan(), want.isnan())
    assert same_bits(got.nan_to_num(7.0), want.nan_to_num(7.0))
    assert same_bits(fast.fake_quantize(x, scheme).nan_to_num(7.0), want.nan_to_num(7.0))


def test_blocks_along_other_axes_are_left_to_the_reference():
    assert by_rows.fake_quantize(normal(128, 128), SCHEMES["fp8_128x128"], -1) is None
    assert by_rows.fake_quantize(normal(64, 64), SCHEMES["int8_rowwise"], 0) is None


#: One of each rule: ratios by row, block and tensor, zero points, powers of two, two levels.
SOME = (
    "int8_rowwise",
    "int8_rowwise_asymmetric",
    "fp8_rowwise",
    "fp8_1x128",
    "fp8_tensorwise",
    "mxfp8_e4m3_rceil",
    "mxfp4_rceil",
    "nvfp4",
    "compressed_tensors.int8_token",
    "compressed_tensors.fp8_token",
    "torchao.intx8_rowwise_asymmetric",
)
TAKEN = tuple(name for name in SCHEMES if quantize._rule(SCHEMES[name], True, False) is not None)
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32


def every_number(scheme, dtype):
    """Blocks that hold their largest number and, of all of them, each bfloat16 up to the scale's target (every
    midpoint too), in float32 also what lies next to it."""
    record = SCHEMES[scheme]
    size = record.scale.block if isinstance(record.scale.block, int) and record.scale.block > 0 else 256
    patterns = torch.arange(1 << 15, dtype=torch.int16).view(BFLOAT16).float()
    finite = patterns[patterns <= record.scale.target]
    if dtype == FLOAT32:
        finite = torch.cat((finite, finite.nextafter(finite + 1).clamp(max=record.scale.target)))
    finite = torch.cat((finite, -finite))
    finite = torch.nn.functional.pad(finite, (0, -len(finite) % (size - 1)))
    x = finite.view(-1, size - 1)
    return torch.cat((torch.full((len(x), 1), record.scale.target), x), 1).to(dtype)


def spread_out(dtype, rows=96, length=256):
    """Rows of all sizes that the loop takes, of numbers that differ by 2**40; zeros of both signs; a row of zeros."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(rows, length, generator=generator)
    x = torch.ldexp(x, torch.randint(-40, 1, x.shape, generator=generator))
    x = torch.ldexp(x, torch.randint(-60, 110, (rows, 1), generator=generator))
    x[3], x[5, ::3], x[6, ::2] = 0.0, -0.0, 0.0
    x[7], x[8] = x[7].abs(), -x[8].abs()
    return x.to(dtype)


def check(scheme, dtype):
    """Zeros are NaN in records whose scales have no floor: those rows are the reference's."""
    scale = SCHEMES[scheme].scale
    for x in (every_number(scheme, dtype), spread_out(dtype)):
        has_scale = scale.floor is not None or scale.power_of_two
        agree(x if has_scale else x[x.abs().amax(-1) > 0], SCHEMES[scheme])


def agree(x, record):
    got = quantize.values(x, record)
    assert got is not None
    assert same_bits(got, reference.fake_quantize(x, record))


@pytest.mark.parametrize("scheme", SOME)
def test_numbers_are_the_reference_s(scheme):
    check(scheme, BFLOAT16)


@pytest.mark.parametrize("scheme", ["int4_g32", "fp8_rowwise"])
def test_scales_of_the_input_s_dtype(scheme):
    """What `for_layout` makes of a scheme: scales are rounded to bfloat16."""
    record = cast_scales(SCHEMES[scheme])
    for x in (every_number(scheme, BFLOAT16), spread_out(BFLOAT16), spread_out(FLOAT32)):
        agree(x, record)
    x = spread_out(BFLOAT16)
    assert not torch.equal(quantize.values(x, record), quantize.values(x, SCHEMES[scheme]))
    assert quantize.values(spread_out(BFLOAT16), cast_scales(SCHEMES[scheme], target=7.003)) is None


def cast_scales(record, **changes):
    return replace(record, name="cast", scale=replace(record.scale, compute="input", **changes))


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", TAKEN)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
def test_numbers_of_every_record_are_the_reference_s(scheme, dtype):
    check(scheme, dtype)


@pytest.mark.parametrize("scheme", ["int8_rowwise", "int8_rowwise_asymmetric", "int8_g32"])
def test_codes_scales_and_zero_points_are_the_reference_s(scheme):
    for x in (every_number(scheme, BFLOAT16), spread_out(BFLOAT16).view(4, 24, 256)):
        have_same_parts(quantize.quantized(x, SCHEMES[scheme], -1), reference.quantize(x, scheme))
    cast = cast_scales(SCHEMES["int8_rowwise"])
    have_same_parts(quantize.quantized(x, cast, -1), reference.quantize(x, cast))


def have_same_parts(got, want):
    assert (got.shape, got.axis, got.scheme, got.packed) == (want.shape, want.axis, want.scheme, False)
    for part in ("codes", "scale", "zero"):
        one, other = getattr(got, part), getattr(want, part)
        assert one is other is None or (one.dtype == other.dtype and torch.equal(one, other))


GIVEN = (
    ("int8_rowwise", 0.03),
    ("int8_tensorwise", 0.011),
    ("fp8_tensorwise", 0.02),
    ("compressed_tensors.int8_tensor", 0.03),
    ("compressed_tensors.fp8_tensor", 0.02),
    ("nvfp4", 0.0005),
)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize(("scheme", "scale"), GIVEN)
def test_numbers_under_given_scales_are_the_reference_s(scheme, scale, dtype):
    """Static scales, which elements exceed; a second level alone; below the floor the reference has to say."""
    x, record = spread_out(FLOAT32)[:20].clamp(-9, 9).to(dtype), SCHEMES[scheme]
    for number in (scale, -1.0, float("nan")):
        part = torch.tensor(number)
        part = part if record.scale.block == "tensor" or record.outer else part.expand(len(x), 1)
        given = reference.Scales(None, part) if record.outer else reference.Scales(part.contiguous())
        want = reference.fake_quantize(x, record, scales=given)
        got = fast.fake_quantize(x, record, scales=given)
        assert same_bits(got.nan_to_num(7.0), want.nan_to_num(7.0))
    plan = quantize.plan_of(x, record, -1, given=(given.scale, given.outer, None))
    assert (plan is None) == (scheme == "int8_rowwise")  # scales of rows are found, not given


@pytest.mark.parametrize("scheme", ["int8_rowwise", "compressed_tensors.int8_token", "nvfp4"])
def test_few_rows_come_to_the_loop(scheme, monkeypatch):
    """A row of a layer's inputs is quantized by a loop from the call on in which it would be worth compiling one."""
    record = replace(SCHEMES[scheme], name="few rows")
    x = spread_out(BFLOAT16)[9:10]
    want = reference.fake_quantize(x, record)
    monkeypatch.setattr(quantize, "ASKED", quantize.Counter())
    results = [quantize.values(x, record) for _ in range(quantize.SOON + 1)]
    assert all(one is None for one in results[:-1])
    assert same_bits(results[-1], want)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 2.0**125, 2.0**-133])
@pytest.mark.parametrize("scheme", ["int8_rowwise", "mxfp8_e4m3_rceil", "nvfp4"])
def test_what_a_row_with_such_a_number_is_the_reference_says(scheme, number):
    """NaN and infinities; scales near the ends of float32."""
    x = torch.zeros(16, 256, dtype=BFLOAT16)
    x[4, 7] = number
    found = quantize.values(x, SCHEMES[scheme])
    want, got = reference.fake_quantize(x, scheme), fast.fake_quantize(x, SCHEMES[scheme])
    assert found is None or same_bits(found, want)
    assert found is None or abs(number) < 1
    assert torch.equal(got.isnan(), want.isnan())
    assert same_bits(got.nan_to_num(7.0), want.nan_to_num(7.0))


def test_views_are_read_as_what_they_are():
    x = spread_out(BFLOAT16)
    for view in (x.t().contiguous().t(), x[::2], x[:, 1:]):
        got = quantize.values(view, SCHEMES["fp8_rowwise"])
        assert got.is_contiguous()
        assert same_bits(got, reference.fake_quantize(view, "fp8_rowwise"))


def test_what_the_loop_is_not_for_is_left_to_the_reference():
    x = spread_out(BFLOAT16)
    assert quantize.values(x[:, :-1], SCHEMES["fp8_1x128"]) is None  # a short last block
    assert quantize.values(x.half(), SCHEMES["int8_rowwise"]) is None
    assert quantize.quantized(x, SCHEMES["int8_rowwise"], 0) is None
    assert quantize.quantized(x, SCHEMES["fp8_rowwise"], 1) is None
    other = [name for name in SCHEMES if name not in TAKEN and FORMATS[SCHEMES[name].element].bits <= 8]
    assert {"nf4", "fp8_128x128", "int4_g128_asymmetric"} & set(other)


def test_threads_change_no_bit(monkeypatch):
    x = torch.from_numpy(np.random.default_rng(3).standard_normal((300, 512), dtype=np.float32)).to(BFLOAT16)
    one = quantize.values(x, SCHEMES["nvfp4"])
    monkeypatch.setattr("fast.cpu.threads.WORTH", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert same_bits(quantize.values(x, SCHEMES["nvfp4"]), one)
    finally:
        torch.set_num_threads(before)


def test_a_format_of_large_values_is_left_to_the_reference(monkeypatch):
    """float32 has no constants to round them by."""
    fmt = Format(
        name="k0", kind="float", bits=3, exponent_bits=2, mantissa_bits=0, bias=-105, specials="nan_ones"
    )
    monkeypatch.setitem(FORMATS, "k0", fmt)
    scheme = replace(SCHEMES["mxfp8_e4m3_rceil"], name="large", element="k0")
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(0)) * 2.0**30
    assert torch.equal(fast.fake_quantize(x, scheme), reference.fake_quantize(x, scheme))
