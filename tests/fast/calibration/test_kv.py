"""Scales of keys and values for torch tensors: the bits of the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fast.calibration.kv import kv_scales
from reference.arrays.bridges import to_numpy
from reference.calibration.kv import kv_scales as reference_kv_scales
from tests.support.refusals import refused


@pytest.mark.parametrize("per", ["tensor", "head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("element", ["float8_e4m3fn", "int8"])
def test_bits(per, dtype, element):
    rng = np.random.default_rng(0)
    k, v = (torch.from_numpy(rng.standard_normal((2, 3, 5, 8))).to(dtype) for _ in range(2))
    k[:, 1] = 0
    mask = torch.from_numpy(rng.random((2, 5)) < 0.7)
    v[~mask[:, None].expand(2, 3, 5)] = torch.nan
    found = kv_scales(k, v, per, element=element, mask=mask)
    expected = reference_kv_scales(to_numpy(k), to_numpy(v), per, element=element, mask=mask.numpy())
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        assert a.shape == b.shape
        assert (a.numpy() == b).all()


def test_refusals():
    x = torch.ones(1, 2, 3, 4)
    refused(ValueError, "per is", kv_scales, x, x, "row")
    refused(ValueError, "heads, tokens, channels", kv_scales, x[0, 0], x)
    refused(ValueError, "NaN or infinity in k", kv_scales, x * torch.inf, x)
    refused(ValueError, "mask of k", kv_scales, x, x, mask=torch.ones(3, dtype=torch.bool))
    refused(TypeError, "torch tensors", kv_scales, x.numpy(), x)
