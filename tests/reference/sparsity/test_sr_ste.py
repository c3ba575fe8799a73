"""SR-STE's gradient against the formula in NumPy's float32, and against autograd of the penalty that it descends."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ao_lab.testing.strategies import assert_same_bits
from reference.sparsity.prune import prune
from reference.sparsity.sr_ste import sr_ste_gradient

NAMES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def formula(g, w, mask, decay):
    """Two operations in float32, one cast."""
    with np.errstate(all="ignore"):
        pull = (w.astype(np.float32) * np.float32(decay)).astype(np.float32)
        return np.where(mask, g, (g.astype(np.float32) + pull).astype(g.dtype))


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(sorted(NAMES)), st.sampled_from([2e-4, 1.0, 1e-45, 1e38, 0.1]), st.data())
def test_equals_the_formula_on_any_bits(name, decay, data):
    dtype = np.dtype(NAMES[name])
    carrier = np.dtype(f"uint{8 * dtype.itemsize}")
    words = hnp.arrays(carrier, (2, 8), elements=st.integers(0, 2 ** (8 * dtype.itemsize) - 1))
    g, w = (data.draw(words).view(dtype) for _ in range(2))
    mask = data.draw(hnp.arrays(np.bool_, (2, 8)))
    made = sr_ste_gradient(g, w, mask, decay=decay)
    assert made.dtype == dtype
    wanted = formula(g, w, mask, decay)
    nan = np.isnan(wanted.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(made.astype(np.float32)), nan)
    np.testing.assert_array_equal(made.view(carrier)[~nan], wanted.view(carrier)[~nan])
    np.testing.assert_array_equal(made.view(carrier)[mask], g.view(carrier)[mask])  # payloads of NaN, too
    finite = np.isfinite(g.astype(np.float32)) & np.isfinite(w.astype(np.float32))
    assert not nan[finite].any()
    plain = sr_ste_gradient(g, w, mask, decay=0)
    np.testing.assert_array_equal(plain.view(carrier), g.view(carrier))
    assert not np.shares_memory(plain, g)


@pytest.mark.parametrize("name", NAMES)
def test_libraries_agree_bit_for_bit(name):
    rng = np.random.default_rng(0)
    g, w = (rng.standard_normal((4, 8)).astype(NAMES[name]) for _ in range(2))
    mask = prune(w)
    expected = sr_ste_gradient(g, w, mask)
    on_torch = [torch.from_numpy(t.astype(np.float32)).to(getattr(torch, name)) for t in (g, w)]
    for function in (sr_ste_gradient, sr_ste_gradient.__wrapped__):
        made = function(*on_torch, torch.from_numpy(mask))
        assert made.dtype == getattr(torch, name)
        assert_same_bits(made.float().numpy(), expected.astype(np.float32))
    made = jax.jit(sr_ste_gradient)(jnp.asarray(g), jnp.asarray(w), jnp.asarray(mask))
    assert_same_bits(np.asarray(made).astype(np.float32), expected.astype(np.float32))


def test_descends_a_penalty_on_what_the_mask_drops():
    """The gradient of <g, w> + decay / 2 * |(1 - mask) w|**2, exact in these small integers."""
    w = torch.tensor([[3.0, -1, 2, 4, 8, -8, 1, 0]], requires_grad=True)
    g = torch.tensor([[1.0, 2, 3, 4, 5, 6, 7, 8]])
    mask = prune(w.detach())
    (torch.sum(g * w) + 0.25 * torch.sum((~mask) * w**2)).backward()
    assert torch.equal(sr_ste_gradient(g, w.detach(), mask, decay=0.5), w.grad)


def test_refusals_name_the_way_out():
    g = np.ones((2, 4), np.float32)
    mask = g > 0
    for decay in (-1e-4, np.nan, np.inf, True, 2.0**127):
        with pytest.raises(ValueError, match="decay is a number from 0"):
            sr_ste_gradient(g, g, mask, decay=decay)
    with pytest.raises(ValueError, match=r"w is float32 of shape \(2, 4\)"):
        sr_ste_gradient(g, g[:1], mask)
    with pytest.raises(ValueError, match="w is float32"):
        sr_ste_gradient(g, g.astype(np.float16), mask)
    with pytest.raises(TypeError, match="as prune returns it, got float32"):
        sr_ste_gradient(g, g, g)
    with pytest.raises(ValueError, match="one bool per weight"):
        sr_ste_gradient(g, g, mask[0])
    with pytest.raises(TypeError, match="cast it to float32"):
        sr_ste_gradient(g.astype(np.float64), g, mask)
