"""`KVCache` for the cache of transformers' `generate()`, and `use_kv_cache_`, after which nothing has to be passed.

    ao_lab.use_kv_cache_(model, "int8")
    model.generate(**inputs, max_new_tokens=64)

transformers creates the cache of a call in `_prepare_cache_for_generation`; the call above puts a function of that name beside
the model's own, on this model alone, which creates a `KVCache` instead, and sets the model's attention to "ao_lab".
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ao_lab.install.extras import needed
from ao_lab.install.versions import cache_argument
from ao_lab.kv_cache import ATTENTION, KV_CACHE
from ao_lab.kv_cache.attention import NAME, inner, reader_of_caches, takes_functions
from ao_lab.kv_cache.layer import KVLayer
from ao_lab.kv_cache.recipe import CALIBRATED, STATIC, KVRecipe, recipe_of
from ao_lab.kv_cache.static_scales import CacheScales, cache_scales
from fast.attention.stored import room_for

cache_utils: Any = needed("transformers.cache_utils")
#: The method of transformers that ours stands beside.
METHOD = "_prepare_cache_for_generation"
#: Fields that layers of one model may have apart.
VARYING = ("num_key_value_heads", "head_dim")
#: Values of `cache_implementation` that ours takes the place of.
REPLACED = (None, "static")


class KVCache(cache_utils.Cache):  # type: ignore[misc]
    """Keys and values of a model's layers, stored by a recipe, for up to `max_length` tokens of each sequence.

    model: a transformers model or its configuration. recipe: a `KVRecipe` or a name of `RECIPES`. Layers with a sliding window
    or a state of another kind have transformers' static cache. The model's attention has to be "ao_lab":
    `model.set_attn_implementation("ao_lab")`, or `use_kv_cache_`. Memory is allocated at the first call, for its batch.
    drafts: layers of transformers' are its dynamic ones, which forget the tokens of rejected drafts.

    ValueError for an unknown recipe, for heads that it cannot take, and for a length below 1; `update` has one for states of
    another model and for tokens beyond the cache. On a GPU, where nothing waits to count them, that is for a prompt alone, and
    later tokens end with CUDA's device-side assertion.
    """

    def __init__(
        self,
        model: Any,
        recipe: Any = "int8",
        max_length: int = 4096,
        *,
        cross: bool = False,
        drafts: bool = False,
    ) -> None:
        self.recipe = recipe_for(model, recipe)
        if type(max_length) is not int or max_length < 1:
            raise ValueError(f"max_length is a number of tokens, 1 or more; got {max_length!r}")
        config = getattr(model, "config", model).get_text_config(decoder=True)
        self.max_length = max_length
        scales = scales_by_layer(model, self.recipe, cross)
        super().__init__(layers=_layers(config, self.recipe, max_length, cross, drafts, scales))

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Write the tokens of a layer; ValueError for a layer that this cache does not have."""
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"this cache is for a model with {len(self.layers)} layers, and got layer {layer_idx}; make one with "
                "KVCache(model, ...) of this model"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def no_padding(self) -> torch.Tensor:
        """An `attention_mask` for sequences none of which is padded, bool (0, 0, 0, 0): each token sees those before it.

            model(token, past_key_values=cache, attention_mask=cache.no_padding)

        Without an `attention_mask` transformers makes one of all positions of the cache in each step of decoding, which kernels
        then read. ValueError in the layer for a model of which a layer has another cache, as those with a sliding window.
        """
        return torch.empty((0, 0, 0, 0), dtype=torch.bool)


class CachePair(cache_utils.EncoderDecoderCache):  # type: ignore[misc]
    """Caches of self and cross attention; transformers' own class crops dynamic ones alone."""

    def check_dynamic_cache(self, method: str) -> None:
        """Nothing to refuse."""


def recipe_for(model: Any, recipe: Any) -> KVRecipe:
    """As `recipe_of`; "calibrated" is the one of the static scales that a model has. ValueError where it has none."""
    if recipe != CALIBRATED:
        return recipe_of(recipe)
    elements = (
        {one.element for one in cache_scales(model).values()} if isinstance(model, torch.nn.Module) else set()
    )
    if len(elements) != 1 or not elements <= STATIC.keys():
        said = f"scales of {', '.join(sorted(elements))}" if elements else "none"
        raise ValueError(
            f"a calibrated cache takes a model's own static scales of one of {', '.join(STATIC)}, and {type(model).__name__} "
            f"has {said}; load a folder with a kv_cache_scheme, or quantize_ with methods=(StaticKV(),) and calibration data"
        )
    return STATIC[elements.pop()]


