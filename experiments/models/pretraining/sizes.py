"""Sizes of the byte-level language models that are trained from scratch. Names are keys of rows.

Width and depth were chosen for matrix products of at least 768 x 768 and heads of 128 features, which GPUs run at a good share
of their peak; every width is a multiple of 256, so that every block size of every scheme divides every layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from experiments.models.language_model import ModelSettings


@dataclass(frozen=True)
class Size:
    """A model, and what it is trained with unless told otherwise: sequences a step and AdamW's peak learning rate."""

    model: ModelSettings
    batch: int
    rate: float


#: 28.7 million parameters: for paired seeds.
SMALL = ModelSettings(
    name="byte-level-30m", width=768, layers=4, heads=6, kv_heads=6, feed_forward=2048, context=1024
)
#: 122.6 million parameters: for one long training.
LARGE = ModelSettings(
    name="byte-level-120m", width=1280, layers=6, heads=10, kv_heads=10, feed_forward=3584, context=1024
)
#: A stand-in for two cores.
TINY = ModelSettings(
    name="byte-level-tiny", width=256, layers=2, heads=2, kv_heads=2, feed_forward=512, context=128
)
SIZES = {
    "tiny": Size(TINY, batch=8, rate=4e-3),
    "30m": Size(SMALL, batch=8, rate=2.5e-4),
    "120m": Size(LARGE, batch=16, rate=2.5e-4),
}

__all__ = ["LARGE", "SIZES", "SMALL", "TINY", "Size"]
