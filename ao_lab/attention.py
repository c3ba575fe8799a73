"""Attention in 8 bits: `use_attention_` for one transformers model, `replace_sdpa_` in the place of torch's own function.

`use_attention_` sets the model's `attn_implementation`. The function of recipe "int8" is registered as "ao_lab_int8", and so
on; its masks are those of "sdpa". Decoding, other masks and caches of ours go on to the functions that have them.

`replace_sdpa_` is for every call of torch.nn.functional.scaled_dot_product_attention:

    with ao_lab.replace_sdpa_("int8"):
        model(**inputs)

What attention in 8 bits does not have goes on to torch's function, and a warning says so, once for each reason; calls with few
queries (decoding) go on without one.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any
from zlib import crc32

import torch

from ao_lab.install.extras import needed
from ao_lab.kv_cache import ATTENTION, KV_CACHE
from ao_lab.kv_cache.attention import NAME, UNKNOWN, attention_forward, fresh_states, inner, takes_functions
from ao_lab.kv_cache.layer import StoredStates
from fast.attention.quantized import quantized_attention
from fast.dispatch import wants_gradient
from fast.ops import constant_result
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
    others = [name for name in ("softcap", "position_bias", *UNKNOWN) if kwargs.get(name) is not None]
    # Where there are others, the cache's attention takes its states, and of a position bias their part.
    if not others and isinstance(key, StoredStates) and key.fresh is not None and query.shape[2] > 1:
        key, value, attention_mask = fresh_states(key, value, attention_mask)
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


#: Fewer queries are decoding, which reads memory; 8 bits would make it no faster.
FEWEST_QUERIES = 32
sdpa = torch.nn.functional.scaled_dot_product_attention


def reason_against(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout: float, scale: float | None,
    enable_gqa: bool = False,
) -> str | None:  # fmt: skip
    """Why a call is not for attention in 8 bits, or None."""
    if any(x.is_nested for x in (query, key, value)):
        return "it takes no nested tensors"
    if wants_gradient((query, key, value)):
        return "it has no gradient"
    if dropout:
        return "it has no dropout"
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return "it takes tensors (batch, heads, tokens, head_dim)"
    if any(x.dtype != query.dtype or x.device != query.device for x in (key, value)):
        return "it takes queries, keys and values of one dtype on one device"
    if _broadcasts(query, key, value, enable_gqa) or 0 in (query.shape[3], value.shape[3]):
        return "it takes no axes that are broadcast, and none of head_dim 0"
    if query.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it takes 16-bit and 32-bit floats, not {query.dtype}"
    if mask is not None and mask.dtype != torch.bool:
        return "it takes masks of bool, not what is added to scores"
    if scale is not None and scale <= 0:
        return "it takes positive scales"
    if query.is_cuda:
        from fast.kernels.attention import prefill

        return prefill.refusal(query, key, value)
    return None


def _broadcasts(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> bool:
    """Whether a batch, or heads without groups, of length 1 stand for several."""
    batches = [x.shape[0] for x in (query, key, value)]
    heads = [x.shape[1] for x in ((key, value) if enable_gqa else (query, key, value))]
    return any(1 in one and any(x != one[0] for x in one) for one in (batches, heads))


@constant_result
def warn_once(reason: str) -> None:
    """Say that calls go to torch's attention; of a compiled program while it is traced."""
    if reason not in _WARNED:
        _WARNED.add(reason)
        warnings.warn(
            f"a call of attention goes to torch's, not to that in 8 bits: {reason}", UserWarning, stacklevel=3
        )


_WARNED: set[str] = set()


def attended(
    recipe: AttentionRecipe,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` by a recipe; torch's where `reason_against` has one, and for few queries."""
    if query.dim() == 4 and not query.is_nested and query.shape[2] < FEWEST_QUERIES:
        reason: str | None = ""
    else:
        reason = reason_against(query, key, value, attn_mask, dropout_p, scale, enable_gqa)
    if reason is None:
        if is_causal and attn_mask is not None:
            raise ValueError("scaled_dot_product_attention takes a mask or is_causal, not both")
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise ValueError(
                f"query has {query.shape[1]} heads and key {key.shape[1]}; pass enable_gqa=True for groups of queries"
            )
        # torch's causal edge begins at the first key.
        offset = 0 if is_causal else None
        return quantized_attention(
            query, key, value, recipe, scale=scale, causal=is_causal, offset=offset, mask=attn_mask
        )
    if reason:
        warn_once(reason)
    return sdpa(
        query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )  # fmt: skip


class ReplacedAttention:
    """What `replace_sdpa_` has replaced; leaving a `with` block, or `restore()`, gives back what was there before."""

    def __init__(self, recipe: AttentionRecipe) -> None:
        self.recipe = recipe
        self.before: Any = torch.nn.functional.scaled_dot_product_attention
        self.function = functools.wraps(sdpa)(functools.partial(attended, recipe))
        torch.nn.functional.scaled_dot_product_attention = self.function

    def restore(self) -> None:
        """Put back the function that was there; ValueError where another one has been put over ours since. Again: nothing."""
        if self.before is None:
            return
        if torch.nn.functional.scaled_dot_product_attention is not self.function:
            raise ValueError(
                "scaled_dot_product_attention was replaced again since; restore what was replaced last first"
            )
        torch.nn.functional.scaled_dot_product_attention, self.before = self.before, None

    def __enter__(self) -> ReplacedAttention:
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()


def replace_sdpa_(recipe: str | AttentionRecipe = "int8") -> ReplacedAttention:
    """Compute torch.nn.functional.scaled_dot_product_attention in 8 bits from now on, in this process, for inference.

    recipe: "int8" (queries and keys in int8), "int8_block" (keys with one scale for 128 tokens, faster), "fp8", or an
    `AttentionRecipe`. Use it as a context manager, or call `restore()` of the result. Programs that torch.compile compiled
    earlier keep the function that they were compiled with.

    Calls with fewer than 32 queries use torch's function; so do, with a warning for each reason, calls that need a gradient or
    have dropout or an additive mask. Code that imported the function by name earlier is not affected.

    ValueError for an unknown recipe, TypeError for anything that is not a recipe.
    """
    return ReplacedAttention(attention_recipe_of(recipe))


__all__ = ["AttentionSettings", "ReplacedAttention", "attended", "replace_sdpa_", "use_attention_"]
