"""A `Quantized` made by hand: what does not fit is refused by every library with one text; bits above a code are ignored."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import ao_lab.jax
import fast
import reference
from ao_lab.testing.strategies import assert_same_bits, fill
from reference import SCHEMES, quantize
from reference.arrays.torch_bridge import to_torch

X = fill("normals", (4, 256), seed=3)
# name, what is replaced, the error, its text.
WRONG = {
    "no scale": ("fp8_rowwise", {"scale": None}, ValueError, r"scale = float32 of shape \(4, 1\).*got none"),
    "scale shape": ("fp8_rowwise", {"scale": np.ones(4, np.float32)}, ValueError, r"got float32 of shape \(4,\)"),
    "scale dtype": ("mxfp4", {"scale": np.ones((4, 8), np.int8)}, ValueError, r"uint8 of.*got int8 of"),
    "no outer": ("nvfp4", {"outer": None}, ValueError, r"outer = float32 of shape \(\).*got none"),
    "outer shape": ("nvfp4", {"outer": np.ones(4, np.float32)}, ValueError, r"outer = float32 of shape \(\), got"),
    "outer too many": ("mxfp4", {"outer": np.ones((), np.float32)}, ValueError, "outer = none"),
    "no center": ("nf4", {"zero": None}, ValueError, r"zero = float32 of shape \(\).*got none"),
    "groups": ("nf4", {"outer": np.ones(3, np.float32)}, ValueError, r"outer = float32 of shape \(1,\), got"),
    "zero shape": (
        "int4_g32_asymmetric", {"zero": np.ones((4, 1), np.int8)}, ValueError, r"zero = int8 of shape \(4, 8\), got",
    ),
    "zero dtype": ("int4_g32_asymmetric", {"zero": np.ones((4, 8), np.uint8)}, ValueError, "got uint8 of"),
    "codes dtype": ("mxfp4", {"codes": np.zeros((4, 256), np.int8)}, TypeError, "uint8 or uint16, got int8"),
    "codes width": ("mxfp4", {"codes": np.zeros((4, 256), np.uint16)}, TypeError, "float4_e2m1fn are uint8, got uint16"),
    "codes shape": ("mxfp4", {"codes": np.zeros((4, 128), np.uint8)}, ValueError, r"\(4, 256\), got \(4, 128\)"),
    "shape": ("mxfp4", {"shape": (2, 512)}, ValueError, r"have shape \(2, 512\), got \(4, 256\)"),
    "shape's type": ("mxfp4", {"shape": 1024}, TypeError, "tuple of integers, got 1024"),
    "lengths": ("mxfp4", {"shape": (4, 256.0)}, TypeError, r"tuple of integers, got \(4, 256.0\)"),
    "axis": ("fp8_rowwise", {"axis": 0}, ValueError, r"scale = float32 of shape \(1, 256\), got"),
    "axis outside": ("fp8_rowwise", {"axis": 2}, ValueError, "axis 2 is outside"),
    "axis type": ("fp8_rowwise", {"axis": 1.0}, TypeError, "axis is an integer, got float"),
    "scheme": ("fp8_rowwise", {"scheme": "fp8_rowwise"}, TypeError, "record, got str: 'fp8_rowwise'"),
    "tiled": ("mxfp4", {"tiled": True}, ValueError, r"uint8 of shape \(1024,\), got uint8 of shape \(4, 8\)"),
    "never tiled": ("fp8_rowwise", {"tiled": True}, ValueError, "tiled=True takes a scheme"),
}  # fmt: skip
LIBRARIES = {
    "numpy": (np.asarray, reference.dequantize),
    "torch's operations": (to_torch, reference.dequantize.__wrapped__),
    "fast": (to_torch, fast.dequantize),
    "jax": (jax.numpy.asarray, ao_lab.jax.dequantize),
}


def in_library(q, convert):
    """q with arrays of another library."""
    arrays = {part: getattr(q, part) for part in ("codes", "scale", "outer", "zero")}
    return replace(q, **{part: None if a is None else convert(a) for part, a in arrays.items()})


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused(library, case):
    name, wrong, error, said = WRONG[case]
    convert, dequantize = LIBRARIES[library]
    q = in_library(replace(quantize(X, name), **wrong), convert)
    with pytest.raises(error, match=said):
        dequantize(q)


def test_scales_of_another_library():
    q = quantize(X, "fp8_rowwise")
    with pytest.raises(ValueError, match="in the codes' library, got a ArrayImpl"):
        reference.dequantize(replace(q, scale=jax.numpy.asarray(q.scale), codes=to_torch(q.codes)))


@pytest.mark.parametrize(
    "name", ["mxfp4", "int4_g32", "int4_g32_asymmetric", "torchao.int4_g32_tinygemm", "nf4"]
)
def test_bits_above_a_code_are_ignored(name):
    q = quantize(X, name)
    more = replace(q, codes=q.codes | np.uint8(0xB0))
    assert_same_bits(reference.dequantize(more), reference.dequantize(q))
    if SCHEMES[name].zero is None or SCHEMES[name].zero.rule == "code":
        w = fill("normals", (256, 2), seed=4)
        assert_same_bits(reference.matmul(more, w), reference.matmul(q, w))


def test_matmul_refuses_as_well():
    q = quantize(X, "fp8_rowwise")
    with pytest.raises(ValueError, match="takes scale = float32"):
        reference.matmul(replace(q, scale=None), X.T)
