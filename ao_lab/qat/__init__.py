"""Quantization-aware training."""

from __future__ import annotations

import importlib
from typing import Any

#: Files written before this was a package ask for these names here.
MOVED = {"QATConfig": "config"}


def __getattr__(name: str) -> Any:
    """A name of `MOVED`, from the module that defines it now."""
    if name not in MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{MOVED[name]}"), name)
