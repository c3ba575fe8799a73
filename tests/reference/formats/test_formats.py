"""Records of formats are checked where they are made, and whatever is accepted encodes its own values back; derived limits and
tables against the published figures, ml_dtypes, gfloat and exact fractions."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction
from math import floor, isnan, log2
from statistics import NormalDist

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from reference.formats import formats
from reference.formats.encode import decode, encode
from reference.formats.formats import FORMATS, Format, format_of
from tests.support import oracles
from tests.support.oracles import CODEBOOKS, FLOATS, INTEGERS, Array
from tests.support.refusals import refused

FLOAT = {"kind": "float", "bits": 8, "exponent_bits": 4, "mantissa_bits": 3, "bias": 7}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**FLOAT, "kind": "flaot"}, "the kind of a format is one of float, int, codebook, scale"),
        ({**FLOAT, "mantissa_bits": 9}, r"bits = 1 \+ exponent_bits \+ mantissa_bits"),
        ({**FLOAT, "signed": False}, "a float has a sign"),
        ({**FLOAT, "specials": "nan_one"}, "specials of a format of kind float is one of ieee"),
        ({**FLOAT, "specials": "nan_minimum"}, "specials of a format of kind float"),
        ({**FLOAT, "bias": 200}, "every value of a format is exact in float32"),
        ({**FLOAT, "bias": -120}, "every value of a format is exact in float32"),
        ({**FLOAT, "bias": 130}, "the smallest normal exponent is -126"),
        ({**FLOAT, "fraction_bits": 1}, "a format of kind float has no fraction_bits"),
        ({**FLOAT, "bits": 17, "mantissa_bits": 12}, "bits of a format of kind float are 1 to 16"),
        ({**FLOAT, "exponent_bits": 7, "mantissa_bits": 0, "specials": "ieee", "bias": 63}, "mantissa_bits >= 1 for NaN"),
        ({**FLOAT, "bits": 8.0}, "bits of format x is an integer"),
        ({**FLOAT, "name": "float32"}, "float32 names a dtype"),
        ({**FLOAT, "name": "e4m3 (mine)"}, "letters, digits and _"),
        ({"kind": "int", "bits": 1}, "signed integer has 2 bits"),
        ({"kind": "int", "bits": 15}, "bits of a format of kind int are 1 to 14"),
        ({"kind": "int", "bits": 8, "signed": False, "specials": "nan_minimum"}, "no special lowest value"),
        ({"kind": "int", "bits": 8, "bias": 1}, "a format of kind int has no bias"),
        ({"kind": "int", "bits": 2, "reach": 0.5}, "reach is 0, or at least the largest value"),
        ({"kind": "codebook", "bits": 2, "table": (3.0, 1.0, 2.0, 0.0)}, "ascend strictly"),
        ({"kind": "codebook", "bits": 2, "table": (0.0, 1.0, 1.0 + 2.0**-40, 2.0)}, "ascend strictly in float32"),
        ({"kind": "codebook", "bits": 1, "table": (0.0, 1e39)}, "finite"),
        ({"kind": "codebook", "bits": 3, "table": (1.0, 2.0, 3.0)}, "a tuple of 8 values, one a code, got 3"),
        ({"kind": "codebook", "bits": 1, "table": [0.0, 1.0]}, "a tuple of 2 values"),
        ({"kind": "scale", "bits": 8, "exponent_bits": 8, "specials": "nan_all_ones", "bias": 127}, "signed=False"),
        ({"kind": "scale", "bits": 8, "exponent_bits": 8, "bias": 127, "signed": False}, "specials of a format of kind scale"),
    ],
)  # fmt: skip
def test_refused(fields, message):
    refused((ValueError, TypeError), message, Format, **{"name": "x", **fields})


@st.composite
def floats(draw):
    exponent, mantissa = draw(st.integers(1, 8)), draw(st.integers(0, 7))
    fields = {"exponent_bits": exponent, "mantissa_bits": mantissa, "bits": 1 + exponent + mantissa}
    specials = draw(st.sampled_from(["ieee", "nan_ones", "nan_negative_zero", "none"]))
    try:
        return Format(name="x", kind="float", bias=draw(st.integers(-130, 160)), specials=specials, **fields)
    except ValueError:
        return None


#: Whose smallest value is so large that float32 has no constant to round it by.
LARGE = Format(
    name="x", kind="float", bits=2, exponent_bits=1, mantissa_bits=0, bias=-105, specials="nan_negative_zero"
)


@given(floats())
@example(LARGE)
def test_accepted_floats_encode_their_values(fmt):
    """Every finite value has its own code again, -0 and the largest included, and what lies beyond saturates there."""
    if fmt is None:
        return
    finite = np.flatnonzero(np.isfinite(fmt.values))
    codes = encode(fmt.values[finite], fmt)
    np.testing.assert_array_equal(codes, finite)
    np.testing.assert_array_equal(decode(codes, fmt), fmt.values[finite])
    assert encode(np.float32(np.inf), fmt) == fmt.max_code == finite[fmt.values[finite].argmax()]


@pytest.mark.parametrize("bits", [2, 9, 14])
def test_accepted_integers_encode_their_values(bits):
    fmt = Format(name="x", kind="int", bits=bits)
    np.testing.assert_array_equal(encode(fmt.values, fmt), np.arange(1 << bits))


def test_all_of_the_package_pass():
    for fmt in FORMATS.values():
        assert Format(**{name: getattr(fmt, name) for name in fmt.__dataclass_fields__}) == fmt


# OCP 8-bit Floating Point 1.0, tables 1 and 2; OCP Microscaling 1.0, tables 1 to 7; IEEE 754 binary16; bfloat16; for fnuz
# "8-bit Numerical Formats for Deep Neural Networks" (arXiv 2206.02915). Largest, smallest normal, smallest subnormal.
PUBLISHED = {
    "float8_e4m3fn": (448.0, 2.0**-6, 2.0**-9),
    "float8_e5m2": (57344.0, 2.0**-14, 2.0**-16),
    "float8_e4m3fnuz": (240.0, 2.0**-7, 2.0**-10),
    "float8_e5m2fnuz": (57344.0, 2.0**-15, 2.0**-17),
    "float6_e2m3fn": (7.5, 1.0, 0.125),
    "float6_e3m2fn": (28.0, 0.25, 0.0625),
    "float4_e2m1fn": (6.0, 1.0, 0.5),
    "float8_e8m0fnu": (2.0**127, 2.0**-127, 2.0**-127),
    "bfloat16": (float.fromhex("0x1.fep127"), 2.0**-126, 2.0**-133),
    "float16": (65504.0, 2.0**-14, 2.0**-24),
}
# OCP Microscaling 1.0, table 1: the largest exponent of each element format.
PUBLISHED_EMAX = {
    "float8_e4m3fn": 8, "float8_e5m2": 15, "float6_e2m3fn": 2, "float6_e3m2fn": 4, "float4_e2m1fn": 2, "mxint8": 0,
}  # fmt: skip
# (codes of +NaN-like patterns in all, infinities, written NaN)
SPECIALS = {
    "float8_e4m3fn": (2, 0, 0x7F),
    "float8_e5m2": (6, 2, 0x7F),
    "float8_e4m3fnuz": (1, 0, 0x80),
    "float8_e5m2fnuz": (1, 0, 0x80),
    "float6_e2m3fn": (0, 0, None),
    "float6_e3m2fn": (0, 0, None),
    "float4_e2m1fn": (0, 0, None),
    "float8_e8m0fnu": (1, 0, 0xFF),
    "bfloat16": (254, 2, 0x7FC0),
    "float16": (2046, 2, 0x7E00),
    "int8_nan": (1, 0, 0x80),
}


def test_every_format_of_the_issue_exists() -> None:
    integers = {f"{sign}int{bits}" for sign in ("", "u") for bits in range(2, 9)}
    others = {
        "uint1",
        "int8_nan",
        "mxint8",
        "nf4",
        "nf4_torchao",
        "ternary",
        "stretched2",
        "dynamic8",
        "e8m3",
    }
    assert set(FORMATS) >= {*PUBLISHED, *integers, *others}
    assert all(name == fmt.name for name, fmt in FORMATS.items())


@pytest.mark.parametrize("name", PUBLISHED)
def test_limits_are_those_published(name: str) -> None:
    fmt = FORMATS[name]
    assert (fmt.max, fmt.smallest_normal, fmt.smallest_subnormal) == PUBLISHED[name]
    assert fmt.min == (2.0**-127 if name == "float8_e8m0fnu" else -fmt.max)
    assert fmt.emax == floor(log2(fmt.max))


@pytest.mark.parametrize("name", PUBLISHED_EMAX)
def test_emax_of_mx_elements(name: str) -> None:
    assert FORMATS[name].emax == PUBLISHED_EMAX[name]


@pytest.mark.parametrize(
    "name", [name for name in FLOATS if FORMATS[name].kind == "float" and oracles.has_dtype(name)]
)
def test_limits_are_those_of_ml_dtypes_and_gfloat(name: str) -> None:
    """`finfo` of ml_dtypes and gfloat's derived properties."""
    fmt, info, other = FORMATS[name], ml_dtypes.finfo(oracles.dtype_of(name)), oracles.gfloat_format(name)
    assert (fmt.max, fmt.min) == (float(info.max), float(info.min)) == (other.max, other.min)
    assert fmt.smallest_normal == float(info.smallest_normal) == other.smallest_normal
    assert fmt.smallest_subnormal == float(info.smallest_subnormal) == other.smallest_subnormal
    assert fmt.epsilon == float(info.eps) == other.eps
    assert (fmt.bits, fmt.mantissa_bits, fmt.exponent_bits) == (other.k, other.precision - 1, other.expBits)
    assert (fmt.bias, fmt.max_code) == (other.bias, other.code_of_max)


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_exact(name: str) -> None:
    """Each value of the table is the fraction that its code's fields say; the table is frozen float32."""
    fmt = FORMATS[name]
    truth = [oracles.float32_pattern(*oracles.exact_value(fmt, code)) for code in range(1 << fmt.bits)]
    assert fmt.values.dtype == np.float32
    assert fmt.values.view(np.uint32).tolist() == truth
    with pytest.raises(ValueError, match="read-only"):
        fmt.values[0] = 1


