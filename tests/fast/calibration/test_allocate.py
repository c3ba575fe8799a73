"""`fast.layer_score`: the reference's, some tokens at a time."""

from __future__ import annotations

import pytest
import torch

import fast
import reference
from fast.calibration import allocate as module
from tests.support.refusals import refused


def test_it_is_the_reference(monkeypatch):
    monkeypatch.setattr(module, "TOKENS", 7)
    generator = torch.Generator().manual_seed(0)
    d, x, g = (torch.randn(shape, generator=generator) for shape in ((5, 8), (20, 8), (20, 5)))
    wanted = reference.layer_score(d.numpy(), x.numpy(), g.numpy())
    assert fast.layer_score(d, x, g) == pytest.approx(wanted, rel=1e-12)
    assert fast.layer_score(d, x.bfloat16(), g) == pytest.approx(
        reference.layer_score(d.numpy(), x.bfloat16().float().numpy(), g.numpy()), rel=1e-12
    )
    refused(ValueError, r"got \(5, 8\), \(20, 5\)", fast.layer_score, d, g, g)
    refused(ValueError, "T >= 1", fast.layer_score, d, x[:0], g[:0])
    refused(ValueError, "look for NaN", fast.layer_score, d, x * torch.nan, g)
    refused(TypeError, "torch tensors", fast.layer_score, d, x, g.numpy())


def test_products_of_bfloat16_are_rounded_once_on_a_cpu():
    """Each output of D x has the relative error of bfloat16, 2^-9, and so has the root of a token's term."""
    generator = torch.Generator().manual_seed(1)
    d, x, g = (torch.randn(shape, generator=generator).bfloat16() for shape in ((5, 8), (20, 8), (20, 5)))
    exact = (x.double() @ d.double().mT) * g.double()
    bound = (
        float((exact.abs().sum(1) * 2**-8 * (2 * exact.sum(1).abs() + exact.abs().sum(1) * 2**-8)).mean()) / 2
    )
    wanted = float(exact.sum(1).square().mean()) / 2
    made = fast.layer_score(d, x, g.float())
    assert abs(made - wanted) <= bound
    assert made == pytest.approx(wanted, rel=0.02)
