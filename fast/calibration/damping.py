"""`held_out_damping` for torch tensors; `reference.calibration.damping` states the rule. CPU tensors run the reference.

`gptq_held_out` is the search and GPTQ by its result in one, for callers that need the Hessian no more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import reference
from fast.calibration.gptq import ColumnRule, Sweep, device_order, gptq, scales_of, swept_result
from fast.calibration.hessian import Ordered, checked_hessian, quadratic
from fast.calibration.inputs import float_tensor, numpy_of
from fast.calibration.search import check_weights
from reference import GPTQResult, Scales, Scheme
from reference.calibration.damping import DAMPINGS, check_candidates, spaced_rows
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
    return errors_of(w.double(), Ordered.of(h, columns), columns, val, rule, candidates, taken)


def errors_of(
    wide: torch.Tensor, ordered: Ordered, columns: torch.Tensor, val: torch.Tensor, rule: ColumnRule,
    candidates: Sequence[float], taken: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The held-out error of every candidate, of some rows of float64 weights, on a CPU."""
    errors = []
    for damping in candidates:
        swept = Sweep.of(wide, ordered.factor(damping).factor, columns, taken).run(rule).change
        change = torch.empty_like(swept)
        change[:, columns] = swept
        errors.append(quadratic(change, val))
    return torch.stack(errors).cpu()


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

    take: gives the Hessian (K, K) away. Off the host it is put in order once, for the search and for GPTQ, and let go of:
    beside the held-out Hessian two matrices of its size are in memory, not three. on_device: None, or whether to go so.
    Raises as both do.
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
    errors = errors_of(wide, ordered, columns, val, rule, candidates, rows)
    factor = ordered.factor(tuple(candidates)[int(errors.argmin())])
    del ordered
    return swept_result(wide, factor, columns, rule)


__all__ = ["gptq_held_out", "held_out_damping", "held_out_errors_on_device"]