def specials_of(fmt: Format) -> tuple[int, int, int | None]:
    """What `SPECIALS` would say of a format that it does not name."""
    ones, sign = (1 << (fmt.bits - 1)) - 1, 1 << (fmt.bits - 1)
    return {
        "ieee": (2 * ((1 << fmt.mantissa_bits) - 1), 2, ones),
        "nan_ones": (2, 0, ones),
        "nan_negative_zero": (1, 0, sign),
        "nan_all_ones": (1, 0, 2 * sign - 1),
        "nan_minimum": (1, 0, sign),
    }.get(fmt.specials, (0, 0, None))


@pytest.mark.parametrize("name", FORMATS)
def test_special_codes(name: str) -> None:
    """How many NaNs and infinities there are, which NaN is written, and that named codes have the named values."""
    fmt = FORMATS[name]
    nans, infinities, nan_code = SPECIALS.get(name) or specials_of(fmt)
    assert int(np.isnan(fmt.values).sum()) == nans
    assert int(np.isinf(fmt.values).sum()) == infinities
    assert fmt.nan_code == nan_code
    assert nan_code is None or isnan(fmt.values[nan_code])
    assert (fmt.infinity_code is not None) == (infinities > 0)
    assert fmt.infinity_code is None or fmt.values[fmt.infinity_code] == np.inf
    finite = fmt.values[np.isfinite(fmt.values)]
    assert fmt.values[fmt.max_code] == fmt.max == finite.max()
    # The lowest integer of ternary is never written.
    assert fmt.min == (finite.min() + 1 if fmt.specials == "unused_minimum" else finite.min())


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_and_signs(name: str) -> None:
    """Which formats have -0, a sign bit, and no zero at all."""
    fmt = FORMATS[name]
    negative_zero = np.flatnonzero((fmt.values == 0) & np.signbit(fmt.values)).tolist()
    plain = fmt.kind == "float" and not name.endswith("fnuz")
    assert fmt.has_negative_zero == plain
    assert negative_zero == ([1 << (fmt.bits - 1)] if plain else [])
    assert fmt.sign_mask == (1 << (fmt.bits - 1) if fmt.kind == "float" else 0)
    assert (0.0 in fmt.values) == (0.0 in fmt.table if fmt.kind == "codebook" else fmt.kind != "scale")
    assert name not in ("float8_e8m0fnu", "stretched2") or 0.0 not in fmt.values


