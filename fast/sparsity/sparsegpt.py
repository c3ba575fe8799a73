"""`sparsegpt` for torch tensors: the steps of `reference.sparsity.sparsegpt` in float64 on the device of the weights.

CPU tensors run the reference. Elsewhere every step is the reference's, in its order, except for sums that no rule orders:

* the factor is R^-1 by a triangular solution, where the reference inverts R as any matrix, and both leave Cholesky's sums to
  their libraries;
* what a block does to the columns behind it is a matrix product; the loss and the mean of the diagonal are sums.

So results differ in the last bits of float64 before weights are rounded to their dtype, and masks where two scores nearly tie.
Where all of these sums are exact (integers within a unit triangular factor, diagonals), results are the reference's bits.
"""

from __future__ import annotations

import torch

import reference
from fast.calibration.hessian import turned, upper_factor
from fast.dispatch import require_tensor
from reference import SparseGPTResult
from reference.arrays.bridges import to_numpy, to_torch
from reference.calibration.hessian import attempts, complaint_of, not_positive_definite
from reference.calibration.inputs import LARGEST
from reference.sparsity.prune import check_groups, parse_pattern
from reference.sparsity.sparsegpt import check_block

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def sparsegpt(
    w: torch.Tensor,
    hessian: torch.Tensor,
    *,
    pattern: str = "2:4",
    block: int = 128,
    damping: float = 0.01,
) -> SparseGPTResult:
    """Prune and update w (outputs, K) by `reference.sparsegpt`, without a scheme of storage; results are tensors on w's device.

    w: finite float32, bfloat16 or float16. hessian: float32 or float64 (K, K) on any device. The device needs 8 bytes a weight,
    and about 40 an element of the Hessian. Errors are those of `reference.sparsegpt`.
    """
    w = require_tensor(w, "sparsegpt").detach()
    if not isinstance(hessian, torch.Tensor):
        raise TypeError(f"fast.sparsegpt takes the hessian as a torch tensor, got {type(hessian).__name__}")
    hessian = hessian.detach()
    if w.device.type != "cpu":
        return sparsegpt_on_device(w, hessian, pattern=pattern, block=block, damping=damping)
    result = reference.sparsegpt(
        to_numpy(w), hessian.cpu().numpy(), pattern=pattern, block=block, damping=damping
    )
    arrays = {"weights": result.weights, "mask": result.mask, "dead": result.dead}
    return result._replace(**{name: to_torch(array) for name, array in arrays.items()})


def sparsegpt_on_device(
    w: torch.Tensor, hessian: torch.Tensor, *, pattern: str, block: int, damping: float
) -> SparseGPTResult:
    """The same by torch operations on w's device, whatever it is."""
    kept, group = parse_pattern(pattern)
    _check_weights(w, group, pattern)
    check_block(block, group, pattern)
    upper, share, floor, dead = _inverse_factor(_checked_hessian(hessian, damping, w), damping)
    wide = w.double()
    wide[:, dead] = 0
    mask = torch.zeros(w.shape, dtype=torch.bool, device=w.device)
    loss = torch.zeros((), dtype=torch.float64, device=w.device)
    for start in range(0, w.shape[1], block):
        stop = min(start + block, w.shape[1])
        errors = _sweep_block(wide, mask, upper, (kept, group), (start, stop), w.dtype)
        wide[:, stop:] -= errors.T @ upper[start:stop, stop:]
        loss += (errors**2).sum()
    return SparseGPTResult(_as_dtype(wide, w.dtype), mask, float(loss), share, floor, dead, None)


def _inverse_factor(h: torch.Tensor, damping: float) -> tuple[torch.Tensor, float, float, torch.Tensor]:
    """`reference.sparsity.sparsegpt.inverse_factor` of a matrix that may be written."""
    diagonal = h.diagonal()
    dead = diagonal == 0
    diagonal[dead] = 1
    given = diagonal.clone()
    for share, floor in attempts(damping):
        diagonal.copy_(given + share * given.mean() + floor * given.max())
        upper = upper_factor(turned(h.tril()))
        if upper is not None:
            one = torch.eye(len(h), dtype=h.dtype, device=h.device)
            return torch.linalg.solve_triangular(upper, one, upper=True), share, floor, dead
    raise not_positive_definite()


