"""Keys and values in low precision for transformers' `generate()`: recipes, cache, attention."""

#: Where a model keeps what `use_attention_` and `use_kv_cache_` set.
ATTENTION, KV_CACHE = "_ao_lab_attention", "_ao_lab_kv_cache"