@pytest.mark.parametrize("name", FLOATS)
def test_positive_codes_ascend(name: str) -> None:
    """Codes sort as values do: what lets rounding carry into the exponent."""
    fmt = FORMATS[name]
    assert (np.diff(fmt.values[: fmt.max_code + 1].astype(np.float64)) > 0).all()


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str) -> None:
    """Range, step and order of two's complement and unsigned codes."""
    fmt = FORMATS[name]
    low, high = fmt.integer_range
    assert high - low + 1 == (1 << fmt.bits) - (name in ("int8_nan", "ternary"))
    step = 2.0**-fmt.fraction_bits
    assert (fmt.min, fmt.max, fmt.smallest_subnormal, fmt.epsilon) == (low * step, high * step, step, step)
    codes: Array = np.arange(low, high + 1) % (1 << fmt.bits)
    assert (fmt.values[codes] == np.arange(low, high + 1) * step).all()


def test_mxint8_reaches_both_ends() -> None:
    """OCP Microscaling 1.0, section 5.3.4: -2 to 1 + 63/64 in steps of 2**-6; -2 is not left out."""
    fmt = FORMATS["mxint8"]
    assert (fmt.min, fmt.max, fmt.epsilon) == (-2.0, 1 + 63 / 64, 2.0**-6)


