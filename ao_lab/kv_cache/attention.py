"""The attention function that transformers' models call with keys and values of an `ao_lab` cache: "ao_lab".

A call that fills an empty cache attends to its own keys and values as the model computed them, by torch's attention; every
other one to what is stored, by `fast.attention`. Layers with another cache (sliding windows) and calls without one go on to
transformers' "sdpa".
"""

from __future__ import annotations

from typing import Any

import torch

from ao_lab.install.extras import needed
from ao_lab.kv_cache import ATTENTION
from ao_lab.kv_cache.layer import StoredStates
from fast.attention.attention import attention
from fast.layers.hadamard import hadamard
from fast.stored_tokens import StoredTokens
from reference.attention.window import ALL_STORED

#: What the function and its mask are registered as.
NAME = "ao_lab"
#: Arguments of models that change the result and that neither torch's attention nor ours has: sinks, and keys that are chosen.
UNKNOWN = ("s_aux", "sinks", "indices", "block_indices")
sdpa_attention_forward: Any = needed("transformers.integrations.sdpa_attention").sdpa_attention_forward


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: Any,
    value: Any,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers' `sdpa_attention_forward`: (B, T, H, D) and no weights. ValueError for what it would leave out."""
    for name in UNKNOWN:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"attention {NAME!r} has no {name!r}, which {type(module).__name__} computes with; use transformers' own "
                f"attention and cache, model.set_attn_implementation('eager')"
            )
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    attention_mask = without_padding(attention_mask, key)
    if isinstance(key, StoredStates) and key.fresh is None:
        return _stored(query, key, value, attention_mask, scaling, is_causal, softcap, position_bias), None
    if isinstance(key, StoredStates):
        key, value, attention_mask = fresh_states(key, value, attention_mask)
        if position_bias is not None:
            position_bias = position_bias[..., : key.shape[2]]
    if softcap is not None:
        return _capped(query, key, value, attention_mask, scaling, is_causal, softcap), None
    result: tuple[torch.Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal,
        softcap=softcap, position_bias=position_bias, **kwargs,
    )  # fmt: skip
    return result


def without_padding(mask: torch.Tensor | None, key: Any) -> torch.Tensor | None:
    """None for the mask that `KVCache.no_padding` gives; ValueError where the states are not of a cache of ours."""
    if mask is None or mask.dim() != 4 or mask.numel():
        return mask
    if not isinstance(key, StoredStates):
        raise ValueError(
            "attention_mask=cache.no_padding is for models all of whose layers have an ao_lab cache, and this layer has none; "
            "leave attention_mask out"
        )
    return None


def fresh_states(
    key: StoredStates, value: StoredStates, mask: torch.Tensor | None
) -> tuple[Any, Any, torch.Tensor | None]:
    """The states of this call, which are not held on to, and the mask of them alone."""
    mask = without_padding(mask, key)
    keys: Any = key.fresh
    values = value.fresh
    key.fresh = value.fresh = None
    return keys, values, mask if mask is None else mask[..., : keys.shape[2]]


def _stored(
    query: torch.Tensor, key: StoredStates, value: StoredStates, mask: torch.Tensor | None, scaling: float | None,
    is_causal: bool, softcap: float | None, position_bias: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    if position_bias is not None:
        mask = _biased(mask, position_bias)
    if key.rotate:
        query = hadamard(query.contiguous(), query.shape[-1])
    y = attention(
        query, key.store, value.store, key.length, scale=scaling, causal=is_causal, mask=mask, softcap=softcap
    )
    key.store.recent = value.store.recent = None
    return y.transpose(1, 2).contiguous()


def _capped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float | None,
    is_causal: bool, softcap: float,
) -> torch.Tensor:  # fmt: skip
    """Over tensors, where torch's attention has no softcap. A mask says what is seen; without one the last keys are the
    queries'.
    """
    # The compiler knows a window by its name, not as a default.
    keys, values = (StoredTokens(x, None, None, "", x.shape[-1], 3, ALL_STORED) for x in (key, value))
    length = torch.tensor(key.shape[2], device=key.device)
    causal = is_causal and mask is None
    y = attention(query, keys, values, length, scale=scaling, causal=causal, mask=mask, softcap=softcap)
    return y.transpose(1, 2).contiguous()


def _biased(mask: torch.Tensor | None, bias: torch.Tensor) -> torch.Tensor:
    """What is added to scores: learned distances, and the least number where a mask hides a key."""
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, torch.finfo(bias.dtype).min)
    return bias + mask


def reader_of_caches(model: Any) -> str:
    """The name of the function that reads our caches: that of `use_attention_`, which hands them on, where it is set."""
    return getattr(getattr(model, ATTENTION, None), "name", NAME)


def inner(model: Any) -> Any:
    """The transformers model in those of torch.compile and PEFT, whose attention and `generate` are its own."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif callable(getattr(model, "get_base_model", None)):
            model = model.get_base_model()
        else:
            return model


def takes_functions(model: Any) -> bool:
    """Whether the model's layers call the attention function that its configuration names."""
    asked = getattr(type(model), "_can_set_attn_implementation", None)
    supported = getattr(model, "_supports_attention_backend", False) or getattr(
        model, "_supports_sdpa", False
    )
    return bool(supported and (asked is None or asked()))


# As soon as a cache can be made, so that a model's attention can be set before it too: the function, and that its masks are
# those of "sdpa".
needed("transformers.modeling_utils").AttentionInterface.register(NAME, attention_forward)
_masks: Any = needed("transformers.masking_utils")
_masks.AttentionMaskInterface.register(NAME, _masks.sdpa_mask)


__all__ = [
    "NAME",
    "attention_forward",
    "fresh_states",
    "inner",
    "reader_of_caches",
    "takes_functions",
    "without_padding",
]
