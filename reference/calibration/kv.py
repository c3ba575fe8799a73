"""`kv_scales`: static scales of keys and values, for caches of 8 bits.

Keys are what the attention call multiplies, after their rotation by position: a rotation of pairs raises a largest magnitude by
up to sqrt(2), so scales of keys before it clip. A scale is the largest magnitude over what its element holds, as of the schemes
`fp8_tensorwise` and `fp8_rowwise`; scales of several batches are merged by their maximum. Nothing but zeros has the scale 1, as
readers of checkpoints take one that is missing: what comes later is not to be divided by the smallest number there is.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from reference.arrays.namespace import choice
from reference.calibration.inputs import check_finite, float_array
from reference.formats.formats import FORMATS, format_of
from reference.quantize.scales import choose_scales
from reference.schemes.schemes import SCHEMES, Scheme

KINDS = ("tensor", "head")


class KVScales(NamedTuple):
    """Scales of keys and of values, float32: 0-d, or one for each head."""

    k: Any
    v: Any


def kv_scales(
    k: Any, v: Any, per: str = "tensor", *, element: str = "float8_e4m3fn", mask: Any = None
) -> KVScales:
    """Scales that a cache of this element divides keys and values by.

    k, v: float32, bfloat16, float16 or float64 (..., heads, tokens, channels), NumPy, as the attention call has them; heads and
    channels may differ between them. per: "tensor" or "head". element: a float8 or an integer format. mask: bool (..., tokens),
    True where a token counts; NaN and infinities of others are not seen. Raises TypeError for other arrays, ValueError for
    other shapes, no elements at all, NaN and infinities, and an element without a sign.
    """
    scheme = cache_scheme(per, element)
    return KVScales(*(_scale(x, name, scheme, mask) for x, name in ((k, "k"), (v, "v"))))


def _scale(x: Any, name: str, scheme: Scheme, mask: Any) -> Any:
    x = float_array(x, "kv_scales", name)
    check_heads(x.shape, name)
    if mask is not None:
        mask = np.asarray(mask)
        check_mask(mask.shape, mask.dtype == bool, x.shape, name)
        x = np.where(mask[..., None, :, None], x, np.zeros((), x.dtype))
    check_finite(x, "kv_scales", name)
    if scheme.scale.block == -1:
        x = np.moveaxis(x, -3, 0).reshape((x.shape[-3], -1))
    scale = np.asarray(choose_scales(x, scheme).scale)
    scale = scale.reshape(scale.shape[:1])
    empty = ~(x.reshape((*scale.shape, -1)) != 0).any(axis=-1)
    return np.where(empty, np.float32(1), scale).reshape(scale.shape)


@lru_cache
def cache_scheme(per: str, element: str) -> Scheme:
    """The record of a cache with one scale, or, of a matrix with a row for each head, one for each."""
    choice(per, KINDS, "per")
    fmt = format_of(element)
    if fmt.kind not in ("int", "float") or not fmt.min < 0:
        raise ValueError(
            f"a cache holds numbers of either sign, and {fmt.name} does not; use float8_e4m3fn or int8"
        )
    base = SCHEMES["fp8_tensorwise" if per == "tensor" else "fp8_rowwise"]
    if FORMATS[base.element] == fmt:
        return base
    return replace(
        base, name=f"{fmt.name}_{per}", element=fmt.name, scale=replace(base.scale, target=float(fmt.max))
    )


def check_heads(shape: tuple[int, ...], name: str) -> None:
    """ValueError unless there are heads, tokens and channels."""
    if len(shape) < 3 or not all(shape):
        raise ValueError(
            f"kv_scales takes {name} of shape (..., heads, tokens, channels) with at least one of each, got {shape}"
        )


def check_mask(mask: tuple[int, ...], is_bool: bool, shape: tuple[int, ...], name: str) -> None:
    """ValueError unless a mask has a bool for each token."""
    wanted = (*shape[:-3], shape[-2])
    if not is_bool or mask != wanted:
        raise ValueError(f"kv_scales takes the mask of {name} as bool of shape {wanted}, got shape {mask}")


__all__ = ["KVScales", "kv_scales"]