def test_nf4_is_made_of_normal_quantiles() -> None:
    """QLoRA, appendix E: quantiles of the normal distribution at evenly spaced probabilities, divided by the largest.

    The published table was computed in float32 with torch: probabilities, quantiles and quotients rounded, to the bit.
    """
    offset = 0.9677083
    normal = NormalDist()
    upper, lower = (torch.linspace(offset, 0.5, count)[:-1].tolist() for count in (9, 8))
    quantiles = [*(-normal.inv_cdf(p) for p in lower), 0.0, *(normal.inv_cdf(p) for p in upper)]
    values = np.sort(np.array(quantiles, np.float32))
    np.testing.assert_array_equal(FORMATS["nf4"].values, values / values.max())
    assert (np.array(FORMATS["nf4"].table) == FORMATS["nf4"].values).all()
    assert (
        FORMATS["nf4_torchao"].values
        == np.round(FORMATS["nf4"].values.astype(np.float64), 4).astype(np.float32)
    ).all()


#: Of codebooks that are not symmetric: the maps of optimizers' states end in a midpoint below, or are unsigned.
LOWEST = {
    "dynamic8": float(np.float32(-0.99296874)),
    "dynamic4": -float(np.float32(0.8875)),
    "dynamic8_unsigned": 0.0,
    "linear4_unsigned": 1 / 16,
}


@pytest.mark.parametrize("name", CODEBOOKS)
def test_codebooks_ascend_between_equal_ends(name: str) -> None:
    fmt = FORMATS[name]
    end = 1.5 if name == "stretched2" else 1.0
    lowest = LOWEST.get(name, -end)
    assert (np.diff(fmt.values) > 0).all()
    assert (fmt.min, fmt.max, len(fmt.table)) == (lowest, end, 1 << fmt.bits)
    assert isnan(fmt.epsilon)


