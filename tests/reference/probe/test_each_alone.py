"""Values alone: what their outputs say of rounding to one side, whatever the scales. Kernels: tests/ao_lab/testing."""

from dataclasses import replace

import numpy as np
import pytest

from reference import SCHEMES
from reference.matmul.linear import transposed
from reference.probe.each_alone import alone, of_alone
from reference.probe.faults import Case, typical_inputs, typical_weight, value
from reference.quantize.quantize import quantize
from reference.quantize.scales import choose_scales


def shown(scheme, operand):
    case = Case(typical_inputs(64, 256), typical_weight(32, 256), SCHEMES[scheme], SCHEMES["int8_rowwise"])
    return {one.case.name[-7:-6]: one for one in alone(case, "float32", 0)}[operand]


def told(one, rounding, grow=1.0, same=False):
    """What is found of a kernel that rounds x like this, under scales `grow` times the specification's."""
    case, record = one.case, replace(one.case.scheme, name="other", rounding=rounding)
    larger = choose_scales(case.x * np.float32(grow), case.scheme)
    y = value(quantize(case.x, record, scales=larger)) @ case.b.T
    return [found.test for found in of_alone(one, y, "float32", "float32", same=same) if found.found]


@pytest.mark.parametrize(
    ("scheme", "grow"),
    [("int8_rowwise", 1.0), ("int8_rowwise", 1.07), ("fp8_rowwise", 1.0), ("mxfp8_e4m3", 1.0)],
)
def test_rounding_to_one_side(scheme, grow):
    one = shown(scheme, "x")
    assert [told(one, way, grow) for way in ("nearest_even", "nearest_away")] == [[], []]
    for way in ("toward_zero", "down"):
        (found,) = told(one, way, grow)
        assert "values are rounded to one side, by 0." in found


@pytest.mark.parametrize("scheme", ["fp8_rowwise", "mxfp8_e4m3", "mxint8", "fp8_rowwise_e5m2"])
@pytest.mark.parametrize("grow", [0.8, 1.07, 1.5, 2.0])
def test_other_scales_are_no_fault(scheme, grow):
    assert told(shown(scheme, "x"), "nearest_even", grow) == []


def test_outputs_are_one_value_each():
    one = shown("int8_rowwise", "w")
    factor = np.unique(one.case.a[one.case.a > 0])
    assert len(factor) == 1 or np.ptp(factor) < 1e-6 * factor[0]
    right = one.case.a @ one.case.b.T
    assert np.abs(right / factor[0] - one.values).max() <= (one.high - one.low).max()
    assert transposed(one.case.wq).shape == one.case.b.T.shape


def test_one_output_has_the_bound_of_one_value():
    one = shown("int8_rowwise", "x")
    y = one.case.right.copy()
    y[3, 7] *= 1 + 1e-4
    tests = [found.test for found in of_alone(one, y, "float32", "float32", same=True) if found.found]
    assert len(tests) == 1
    assert tests[0].startswith("output (3, 7) is off by")
    assert of_alone(one, y, "float32", "float32", same=False)[-1].test == "values are rounded to one side"


def test_outputs_that_are_no_numbers():
    """Of blocks of zeros, say, which the other inputs do not have: in any test here the right ones are finite."""
    one = shown("int8_rowwise", "x")
    y = one.case.right.copy()
    y[3, 7], y[5] = np.nan, np.inf
    for same in (True, False):
        (found,) = of_alone(one, y, "float32", "float32", same=same)
        assert found.found
        assert found.test == "33 of 2048 outputs are inf or NaN where the right ones are finite"
