"""The forward of transformers' experts, tokens sorted on their device; none of transformers is imported.

A class with the decorator `use_experts_implementation` says of itself: which parameters it has (`has_gate`, `has_bias`), which
way round they lie (`is_transposed`), how it gates (`_apply_gate`) or activates (`act_fn`), whether it normalizes results
(`has_post_expert_norm`). `config._experts_implementation` then has no say.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ao_lab.training.grouped.autograd import grouped_linear
from ao_lab.training.grouped.sort import combine, dispatch, sort_by_expert
from ao_lab.training.layers import Settings, autocast
from ao_lab.training.transforms.support import check_experts_traced


def follows_transformers(module: nn.Module) -> bool:
    """Whether a module says of itself what transformers' decorator lets it say."""
    said = all(
        isinstance(getattr(module, name, None), bool) for name in ("has_gate", "has_bias", "is_transposed")
    )
    if not said or not hasattr(module, "num_experts"):
        return False
    up = "gate_up_proj" if module.has_gate else "up_proj"
    gates = hasattr(module, "_apply_gate" if module.has_gate else "act_fn")
    return gates and {up, "down_proj"} <= {name for name, _ in module.named_parameters(recurse=False)}


def experts_forward(
    module: Any,
    settings: Settings,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """(T, K): for each token the weighted sum of its experts' results.

    hidden_states (T, K), top_k_index and top_k_weights (T, k). Numbers of no expert, as expert-parallel routers give to the
    tokens of others, add nothing.
    """
    check_experts_traced(module.down_proj)
    order, offsets, _ = sort_by_expert(top_k_index, module.num_experts)
    rows = dispatch(hidden_states, order, top_k_index.shape[-1])
    owners = torch.searchsorted(
        offsets, torch.arange(rows.shape[0], device=rows.device, dtype=torch.int32), right=True
    )
    up = "gate_up_proj" if module.has_gate else "up_proj"
    rows = _projected(module, up, rows, offsets, owners, settings)
    rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
    rows = _projected(module, "down_proj", rows, offsets, owners, settings)
    if getattr(module, "has_post_expert_norm", False):
        rows = module.post_expert_norm(rows)
    return combine(rows, order, top_k_weights).to(hidden_states.dtype)


def _projected(
    module: Any, name: str, x: torch.Tensor, offsets: torch.Tensor, owners: torch.Tensor, settings: Settings
) -> torch.Tensor:
    """One projection of each row by its expert, with its bias; zeros for rows of no expert."""
    w = getattr(module, name)
    w = w.transpose(1, 2) if module.is_transposed else w
    y = linear_by(settings, x, w, offsets, evaluated=not module.training)
    if module.has_bias:
        # A row of zeros for rows of no expert.
        bias = nn.functional.pad(getattr(module, f"{name}_bias"), (0, 0, 0, 1))
        y = y + bias[owners].to(y.dtype)
    return y


def linear_by(
    settings: Settings, x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, *, evaluated: bool = False
) -> torch.Tensor:
    """`grouped_linear` in the dtype of w or of autocast, with lengths filled up as the recipe asks: zeros add nothing."""
    check_experts_traced(w)
    x, w, _ = autocast(x.to(w.dtype), w, None)
    n, k = w.shape[1:]
    more_n, more_k = (-length % step for length, step in zip((n, k), settings.steps[1:], strict=True))
    if more_k:
        x = nn.functional.pad(x, (0, more_k))
    if more_n or more_k:
        w = nn.functional.pad(w, (0, more_k, 0, more_n))
    return grouped_linear(x, w, offsets, settings.recipe, settings.kernel, evaluated=evaluated)[:, :n]


__all__ = ["experts_forward", "follows_transformers", "linear_by"]
