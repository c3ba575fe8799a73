"""`use_attention_`: attention in 8 bits for one transformers model, as a function of its `attn_implementation`.

The function of recipe "int8" is registered as "ao_lab_int8", and so on; its masks are those of "sdpa". Decoding, other masks
and caches of ours go on to the functions that have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any
from zlib import crc32

import torch

from ao_lab.attention.sdpa import FEWEST_QUERIES, attended, warn_once
from ao_lab.install.extras import needed
from ao_lab.kv_cache import ATTENTION, KV_CACHE
from ao_lab.kv_cache.attention import NAME, UNKNOWN, attention_forward, fresh_states, inner, takes_functions
from ao_lab.kv_cache.layer import StoredStates
from reference.attention.quantized import ATTENTION_RECIPES, AttentionRecipe, attention_recipe_of

#: How names of functions begin; a recipe without a name goes by a checksum of its fields.
PREFIX = "ao_lab_"


def forward(
    recipe: AttentionRecipe,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Any,
    value: Any,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers' `sdpa_attention_forward`: (B, T, H, D) and no weights. ValueError for what it would leave out."""
    if isinstance(key, StoredStates) and key.fresh is not None and query.shape[2] > 1:
        key, value, attention_mask = fresh_states(key, value, attention_mask)
    others = [name for name in ("softcap", "position_bias", *UNKNOWN) if kwargs.get(name) is not None]
    if others and query.shape[2] >= FEWEST_QUERIES:
        warn_once(f"it has no {others[0]}")
    if isinstance(key, StoredStates) or others:
        return attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )  # fmt: skip
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    # From the first key on: what lies behind the queries in an empty static cache is seen by none.
    is_causal = is_causal and attention_mask is None and query.shape[2] > 1
    y = attended(
        recipe, query, key, value, attn_mask=attention_mask, dropout_p=dropout, is_causal=is_causal, scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return y.transpose(1, 2).contiguous(), None


@dataclass(frozen=True)
class AttentionSettings:
    """What `use_attention_` has set; as a string, in a sentence.

    recipe: of attention. name: of its function among transformers'. before: the model's own attention.
    """

    recipe: AttentionRecipe
    name: str
    before: str | None

    def __str__(self) -> str:
        return f"prefill by attention {self.name} ({self.recipe}); before: {self.before}"


def register(recipe: AttentionRecipe, name: str) -> None:
    """Tell transformers of the function of a recipe, and that its masks are those of "sdpa"."""
    utils, masks = needed("transformers.modeling_utils"), needed("transformers.masking_utils")
    utils.AttentionInterface.register(name, partial(forward, recipe))
    masks.AttentionMaskInterface.register(name, masks.sdpa_mask)


def use_attention_(model: Any, recipe: str | AttentionRecipe | None = "int8") -> AttentionSettings | None:
    """Compute the prefill attention of a transformers model in 8 bits, in place; returns what was set.

    recipe: as for `replace_sdpa_`; None restores the previous state. Calls with fewer than 32 queries, as in decoding, use
    transformers' "sdpa"; with a cache of `use_kv_cache_` (called before or after), its attention. Supported: padding, sliding
    windows and grouped-query attention. Training, dropout, softcaps and additive masks use an attention that supports them,
    with a warning.

    TypeError for anything but a transformers model, ValueError for an unknown recipe and for a model whose attention
    implementation cannot be replaced; nothing has changed then.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise TypeError(
            f"use_attention_ takes a transformers model, got {type(model).__name__}; for others there is "
            "ao_lab.replace_sdpa_"
        )
    model = inner(model)
    before, cache = getattr(model, ATTENTION, None), getattr(model, KV_CACHE, None)
    if recipe is None:
        if before is not None:
            model.set_attn_implementation(before.before or "sdpa" if cache is None else NAME)
            delattr(model, ATTENTION)
        return None
    record = attention_recipe_of(recipe)
    if not takes_functions(model):
        raise ValueError(
            f"the attention of {type(model).__name__} takes no function of others; use ao_lab.replace_sdpa_ where it calls "
            "torch's scaled_dot_product_attention"
        )
    named = [name for name, one in ATTENTION_RECIPES.items() if one == record]
    name = PREFIX + (named[0] if named else f"{crc32(repr(record).encode()):08x}")
    register(record, name)
    was = cache.attention if cache is not None else getattr(model.config, "_attn_implementation", None)
    was = was if before is None else before.before
    model.set_attn_implementation(name)
    settings = AttentionSettings(record, name, was)
    setattr(model, ATTENTION, settings)
    return settings


__all__ = ["AttentionSettings", "use_attention_"]
