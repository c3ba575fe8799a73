"""Records of formats are checked where they are made; whatever is accepted encodes its own values back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.formats.encode import decode, encode
from reference.formats.formats import FORMATS, Format

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
    with pytest.raises((ValueError, TypeError), match=message):
        Format(**{"name": "x", **fields})


@st.composite
def floats(draw):
    exponent, mantissa = draw(st.integers(1, 8)), draw(st.integers(0, 7))
    fields = {"exponent_bits": exponent, "mantissa_bits": mantissa, "bits": 1 + exponent + mantissa}
    specials = draw(st.sampled_from(["ieee", "nan_ones", "nan_negative_zero", "none"]))
    try:
        return Format(name="x", kind="float", bias=draw(st.integers(-130, 160)), specials=specials, **fields)
    except ValueError:
        return None


@given(floats())
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
