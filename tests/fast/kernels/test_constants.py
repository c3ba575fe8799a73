"""What `fast.kernels.scheme.constants` makes of records: fields decide, names do not."""

import platform
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from reference import FORMATS, SCHEMES, Zero
from reference.quantize.blocks import Blocks

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

from fast.kernels.quantize import plan as passes
from fast.kernels.scheme.constants import constants_of
from fast.kernels.scheme.element_constants import element_of
from fast.kernels.scheme.fast_path_rules import OCP, ocp_name
from fast.kernels.scheme.ordinary_blocks import log2_is_exact


@pytest.fixture
def copy(monkeypatch):
    """A function that registers a format's record under another name."""

    def add(name):
        monkeypatch.setitem(FORMATS, f"own_{name}", replace(FORMATS[name], name=f"own_{name}"))
        return f"own_{name}"

    return add


@pytest.mark.parametrize("name", FORMATS)
def test_a_renamed_format_has_the_same_constants(name):
    own = replace(FORMATS[name], name="own")
    for hardware in (False, True):
        for fours in (False, True):
            made = element_of(own, hardware=hardware, fours=fours)
            assert made == element_of(FORMATS[name], hardware=hardware, fours=fours)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_renamed_element_has_the_same_kernels(name, copy):
    scheme = SCHEMES[name]
    own = replace(scheme, name="own", element=copy(scheme.element))
    for dtype in ("float32", "bfloat16"):
        assert constants_of(own, dtype) == constants_of(scheme, dtype)


@pytest.mark.parametrize("name", ["nvfp4", "nf4", "torchao.nvfp4"])
def test_a_renamed_storage_has_the_same_kernels(name, copy):
    scheme = SCHEMES[name]
    own = replace(scheme, name="own", scale=replace(scheme.scale, storage=copy(scheme.scale.storage)))
    assert constants_of(own, "bfloat16") == constants_of(scheme, "bfloat16")


def test_zero_points_in_another_dtype_have_no_kernel():
    """Kernels keep zero points that are numbers as bfloat16 or float32."""
    scheme = SCHEMES["torchao.int4_g32_tinygemm"]
    for storage in ("float32", "bfloat16", "float16"):
        own = replace(scheme, name="own", zero=Zero(rule="value", storage=storage))
        asked = passes.problem_of("bfloat16", own, Blocks.of((64, 256), own.scale, -1))
        assert (asked is not None) == (storage != "float16")


@pytest.mark.parametrize("name", OCP)
def test_another_field_makes_another_format(name):
    fmt = FORMATS[name]
    assert ocp_name(fmt) == OCP[name] == ocp_name(replace(fmt, name="own"))
    assert ocp_name(replace(fmt, bias=fmt.bias + 1)) == ""
    assert ocp_name(replace(fmt, specials="nan_negative_zero")) == ""
    assert element_of(replace(fmt, bias=fmt.bias + 1)) != element_of(fmt)


@pytest.mark.parametrize(
    "name", ["torchao.mxfp8_e4m3_floor", "compressed_tensors.int4_g128", "te.nvfp4", "int4_g32", "nf4"]
)
def test_a_new_record_is_all_that_a_scheme_takes(name, monkeypatch):
    """A record under a new name has the constants, and so the kernels, of one with the same fields: names do not decide."""
    own = replace(SCHEMES[name], name="mine.first")
    monkeypatch.setitem(SCHEMES, own.name, own)
    for dtype in ("float32", "bfloat16", "float16"):
        made, known = constants_of(SCHEMES["mine.first"], dtype), constants_of(SCHEMES[name], dtype)
        assert made == known
        assert (made.has_same, made.fast_path.value) == (known.has_same, known.fast_path.value)


