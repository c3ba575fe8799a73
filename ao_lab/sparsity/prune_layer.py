"""One weight, pruned: from its values and what calibration kept of its inputs to the values that it has afterwards.

Masks are those of `reference.prune` and `reference.prune_transposable` by the reference's scores, bit for bit, on any device.
On the host they are found some rows at a time, since scores are integers of 32 bits there. SparseGPT runs in float64 where the
weight is: on the host it takes minutes for the layers of a large model.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import fast
import reference
from ao_lab.sparsity.config import SparsityConfig
from fast.sparsity.prune_into import prune_into

#: Elements whose mask is found at once on the host; on other devices sixteen times as many.
PIECE = 2**20


class Pruned(NamedTuple):
    """`weights` (out, in) with zeros, the score that decided, and what SparseGPT said."""

    weights: torch.Tensor
    score: str
    facts: dict[str, float]


def prune_weight(w: torch.Tensor, config: SparsityConfig, statistic: torch.Tensor | None) -> Pruned:
    """The pruned values of w (out, in), which stays as it is.

    statistic: square sums (in,) for "wanda" and "ria", the Hessian (in, in) for "sparsegpt"; None, or nothing but zeros, tells
    no channels apart, so that magnitude decides.
    """
    if config.calibrates and (statistic is None or not bool(statistic.any())):
        statistic, score = None, "magnitude"
    else:
        score = config.score
    if score == "sparsegpt" and statistic is not None:
        return _by_sparsegpt(w, config, statistic)
    scores = scores_of(w, score, statistic)
    return Pruned(w.masked_fill(~mask_of(w, config, scores), 0), score, {})


def scores_of(w: torch.Tensor, score: str, sums: torch.Tensor | None) -> torch.Tensor | None:
    """The reference's scores; None for magnitude, which w itself is."""
    if score == "magnitude" or sums is None:
        return None
    function: Any = {"wanda": reference.wanda_scores, "ria": reference.ria_scores}[score]
    found: torch.Tensor = function(w, sums.to(w.device))
    return found


def mask_of(
    w: torch.Tensor, config: SparsityConfig, scores: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Bool, True where a weight stays. out: a mask that is written, by default a new one."""
    ranked = w if scores is None else scores
    rows = max((PIECE if w.device.type == "cpu" else 16 * PIECE) // max(w.shape[1], 1) // 8 * 8, 8)
    if ranked.shape[0] <= rows:
        if out is None:
            return _mask(ranked, config)
        return prune_into(ranked, out, pattern=config.pattern, transposable=config.transposable)
    made = torch.empty(ranked.shape, dtype=torch.bool, device=ranked.device) if out is None else out
    for start in range(0, ranked.shape[0], rows):
        place, piece = made[start : start + rows], ranked[start : start + rows]
        prune_into(piece, place, pattern=config.pattern, transposable=config.transposable)
    return made


def _mask(ranked: torch.Tensor, config: SparsityConfig) -> torch.Tensor:
    """The mask of some rows by their scores."""
    if config.transposable:
        return fast.prune_transposable(ranked)
    return fast.prune(ranked, pattern=config.pattern)


def _by_sparsegpt(w: torch.Tensor, config: SparsityConfig, hessian: torch.Tensor) -> Pruned:
    result = fast.sparsegpt(w, hessian, pattern=config.pattern, block=config.columns, damping=config.damping)
    facts = {"loss": result.loss, "damping": result.damping, "floor": result.floor}
    return Pruned(result.weights, "sparsegpt", facts)


__all__ = ["PIECE", "Pruned", "mask_of", "prune_weight", "scores_of"]
