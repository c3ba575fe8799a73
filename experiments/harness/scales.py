"""Which scales of a run measure published models, and which their stand-ins."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.harness.settings import Settings


def published_shapes(settings: Settings) -> bool:
    """Whether a run measures the shapes of published models, at full scale on a GPU, or tiny stand-ins."""
    return settings.scale == "full" and settings.device == "cuda"
