"""Records that lose values without a word: refused when they are made or registered, unless their `deviations` say so."""

from dataclasses import replace

import numpy as np
import pytest

import reference
from reference import FORMATS, SCHEMES, Scale, Zero, register
from reference.schemes.schemes import RECORDS
from tests.support.refusals import refused

X = np.random.default_rng(0).standard_normal((4, 64), np.float32)


@pytest.fixture(autouse=True)
def _forgotten():
    """What a test registers is forgotten afterwards."""
    before = [dict(table) for table in (FORMATS, SCHEMES, RECORDS)]
    yield
    for table, old in zip((FORMATS, SCHEMES, RECORDS), before, strict=True):
        table.clear()
        table.update(old)


def test_a_target_that_saturates_is_registered_only_where_it_is_meant():
    """A record that has it is made all the same: recipes of training hold such ones."""
    for name, target in (("mxfp8_e4m3", 449.0), ("int8_rowwise", 127.6), ("int4_g32_asymmetric", 15.1)):
        made = replace(SCHEMES[name], name="beyond", scale=replace(SCHEMES[name].scale, target=target))
        refused(ValueError, f"target {target:g} of beyond is beyond", register, made)
        assert "beyond" not in SCHEMES
    assert register(replace(made, deviations=("saturates",))).scale.target == target


@pytest.mark.parametrize("statistic", ["absmax", "minmax_split"])
def test_zero_points_stand_beside_a_range_or_are_meant(statistic):
    """Beside a largest magnitude values of one sign are lost; with the statistic that the message names none are."""
    made = {"name": "lost", "zero": Zero(), "scale": Scale(block=32, statistic=statistic)}
    refused(
        ValueError, "of one sign are lost.*statistic='minmax_with_zero'", replace, SCHEMES["int4_g32"], **made
    )
    meant = register(replace(SCHEMES["int4_g32"], **made, deviations=("one sign is lost",)))
    assert meant.zero == Zero()
    kept = register(replace(meant, name="kept", scale=Scale(block=32, statistic="minmax_with_zero")))
    assert (np.sign(reference.fake_quantize(X, kept)) * np.sign(X) >= 0).all()


def test_unsigned_integers_have_zero_points_or_are_meant():
    made = replace(SCHEMES["int5_g32"], name="cut", element="uint5", scale=Scale(block=32))
    refused(ValueError, "elements of uint5, from 0 on.* all negative values become 0", register, made)
    assert register(replace(made, deviations=("of squares",))).format.min == 0


@pytest.mark.parametrize("name", ["my scheme!", "a,b", "a=b", "a\n"])
def test_registered_names_can_be_typed(name):
    refused(ValueError, "is to be typed in commands", register, replace(SCHEMES["mxfp4"], name=name))


def test_scales_of_8_bits_have_an_outer_scale_or_are_meant():
    """Without one they saturate, or make all elements 0; the outer scale that the message names is right."""
    narrow = replace(
        SCHEMES["mxfp8_e4m3"], name="narrow", scale=replace(SCHEMES["nvfp4"].scale, target=448.0)
    )
    refused(
        ValueError,
        "float8_e4m3fn, which ends at 448, without an outer scale.*target=200704",
        register,
        narrow,
    )
    assert "narrow" not in SCHEMES
    outer = Scale(block="tensor", statistic="absmax_elements", target=200704)
    register(replace(narrow, name="with_outer", outer=outer))
    assert register(replace(narrow, deviations=("saturates",))).outer is None
    got = reference.fake_quantize(X * np.float32(1e6), "with_outer")
    assert np.allclose(got, X * 1e6, rtol=0.07, atol=1e3)


def test_ratios_are_no_powers_of_two_unless_that_is_meant():
    """Rounded to the nearest power, scales are too small for half of the blocks; the rule that the message names is not."""
    near = replace(
        SCHEMES["mxfp8_e4m3"], name="near", scale=replace(SCHEMES["mxfp8_e4m3"].scale, rule="ratio")
    )
    x = np.full((1, 32), 576, np.float32)
    assert np.all(reference.fake_quantize(x, near) == 448)
    refused(ValueError, "nearest power of two.*rule='rceil'", register, near)
    assert "near" not in SCHEMES
    made = register(replace(near, scale=replace(near.scale, rule="rceil")))
    assert np.all(reference.fake_quantize(x, made) == x)
    assert register(replace(near, name="meant", deviations=("saturates",))).scale.rule == "ratio"
