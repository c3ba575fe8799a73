"""Functions that do more for torch tensors than the specification can: take part in autograd."""

from __future__ import annotations

import sys
from typing import Any

import reference
from reference import Scheme


def fake_quantize(x: Any, scheme: str | Scheme, *, axis: int = -1, scales: Any = None) -> Any:
    """x rounded to what its scheme represents: `reference.fake_quantize`, differentiable in JAX and in torch.

    NumPy, JAX and torch alike; see there for arguments, gradients and errors.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor):
        return reference.fake_quantize(x, scheme, axis=axis, scales=scales)
    import fast

    return fast.fake_quantize(x, scheme, axis=axis, scales=scales)
