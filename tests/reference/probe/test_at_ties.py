"""Inputs at ties: each element is one, and a kernel that rounds them otherwise is told from one that does not."""

import numpy as np
import pytest

from reference import SCHEMES
from reference.probe.at_ties import at_ties, ties_are_the_specifications
from reference.probe.faults import Case, typical_inputs, typical_weight


def tied(scheme, dtype="bfloat16"):
    record = SCHEMES[scheme]
    return at_ties(Case(typical_inputs(48, 256), typical_weight(32, 256), record, record), dtype, 0)


@pytest.mark.parametrize("scheme", ["fp8_rowwise", "int8_tensorwise", "mxfp4", "nvfp4"])
def test_each_element_is_a_tie(scheme):
    """The specification takes the even neighbour, as far above as below, of all elements but the largest."""
    one = tied(scheme)
    off = np.abs(one.a - one.x)
    assert (off[:, np.arange(256) % 16 != 0] > 0).all()
    assert (off[:, ::16] == 0).all()
    up = np.abs(one.x) < np.abs(one.a)
    assert 0.2 < up.mean() < 0.7
    away = one.x + np.sign(one.x) * off  # the other neighbour where the specification rounds toward zero
    outputs = [one.right, one.right.astype(np.float32), away @ one.b.T]
    assert [ties_are_the_specifications(one, y, "bfloat16", "float32", 4.0) for y in outputs] == [
        True,
        True,
        False,
    ]


def test_schemes_without():
    assert tied("nf4") is None
    assert tied("int4_g32_asymmetric") is None
    one = Case(typical_inputs(48, 256), typical_weight(32, 256), None, SCHEMES["int4_g32"])
    assert at_ties(one, "float16", 0).x is one.x
