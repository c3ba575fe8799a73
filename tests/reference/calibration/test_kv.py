"""Scales of keys and values against the largest magnitude over what the element holds."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from reference.calibration.kv import kv_scales
from tests.support.refusals import refused

F = np.float32


def cache(seed, dtype=F):
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((2, 3, 5, 8)) * np.asarray([1.0, 10.0, 0.1])[:, None, None]
    return k.astype(F).astype(dtype), rng.standard_normal((2, 3, 5, 4)).astype(F).astype(dtype)


@pytest.mark.parametrize("dtype", [F, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize(
    ("element", "largest"), [("float8_e4m3fn", 448), ("float8_e5m2", 57344), ("int8", 127)]
)
def test_largest_magnitudes(dtype, element, largest):
    k, v = cache(0, dtype)
    for x, found in zip((k, v), kv_scales(k, v, element=element), strict=True):
        assert found.shape == ()
        assert found.dtype == F
        assert found == F(np.abs(x.astype(F)).max()) / F(largest)
    for x, found in zip((k, v), kv_scales(k, v, "head", element=element), strict=True):
        assert found.shape == (3,)
        for head in range(3):
            assert found[head] == F(np.abs(x[:, head].astype(F)).max()) / F(largest)


def test_padding_is_not_seen():
    k, v = cache(1)
    mask = np.ones((2, 5), bool)
    mask[0, 3:] = mask[1, :1] = False
    dirty = k.copy()
    dirty[0, :, 3], dirty[0, :, 4], dirty[1, :, 0] = np.nan, np.inf, 1e30
    clean = np.where(mask[:, None, :, None], k, 0)
    for per in ("tensor", "head"):
        assert (kv_scales(dirty, v, per, mask=mask).k == kv_scales(clean, v, per).k).all()


def test_zeros_have_the_scale_one():
    k, v = cache(2)
    k[:, 1] = 0
    assert kv_scales(k, 0 * v, "head").k[1] == 1
    assert kv_scales(k, 0 * v).v == 1
    assert kv_scales(k * F(1e-45), v).k > 0


def test_one_sequence_has_no_batch():
    k, v = cache(3)
    assert kv_scales(k[0], v[0], "head").k.shape == (3,)


def test_refusals():
    k, v = cache(4)
    refused(ValueError, "per is", kv_scales, k, v, "channel")
    refused(ValueError, "either sign", kv_scales, k, v, element="uint8")
    refused(ValueError, "either sign", kv_scales, k, v, element="float8_e8m0fnu")
    refused(ValueError, "heads, tokens, channels", kv_scales, k[0, 0], v)
    refused(ValueError, "heads, tokens, channels", kv_scales, k, v[:, :, :0])
    refused(ValueError, "NaN or infinity in v", kv_scales, k, v * F(np.nan))
    refused(ValueError, r"mask of k as bool of shape \(2, 5\)", kv_scales, k, v, mask=np.ones((2, 4), bool))
    refused(ValueError, "bool", kv_scales, k, v, mask=np.ones((2, 5)))
    refused(TypeError, "NumPy", kv_scales, k.tolist(), v)
