"""The calls that a kernel has to stand, and likeness; `tests/ao_lab/testing/test_kernels.py` has kernels."""

import numpy as np
import pytest

from reference import SCHEMES
from reference.probe import judge
from reference.probe.faults import FAULTS, typical_inputs, typical_weight

SCHEME = SCHEMES["fp8_1x128"], SCHEMES["fp8_128x128"]


def test_the_cases():
    x, w = judge.operands(None, None, "bfloat16", 0)
    asked = list(judge.cases(SCHEMES["fp8_rowwise"], SCHEMES["fp8_rowwise"], x, w, "bfloat16"))
    found = {case.name: case for case, *_ in asked}
    assert (x == x.astype(np.float32)).all()
    assert not (x.view(np.uint32) & 0xFFFF).any()
    assert (found["inputs times 2^12"].x == x * 4096).all()
    assert [case.sizes for case in asked[3]][:3] == [(246, 89, 765), (246, 89, 752), (246, 80, 752)]
    assert asked[3][-1].sizes == (246, 96, 768)
    last = found["NaN in a token, zeros in another"]
    assert np.isnan(last.x).sum() == 1
    assert not last.x[0].any()
    assert not last.w[0].any()
    blocks = [
        case.sizes
        for case, *_ in judge.cases(*SCHEME, typical_inputs(64, 512), typical_weight(256, 512), "float32")
    ]
    assert blocks == [(64, 256, 512)] * 3 + [(59, 249, 509)] + [(64, 256, 512)]


def test_a_right_kernel_and_one_that_is_like_a_fault():
    given = typical_inputs(100, 384), typical_weight(128, 384)
    assert judge.judge(lambda case: case.right, *SCHEME, *given).ok
    both = judge.judge(lambda case: 1.01 * FAULTS["first row"].outputs(case), *SCHEME, *given)
    assert both.looks_like == "first row"
    assert 0.5 < both.explained < 1


@pytest.mark.parametrize("beyond", [np.inf, 65504.0])
def test_outputs_beyond_the_largest_number_are_no_fault(beyond):
    """A token's outputs leave float16: an infinity and the largest number are right, NaN is not."""
    x, w = typical_inputs(64, 384), typical_weight(32, 384)
    x[5] *= np.float32(3e4 / np.abs(x[5]).max())
    w[3] *= np.float32(100 / np.abs(w[3]).max())
    rows = SCHEMES["fp8_rowwise"], SCHEMES["fp8_rowwise"]

    def kernel(case, value=beyond):
        y = case.right.copy()
        y[np.abs(y) > 65504] = value
        return y

    assert (np.abs(judge.Case(x, w, *rows).right[5]) > 65504).any()
    assert judge.judge(kernel, *rows, x, w, dtype="float16").ok
    assert not judge.judge(lambda case: kernel(case, np.nan), *rows, x, w, dtype="float16").ok
    with pytest.raises(ValueError, match="no token has an output that float16 holds"):
        judge.judge(kernel, *rows, np.full_like(x, 1e4), np.full_like(w, 1e4), dtype="float16")


def test_wrong_operands():
    with pytest.raises(ValueError, match="with 8 tokens"):
        judge.operands(np.ones((3, 3)), None, "float32", 0)