def scales_by_layer(model: Any, recipe: KVRecipe, cross: bool = False) -> dict[int, CacheScales]:
    """A model's static scales by numbers of layers, where the recipe is static; ValueError where a layer has none."""
    if not recipe.static:
        return {}
    found = cache_scales(model) if isinstance(model, torch.nn.Module) else {}
    modules = dict(model.named_modules()) if found else {}
    numbered: dict[Any, CacheScales] = {
        getattr(modules.get(name), "layer_idx", None): one for name, one in found.items()
    }
    count = getattr(getattr(model, "config", model).get_text_config(decoder=True), "num_hidden_layers", 0)
    if cross or not found or set(numbered) != set(range(count)):
        raise ValueError(
            f"static scales are of all self-attention layers, and {type(model).__name__} has them for {len(numbered)} of "
            f"{count}{' besides cross attention' * cross}; pass the model itself, calibrated with StaticKV, or use 'int8'"
        )
    return numbered


def _layers(
    config: Any, recipe: KVRecipe, max_length: int, cross: bool, drafts: bool = False,
    scales: Mapping[int, CacheScales] | None = None,
) -> list[Any]:  # fmt: skip
    theirs = cache_utils.StaticCache(config=config, max_cache_len=max_length).layers
    heads, width = (0, 0) if cross else _heads(config)
    if width:
        recipe.check_width(width, width)
    # Cross attention sees all of the encoder's states in every layer.
    full = [cross or type(layer) is cache_utils.StaticLayer for layer in theirs]
    if drafts:  # of a static window nothing that was pushed out comes back
        theirs = cache_utils.DynamicCache(config=config).layers
    return [
        KVLayer(max_length, recipe, heads, width, (scales or {}).get(number)) if own else layer
        for number, (own, layer) in enumerate(zip(full, theirs, strict=True))
    ]


def _heads(config: Any) -> tuple[int, int]:
    """Key heads of a layer and their channels; 0 where the configuration does not say so plainly."""
    queries = getattr(config, "num_attention_heads", None)
    heads = getattr(config, "num_key_value_heads", None) or queries
    width = getattr(config, "head_dim", None)
    if not width and isinstance(queries, int) and queries:
        width = (getattr(config, "hidden_size", None) or 0) // queries
    layers = getattr(config, "per_layer_config", None) or []
    uneven = len({tuple(getattr(one, name, None) for name in VARYING) for one in layers}) > 1
    if getattr(config, "kv_lora_rank", None) or uneven or not isinstance(heads, int):
        return 0, 0
    return heads, int(width or 0)


@dataclass(frozen=True)
class KVCacheSettings:
    """What `use_kv_cache_` has set; str() describes it in a sentence.

    recipe: of the cache. attention: the model's attention implementation before. bytes_per_token, bytes_beside: over all layers
    that use the recipe, for one sequence: the part that grows, and the tokens that are kept unquantized. reader: the kernel
    that decodes from it on a GPU.
    """

    recipe: KVRecipe
    attention: str | None
    layers: int
    others: int
    bytes_per_token: float
    bytes_beside: int = 0
    reader: str = ""

    def __str__(self) -> str:
        beside = f", {self.bytes_beside} beside" * bool(self.bytes_beside)
        others = (
            f", {self.others} with windows or states of their own as transformers has them"
            if self.others
            else ""
        )
        return (
            f"generate() stores {self.recipe} in {self.layers} layers{others}: {self.bytes_per_token:.0f} bytes a token of a "
            f"sequence{beside}; attention {NAME} (before: {self.attention}); {self.reader}"
        )


def use_kv_cache_(model: Any, recipe: Any = "int8") -> KVCacheSettings | None:
    """Let a transformers model's `generate()` store its KV cache by a recipe, in place; returns what was set.

    recipe: a `KVRecipe`, a name of `RECIPES`, "calibrated" for static scales from calibration (`StaticKV`) or from a folder's
    kv_cache_scheme, or None, which restores the previous state. The cache has a fixed size, that of the call's longest
    sequence, and is compiled like transformers' static cache; "bfloat16" stores keys and values unquantized and lets
    transformers' compiled decoding use our attention. Calls with a cache of their own (`past_key_values=`), another
    `cache_implementation` than "static", or `use_cache=False` are unchanged. A second call replaces the recipe.

    Supported: batches padded on either side, beam search, sampling, assisted generation, grouped-query attention,
    encoder-decoder models, and heads split over processes. Weights are not changed, so call it before or after `quantize_`.
    `save_pretrained` does not save it.

    TypeError for a model that does not generate. ValueError for an unknown recipe, for one that the model's heads do not
    support (nothing has changed then), and for a model whose attention implementation cannot be replaced.
    """
    if not hasattr(model, "generate") or not hasattr(model, METHOD):
        raise TypeError(
            f"use_kv_cache_ takes a transformers model that generates, got {type(model).__name__}; for a loop of your own pass "
            "past_key_values=ao_lab.KVCache(model, recipe, max_length)"
        )
    model = inner(model)
    before = getattr(model, KV_CACHE, None)
    if recipe is None:
        if before is not None:
            if not hasattr(model, ATTENTION):
                model.set_attn_implementation(before.attention or "sdpa")
            delattr(model, KV_CACHE)
            delattr(model, METHOD)
        return None
    if not takes_functions(model):
        raise ValueError(
            f"the attention of {type(model).__name__} cannot be replaced, and its own does not read a low-precision "
            "cache; use transformers' own cache"
        )
    check_attention(model)
    chosen = recipe_for(model, recipe)
    scales_by_layer(model, chosen, bool(model.config.is_encoder_decoder))
    settings = _settings(model, chosen, before)
    model.set_attn_implementation(reader_of_caches(model))
    setattr(model, KV_CACHE, settings)
    setattr(model, METHOD, partial(prepare_cache, model))
    return settings


