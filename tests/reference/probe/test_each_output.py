"""The bound of each output: right kernels stay inside it in any order of sums and of scaling, a wrong output does not."""

import ml_dtypes
import numpy as np
import pytest

from reference import SCHEMES
from reference.probe import detect, each_output
from reference.probe.faults import RIGHT, Case, typical_inputs, typical_weight
from tests.reference.probe.test_faults import case

ALL = np.ones(150, bool)


@pytest.mark.parametrize("scheme", ["fp8_rowwise", "int8_rowwise_asymmetric"])
def test_sums_in_any_order_stay_inside(scheme):
    one = Case(typical_inputs(150, 384), typical_weight(48, 384), SCHEMES[scheme], SCHEMES["int8_rowwise"])
    bound = each_output.sums_bound(one, "float64", "float32")
    for name, kernel in RIGHT.items():
        assert name == "powers of two" or (np.abs(kernel(one) - one.right) <= bound).all(), name
    off = detect.rounded(one.right, "bfloat16") - one.right
    assert (np.abs(off) <= each_output.sums_bound(one, "bfloat16", "float32")).all()
    assert (np.abs(off) > bound).any()


def test_another_order_of_scaling_stays_inside_with_values_at_ties_alone():
    """x / amax * 448 has other values than x / (amax / 448) where these lie at ties, and nowhere else."""

    def values(x):
        amax = np.abs(x).max(1, keepdims=True)
        codes = (x / amax * np.float32(448)).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
        return (codes.astype(np.float32) * (amax / np.float32(448))).astype(np.float64)

    given = typical_inputs(150, 384), typical_weight(48, 384)
    x, w = (one.astype(ml_dtypes.bfloat16).astype(np.float32) for one in given)
    one = Case(x, w, SCHEMES["fp8_rowwise"], SCHEMES["fp8_rowwise"])
    y = values(x) @ values(w).T
    bound = each_output.sums_bound(one, "float64", "float32")
    assert (np.abs(y - one.right) > bound).mean() > 0.05
    assert (np.abs(y - one.right) <= bound + each_output.ties_bound(one)).all()
    assert not any(f.found for f in detect.findings(one, y))


@pytest.mark.parametrize("at", [(0, 0), (149, 65)])
def test_one_output_of_thousands(at):
    one = case(tokens=150)
    y = one.right.copy()
    y[at] += 0.02 * y.std()
    (found,) = (f for f in detect.findings(one, y) if f.found)
    assert found.test.startswith(f"output {at} is off by 0.02")


@pytest.mark.parametrize(
    ("at", "named"),
    [
        (np.s_[128:], "all of tokens 128 to 149 times 1.05"),
        (np.s_[3], "all of token 3 times 1.05"),
        (np.s_[::9], "all of tokens 0 to 144, 17 of them, times 1.05"),
        (np.s_[:, 5], "all of channel 5 times 1.05"),
    ],
)
def test_whole_tokens_and_channels_are_held_to_the_bound_of_their_own_ties(at, named):
    """Half of all tokens and more have the median's values; the rest's, 5% off, are no ties' and no convention's."""
    one = case(tokens=150)
    y = one.right.copy()
    y[at] *= 1.05
    assert any(f.found and f.test.endswith(named) for f in detect.findings(one, y))
