"""Inputs on which conventions of scales cannot differ: every scheme has them, right kernels pass, each wrong part shows."""

from dataclasses import replace

import numpy as np
import pytest

from reference import SCHEMES
from reference.matmul.linear import transposed
from reference.matmul.matmul import matmul
from reference.probe.detect import rounded
from reference.probe.faults import FAULTS, RIGHT, Case, value
from reference.probe.held_exactly import aside, held_exactly, of_held
from reference.quantize.quantize import quantize
from reference.quantize.scales import choose_scales

PAIRS = {
    "fp8_rowwise": "fp8_rowwise",
    "int8_rowwise": "int8_rowwise",
    "int8_rowwise_asymmetric": "int4_g64",
    "fp8_1x128": "fp8_128x128",
    "mxfp8_e4m3": "mxfp4",
    "nvfp4": "nvfp4",
    "nf4": "torchao.int4_g32",
}


def held(x="fp8_rowwise", w=None, dtype="float32", shape=(70, 40, 512)):
    tokens, outputs, channels = shape
    given = np.ones((tokens, channels), np.float32), np.ones((outputs, channels), np.float32)
    record = None if x is None else SCHEMES[x]
    return held_exactly(Case(*given, record, SCHEMES[w or PAIRS[x]]), dtype, 0)


def told(one, y, dtype="float32", **settings):
    return of_held(one, rounded(y, dtype), dtype, "float32", **{"quantized": False} | settings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("scheme", PAIRS)
def test_right_kernels_pass_and_each_wrong_part_is_told(scheme, dtype):
    one = held(scheme, dtype=dtype)
    assert (one.right > 0).all()
    for name, kernel in RIGHT.items():
        assert not (found := told(one, kernel(one), dtype)).found, (name, found)
    for at in (np.s_[64:], np.s_[3], np.s_[-1:], np.s_[:, 5], np.s_[:, -9:], np.s_[:64, :32], np.s_[7, 9]):
        y = one.right.copy()
        y[at] *= 1.01
        assert told(one, y, dtype).found, at


@pytest.mark.parametrize("factor", [127 / 128, (127 / 127.5) ** 2, 1 + 2.0**-8])
def test_one_factor_of_all_outputs_is_a_convention_and_two_are_not(factor):
    """Wrong parts beside it show as beside the specification's; not where the kernel was given quantized operands."""
    for dtype in ("float32", "bfloat16"):
        one = held("int8_rowwise", dtype=dtype)
        y = one.right * factor
        found = told(one, y, dtype)
        assert (found.found, "times" in found.test) == (False, True)
        assert told(one, y, dtype, quantized=True).found
        y[64:] *= 1.01
        found = told(one, y, dtype)
        assert found.found
        assert "all of tokens 64 to 69 times 1.0" in found.test


def test_a_factor_that_no_largest_magnitude_makes_and_outputs_that_are_no_numbers():
    one = held("int8_rowwise")
    assert (
        told(one, one.right * 1.03).test
        == "all outputs times 1.03, which no rounding of a largest magnitude makes"
    )
    assert told(one, -one.right).found
    y = one.right.copy()
    y[3, 7], y[5, :2] = np.nan, np.inf
    assert told(one, y).test.startswith("3 of 2800 outputs are inf or NaN")


@pytest.mark.parametrize("scheme", ["fp8_rowwise", "int8_rowwise", "int4_g64"])
def test_the_allowed_factor_is_that_of_other_scales(scheme):
    """x quantized under larger scales, and smaller ones to one step beyond the largest value; half as large is a fault."""
    one = held(scheme, "int8_rowwise")
    scales, top = choose_scales(one.x, one.scheme), one.scheme.scale.target
    for grow in (0.5, top / (top + 1), 1.02, 2.0):
        larger = replace(scales, scale=scales.scale * np.float32(grow))
        found = told(one, value(quantize(one.x, one.scheme, scales=larger)) @ one.b.T)
        assert found.found == (grow == 0.5), (grow, found)


def test_sums_of_fourteen_bits_are_exact_where_they_are_allowed():
    """So that a part is told there too."""
    one = held(shape=(40, 24, 768))
    y = np.asarray(matmul(one.xq, transposed(one.wq), accumulation="hopper_fp8"), np.float64)
    assert not of_held(one, y, "float32", "fast", quantized=False).found
    y[7, 9] *= 1.004
    assert of_held(one, y, "float32", "fast", quantized=False).found


def test_sums_in_sixteen_bits_show_over_scales_that_are_powers_of_two():
    """Inputs of a layer have ties of e4m3 there, which hide them."""
    one = held("mxfp8_e4m3", "mxfp8_e4m3", "bfloat16", (70, 40, 768))
    assert told(one, FAULTS["bfloat16 sums"].outputs(one), "bfloat16").found


@pytest.mark.nightly
def test_every_scheme_has_such_inputs_but_one_without_zero():
    without = [name for name in SCHEMES if held(None, name, "bfloat16", (32, 256, 256)) is None]
    assert without == ["stretched2_rowwise", "stretched2_g32"]


def test_steps():
    assert aside(None) == 0
    assert 2 ** aside(SCHEMES["int8_rowwise"]) > 128 / 127
    assert 2 ** aside(SCHEMES["int4_g64"]) > 8 / 7
    assert 2 ** aside(SCHEMES["fp8_rowwise"]) < 1.1
