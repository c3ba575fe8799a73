"""A training of a second: a model of two small layers on the text that tests make."""

from dataclasses import replace

from experiments.models.llama import ModelSettings
from experiments.models.pretraining import Budget, PretrainSettings

MODEL = ModelSettings(width=32, layers=1, heads=2, kv_heads=2, feed_forward=64, context=16)
#: Twelve steps of 64 bytes.
SETTINGS = PretrainSettings(model=MODEL, budget=Budget(bytes=12 * 64), batch=4, rate=1e-2, compiled=False)

__all__ = ["MODEL", "SETTINGS", "replace"]
