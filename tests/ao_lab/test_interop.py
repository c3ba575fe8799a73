"""Quantized tensors in torch's own dtypes: the same memory, the same numbers."""

import numpy as np
import pytest
import torch

import fast
from ao_lab import from_native, native_dtype, to_native
from ao_lab.testing.strategies import assert_same_bits
from reference import FORMATS

NAMES = (
    "fp8_rowwise", "fp8_rowwise_e5m2", "mxfp8_e4m3", "mxfp6_e2m3", "mxfp4", "mxint8", "nvfp4", "int8_rowwise_asymmetric",
    "int4_g32", "nf4", "torchao.mxfp8_e4m3_rceil",
)  # fmt: skip


def normals(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("packed", [False, True])
def test_there_and_back_over_the_same_memory(name, packed):
    q = fast.quantize(normals(8, 64), name, packed=packed)
    parts = to_native(q)
    for ours, theirs in zip((q.codes, q.scale, q.outer, q.zero), parts, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or ours.data_ptr() == theirs.data_ptr()
    assert_same_bits(from_native(parts, name, shape=(8, 64), packed=packed), q)


@pytest.mark.parametrize("name", [name for name in FORMATS if native_dtype(name) is not None])
def test_torch_reads_the_same_numbers(name):
    fmt = FORMATS[name]
    codes = torch.arange(1 << fmt.bits, dtype=torch.int32).to(torch.uint8 if fmt.bits == 8 else torch.uint16)
    theirs = codes.view(native_dtype(name)).to(torch.float32)
    ours = fast.decode(codes, name)
    if fmt.name == "mxint8":
        theirs = theirs / 64
    np.testing.assert_array_equal(theirs.numpy(), ours.numpy())


def test_dtypes_of_parts():
    parts = to_native(fast.quantize(normals(4, 64), "mxfp8_e5m2", tiled=False))
    assert (parts.codes.dtype, parts.scale.dtype) == (torch.float8_e5m2, torch.float8_e8m0fnu)
    parts = to_native(fast.quantize(normals(4, 64), "nvfp4", packed=True))
    assert (parts.codes.dtype, parts.scale.dtype) == (torch.float4_e2m1fn_x2, torch.float8_e4m3fn)
    assert parts.codes.shape == (4, 32)
    assert to_native(fast.quantize(normals(4, 64), "int8_rowwise")).codes.dtype == torch.int8
    # torch has nothing for these: they stay bytes.
    assert to_native(fast.quantize(normals(4, 64), "mxfp6_e2m3")).codes.dtype == torch.uint8
    assert to_native(fast.quantize(normals(4, 64), "int4_g32", packed=True)).codes.dtype == torch.uint8


def test_scaled_mm_takes_them():
    """Products of small integers under scales that are powers of two: every sum is exact, in any order."""
    generator = torch.Generator().manual_seed(0)
    one, two = (torch.randint(-8, 9, (16, 32), generator=generator).float() for _ in range(2))
    scales = torch.full((), 0.5), torch.full((), 4.0)
    made = [fast.quantize(x * s, "fp8_tensorwise", scales=s) for x, s in zip((one, two), scales, strict=True)]
    left, right = map(to_native, made)
    got = torch._scaled_mm(
        left.codes, right.codes.t(), scale_a=left.scale, scale_b=right.scale, out_dtype=torch.float32
    )
    assert torch.equal(got, 2 * (one @ two.t()))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"scheme": "mxfp9"}, ValueError, "mxfp9"),
        ({"packed": True, "shape": None}, ValueError, "needs shape="),
        ({"shape": (4, 32)}, ValueError, r"have shape \(4, 32\), got \(4, 64\)"),
        ({"scale": torch.zeros(4, 2)}, (TypeError, ValueError), "scale"),
        ({"scale": torch.zeros(4, 1, dtype=torch.uint8)}, ValueError, "scale"),
        ({"codes": torch.zeros(4, 64)}, TypeError, "codes as uint8 or uint16, got float32"),
    ],
)
def test_what_does_not_fit_is_refused(change, error, words):
    q = to_native(fast.quantize(normals(4, 64), "mxfp8_e4m3"))
    parts = q._replace(**{name: change[name] for name in ("codes", "scale") if name in change})
    options = {name: change[name] for name in ("packed", "shape") if name in change}
    with pytest.raises(error, match=words):
        from_native(parts, change.get("scheme", "mxfp8_e4m3"), **options)


def test_only_torch_tensors():
    q = fast.quantize(normals(4, 64), "mxfp8_e4m3")
    with pytest.raises(TypeError, match="got ndarray"):
        to_native(q.__class__(**{**vars(q), "codes": q.codes.numpy(), "scale": q.scale.numpy()}))
    with pytest.raises(TypeError, match="got Tensor"):
        to_native(normals(2))