def check_attention(model: Any) -> None:
    """ValueError for layers that compute with what a cache in low precision, or our attention, does not give them."""
    for name, module in model.named_modules():
        if getattr(module, "sinks", None) is not None:
            raise ValueError(
                f"{name} of {type(model).__name__} has attention sinks, which attention {NAME!r} does not have; use "
                "transformers' own cache"
            )
        if hasattr(module, "expand_kv"):
            raise ValueError(
                f"{name} of {type(model).__name__} stores latent states and multiplies them after the cache, which a "
                "low-precision cache does not support; use transformers' own cache"
            )


def _settings(model: Any, recipe: KVRecipe, before: KVCacheSettings | None) -> KVCacheSettings:
    config = model.config.get_text_config(decoder=True)
    layers = _layers(config, recipe, 1, False)
    ours = sum(isinstance(layer, KVLayer) for layer in layers)
    heads, width = _heads(config)
    prefill = getattr(model, ATTENTION, None)
    attention = config._attn_implementation if prefill is None else prefill.before
    attention = attention if before is None else before.attention
    size = next((p.element_size() for p in model.parameters() if p.is_floating_point()), 2)
    return KVCacheSettings(
        recipe, attention, ours, len(layers) - ours, ours * recipe.bytes_per_token(heads, width, size),
        ours * recipe.bytes_beside(heads, width, size), reader_of(recipe, width),
    )  # fmt: skip


def reader_of(recipe: KVRecipe, width: int) -> str:
    """What attends to one token's cache on a GPU, in a sentence; it is dequantized in each step where no kernel does."""
    if importlib.util.find_spec("triton") is None:
        return "without triton it is dequantized at each step"
    from fast.kernels.attention import decode

    like, scale = (
        torch.zeros(1, 1, 1, max(width, 1), dtype=torch.bfloat16),
        torch.ones(1) if recipe.static else None,
    )
    keys, values = (
        room_for(like, 1, scheme, axis=axis, window=recipe.window, scale=None if scheme is None else scale)
        for scheme, axis in zip(recipe.schemes, recipe.axes, strict=True)
    )
    reason = decode.refusal(like, keys, values, None, 0.0)
    kernel = "on GPUs of compute capability 9.0 a kernel reads it"
    return kernel if reason is None else f"on a GPU it is dequantized in each step, since {reason}"


def prepare_cache(
    model: Any, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int,
    max_cache_length: int,
) -> None:  # fmt: skip
    """In place of transformers' method of that name: the cache of a call of `generate`."""
    name, settings = cache_argument(model), getattr(model, KV_CACHE)
    given = model_kwargs.get(name)
    own = given is None and generation_config.use_cache is not False
    if (
        not own
        or generation_config.cache_implementation not in REPLACED
        or not model._supports_default_dynamic_cache()
    ):
        _check_length(given, max_cache_length)
        base = getattr(type(model), METHOD)
        base(model, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
        return
    wanted = max(
        max_cache_length,
        generation_config.max_cache_len or 0,
        getattr(model, "_previous_max_cache_length", -1),
    )
    drafts = generation_config.is_assistant or generation_mode == "assisted_generation"
    cache = KVCache(model, settings.recipe, wanted, drafts=drafts)
    # A longer cache than a call needs saves compiling for another length.
    model._previous_max_cache_length = wanted
    if model.config.is_encoder_decoder:
        seen = model_kwargs["encoder_outputs"][0].shape[1]
        cache = CachePair(cache, KVCache(model, settings.recipe, seen, cross=True))
    model_kwargs[name] = cache
    if generation_config.is_assistant:
        cache.activate_past_recording()


def _check_length(cache: Any, wanted: int) -> None:
    """ValueError for a cache of the caller's that is too short, before anything runs."""
    if isinstance(cache, KVCache) and cache.max_length < wanted:
        raise ValueError(
            f"the cache has room for {cache.max_length} tokens and this call may reach {wanted}; make one with "
            f"max_length={wanted}, or lower max_new_tokens"
        )


__all__ = ["KVCache", "KVCacheSettings", "check_attention", "prepare_cache", "use_kv_cache_"]
