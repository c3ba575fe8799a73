"""Both axes of one read: which matrices the kernel takes; elsewhere two reads, the same bits."""

from dataclasses import replace

import pytest
import torch

import reference
from ao_lab.testing.strategies import assert_same_bits
from fast.quantize.rowwise_colwise import both_values, values_and_codes
from reference import SCHEMES

MX = [name for name in SCHEMES if name.startswith(("mxfp8", "mxfp6", "mxfp4"))]


def matrix(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ["mxfp8_e4m3_rceil", "nvfp4", "fp8_1x128"])
def test_they_are_two_calls(name, dtype):
    x, scheme = matrix(64, 256, dtype=getattr(torch, dtype)), SCHEMES[name]
    rows, columns = (reference.fake_quantize(x, scheme, axis=axis) for axis in (1, 0))
    for made, wanted in zip(both_values(x, scheme), (rows, columns), strict=True):
        assert_same_bits(made, wanted)
    values, q = values_and_codes(x, scheme)
    assert_same_bits(values, rows)
    assert_same_bits(q, reference.quantize(x, scheme, axis=0))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_in_a_compiled_program():
    """By operators, whose scales and outer scales find their places."""
    x, scheme = matrix(64, 256), SCHEMES["nvfp4"]
    torch._dynamo.reset()
    made, q = torch.compile(values_and_codes, backend="aot_eager", fullgraph=True)(x, scheme)
    assert_same_bits(made, reference.fake_quantize(x, scheme))
    assert_same_bits(q, reference.quantize(x, scheme, axis=0))
    both = torch.compile(both_values, backend="aot_eager", fullgraph=True)(x, scheme)
    assert_same_bits(both[1], reference.fake_quantize(x, scheme, axis=0))


def test_which_matrices_the_kernel_takes():
    from fast.kernels.both_axes import covers

    scheme = SCHEMES["mxfp8_e4m3"]
    assert all(covers(matrix(*shape), scheme) for shape in ((32, 32), (96, 160), (64, 1024)))
    assert covers(matrix(64, 64, dtype=torch.float16), scheme)
    for x in (matrix(48, 64), matrix(64, 48), matrix(64, 64).t()[:, :32], matrix(2, 32, 32), matrix(0, 32)):
        assert not covers(x, scheme)
    assert not covers(matrix(64, 64, dtype=torch.float32), scheme)


def test_which_schemes_the_kernel_takes():
    """MX floats of both rules and no other default scheme; neither drawn, nor those with other blocks."""
    from fast.kernels.both_axes import covers

    x = matrix(128, 128)
    assert [name for name, scheme in SCHEMES.items() if covers(x, scheme) and "." not in name] == MX
    mx = SCHEMES["mxfp4"]
    assert not covers(x, replace(mx, name="drawn", rounding="stochastic"))
    assert not covers(x, replace(mx, name="short", scale=replace(mx.scale, block=16)))
