"""`second_moment` and `triangular_factor` for torch tensors; `reference.calibration.hessian` states the rules.

CPU tensors run the reference. Elsewhere the steps are the reference's in float64 on the device, up to the order of sums. Of
16-bit inputs on a GPU `TOKENS` at a time are multiplied by tensor cores into float32, in which their products are exact, and
added in float64: each element is off by at most TOKENS 2^-24 of the sum of magnitudes, and in the mean far less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import reference
from fast.calibration.inputs import float_tensor, numpy_of, torch_of
from reference.calibration.hessian import (
    SecondMoment,
    TriangularFactor,
    attempts,
    check_damping,
    complaint_of,
    not_positive_definite,
)

#: Inputs whose products are summed in float32.
TOKENS = 4096
#: Rows of a matrix of inputs by inputs that are put in order at a time: such matrices are the largest that calibration has.
STRIP = 1024
#: The same for products on a CPU, where less to multiply is worth more of them.
CPU_STRIP = 384
SHORT = (torch.bfloat16, torch.float16)


def second_moment(x: torch.Tensor, mask: torch.Tensor | None = None) -> SecondMoment:
    """The mean of x x^T over inputs (..., K) that `mask` (...) counts, a float64 tensor on x's device: see
    `reference.second_moment`.
    """
    x = float_tensor(x, "second_moment", "x")
    if x.device.type == "cpu":
        moment = reference.second_moment(numpy_of(x), numpy_of(mask))
        return SecondMoment(torch_of(moment.value), moment.count)
    return second_moment_on_device(x, mask)


def second_moment_on_device(x: torch.Tensor, mask: torch.Tensor | None = None) -> SecondMoment:
    """The same on x's device, whatever it is."""
    if x.dim() < 1 or not x.shape[-1]:
        raise ValueError(f"second_moment takes inputs (..., K) with K >= 1, got shape {tuple(x.shape)}")
    rows = x.reshape(-1, x.shape[-1])
    if mask is not None:
        if mask.dtype != torch.bool or mask.shape != x.shape[:-1]:
            raise ValueError(
                f"mask is a tensor of bool of shape {tuple(x.shape[:-1])}, True for what counts; got {mask.dtype} of shape "
                f"{tuple(mask.shape)}"
            )
        rows = rows[mask.to(x.device).reshape(-1)]
    total = torch.zeros((x.shape[-1],) * 2, dtype=torch.float64, device=x.device)
    add_products(total, rows)
    total /= max(len(rows), 1)
    # Each diagonal element is a sum of squares, which any NaN or infinity of its channel reaches.
    if not bool(total.diagonal().isfinite().all()):
        wrong = int((~rows.isfinite()).sum())
        raise ValueError(
            f"second_moment takes finite inputs, got {wrong} of NaN or infinity among {tuple(rows.shape)}; mask those inputs"
        )
    return SecondMoment(total, len(rows))


def add_products(total: torch.Tensor, rows: torch.Tensor) -> None:
    """Add the sum of x x^T over inputs (tokens, K) to a float64 matrix (K, K), in place, on its device.

    On a GPU 16-bit inputs are multiplied by tensor cores, `TOKENS` of them summed in float32: their products are exact there,
    and such a sum is off by at most TOKENS * 2^-24 of the sum of magnitudes. All else is float64.
    """
    for part in rows.to(total.device).split(TOKENS):
        if part.is_cuda and part.dtype in SHORT:
            total += torch.mm(part.mT, part, out_dtype=torch.float32)
        else:
            wide = part.double()
            total.addmm_(wide.mT, wide)


def triangular_factor(hessian: torch.Tensor, *, damping: float = 0.01, order: Any = None) -> TriangularFactor:
    """The factor R of the damped Hessian as a float64 tensor on its device: see `reference.triangular_factor`."""
    hessian = float_tensor(hessian, "triangular_factor", "the hessian")
    if hessian.device.type == "cpu":
        result = reference.triangular_factor(numpy_of(hessian), damping=damping, order=numpy_of(order))
        return result._replace(factor=torch_of(result.factor), dead=torch_of(result.dead))
    h = checked_hessian(hessian)
    order = None if order is None else torch.as_tensor(order, device=h.device)
    if order is not None and not bool(
        torch.equal(order.sort().values, torch.arange(len(h), device=h.device))
    ):
        raise ValueError(f"order is a permutation of 0 to {len(h) - 1}, one integer a column")
    return factor_on_device(h, damping, order)


def factor_on_device(h: torch.Tensor, damping: float, order: torch.Tensor | None) -> TriangularFactor:
    """The same of a checked float64 matrix on any device, which is not changed."""
    return Ordered.of(h, order).factor(damping)


