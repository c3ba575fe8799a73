"""What `fast.kernels.scheme.constants` makes of records: fields decide, names do not."""

import platform
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from reference import FORMATS, SCHEMES, Zero
from reference.quantize.blocks import Blocks

if platform.system() != "Linux":
    pytest.skip("triton has no packages for this system", allow_module_level=True)

from fast.kernels.quantize import plan as passes
from fast.kernels.scheme.constants import constants_of, element_of
from fast.kernels.scheme.fast_path_rules import OCP, difference_thresholds, log2_is_exact, ocp_name


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
        for fp4 in (False, True):
            made = element_of(own, hardware=hardware, fp4=fp4)
            assert made == element_of(FORMATS[name], hardware=hardware, fp4=fp4)


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
    values = {n for n in SCHEMES if n.startswith("hqq.")}  # zero points that are numbers, in bfloat16
    assert general == encoded | values | {n for n, s in SCHEMES.items() if s.codes_from == "exact"}
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


@pytest.mark.parametrize("tie", [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
def test_corrected_products_lie_on_the_side_of_a_tie_where_quotients_lie(tie):
    """`quotient_sequence`: every divisor of 24 bits, and the two 8-bit numbers beside its product with a tie of e2m1."""
    significands = np.arange(1 << 23, 1 << 24, dtype=np.int64)
    for part in np.array_split(significands, 16):
        divisor = part * 2.0**-23
        m = (1 / divisor.astype(np.float32)).astype(np.float64)
        # Products of two float32 numbers are exact in float64, and so is what is left of 1.
        error = towards_zero((1 - divisor * m) * m)
        unit = np.exp2(np.floor(np.log2(tie * divisor)) - 7)
        for steps in (0, 1):
            x = (np.floor(tie * divisor / unit) + steps) * unit
            y = (x * m + (x * error).astype(np.float32)).astype(np.float32)
            assert np.array_equal(np.sign(y - tie), np.sign((x / divisor).astype(np.float32) - tie))


def towards_zero(exact):
    """The float32 next to float64 numbers whose magnitude is no larger, as float64."""
    near = exact.astype(np.float32)
    return np.where(np.abs(near) > np.abs(exact), np.nextafter(near, np.float32(0)), near).astype(np.float64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_thresholds_of_rounded_differences_hold_before_rounding(dtype):
    """The largest float32 with each code: the next one, rounded to the dtype, has the next code."""
    fmt = FORMATS["nf4_torchao"]
    kind = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype]
    table = np.asarray(fmt.table, np.float32).astype(kind).astype(np.float32)
    thresholds = np.asarray(difference_thresholds(fmt, dtype), np.float32)
    for step, codes in ((0, np.arange(15)), (1, np.arange(1, 16))):
        y = np.nextafter(thresholds, np.float32(2)) if step else thresholds
        rounded = y.astype(kind).astype(np.float32)
        found = np.abs((rounded[:, None] - table).astype(kind).astype(np.float32)).argmin(axis=1)
        assert found.tolist() == codes.tolist()
