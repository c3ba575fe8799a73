"""`held_out_damping` for torch tensors; `reference.calibration.damping` states the rule. CPU tensors run the reference.

`gptq_held_out` is the search and GPTQ by its result in one, for callers that need the Hessian no more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import reference
from fast.calibration.gptq import ColumnRule, Sweep, Swept, device_order, gptq, result_of, scales_of
from fast.calibration.hessian import Ordered, checked_hessian, quadratic
from fast.calibration.inputs import float_tensor, numpy_of
from fast.calibration.search import check_weights
from reference import GPTQResult, Scales, Scheme
from reference.calibration.damping import DAMPINGS, check_candidates, spaced_rows
from reference.calibration.hessian import TriangularFactor
from reference.quantize.blocks import Blocks
from reference.schemes.schemes import scheme_of


def held_out_damping(
    w: torch.Tensor,
    hessian: torch.Tensor,
    hessian_val: torch.Tensor,
    scheme: str | Scheme,
    *,
    scales: Scales | torch.Tensor | None = None,
    order: str = "stored",
    candidates: Sequence[float] = DAMPINGS,
    rows: int | None = None,
) -> float:
    """The candidate with the least held-out error, by `reference.held_out_damping`, on w's device."""
    w = float_tensor(w, "held_out_damping", "w")
    matrices = [
        float_tensor(h, "held_out_damping", name)
        for h, name in ((hessian, "the hessian"), (hessian_val, "the held-out hessian"))
    ]
    options: dict[str, Any] = {"order": order, "candidates": candidates, "rows": rows}
    if w.device.type != "cpu":
        errors = held_out_errors_on_device(w, *matrices, scheme, scales=scales, **options)
        return float(tuple(candidates)[int(errors.argmin())])
    arrays = [numpy_of(h) for h in matrices]
    return reference.held_out_damping(numpy_of(w), *arrays, scheme, scales=numpy_of(scales), **options)


def held_out_errors_on_device(
    w: torch.Tensor,
    hessian: torch.Tensor,
    hessian_val: torch.Tensor,
    scheme: str | Scheme,
    *,
    scales: Scales | torch.Tensor | None = None,
    order: str = "stored",
    candidates: Sequence[float] = DAMPINGS,
    rows: int | None = None,
) -> torch.Tensor:
    """tr(D H_val D^T) of every candidate, float64 on a CPU; the steps run on w's device, whatever it is.

    Beside both Hessians there are two matrices of their size at a time.
    """
    record = scheme_of(scheme)
    check_weights(w, record, "held_out_damping")
    check_candidates(candidates, rows)
    h, val = (checked_hessian(one, w.shape[1], w.device) for one in (hessian, hessian_val))
    blocks = Blocks.of(tuple(w.shape), record.scale, -1)
    columns = device_order(h, order, blocks)
    rule = ColumnRule.of(record, scales_of(w, record, scales, h), blocks, w)
    taken = torch.from_numpy(spaced_rows(len(w), rows)).to(w.device)
    return tried(w.double(), Ordered.of(h, columns), columns, val, rule, candidates, taken).errors


class Tried(NamedTuple):
    """The held-out error of every candidate, float64 on a CPU; the sweep of the best, and its factor without the matrix."""

    errors: torch.Tensor
    factor: TriangularFactor
    swept: Swept


def tried(
    wide: torch.Tensor, ordered: Ordered, columns: torch.Tensor, val: torch.Tensor, rule: ColumnRule,
    candidates: Sequence[float], taken: torch.Tensor,
) -> Tried:  # fmt: skip
    """Every candidate on some rows of float64 weights. The best so far is kept beside the one that is tried."""
    errors, best = list[torch.Tensor](), None
    for damping in candidates:
        factor = ordered.factor(damping)
        swept = Sweep.of(wide, factor.factor, columns, taken).run(rule)
        change = torch.empty_like(swept.change)
        change[:, columns] = swept.change
        errors.append(quadratic(change, val).cpu())
        if best is None or int(torch.stack(errors).argmin()) == len(errors) - 1:
            # Of the factor its matrix is not needed any more, of the sweep what it changed.
            best = (
                factor._replace(factor=change.new_empty(0, 0)),
                replace(swept, change=change.new_empty(0, 0)),
            )
        del factor, swept, change
    if best is None:
        raise ValueError("no damping is given; give at least one")
    return Tried(torch.stack(errors), *best)


def gptq_held_out(
    w: torch.Tensor,
    take: Callable[[], torch.Tensor],
    hessian_val: torch.Tensor,
    scheme: str | Scheme,
    *,
    scales: Scales,
    order: str = "stored",
    candidates: Sequence[float] = DAMPINGS,
    on_device: bool | None = None,
) -> GPTQResult:
    """`gptq` with the damping of `held_out_damping`, the same bits as both calls.

    take: gives the Hessian (K, K) away. Off the host it is put in order once, and let go of: beside the held-out Hessian two
    matrices of its size are in memory, not three. The sweep of the best candidate is the result, so that none runs twice.
    on_device: None, or whether to go so. Raises as both do.
    """
    w = float_tensor(w, "gptq", "w")
    if not (w.device.type != "cpu" if on_device is None else on_device):
        hessian = take()
        found = held_out_damping(
            w, hessian, hessian_val, scheme, scales=scales, order=order, candidates=candidates
        )
        return gptq(w, hessian, scheme, scales=scales, order=order, damping=found)
    record = scheme_of(scheme)
    check_weights(w, record, "gptq")
    check_candidates(candidates, None)
    val, blocks = (
        checked_hessian(hessian_val, w.shape[1], w.device),
        Blocks.of(tuple(w.shape), record.scale, -1),
    )
    h = checked_hessian(float_tensor(take(), "gptq", "the hessian"), w.shape[1], w.device)
    columns = device_order(h, order, blocks)
    rule, ordered = ColumnRule.of(record, scales, blocks, w), Ordered.of(h, columns)
    del h
    wide, rows = w.double(), torch.arange(len(w), device=w.device)
    _, factor, swept = tried(wide, ordered, columns, val, rule, candidates, rows)
    del ordered, val
    return result_of(swept, factor, rule)


__all__ = ["gptq_held_out", "held_out_damping", "held_out_errors_on_device"]
