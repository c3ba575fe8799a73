"""A GPU's compute capability, as the products of `ao_lab.gemm` see it."""

from __future__ import annotations

from typing import Any

from ao_lab.gemm import codes, dense, sparse

#: The modules that ask for it, each by a name of its own.
ASKED_BY = (codes, dense, sparse)


def set_capability(monkeypatch: Any, found: tuple[int, int]) -> None:
    """Every GPU has this one, as far as products see."""
    for module in ASKED_BY:
        monkeypatch.setattr(module, "capability", lambda index: found)


__all__ = ["ASKED_BY", "set_capability"]
