"""The headers `*.cuh` of this folder by their names, as NVRTC is given them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

#: In the order in which a source includes them.
NAMES = ("words.cuh", "copies.cuh", "output.cuh", "tiles.cuh", "store.cuh", "scaled.cuh")


@lru_cache(maxsize=1)
def common() -> dict[str, str]:
    """Text by name."""
    folder = Path(__file__).parent
    return {name: (folder / name).read_text() for name in NAMES}


__all__ = ["NAMES", "common"]
