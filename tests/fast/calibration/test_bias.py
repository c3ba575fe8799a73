"""`fast.correct_bias`: the reference's float64 sums."""

from __future__ import annotations

import torch

import fast
import reference
from reference import quantize
from tests.support.refusals import refused


def test_it_is_the_reference():
    """Values are a power of two times small integers: all sums are exact."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randint(-9, 10, (4, 64), generator=generator) / 8
    mean = torch.randint(-5, 6, (64,), generator=generator).double()
    q = quantize(w, "mxfp4")
    wanted = reference.correct_bias(w.numpy(), quantize(w.numpy(), "mxfp4"), mean.numpy())
    made = fast.correct_bias(w, q, mean)
    assert made.dtype == torch.float64
    assert made.tolist() == wanted.tolist()
    refused(ValueError, r"shape \(64,\)", fast.correct_bias, w, q, mean[:3])
    refused(ValueError, "finite mean", fast.correct_bias, w, q, mean * torch.nan)
    refused(ValueError, "finite numbers", fast.correct_bias, w * torch.inf, q, mean)
    refused(ValueError, "that of w", fast.correct_bias, w[:2], q, mean)
    refused(ValueError, "as a matrix", fast.correct_bias, w[0], q, mean)
    refused(TypeError, "torch tensors", fast.correct_bias, w.numpy(), q, mean)
