"""What is told of a kernel: nothing of right ones, each fault of the bank, in the part of it where it is."""

import numpy as np
import pytest

from reference.probe import detect
from reference.probe.faults import FAULTS, RIGHT
from tests.reference.probe.test_faults import case


def test_right_kernels_and_faults():
    """Every fault that shows on these inputs as they are; the others need scaled ones or a NaN (`probe_kernel`)."""
    one = case(tokens=150)
    for name, kernel in RIGHT.items():
        assert not [str(f) for f in detect.findings(one, kernel(one)) if f.found], name
    silent = set()
    for name, fault in FAULTS.items():
        y = fault.outputs(one)
        if y is not None and not any(f.found for f in detect.findings(one, y)):
            silent.add(name)
    assert silent == {"no scale", "nan to zero"}


def test_a_part_is_named():
    one = case(tokens=150)
    y = one.right.copy()
    y[17] *= 1.5
    assert any(f.found and f.test == "error of token 17" for f in detect.findings(one, y))
    y = one.right.copy()
    y[:, 5] *= 1.5
    assert any(f.found and f.test == "error of channel 5" for f in detect.findings(one, y))


def test_rounding_of_outputs_is_no_fault_and_sums_beside_it_are():
    one = case(tokens=250)
    for dtype in ("bfloat16", "float16"):
        assert not any(f.found for f in detect.findings(one, detect.rounded(one.right, dtype), dtype))
    found = detect.findings(one, detect.rounded(one.right, "bfloat16"), "float32")
    assert any(f.found and f.test == "error of sums" for f in found)


def test_what_is_asked_of_sums():
    """14 bits are a fault where float32 was asked for, and none where one chain was."""
    one = case(tokens=100)
    y = FAULTS["short accumulator"].outputs(one)
    assert [
        any(f.found for f in detect.findings(one, y, accumulation=kind)) for kind in ("float32", "fast")
    ] == [True, False]
    rows = np.ones(100, bool)
    errors = [detect.sum_error(one, rows, kind) for kind in ("float32", "precise", "fast")]
    assert errors == sorted(errors)


def test_elements_that_are_not_finite():
    one = case()
    y = one.right.copy()
    y[3, 4] = np.inf
    (found,) = detect.findings(one, y)
    assert found.found
    assert "1 of 4620 outputs are inf or NaN where the right ones are finite" in str(found)
    with pytest.raises(ValueError, match=r"shape \(66, 70\)"):
        detect.findings(one, y.T)