def test_another_field_takes_another_path():
    """What decides is whether a sequence is exact for the fields; otherwise the general rules serve."""
    known = SCHEMES["compressed_tensors.int4_g128"]
    assert constants_of(known, "bfloat16").has_same
    for fields in ({"rounding": "nearest_away"}, {"codes_from": "exact"}):
        assert not constants_of(replace(known, name="mine", **fields), "bfloat16").has_same
    # No sequence divides by 7.3 exactly.
    assert not constants_of(
        replace(known, name="mine", scale=replace(known.scale, target=7.3)), "bfloat16"
    ).has_same


def test_which_records_take_the_general_rules_alone():
    """Of bfloat16: scales for encoding. The codes of NF4, under exact scales, are those of another record."""
    general = {
        n
        for n, s in SCHEMES.items()
        if not (constants_of(s, "bfloat16").fast_path.value or constants_of(s, "bfloat16").has_same)
    }
    encoded = {n for n, s in SCHEMES.items() if s.scale.stored == "encode"}
    assert general == encoded | {n for n, s in SCHEMES.items() if s.codes_from == "exact"}
    assert all(constants_of(passes.first_level(SCHEMES[n]), "bfloat16").has_same for n in ("torchao.nf4",))


def exact_quotients(dtype):
    """Significands of two numbers of a dtype, as integers."""
    bits = {"bfloat16": 8, "float16": 11}[dtype]
    return np.arange(1 << (bits - 1), 1 << bits, dtype=np.int64)


def test_no_quotient_of_two_bfloat16_numbers_is_near_a_midpoint_of_bfloat16():
    """`quotient_sequence`, "product": the distance is 2**-17 of the quotient or more, whatever the significands."""
    a, b = exact_quotients("bfloat16")[:, None], exact_quotients("bfloat16")[None, :]
    for shift in (8, 9):
        # Midpoints c / 2**shift with c odd: the nearest of them to a / b, from both sides.
        c = ((a << shift) // b) | 1
        for middle in (c - 2, c, c + 2):
            distance = np.abs((a << shift) - b * middle)
            inside = (middle >= 256) & (middle < 512)
            assert np.all(np.where(inside, distance, 1) >= 1)
            # |a / b - c / 2**shift| / (a / b), in units of 2**-17.
            assert np.all(np.where(inside, (distance << 17) >= (a << shift), True))


def test_rounded_logarithms_of_16_bit_maxima_are_exact():
    """`log2_is_exact`: then torchao's rceil is the exact one."""
    for target in (448.0, 57344.0, 7.5, 28.0, 6.0):
        assert log2_is_exact("bfloat16", target)
        assert log2_is_exact("float16", target)
        assert not log2_is_exact("float32", target)


def test_corrected_and_refined_products_are_quotients():
    """`refined`, of divisors of 24 bits: all 8-bit significands beside each of the seven ties."""
    for tie in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0):
        v = np.repeat(np.arange(128, 256), 33).astype(np.float64)
        middle = (v / tie).astype(np.float32).view(np.int32) + np.tile(np.arange(-16, 17), 128).astype(
            np.int32
        )
        divisor = middle.view(np.float32)
        m = (1 / divisor.astype(np.float64)).astype(np.float32)
        for value, d, inverse in zip(v, divisor, m, strict=True):
            low = np.float32(float(1 - Fraction(float(d)) * Fraction(float(inverse)))) * inverse
            product = np.float32(value) * low
            y = nearest(Fraction(float(value)) * Fraction(float(inverse)) + Fraction(float(product)))
            rest = Fraction(float(value)) - Fraction(y) * Fraction(float(d))
            y = nearest(Fraction(y) + rest * Fraction(float(inverse)))
            assert y == nearest(Fraction(float(value)) / Fraction(float(d)))


def nearest(exact):
    """The float32 nearest to a fraction, ties to even; far from the ends of the range."""
    power = exact.numerator.bit_length() - exact.denominator.bit_length() - 25
    scaled = exact / Fraction(2) ** power
    down = power + (scaled.numerator // scaled.denominator).bit_length() - 24
    return float(round(exact / Fraction(2) ** down) * Fraction(2) ** down)
