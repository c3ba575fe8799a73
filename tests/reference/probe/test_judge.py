"""The calls that a kernel has to stand, and likeness; `tests/ao_lab/testing/test_kernels.py` has kernels."""

import numpy as np
import pytest

from reference import SCHEMES
from reference.probe import judge
from reference.probe.faults import FAULTS, typical_inputs, typical_weight

SCHEME = SCHEMES["fp8_1x128"], SCHEMES["fp8_128x128"]


def test_the_cases():
    x, w = judge.operands(None, None, "bfloat16", 0)
    rows = SCHEMES["fp8_rowwise"]
    asked = list(judge.cases(judge.Probed(lambda case: case.right, rows, rows, x, w, "bfloat16")))
    found = {case.name: case for case in asked}
    assert (x == x.astype(np.float32)).all()
    assert not (x.view(np.uint32) & 0xFFFF).any()
    assert (found["inputs times 2^12"].x == x * 4096).all()
    last = found["NaN in a token, zeros in another"]
    assert np.isnan(last.x).sum() == 1
    assert not last.x[0].any()
    assert not last.w[0].any()
    assert {case.sizes for case in asked} == {(251, 96, 768)}


@pytest.mark.parametrize(
    ("tiles", "tried", "lines"),
    [
        ((1, 1, 1), (59, 249, 509), 0),
        ((1, 8, 16), (59, 240, 496), 2),
        ((16, 1, 1), (48, 249, 509), 2),
        ((16, 16, 16), (48, 240, 496), 4),
        ((64, 1, 1), (64, 249, 509), 3),
        ((64, 256, 512), None, 13),
    ],
)
def test_other_lengths_are_the_first_that_the_kernel_takes(tiles, tried, lines):
    """Of M alone as of N and K; what a kernel refuses is named once, and a kernel that takes no other length is not refused."""

    def kernel(case):
        if any(size % tile for size, tile in zip(case.sizes, tiles, strict=True)):
            raise ValueError(f"tiles of {tiles}")
        return case.right

    rows, given = (
        (SCHEMES["fp8_rowwise"], SCHEMES["fp8_rowwise"]),
        (typical_inputs(64, 512), typical_weight(256, 512)),
    )
    probed = judge.Probed(kernel, *rows, *given, "float32")
    found = [case.sizes for case, _ in judge._other_lengths(probed)]
    assert found == ([tried] if tried else [])
    report = judge.judge(kernel, *rows, *given)
    assert (report.ok, report.refused) == (True, tuple(probed.refused))
    assert len(probed.refused) == lines
    assert ("no other lengths were tried" in str(report)) == (tried is None)


def test_typical_inputs_have_whole_tiles_where_a_kernel_refuses_odd_ones():
    sizes = []

    def kernel(case):
        sizes.append(case.sizes)
        if case.sizes[0] % 16:
            raise RuntimeError("M is a multiple of 16")
        return case.right

    report = judge.judge(kernel, SCHEMES["int8_rowwise"], SCHEMES["int8_rowwise"])
    assert report.ok
    assert sizes[:2] == [(251, 96, 768), (256, 96, 768)]
    assert "M is a multiple of 16): M, N, K = (251, 96, 768)" in report.refused[0]
    with pytest.raises(RuntimeError, match="multiple of 16"):
        judge.judge(kernel, *[SCHEMES["int8_rowwise"]] * 2, typical_inputs(37, 384), typical_weight(32, 384))


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
