"""Shapes of published Llamas, and of stand-ins that two cores can run. Names are keys of committed rows."""

from __future__ import annotations

from dataclasses import replace

from experiments.models.llama import LlamaConfig

LLAMA_3_1_8B = LlamaConfig(
    name="llama-3.1-8b-random",
    vocabulary=128256,
    width=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    feed_forward=14336,
)
#: Two decoder layers of Llama-3-8B, as issues and pages of other projects name them. It differs from 3.1 in the rotary factor
#: alone, which costs nothing, so that of 3.1 stays.
LLAMA_3_8B_TWO_LAYERS = replace(LLAMA_3_1_8B, name="llama-3-8b-two-blocks-random", layers=2)
LLAMA_3_2_3B = LlamaConfig(
    name="llama-3.2-3b-random",
    vocabulary=128256,
    width=3072,
    layers=28,
    heads=24,
    kv_heads=8,
    feed_forward=8192,
    rope_factor=32.0,
)
#: Stand-in of `decode`.
TINY = LlamaConfig(
    name="tiny-stand-in-random",
    vocabulary=512,
    width=256,
    layers=2,
    heads=4,
    kv_heads=2,
    feed_forward=512,
)
#: Stand-ins of `qat_overhead`, as small as groups of 128 allow.
TINY_TWO_LAYERS = replace(
    TINY, name="two-tiny-blocks-stand-in-random", width=128, heads=2, kv_heads=1, feed_forward=256
)
TINY_ONE_LAYER = replace(TINY_TWO_LAYERS, name="tiny-model-stand-in-random", layers=1)