def _sweep_block(
    wide: torch.Tensor, mask: torch.Tensor, upper: torch.Tensor, pattern: tuple[int, int], columns: tuple[int, int],
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """The columns of a block, updated among themselves; the errors e, (columns of the block, rows).

    Columns lie beside each other here as rows do in `wide`, so that each is read and written in one piece.
    """
    (kept, group), (start, stop) = pattern, columns
    work, chosen = wide[:, start:stop].T.contiguous(), mask[:, start:stop].T.contiguous()
    factor = upper[start:stop, start:stop]
    errors = torch.zeros_like(work)
    for j in range(stop - start):
        if j % group == 0:
            scores = work[j : j + group].abs() / factor.diagonal()[j : j + group, None]
            chosen[j : j + group] = _largest(scores, kept)
        final = torch.where(chosen[j], _as_dtype(work[j], dtype).double(), 0.0)
        errors[j] = (work[j] - final) / factor[j, j]
        # Product and difference are rounded one after the other, as NumPy does.
        work[j + 1 :] -= torch.outer(factor[j, j + 1 :], errors[j])
        work[j] = final
    wide[:, start:stop], mask[:, start:stop] = work.T, chosen.T
    return errors


def _largest(scores: torch.Tensor, kept: int) -> torch.Tensor:
    """Bool of scores (M, rows): the `kept` largest of each column, ties to the lower index."""
    order = torch.sort(scores, dim=0, descending=True, stable=True).indices[:kept]
    return torch.zeros(scores.shape, dtype=torch.bool, device=scores.device).scatter_(0, order, True)


def _as_dtype(column: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 rounded to float32 and then to a dtype; what is out of range is its largest finite value."""
    limit = torch.finfo(dtype).max
    return column.clamp(-LARGEST, LARGEST).float().clamp(-limit, limit).to(dtype)


def _check_weights(w: torch.Tensor, group: int, pattern: str) -> None:
    """The errors of `sparsegpt`."""
    if w.dtype not in FLOATS:
        raise TypeError(f"sparsegpt takes float32, bfloat16, float16, got {w.dtype}; cast it to float32")
    if w.dim() != 2:
        raise ValueError(
            f"sparsegpt takes a matrix (outputs, inputs), got shape {tuple(w.shape)}; give them one by one"
        )
    check_groups(tuple(w.shape), group, pattern)
    wrong = int((~w.isfinite()).sum())
    if wrong:
        raise ValueError(
            f"sparsegpt takes finite weights, got {wrong} of NaN or infinity, which updates would spread; replace them"
        )


def _checked_hessian(hessian: torch.Tensor, damping: float, w: torch.Tensor) -> torch.Tensor:
    """A copy in float64 on w's device."""
    if isinstance(damping, bool) or not 0 <= damping <= 1:
        raise ValueError(f"damping is a share of the mean diagonal, 0 to 1, got {damping!r}; 0.01 is usual")
    if hessian.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"the hessian is float32 or float64, got {hessian.dtype}; convert it first")
    size = w.shape[1]
    if tuple(hessian.shape) != (size, size):
        raise ValueError(
            f"the hessian is ({size}, {size}), inputs by inputs, got shape {tuple(hessian.shape)}"
        )
    if not size:
        raise ValueError("a hessian of no inputs; give at least one column")
    h = hessian.to(w.device, torch.float64, copy=True)
    complaint = complaint_of(float(h.abs().max()), float(h.diagonal().min()))
    if complaint:
        raise ValueError(complaint)
    return h


__all__ = ["sparsegpt", "sparsegpt_on_device"]
