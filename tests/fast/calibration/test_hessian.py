"""`fast.second_moment` and `fast.triangular_factor`: on the host the reference; their steps on a device, on CPU tensors."""

from __future__ import annotations

import pytest
import torch

import fast
import reference
from ao_lab.testing.strategies import assert_same_bits
from fast.calibration import hessian as module
from fast.calibration.hessian import Ordered, checked_hessian, factor_on_device, second_moment_on_device
from tests.support.refusals import refused


def moments(seed, k=24, tokens=200):
    x = torch.randn(tokens, k, generator=torch.Generator().manual_seed(seed))
    return x, fast.second_moment(x).value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_second_moment(dtype, monkeypatch):
    """Integers, whose sums are exact in any order: the same bits, padded or not."""
    monkeypatch.setattr(module, "TOKENS", 16)
    x = torch.randint(-3, 4, (4, 16, 8), generator=torch.Generator().manual_seed(0)).to(dtype)
    wanted = reference.second_moment(x.double().numpy())
    for made in (fast.second_moment(x), second_moment_on_device(x)):
        assert_same_bits(made.value, torch.from_numpy(wanted.value))
        assert made.count == 64
    padded = torch.cat([x, torch.full_like(x, torch.nan)], dim=1)
    mask = torch.arange(32).expand(4, 32) < 16
    for made in (fast.second_moment(padded, mask), second_moment_on_device(padded, mask)):
        assert_same_bits(made.value, torch.from_numpy(wanted.value))
        assert made.count == 64
    assert second_moment_on_device(x, torch.zeros(4, 16, dtype=torch.bool)).count == 0


@pytest.mark.parametrize("damping", [0.0, 0.01, 3.0])
def test_the_factor(damping):
    _, h = moments(1)
    h[3], h[:, 3] = 0, 0
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    copy = h.clone()
    for one in (None, order):
        wanted = reference.triangular_factor(
            h.numpy(), damping=damping, order=None if one is None else one.numpy()
        )
        made = factor_on_device(checked_hessian(h), damping, one)
        torch.testing.assert_close(
            made.factor, torch.from_numpy(wanted.factor.copy()), rtol=1e-10, atol=1e-12
        )
        assert_same_bits(made.dead, torch.from_numpy(wanted.dead))
        assert made[2:] == wanted[2:]
        assert_same_bits(
            fast.triangular_factor(h, damping=damping, order=one).factor,
            torch.from_numpy(wanted.factor.copy()),
        )
    assert_same_bits(h, copy)
    # Only the lower triangle is read.
    low = factor_on_device(checked_hessian(h.tril()), damping, order).factor
    assert_same_bits(low, factor_on_device(checked_hessian(h), damping, order).factor)


def test_one_damping_after_the_other():
    """Each as if it were the first, where one before had to be raised too."""
    _, h = moments(4)
    h[5], h[:, 5] = 0, 0
    h[1, 2] = h[2, 1] = 1.02 * (h[1, 1] * h[2, 2]).sqrt()
    order = torch.randperm(24, generator=torch.Generator().manual_seed(4))
    ordered, raised = Ordered.of(h, order), False
    for damping in (0.001, 1.0, 0.01, 1.0):
        found, alone = ordered.factor(damping), factor_on_device(h, damping, order)
        assert_same_bits(found.factor, alone.factor)
        assert_same_bits(found.dead, alone.dead)
        assert found[2:] == alone[2:]
        raised = raised or found.damping > damping
    assert raised


def test_damping_rises():
    bent = torch.eye(8, dtype=torch.float64)
    bent[1, 2] = bent[2, 1] = 1.035
    assert factor_on_device(bent, 0.01, None)[2:] == (0.04, 0.0)
    bent[1, 2] = bent[2, 1] = 40
    refused(ValueError, "not positive definite", factor_on_device, bent, 0.01, None)


def test_refusals():
    x, h = moments(2)
    for call in (fast.second_moment, second_moment_on_device):
        refused(
            ValueError, "got 3 of NaN", call, torch.cat([x, x[:1].index_fill(1, torch.arange(3), torch.inf)])
        )
        refused(ValueError, "K >= 1", call, x[:, :0])
        refused(ValueError, r"bool of shape \(200,\)", call, x, torch.ones(200))
    for changed, said in (
        (h[:3], "inputs by inputs"),
        (0 * h, "no input was seen"),
        (-h, "negative"),
        (h[:0, :0], "no inputs"),
    ):
        refused(ValueError, said, checked_hessian, changed)
        refused(ValueError, said, fast.triangular_factor, changed)
    refused(TypeError, "got torch.float16", checked_hessian, h.half())
    refused(TypeError, "torch tensors", fast.triangular_factor, h.numpy())
    refused(ValueError, "permutation", fast.triangular_factor, h, order=[0] * 24)
