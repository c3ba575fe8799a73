"""How many matrices of inputs by inputs live on a device beside a layer's Hessians: at 14336 inputs each has 1.6 GB."""

import pytest
import torch

from fast.calibration import hessian as module
from fast.calibration.damping import gptq_held_out, held_out_errors_on_device
from fast.calibration.gptq import gptq_on_device
from fast.calibration.hessian import Ordered, quadratic, turn_
from reference import choose_scales
from tests.support.live_bytes import most_bytes

SIZE = 128
MATRIX = SIZE * SIZE * 8


@pytest.fixture
def case(monkeypatch):
    """A matrix of few rows; strips as thin against its Hessian as at 14336 inputs."""
    monkeypatch.setattr(module, "STRIP", 8)
    x = torch.randn(2048, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    w = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(1))
    h, val = (part.T @ part / len(part) for part in x.split(1024))
    return w, h, val, choose_scales(w, "int4_g32")


def test_damping_holds_two_matrices_beside_the_hessians(case):
    """The one that is factored, and its factor."""
    w, h, val, scales = case

    def run():
        held_out_errors_on_device(w, h, val, "int4_g32", scales=scales, candidates=(0.01, 0.1))

    assert most_bytes(run) < 2.5 * MATRIX


def test_gptq_holds_two_matrices_beside_the_hessian(case):
    w, h, _, scales = case
    assert (
        most_bytes(lambda: gptq_on_device(w, h, "int4_g32", scales=scales, order="activation")) < 2.5 * MATRIX
    )


def test_damping_and_gptq_hold_two_matrices_in_all_beside_the_held_out_hessian(case):
    """The Hessian that is given away is one of them until it is in order."""
    w, h, val, scales = case

    def run():
        given = [h.clone()]
        gptq_held_out(w, given.pop, val, "int4_g32", scales=scales, candidates=(0.01, 0.1), on_device=True)

    assert most_bytes(run) < 2.5 * MATRIX


def test_a_hessian_is_checked_without_another_one(case):
    _, h, _, _ = case
    assert most_bytes(lambda: module.checked_hessian(h)) < 0.1 * MATRIX
    for place, value, said in (
        ((3, 5), torch.nan, "NaN"),
        ((5, 3), -torch.inf, "NaN"),
        ((2, 2), -1.0, "diagonal"),
    ):
        wrong = h.clone()
        wrong[place] = value
        with pytest.raises(ValueError, match=said):
            module.checked_hessian(wrong)


@pytest.mark.parametrize("size", [1, 5, 64, 70])
def test_strips_are_the_whole(monkeypatch, size):
    """In an order, turned in place, and as a quadratic form, of the lower triangle alone."""
    monkeypatch.setattr(module, "STRIP", 16)
    generator = torch.Generator().manual_seed(size)
    h = torch.randn(size, size, dtype=torch.float64, generator=generator)
    whole = h.tril() + h.tril(-1).mT
    order = torch.randperm(size, generator=generator)
    expected = whole[order][:, order].flip(0, 1).mT.tril()
    assert torch.equal(Ordered.of(h, order).turned, expected)
    assert torch.equal(turn_(h.clone()), h.flip(0, 1))
    d = torch.randn(3, size, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(quadratic(d, h), ((d @ whole) * d).sum(), rtol=1e-12, atol=0)
    # Of a matrix that is not quite symmetric all elements count.
    torch.testing.assert_close(quadratic(d, h, lower=False), ((d @ h) * d).sum(), rtol=1e-12, atol=0)
