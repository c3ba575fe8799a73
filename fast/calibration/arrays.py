"""What functions that run the reference on CPU tensors give it, and get back: tensors and NumPy arrays over the same memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from reference import Quantized, Scales
from reference.arrays.bridges import to_numpy, to_torch

PARTS = ("scale", "outer", "zero")


def numpy_of(value: Any) -> Any:
    """A tensor on any device as a NumPy array; anything else as it is."""
    return to_numpy(value.detach().cpu()) if isinstance(value, torch.Tensor) else value


def numpy_scales(scales: Any) -> Any:
    """`Scales` of tensors, or a tensor, as of NumPy arrays; None as it is."""
    if not isinstance(scales, Scales):
        return numpy_of(scales)
    return Scales(*(numpy_of(getattr(scales, part)) for part in PARTS))


def torch_scales(scales: Scales) -> Scales:
    """`Scales` of NumPy arrays as of tensors."""
    return Scales(*(to_torch(getattr(scales, part)) for part in PARTS))


def torch_quantized(q: Quantized) -> Quantized:
    """A `Quantized` of NumPy arrays as of tensors."""
    return replace(q, **{part: to_torch(getattr(q, part)) for part in ("codes", *PARTS)})


__all__ = ["numpy_of", "numpy_scales", "torch_quantized", "torch_scales"]
