"""Other conventions of scales are told from wrong sums; `tests/ao_lab/testing/test_kernels.py` has whole kernels."""

import numpy as np
import pytest

from reference.probe import detect
from reference.probe.each_output import sums_bound, ties_bound
from reference.probe.faults import FAULTS, value
from reference.probe.rescaled import rescaled
from reference.quantize.quantize import quantize
from reference.quantize.scales import choose_scales
from tests.reference.probe.test_faults import case

CASES = {
    "W4A8": ("int8_rowwise", "int4_g64"),
    "FP8": ("fp8_rowwise", None),
    "blocks": ("fp8_1x128", "fp8_128x128"),
    "weight-only": (None, "int4_g32"),
}


def coarser(scale):
    """Rounded to eight bits, as bfloat16 is."""
    return (scale.view(np.uint32) + 0x8000 & 0xFFFF0000).view(np.float32)


def values(x, scheme, convention):
    """What an operand is quantized to under other scales: rounded before it, after it, or for another largest value."""
    if scheme is None:
        return x.astype(np.float64)
    scales = choose_scales(x, scheme)
    other = scales.scale * np.float32(127 / 127.5) if convention == "127.5" else coarser(scales.scale)
    if convention == "after":
        q = quantize(x, scheme)
        return value(type(q)(q.codes, other, q.outer, q.zero, q.shape, q.axis, q.scheme))
    return value(quantize(x, scheme, scales=type(scales)(other, scales.outer, scales.zero)))


def bound_of(one):
    return detect.BEYOND * (sums_bound(one, "float32", "float32") + ties_bound(one))


@pytest.mark.parametrize("convention", ["before", "after", "127.5"])
@pytest.mark.parametrize(
    "name", ["W4A8", *(pytest.param(one, marks=pytest.mark.nightly) for one in CASES if one != "W4A8")]
)
def test_other_scales(name, convention):
    """Of x, of w, and of both: no fault."""
    one = case(*CASES[name], tokens=150)
    a, b = values(one.x, one.scheme, convention), values(one.w, one.weight_scheme, convention)
    every = np.ones(150, bool)
    for y in (a @ one.b.T, one.a @ b.T, a @ b.T):
        assert np.array_equal(y, one.right) or rescaled(one, y, every, bound_of(one))
        found = detect.findings(one, y)
        assert not [str(f) for f in found if f.found]


@pytest.mark.parametrize("name", CASES)
def test_wrong_sums_are_none(name):
    one, every = case(*CASES[name], tokens=150), np.ones(150, bool)
    assert not rescaled(one, one.right, every, bound_of(one))
    for fault in ("bfloat16 sums", "dropped tail", "unwritten rows", "short accumulator"):
        y = FAULTS[fault].outputs(one)
        assert y is None or not rescaled(one, y, every, bound_of(one)), fault


@pytest.mark.parametrize("at", [np.s_[3, 5], np.s_[:, 5], np.s_[3], np.s_[:20]])
@pytest.mark.parametrize("factor", [1.01, 1.05, 1.5])
def test_another_scale_of_a_part_is_no_convention(at, factor):
    """Alone, and beside scales of another convention that explain most of the difference."""
    one, every = case(*CASES["W4A8"], tokens=150), np.ones(150, bool)
    for a in (one.a, values(one.x, one.scheme, "before")):
        y = a @ one.b.T
        y[at] *= factor
        small = (np.abs(y - a @ one.b.T) <= bound_of(one)).all()
        assert small or not rescaled(one, y, every, bound_of(one))
