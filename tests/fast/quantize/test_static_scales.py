"""`quantize_rows`: codes as under the given scales, and scales of rows that show a NaN; its kernel in Triton's interpreter."""

import platform

import pytest
import torch

import fast
from ao_lab.testing.strategies import assert_same_bits
from fast.quantize.static_scales import quantize_rows, rows_record
from reference import SCHEMES, Scales
from tests.emulator.interpreter_process import lines_of

X = torch.linspace(-5, 5, 4 * 48).reshape(4, 48)
X[1, 7] = X[3, 47] = float("nan")
X[2, 0] = float("inf")
ZERO = torch.tensor(3, dtype=torch.int8)
GIVEN = [
    ("int8_tensorwise", Scales(torch.tensor(0.03))),
    ("torchao.int8_tensorwise_asymmetric", Scales(torch.tensor(0.03), None, ZERO)),
    ("int8_rowwise", Scales(torch.tensor([[0.03], [0.02], [0.01], [0.04]]))),
]


@pytest.mark.parametrize(("name", "scales"), GIVEN)
def test_codes_are_those_of_quantize_and_scales_those_of_rows(name, scales):
    made, q = quantize_rows(X, name, scales), fast.quantize(X, name, scales=scales)
    assert_same_bits(made.codes, q.codes)
    wanted = scales.scale.expand(4, 1).clone()
    wanted[[1, 3]] = float("nan")
    assert_same_bits(made.scale, wanted)
    assert (made.zero is None) == (scales.zero is None)
    if made.zero is not None:
        assert torch.equal(made.zero, scales.zero.expand(4, 1))
    assert (made.scheme.scale.block, made.scheme.element, made.axis) == (-1, "int8", 1)


@pytest.mark.parametrize(("name", "scales"), GIVEN)
def test_the_operator(name, scales):
    given = (X.nan_to_num(1.0), name, scales.scale, scales.zero)  # its comparisons know no NaN
    assert set(torch.library.opcheck(torch.ops.ao_lab.quantize_rows, given).values()) == {"SUCCESS"}

    def codes_and_scales(x):
        q = quantize_rows(x, name, scales)
        return q.codes, q.scale, fast.dequantize(q)

    torch.compiler.reset()
    compiled = torch.compile(codes_and_scales, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(X), codes_and_scales(X), strict=True):
        assert_same_bits(one, other)


def test_the_record_is_one_object():
    """Calls are found by it."""
    assert rows_record("int8_tensorwise") is rows_record("int8_tensorwise")
    assert rows_record("int8_rowwise") == SCHEMES["int8_rowwise"]


def test_what_it_does_not_take():
    for name in ("int4_g32", "mxfp8_e4m3", "nvfp4"):
        with pytest.raises(ValueError, match=f"one float32 scale for each row or in all, got {name}"):
            quantize_rows(X, name, Scales(torch.tensor(1.0)))
    with pytest.raises(ValueError, match=r"takes a matrix \(M, K\), got shape \(48,\)"):
        quantize_rows(X[0], "int8_tensorwise", Scales(torch.tensor(1.0)))
    assert quantize_rows(X[:0], "int8_tensorwise", Scales(torch.tensor(1.0))).scale.shape == (0, 1)


@pytest.mark.skipif(platform.system() != "Linux", reason="triton has no packages for this system")
def test_the_kernel_agrees():
    assert len(lines_of("linear", "static_scales")) == 7
