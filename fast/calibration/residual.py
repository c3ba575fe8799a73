"""`correct_bias` and `low_rank_residual` for torch tensors; `reference.calibration.residual` states what they are.

`correct_bias` is float64 operations of torch on every device. Of `low_rank_residual` CPU tensors run the reference; elsewhere
the eigenvectors of D H D^T come from the device's library where a side of the weight is at most `EXACT`; for longer sides from
subspace iteration with `EXTRA` columns more, each round a product with D H D^T and an orthogonalization, from a start that
depends on shapes alone: what is left of the error is then within about a thousandth.
"""

from __future__ import annotations

import torch

import reference
from fast.calibration.inputs import (
    check_finite,
    float_tensor,
    numpy_of,
    rounded,
    second_moments,
    torch_of,
    weight_matrix,
)
from fast.quantize.quantize import dequantize
from reference.calibration.residual import LowRank, check_quantized_like, check_rank
from reference.quantize.stored import Quantized

EXACT, EXTRA, ROUNDS = 1024, 32, 12


def correct_bias(w: torch.Tensor, quantized: Quantized, mean: torch.Tensor) -> torch.Tensor:
    """(W - Q) mean, float64 (N,) on w's device: see `reference.correct_bias`. mean: on any device."""
    w, mean = weight_matrix(w, "correct_bias"), float_tensor(mean, "correct_bias", "the mean")
    if mean.shape != w.shape[1:]:
        raise ValueError(
            f"correct_bias takes the mean of inputs, shape {tuple(w.shape[1:])}, got shape {tuple(mean.shape)}; use the "
            f"statistics of this layer"
        )
    check_finite(mean, "correct_bias", "the mean")
    check_quantized_like(quantized, tuple(w.shape), "correct_bias")
    change = w.double() - dequantize(quantized).double()
    return change @ mean.to(w.device, torch.float64)


def low_rank_residual(
    w: torch.Tensor,
    quantized: Quantized,
    hessian: torch.Tensor,
    rank: int,
    *,
    dtype: torch.dtype | None = None,
) -> LowRank:
    """Two factors (N, r), (r, K) of the error of a quantized weight, on w's device: see `reference.low_rank_residual`."""
    w = float_tensor(w, "low_rank_residual", "w")
    h = float_tensor(hessian, "low_rank_residual", "the hessian")
    if w.device.type != "cpu":
        return low_rank_on_device(w, quantized, h, rank, dtype=dtype)
    check_quantized_like(quantized, tuple(w.shape), "low_rank_residual")
    dtype = w.dtype if dtype is None else dtype
    factors = reference.low_rank_residual(numpy_of(w), numpy_of(quantized), numpy_of(h), rank, dtype=dtype)
    return LowRank(*map(torch_of, factors))


def low_rank_on_device(
    w: torch.Tensor,
    quantized: Quantized,
    hessian: torch.Tensor,
    rank: int,
    *,
    dtype: torch.dtype | None = None,
) -> LowRank:
    """The same by torch operations on w's device, whatever it is."""
    w = weight_matrix(w, "low_rank_residual")
    check_quantized_like(quantized, tuple(w.shape), "low_rank_residual")
    check_rank(rank, tuple(w.shape))
    h = second_moments(hessian.to(w.device), w.shape[1], "low_rank_residual")
    values = dequantize(quantized, torch.float32)
    check_finite(values, "low_rank_residual", "the values of quantized")
    d = w.double() - values.double()
    h = (h + h.T) / 2
    dtype = w.dtype if dtype is None else dtype
    left = rounded(_signed(_directions(d, h, rank)), dtype)
    wide = left.double()
    right = torch.linalg.solve(wide.T @ wide, wide.T @ d) if rank else d.new_zeros((0, d.shape[1]))
    return LowRank(left, rounded(right, dtype))


def _directions(d: torch.Tensor, h: torch.Tensor, rank: int) -> torch.Tensor:
    """The first left singular vectors of D R (N, rank)."""
    if len(d) <= EXACT:
        costs = d @ h @ d.T
        return torch.linalg.eigh((costs + costs.T) / 2).eigenvectors.flip(1)[:, :rank]
    width = min(rank + EXTRA, *d.shape)
    rows = torch.arange(len(d), dtype=d.dtype, device=d.device)[:, None]
    columns = torch.arange(1, width + 1, dtype=d.dtype, device=d.device)
    # A table of numbers without structure that needs no random generator.
    basis = torch.linalg.qr((rows * rows * 0.7548776662 + rows * columns * 1.3247179572).sin()).Q
    for _ in range(ROUNDS):
        basis = torch.linalg.qr(d @ (h @ (d.T @ basis))).Q
    small = basis.T @ (d @ (h @ (d.T @ basis)))
    turn = torch.linalg.eigh((small + small.T) / 2).eigenvectors.flip(1)
    return basis @ turn[:, :rank]


def _signed(vectors: torch.Tensor) -> torch.Tensor:
    """The element of largest magnitude of each column positive."""
    if not vectors.numel():
        return vectors
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return vectors * torch.where(largest < 0, -1.0, 1.0)


__all__ = ["correct_bias", "low_rank_residual"]
