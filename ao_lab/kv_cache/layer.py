"""`KVLayer`: keys and values of one layer of a transformers model, stored by a recipe.

The contract with transformers: `update` writes new tokens and returns two `StoredStates`, which a model hands to its attention
function untouched; that function is ours (`ao_lab.kv_cache.attention`). Any other meets an object that says so. Nothing
depends on a number on the host, so that the layer compiles as transformers' own `StaticLayer` does.
"""

from __future__ import annotations

from typing import Any

import torch

from ao_lab.install.extras import needed
from ao_lab.kv_cache.recipe import KVRecipe
from ao_lab.kv_cache.static_scales import CacheScales
from fast.attention.stored import append_, recent_tokens, restore_, room_for, signed
from fast.layers.hadamard import hadamard
from fast.stored_tokens import StoredTokens

StaticLayer: Any = needed("transformers.cache_utils").StaticLayer


class StoredStates:
    """Keys or values of a layer, as its `update` returns them.

    store: what is written in place. length: tokens in it, 0-d int64 on its device. fresh: the states of the call that filled an
    empty cache, as the model computed them; None afterwards. rotate: whether they are mixed by Hadamard's transform.
    """

    def __init__(self, store: StoredTokens, length: torch.Tensor, rotate: bool) -> None:
        self.store, self.length, self.rotate = store, length, rotate
        self.fresh: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, heads, positions of the cache, width): models of relative positions ask for how many keys there are."""
        return self.store.shape

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"keys and values of an ao_lab cache have no {name!r}: the model's attention takes tensors. Call "
            "ao_lab.use_kv_cache_(model, recipe), which sets an attention that takes them, or use transformers' own cache"
        )

    def __getitem__(self, key: Any) -> Any:
        return self.__getattr__("values of a tensor")


class KVLayer(StaticLayer):  # type: ignore[misc]
    """The cache of one layer; created by `KVCache`."""

    is_compileable = True
    is_croppable = True
    is_sliding = False
    cumulative_length: torch.Tensor

    def __init__(
        self,
        max_cache_len: int,
        recipe: KVRecipe,
        heads: int = 0,
        width: int = 0,
        scales: CacheScales | None = None,
    ) -> None:
        super().__init__(max_cache_len=max_cache_len)
        self.recipe, self.expected, self.scales = recipe, (heads, width), scales
        # A tensor, so that compiled programs do not depend on it.
        self.cumulative_length = torch.tensor(0, dtype=torch.int64)
        #: Whether no token was written since the last reset.
        self.is_empty = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Room for this batch; ValueError for heads that the recipe, or the model of this cache, does not have."""
        self._check_model(key_states)
        self.recipe.check_width(key_states.shape[-1], value_states.shape[-1])
        key_scheme, value_scheme = self.recipe.schemes
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size, self.num_heads = key_states.shape[:2]
        self.k_head_dim, self.v_head_dim = key_states.shape[-1], value_states.shape[-1]
        key_axis, value_axis = self.recipe.axes
        window = self.recipe.window
        k_scale, v_scale = self._static_scales()
        keys = room_for(
            key_states, self.max_cache_len, key_scheme, axis=key_axis, window=window, scale=k_scale
        )
        values = room_for(
            value_states, self.max_cache_len, value_scheme, axis=value_axis, window=window, scale=v_scale
        )
        length: torch.Tensor = self.cumulative_length.to(self.device)
        self.cumulative_length = length
        if not torch.compiler.is_compiling():
            static = [scale for scale in (k_scale, v_scale) if scale is not None]
            for tensor in (*keys.tensors(), *values.tensors(), *static, self.cumulative_length):
                torch._dynamo.mark_static_address(tensor)
        self.keys = StoredStates(keys, self.cumulative_length, self.recipe.rotate)
        self.values = StoredStates(values, self.cumulative_length, False)
        self.is_initialized = True

    def _static_scales(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """On the device, of all heads or of this layer's; ValueError for those of another number of heads."""
        if self.scales is None:
            return None, None
        scales = self.scales.k.to(self.device), self.scales.v.to(self.device)
        for scale in scales:
            if scale.numel() not in (1, self.num_heads):
                raise ValueError(
                    f"static scales of {scale.numel()} heads do not fit {self.num_heads} key heads of this layer; calibrate "
                    "this model with StaticKV, or use a recipe that takes scales of each token, as 'int8'"
                )
        return scales

    def _check_model(self, key_states: torch.Tensor) -> None:
        found = (key_states.shape[1], key_states.shape[-1])
        heads, width = self.expected
        # Heads may be split over processes.
        if (heads and heads % found[0]) or (width and width != found[1]):
            raise ValueError(
                f"this cache is for a model with {heads} key heads of {width} channels, and got {found[0]} of {found[1]}; make "
                "one with KVCache(model, ...) of this model"
            )

    def _check_room(self, key_states: torch.Tensor) -> None:
        """ValueError for tokens beyond the cache, before one is written.

        On a GPU of a prompt alone, since nothing waits for the number there: later tokens meet the assertion of `append_`.
        """
        batch, heads, new, width = key_states.shape
        if (batch, heads, width) != (self.batch_size, self.num_heads, self.k_head_dim):
            raise ValueError(
                f"this cache holds {self.batch_size} sequences of {self.num_heads} heads of {self.k_head_dim} channels, and "
                f"got {(batch, heads, width)}; call its reset() and use it for one batch, or make another"
            )
        if torch.compiler.is_compiling():
            return
        there = 0 if self.is_empty or self.device.type != "cpu" else int(self.cumulative_length)
        if there + new > self.max_cache_len:
            raise ValueError(
                f"the cache has room for {self.max_cache_len} tokens, {there} are there and {new} came; make one with "
                f"max_length={there + new} or more"
            )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[StoredStates, StoredStates]:
        """Write the new tokens; what the attention function takes."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check_room(key_states)
        new = key_states.shape[2]
        self.keys.fresh, self.values.fresh = (
            (key_states, value_states) if self.is_empty and new > 1 else (None, None)
        )
        stores = self.keys.store, self.values.store
        self._remember(key_states, value_states, new > 1 and not self.is_empty)
        append_(*stores, key_states, value_states, self.cumulative_length, self.recipe.rotate)
        if self.is_empty:
            self.is_empty = False
        return self.keys, self.values

    def _remember(self, key_states: torch.Tensor, value_states: torch.Tensor, several: bool) -> None:
        """What each of several new tokens sees as computed, before it is overwritten."""
        for states, new in ((self.keys, key_states), (self.values, value_states)):
            states.store.recent = None
            if several and states.store.computed is not None:
                if states.rotate:
                    new = hadamard(new.contiguous(), new.shape[-1])
                states.store.recent = recent_tokens(states.store, new, self.cumulative_length)

    def _tensors(self) -> list[torch.Tensor]:
        return [*self.keys.store.tensors(), *self.values.store.tensors()]

    def recorded(self) -> list[torch.Tensor]:
        """What a step of one more token reads and writes at its address; nothing before there is a token."""
        if not self.is_initialized or self.is_empty:
            return []
        static = [one.store.scale for one in (self.keys, self.values) if one.store.static]
        return [*self._tensors(), *(one for one in static if one is not None), self.cumulative_length]

    def reset(self) -> None:
        """Forget all tokens; memory stays."""
        if self.is_initialized:
            for tensor in self._tensors():
                tensor.zero_()
            self.keys.fresh = self.values.fresh = None
            self.keys.store.recent = self.values.store.recent = None
        self.cumulative_length.zero_()
        self.is_empty = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens; a positive number is what remains, as earlier transformers counts."""
        if self.is_initialized and tokens_to_remove > 0:
            self.forget((self.cumulative_length - tokens_to_remove).clamp(min=0))
        elif self.is_initialized:
            self.forget(-tokens_to_remove)

    def forget(self, count: int | torch.Tensor) -> None:
        """Forget the last `count` tokens: a number, or a 0-d tensor on the cache's device, which nothing waits for."""
        before = self.cumulative_length.clone()
        self.cumulative_length.sub_(count).clamp_(min=0)
        for states in (self.keys, self.values):
            states.store.recent = None
            restore_(states.store, before, self.cumulative_length)

    def get_seq_length(self, *args: Any) -> Any:
        """How many tokens are there: a number on the device, 0 before the first."""
        return self.cumulative_length if self.is_initialized else 0

    def get_mask_sizes(self, *args: Any) -> tuple[int, int]:
        """Keys that a mask has to cover: all positions."""
        return self.max_cache_len, 0

    def get_max_length(self) -> int:
        """Positions of the cache."""
        return int(self.max_cache_len)

    #: Its name before transformers 5.20.
    get_max_cache_shape = get_max_length

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence i becomes what beam_idx[i] was."""
        if self.is_initialized:
            for tensor in self._tensors():
                tensor.copy_(_rows(tensor, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence `repeats` times."""
        if self.is_initialized:
            self.batch_select_indices(
                torch.arange(self.batch_size, device=self.device).repeat_interleave(repeats)
            )

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences alone, in new memory."""
        if not self.is_initialized:
            return
        for states in (self.keys, self.values):
            for name in ("codes", "scale", "zero", "computed"):
                held = getattr(states.store, name)
                if held is not None and not (name == "scale" and states.store.static):
                    setattr(states.store, name, _rows(held, indices.to(held.device)))
        self.batch_size = self.keys.store.codes.shape[0]

    def offload(self) -> None:
        """Not supported."""
        raise ValueError(
            "a cache in low precision is not offloaded to the host; use transformers' own cache with cache_implementation="
            "'offloaded'"
        )

    prefetch = offload


def _rows(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows of the first axis."""
    return signed(tensor).index_select(0, indices).view(tensor.dtype)


__all__ = ["KVLayer", "StoredStates"]
