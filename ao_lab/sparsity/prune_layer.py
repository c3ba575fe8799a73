"""One weight, pruned: from its values and what calibration kept of its inputs to the values that it has afterwards.

Masks are those of `reference.prune` and `reference.prune_transposable` by the reference's scores, bit for bit, on any device.
On the host they are found some rows at a time, since scores are integers of 32 bits there. SparseGPT runs in float64 where the
weight is: on the host it takes minutes for the layers of a large model.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

import fast
import reference
from ao_lab.sparsity.config import SparsityConfig
from fast.sparsity.prune import prune_into

# What a weight says of itself: whether it can be written in place, which pattern its zeros have, whether it is finite.

#: Groups in which weights are pruned, beside those of the pattern that is asked for.
GROUPS = (4, 8)
NOT_FINITE = "it holds NaN or infinity"
#: The share of groups that have as many nonzeros as the fullest, from which on they are a pattern.
USUAL = 0.95


def layout_reason(w: torch.Tensor) -> str | None:
    """Why a tensor's elements cannot be read as those of a matrix, and the way out."""
    if w.layout == torch.strided:
        return None
    return (
        f"layout {w.layout} holds values and places; make it dense (module.weight = "
        f"torch.nn.Parameter(module.weight.to_dense()))"
    )


def in_place_reason(w: torch.Tensor, inference: bool = False) -> str | None:
    """Why a tensor cannot be written in place, and the way out. inference: whether that is tried inside inference mode."""
    clone = "module.weight = torch.nn.Parameter(module.weight.detach().clone()) outside of it"
    if w.is_inference() and not inference:
        return f"it was made under torch.inference_mode and cannot be written in place; {clone} makes it a plain one"
    if any(step == 0 and length > 1 for length, step in zip(w.shape, w.stride(), strict=True)):
        clone = "module.weight = torch.nn.Parameter(module.weight.detach().contiguous())"
        return f"it was expanded: several elements are one in memory; {clone} gives each its own"
    return None


def torch_prune_reason(module: nn.Module, name: str) -> str | None:
    """What to do with a parameter that torch.nn.utils.prune masks."""
    plain = name.removesuffix("_orig")
    if plain == name or not hasattr(module, f"{plain}_mask"):
        return None
    return (
        f"torch.nn.utils.prune computes the layer's {plain} from it; torch.nn.utils.prune.remove(module, {plain!r}) makes it a "
        f"plain one with zeros"
    )


def most_kept(mask: torch.Tensor, group: int) -> int:
    """The largest number of True in any group of a bool matrix's rows."""
    return int(mask.reshape(-1, group).sum(-1).max())


def pruned_pattern(mask: torch.Tensor, group: int) -> str | None:
    """ "N:M" of a bool matrix whose groups of M along its rows have N True each: some pruning left these zeros.

    M is `group`, or one of `GROUPS`, and rows have more than one group. Groups that are False altogether do not count, and a
    few may have fewer. None of dense weights, of a matrix that is False altogether, and of zeros here and there.
    """
    for size in dict.fromkeys((group, *GROUPS)):
        if size > 1 and mask.numel() and mask.shape[-1] % size == 0 and mask.shape[-1] > size:
            counts = mask.reshape(-1, size).sum(-1)
            most, some = int(counts.max()), counts[counts > 0]
            if 0 < most < size and float((some == most).float().mean()) >= USUAL:
                return f"{most}:{size}"
    return None


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
    scores: torch.Tensor = function(w, sums.to(w.device))
    return scores


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
    mask = torch.empty(ranked.shape, dtype=torch.bool, device=ranked.device) if out is None else out
    for start in range(0, ranked.shape[0], rows):
        part, piece = mask[start : start + rows], ranked[start : start + rows]
        prune_into(piece, part, pattern=config.pattern, transposable=config.transposable)
    return mask


def _mask(ranked: torch.Tensor, config: SparsityConfig) -> torch.Tensor:
    """The mask of some rows by their scores."""
    if config.transposable:
        return fast.prune_transposable(ranked)
    return fast.prune(ranked, pattern=config.pattern)


def _by_sparsegpt(w: torch.Tensor, config: SparsityConfig, hessian: torch.Tensor) -> Pruned:
    result = fast.sparsegpt(w, hessian, pattern=config.pattern, block=config.columns, damping=config.damping)
    facts = {"loss": result.loss, "damping": result.damping, "floor": result.floor}
    return Pruned(result.weights, "sparsegpt", facts)