@dataclass(frozen=True)
class Ordered:
    """A Hessian in an order, as it is factored with one damping after the other: put in order once for all of them.

    turned: (K, K), with J the reversal of the order J H J in its lower triangle, whose diagonal each damping writes. diagonal:
    (K,) of H in the order. dead: (K,) as stored. mean, most: of the diagonal of what is not dead.
    """

    turned: torch.Tensor
    diagonal: torch.Tensor
    dead: torch.Tensor
    mean: torch.Tensor
    most: torch.Tensor

    @classmethod
    def of(cls, h: torch.Tensor, order: torch.Tensor | None) -> Ordered:
        """Of a checked float64 matrix, which is not changed; of its size `turned` alone is in memory beside it."""
        diagonal = h.diagonal().clone()
        dead = diagonal == 0
        order = torch.arange(len(h), device=h.device) if order is None else order
        last = order.flip(0)
        turned = torch.empty_like(h, memory_format=torch.contiguous_format)
        for start in range(0, len(h), STRIP):
            part = slice(start, start + STRIP)
            turned[part] = symmetric_rows(h, last[part]).index_select(1, last)
        return cls(turned.tril_(), diagonal[order], dead, diagonal[~dead].mean(), diagonal.max())

    def factor(self, damping: float) -> TriangularFactor:
        """Of the damped matrix; ValueError where no damping makes it positive definite."""
        check_damping(damping)
        quiet = self.diagonal == 0
        for share, floor in attempts(damping):
            added = share * self.mean + floor * self.most
            damped = self.diagonal + torch.where(quiet & (added == 0), self.mean, added)
            self.turned.diagonal().copy_(damped.flip(0))
            upper = upper_factor(self.turned)
            if upper is not None:
                return TriangularFactor(upper, self.dead, share, floor)
        raise not_positive_definite()


def turned(lower: torch.Tensor) -> torch.Tensor:
    """The lower triangle of J H J for a symmetric matrix H with this one, J the reversal."""
    return lower.flip(0, 1).mT


def symmetric_rows(h: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows (count, K) of the symmetric matrix with h's lower triangle."""
    columns = torch.arange(len(h), device=h.device)
    return torch.where(columns <= rows[:, None], h.index_select(0, rows), h.index_select(1, rows).mT)


def quadratic(change: torch.Tensor, h: torch.Tensor, lower: bool = True) -> torch.Tensor:
    """tr(D H D^T), float64, for changes D (N, K) and a matrix H (K, K): the sum of `quadratic_rows`."""
    return quadratic_rows(change, h, lower).sum()


def quadratic_rows(change: torch.Tensor, h: torch.Tensor, lower: bool = True) -> torch.Tensor:
    """d H d^T of each row d of D, (N,) float64, for changes D (N, K) and a matrix H (K, K), some rows of that at a time.

    lower: whether H is the symmetric matrix with h's lower triangle; else all of h counts. Either way an element and the one
    across the diagonal are added before they are multiplied, so that there are about half of D H's products.
    """
    total = torch.zeros(len(change), dtype=torch.float64, device=change.device)
    size = min(STRIP, CPU_STRIP) if change.device.type == "cpu" else STRIP
    for start in range(0, len(h), size):
        part = slice(start, min(start + size, len(h)))
        own, left, square = change[:, part], h[part, :start], h[part, part]
        square = square.tril() + square.tril(-1).mT if lower else square
        moved = own @ square
        if start:
            both = left * 2 if lower else left + h[:start, part].mT
            moved = moved.addmm_(change[:, :start], both.mT)
        total += (moved * own).sum(-1)
    return total


def turn_(m: torch.Tensor) -> torch.Tensor:
    """J M J in place of a square matrix M, J the reversal."""
    k = len(m)
    for start in range(0, k // 2, STRIP):
        stop = min(start + STRIP, k // 2)
        first = m[start:stop].flip(0, 1)
        m[start:stop] = m[k - stop : k - start].flip(0, 1)
        m[k - stop : k - start] = first
    if k % 2:
        m[k // 2] = m[k // 2].flip(0)
    return m


def upper_factor(turned: torch.Tensor) -> torch.Tensor | None:
    """Upper triangular R, R R^T the symmetric matrix H of which `turned` holds J H J; None where there is none."""
    # H = R R^T for R = J L J and J H J = L L^T.
    factor, failed = torch.linalg.cholesky_ex(turned)
    return None if int(failed) else turn_(factor)


def checked_hessian(
    hessian: torch.Tensor, size: int | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """The matrix in float64 on a device; the errors of `reference.triangular_factor`. size: the K that it should have."""
    if hessian.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"the hessian is float32 or float64, got {hessian.dtype}; convert it first")
    size = hessian.shape[-1] if size is None and hessian.dim() else size
    if tuple(hessian.shape) != (size, size):
        raise ValueError(
            f"the hessian is ({size}, {size}), inputs by inputs, got shape {tuple(hessian.shape)}"
        )
    if not size:
        raise ValueError("a hessian of no inputs; give at least one column")
    h = hessian.to(hessian.device if device is None else device, torch.float64)
    # No matrix of magnitudes: these are the largest tensors that calibration has. The host waits once.
    low, high = torch.aminmax(h)
    largest, least = torch.stack([torch.maximum(-low, high), h.diagonal().min()]).tolist()
    complaint = complaint_of(largest, least)
    if complaint:
        raise ValueError(complaint)
    return h


__all__ = ["add_products", "second_moment", "triangular_factor"]
