"""`kv_scales` for torch tensors; `reference.calibration.kv` states the rules. The same bits on every device."""

from __future__ import annotations

from typing import Any

import torch

from fast.calibration.inputs import check_finite, float_tensor
from fast.quantize.quantize import choose_scales
from reference.calibration.kv import KVScales, cache_scheme, check_heads, check_mask
from reference.schemes.schemes import Scheme


def kv_scales(
    k: torch.Tensor,
    v: torch.Tensor,
    per: str = "tensor",
    *,
    element: str = "float8_e4m3fn",
    mask: torch.Tensor | None = None,
) -> KVScales:
    """Scales that a cache divides keys and values by, float32 on their device: see `reference.kv_scales`."""
    scheme = cache_scheme(per, element)
    return KVScales(*(_scale(x, name, scheme, mask) for x, name in ((k, "k"), (v, "v"))))


def _scale(x: torch.Tensor, name: str, scheme: Scheme, mask: Any) -> torch.Tensor:
    x = float_tensor(x, "kv_scales", name)
    check_heads(tuple(x.shape), name)
    if mask is not None:
        mask = torch.as_tensor(mask, device=x.device)
        check_mask(tuple(mask.shape), mask.dtype == torch.bool, tuple(x.shape), name)
        x = torch.where(mask[..., None, :, None], x, x.new_zeros(()))
    check_finite(x, "kv_scales", name)
    if scheme.scale.block == -1:
        x = x.movedim(-3, 0).reshape(x.shape[-3], -1)
    scale = choose_scales(x, scheme).scale
    scale = scale.reshape(scale.shape[:1])
    empty = ~(x.reshape(*scale.shape, -1) != 0).any(-1)
    return torch.where(empty, 1.0, scale)  # type: ignore[no-any-return]


__all__ = ["kv_scales"]
