"""`Scheme.deviations` against what records do: which finite inputs become infinite or NaN, for every record.

Default records keep every finite input finite; another project's record that does not says so, and one that says so does.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from reference.quantize.quantize import dequantize, quantize
from reference.schemes.schemes import SCHEMES, Scheme, scheme_of
from reference.schemes.torchao import (
    LARGE_16_OVERFLOWS,
    LARGE_OVERFLOWS,
    SMALL_IS_NAN,
    TINY_TENSOR_IS_NAN,
    torchao_integer,
)

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
SHAPE = (128, 256)
# Of the patterns that `torchao_integer` knows, one of each kind.
OTHERS = (
    "intx1_g32_asymmetric",
    "intx7_rowwise_no_clipping",
    "intx4_g64_f32",
    "intx4_g64_bf16",
    "int8_g64",
    "intx4_g64",
)
NAMES = [*SCHEMES, *(f"torchao.{name}" for name in OTHERS)]


def scheme(name: str) -> Scheme:
    return torchao_integer(name) or scheme_of(name)


def large(dtype: str) -> list[npt.NDArray[np.float64]]:
    """Tensors with the largest finite numbers of a dtype: alone, of both signs, among others, of all sizes."""
    most = float(ml_dtypes.finfo(DTYPES[dtype]).max)
    places = np.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE)
    signs = np.where(places % 2, 1.0, -1.0)
    sizes = np.random.default_rng(0).uniform(-1, 1, SHAPE)
    few = np.where(places % 16 == 3, most, 1.0)
    # Scales that are rounded themselves may end above the largest.
    fall = most * (1 - 0.3 * (places // 64 % 97 == 5))
    return [
        np.full(SHAPE, most), -np.full(SHAPE, most), most * signs, 0.6 * most * signs, sizes * most, few, fall
    ]  # fmt: skip


def small(dtype: str) -> list[npt.NDArray[np.float64]]:
    """Zeros, tensors around the smallest normal number and of the smallest subnormal one, rows of zeros among others."""
    limits = ml_dtypes.finfo(DTYPES[dtype])
    sizes = np.random.default_rng(1).uniform(-1, 1, SHAPE)
    rows = np.where(np.arange(SHAPE[0])[:, None] % 2, sizes, 0)
    least = float(limits.smallest_subnormal)
    return [np.zeros(SHAPE), rows, np.full(SHAPE, least), sizes * float(limits.smallest_normal), sizes * 1e-6]


def finite(x: npt.NDArray[np.float64], record: Scheme, dtype: str, output: str) -> bool:
    """Whether all values of a tensor are finite after quantization."""
    values = dequantize(quantize(x.astype(DTYPES[dtype]), record), output)
    return bool(np.isfinite(np.asarray(values).astype(np.float64)).all())


@pytest.mark.parametrize("name", NAMES)
def test_large_inputs(name: str) -> None:
    record = scheme(name)
    wide = all(finite(x, record, "float32", "float32") for x in large("float32"))
    narrow = all(finite(x, record, dtype, dtype) for dtype in ("bfloat16", "float16") for x in large(dtype))
    assert (LARGE_OVERFLOWS in record.deviations) == (not wide)
    assert (LARGE_16_OVERFLOWS in record.deviations) == (wide and not narrow)


@pytest.mark.parametrize("name", NAMES)
def test_small_inputs(name: str) -> None:
    record = scheme(name)
    good = all(finite(x, record, dtype, "float32") for dtype in DTYPES for x in small(dtype))
    assert ({SMALL_IS_NAN, TINY_TENSOR_IS_NAN}.isdisjoint(record.deviations)) == good


def test_the_largest_range_of_integers_with_zero_points() -> None:
    """max - min beyond the largest float32 makes the scale infinite: of the seven records in question, each says so."""
    x = np.full(SHAPE, 2.0e38, np.float32)
    x[:, ::2] *= -1
    asymmetric = [name for name in SCHEMES if name.startswith("torchao.int") and name.endswith("_asymmetric")]
    assert len(asymmetric) >= 7
    for name in asymmetric:
        q = quantize(x, name)
        assert np.isinf(q.scale).all()
        assert not np.isfinite(dequantize(q)).any()
