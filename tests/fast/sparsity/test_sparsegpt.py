"""`fast.sparsegpt`: on the host the reference; its steps on a device, run here on CPU tensors, where all sums are exact."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fast
import reference
from ao_lab.testing.strategies import assert_same_bits
from fast.sparsity.sparsegpt import sparsegpt_on_device
from reference.arrays.bridges import to_numpy, to_torch

PARTS = ("weights", "mask", "dead")
KINDS = st.sampled_from(["float32", "bfloat16", "float16"])


def same(made, wanted):
    for part in PARTS:
        assert_same_bits(getattr(made, part), torch.as_tensor(getattr(wanted, part)))
    assert (made.loss, made.damping, made.floor) == (wanted.loss, wanted.damping, wanted.floor)
    assert made.scales is None


def by_reference(w, hessian, **options):
    """The reference on the values of torch tensors."""
    made = reference.sparsegpt(to_numpy(w), hessian.numpy(), **options)
    return made._replace(weights=to_torch(made.weights))


def integer_problem(seed, rows, columns):
    """Weights of small integers, and H = L^T L of a unit upper L^-1 of integers near the diagonal: all sums are exact."""
    rng = np.random.default_rng(seed)
    w = torch.from_numpy(rng.integers(-8, 9, (rows, columns)).astype(np.float32))
    upper = np.eye(columns)  # U, and U^T U is the inverse of H
    for j in range(columns - 1):
        upper[j, j + 1] = rng.integers(-1, 2)
    inverse = np.linalg.inv(upper).round()
    return w, torch.from_numpy(inverse @ inverse.T)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**31), KINDS, st.sampled_from(["2:4", "1:4", "4:8", "1:2"]), st.sampled_from([8, 16, 128])
)
def test_steps_are_those_of_the_reference(seed, dtype, pattern, block):
    """Neighbouring columns depend on each other, inside blocks and across them; kept and dropped ones, with ties."""
    w, hessian = integer_problem(seed, 5, 32)
    w, options = w.to(getattr(torch, dtype)), {"pattern": pattern, "block": block, "damping": 0.0}
    same(sparsegpt_on_device(w, hessian, **options), by_reference(w, hessian, **options))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), KINDS)
def test_diagonals_and_dead_channels(seed, dtype):
    """Powers of four, whose roots and quotients are exact; some channels never seen."""
    rng = np.random.default_rng(seed)
    diagonal = 4.0 ** rng.integers(-3, 4, 16) * rng.integers(0, 2, 16)
    diagonal[0] = 1
    w = torch.from_numpy(rng.standard_normal((6, 16))).to(getattr(torch, dtype))
    hessian, options = torch.from_numpy(np.diag(diagonal)), {"pattern": "2:4", "block": 8, "damping": 0.0}
    made, wanted = sparsegpt_on_device(w, hessian, **options), by_reference(w, hessian, **options)
    same(made._replace(loss=0), wanted._replace(loss=0))
    # Sums of as many squares as there are weights: each addition errs by half a unit of the sum at most.
    assert abs(made.loss - wanted.loss) <= 2 * w.numel() * 2.0**-53 * wanted.loss


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_usual_hessians(dtype):
    """Sums differ in the last bits of float64 alone: masks and rounded weights are the same where nothing nearly ties."""
    rng = np.random.default_rng(3)
    x = torch.from_numpy(rng.standard_normal((256, 64)))
    w = torch.from_numpy(rng.standard_normal((24, 64))).to(getattr(torch, dtype))
    made = sparsegpt_on_device(w, x.T @ x, pattern="2:4", block=16, damping=0.01)
    wanted = by_reference(w, x.T @ x, pattern="2:4", block=16, damping=0.01)
    # The condition of this Hessian is below 100, and of 64 updates each errs by some 2**-52: a weight would have to lie within
    # 2**-40 of the middle between two neighbours, and of float32 one in 2**16 does.
    assert_same_bits(made.mask, torch.as_tensor(wanted.mask))
    assert_same_bits(made.weights, wanted.weights)
    assert made.loss == pytest.approx(wanted.loss, rel=1e-12)
    assert not bool(made.weights[~made.mask].any())


def test_damping_rises_as_in_the_reference():
    hessian = torch.tensor([[1.0, 2, 0, 0], [2, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]], dtype=torch.float64)
    w = torch.ones(2, 4)
    made = sparsegpt_on_device(w, hessian, pattern="2:4", block=4, damping=0.5)
    wanted = by_reference(w, hessian, pattern="2:4", block=4, damping=0.5)
    assert (made.damping, made.floor) == (wanted.damping, wanted.floor)
    assert wanted.damping == 1 or wanted.floor > 0
    with pytest.raises(ValueError, match="not positive definite"):
        sparsegpt_on_device(w, 9 * hessian - 8 * torch.eye(4), pattern="2:4", block=4, damping=0.0)


def test_host_tensors_are_pruned_by_the_reference():
    w, hessian = integer_problem(1, 4, 16)
    made = fast.sparsegpt(torch.nn.Parameter(w), hessian, pattern="1:4", block=8, damping=0.02)
    same(made, by_reference(w, hessian, pattern="1:4", block=8, damping=0.02))
    assert made.weights.dtype == torch.float32
    assert isinstance(made.mask, torch.Tensor)


@pytest.mark.parametrize("run", [sparsegpt_on_device, fast.sparsegpt])
def test_refusals_name_the_way_out(run):
    w, h = torch.ones(2, 8), torch.eye(8)
    options = {"pattern": "2:4", "block": 8, "damping": 0.01}

    def refused(kind, text, w=w, h=h, **changed):
        before = w.clone(), h.clone()
        with pytest.raises(kind, match=text):
            run(w, h, **{**options, **changed})
        assert torch.equal(w.nan_to_num(), before[0].nan_to_num())
        assert torch.equal(h.nan_to_num(), before[1].nan_to_num())

    refused(TypeError, "cast it to float32", w=w.double())
    refused(ValueError, "takes a matrix", w=w[0])
    refused(ValueError, "multiple of 4", w=w[:, :6])
    infinite = w.clone()
    infinite[1, 3] = torch.inf
    refused(ValueError, "got 1 of NaN or infinity", w=infinite)
    refused(ValueError, "share of the mean diagonal", damping=2)
    refused(ValueError, "positive multiple", block=6)
    refused(TypeError, "convert it first", h=h.half())
    refused(ValueError, r"\(8, 8\), inputs by inputs", h=h[:4])
    refused(ValueError, "got NaN or larger", h=h * torch.nan)
    refused(ValueError, "got negative elements", h=-h)
    refused(ValueError, "no input was seen", h=0 * h)


def test_a_hessian_that_is_no_tensor():
    with pytest.raises(TypeError, match="hessian as a torch tensor, got ndarray"):
        fast.sparsegpt(torch.ones(2, 4), np.eye(4))
