"""`held_out_damping`: the damping whose codes lose least on inputs that the Hessian has not seen.

A Hessian of few tokens is sharp in directions that other tokens do not have, and GPTQ then moves errors into them: the loss on
its own inputs falls while that on others rises. Damping is what holds it back, and no fixed share fits: the fewer tokens a
channel and the more alike the channels, the more is needed. So each candidate sweeps, and its change D of the weights is judged
by tr(D H_val D^T) with the Hessian of held-out tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from reference.calibration.gptq import ORDERS, Sweep, column_order, column_rule, scales_of
from reference.calibration.hessian import check_damping, checked_hessian, triangular_factor
from reference.calibration.inputs import Matrix
from reference.calibration.nearest import checked_weights
from reference.quantize.blocks import Blocks
from reference.quantize.stored import Scales
from reference.schemes.schemes import Scheme, scheme_of

#: What is tried by default: half a decade apart, to where little is left of the correlations.
DAMPINGS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


def held_out_damping(
    w: Any,
    hessian: Any,
    hessian_val: Any,
    scheme: str | Scheme,
    *,
    scales: Scales | None = None,
    order: str = ORDERS[0],
    candidates: Sequence[float] = DAMPINGS,
    rows: int | None = None,
) -> float:
    """The candidate with the least held-out error, of two as good the earlier one.

    w, hessian, scheme, scales, order: as in `gptq`. hessian_val: like hessian, the mean of x x^T over tokens that it does not
    hold. candidates: shares of the mean diagonal. rows: None, or how many rows of w are swept, evenly spaced.

    Raises what `gptq` raises, ValueError for no candidates and for rows below 1.
    """
    errors = held_out_errors(
        w, hessian, hessian_val, scheme, scales=scales, order=order, candidates=candidates, rows=rows
    )
    return float(tuple(candidates)[int(np.argmin(errors))])


def held_out_errors(
    w: Any,
    hessian: Any,
    hessian_val: Any,
    scheme: str | Scheme,
    *,
    scales: Scales | None = None,
    order: str = ORDERS[0],
    candidates: Sequence[float] = DAMPINGS,
    rows: int | None = None,
) -> Matrix:
    """tr(D H_val D^T) of every candidate, float64; arguments as in `held_out_damping`."""
    record = scheme_of(scheme)
    w, _, wide = checked_weights(w, record, "held_out_damping")
    check_candidates(candidates, rows)
    h, val = checked_hessian(hessian, wide.shape[1]), checked_hessian(hessian_val, wide.shape[1])
    blocks = Blocks.of(wide.shape, record.scale, -1)
    columns = column_order(np.diag(h), order, blocks)
    val = (np.tril(val) + np.tril(val, -1).T)[np.ix_(columns, columns)]
    ns, nearest, groups = column_rule(record, scales_of(w, record, scales, np.diag(h)), blocks)
    taken = spaced_rows(len(wide), rows)
    nearest = nearest.mapped(lambda scale: scale[:, taken] if scale.shape[1] > 1 else scale)
    errors = []
    for damping in candidates:
        factor = triangular_factor(h, damping=damping, order=columns)
        change = Sweep.of(wide[taken], factor.factor, columns).run((ns, nearest, groups)).change
        errors.append(float(((val @ change) * change).sum()))
    return np.array(errors)


def spaced_rows(count: int, rows: int | None) -> Any:
    """Indices of so many rows, evenly spaced; all of them for None, or where there are no more."""
    if rows is None or rows >= count:
        return np.arange(count)
    return np.arange(rows) * count // rows


def check_candidates(candidates: Sequence[float], rows: int | None) -> None:
    """ValueError for no candidates, one that is no damping, and a number of rows below 1."""
    if not len(candidates):
        raise ValueError("candidates are one damping at least, got none; leave them out for the usual ones")
    for damping in candidates:
        check_damping(damping)
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise ValueError(f"rows is how many rows of w are swept, 1 or more, or None; got {rows!r}")


__all__ = ["DAMPINGS", "held_out_damping", "held_out_errors"]