@pytest.mark.parametrize("name", FORMATS)
def test_stretched_levels_stand_for_intervals_of_one_width(name: str) -> None:
    """ParetoQ (arXiv 2502.02631): k levels, each the middle of its k-th of the range; elsewhere the ends are levels."""
    fmt = FORMATS[name]
    if not fmt.reach:
        assert fmt.limit == fmt.max
        return
    levels = np.sort(fmt.values[fmt.values >= fmt.min])
    width = 2 * fmt.limit / len(levels)
    middles = (np.arange(len(levels)) + 0.5) * width - fmt.limit
    assert (levels == middles).all()


@pytest.mark.parametrize("name", FLOATS)
def test_neighbours_are_a_unit_apart(name: str) -> None:
    """The distance above 1 is epsilon, the one above zero the smallest subnormal."""
    fmt = FORMATS[name]
    values = [oracles.exact_value(fmt, code)[0] for code in range(fmt.max_code + 1)]
    one = values.index(Fraction(1))
    if fmt.kind == "scale":
        assert values[one + 1] == 2
        assert isnan(fmt.epsilon)
        return
    assert values[one + 1] - values[one] == Fraction(fmt.epsilon)
    assert values[1] == Fraction(fmt.smallest_subnormal)
    assert values[1 << fmt.mantissa_bits] == Fraction(fmt.smallest_normal)


def test_records_are_data() -> None:
    """Frozen, hashable, replaceable; limits follow the fields."""
    fmt = FORMATS["float8_e4m3fn"]
    with pytest.raises(FrozenInstanceError):
        fmt.bias = 8  # type: ignore[misc]
    ieee = replace(fmt, name="float8_e4m3", specials="ieee")
    assert (ieee.max, ieee.infinity_code, fmt.max) == (240.0, 0x78, 448.0)
    assert len({fmt, replace(fmt), ieee}) == 2
    assert repr(fmt) == "Format(float8_e4m3fn)"
    own = Format(name="own", kind="float", bits=8, exponent_bits=3, mantissa_bits=4)
    assert (own.bias, own.max) == (3, 31.0)  # the bias of IEEE 754 where none is given
    fields = "kind='float', bits=8, exponent_bits=3, mantissa_bits=4, bias=3, specials='none'"
    assert str(own) == f"Format(own: {fields}; -31 to 31)"


def test_format_of() -> None:
    """Names and records; unknown names are answered with the nearest."""
    for name, fmt in FORMATS.items():
        assert format_of(name) is fmt
        assert format_of(fmt) is fmt
    own = Format(name="own", kind="int", bits=3)
    assert format_of(own) is own
    with pytest.raises(
        ValueError,
        match=r"unknown format 'float8_e4m3'; the nearest are float8_e4m3fn(, \w+)*; one of your own is registered",
    ):
        format_of("float8_e4m3")
    refused(ValueError, "'fp8'; the nearest are float8_e4m3fn, float8_e5m2", format_of, "fp8")
    refused(ValueError, "unknown format 'zzz'; known are bfloat16, dynamic4", format_of, "zzz")
    for wrong in (8, None, np.float32):
        with pytest.raises(TypeError, match="a format is given by name or as a record"):
            format_of(wrong)  # type: ignore[arg-type]


# Maps of optimizers' states: the tables that torchao computes, in the table of formats whatever was imported.


@pytest.mark.parametrize(("signed", "exponents", "bits"), [(True, 7, 8), (False, 7, 8), (True, 3, 4)])
def test_dynamic_maps_are_torchaos(signed, exponents, bits):
    other = pytest.importorskip("torchao.optim.quant_utils")
    assert list(formats.dynamic_map(signed, exponents, bits)) == other.create_dynamic_map(
        signed, exponents, bits
    )


def test_4_bits_of_the_second_moment_are_torchaos_and_have_no_zero():
    assert FORMATS["linear4_unsigned"].table == tuple(torch.linspace(0, 1, 17)[1:].tolist())


def test_formats_do_not_depend_on_what_was_imported():
    code = "import reference; names = set(reference.FORMATS); import reference.optim.states; "
    code += "assert names == set(reference.FORMATS), names ^ set(reference.FORMATS)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert {name for name, *_ in formats.CODEBOOKS} <= set(FORMATS)
