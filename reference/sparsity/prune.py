"""N:M masks: of every M consecutive weights along the last axis, keep the N with the largest score.

Scores are compared as integers derived from their bit patterns, never as floats: XLA flushes subnormals in comparisons, so
2**-140 > 0 is false there. The integer of a float is its bit pattern without the sign bit, which sorts as the magnitude does.

Source: Mishra et al., "Accelerating Sparse Deep Neural Networks" (arXiv 2104.08378), section 3, for 2:4; Zhou et al.,
"Learning N:M Fine-grained Structured Sparse Neural Networks" (arXiv 2102.04010), for N:M.
"""

from __future__ import annotations

import re
from typing import Any

from reference.arrays.namespace import Array, Namespace, as_array, namespace_of
from reference.arrays.widen import INFINITY, MAGNITUDE, float32_bits

FLOATS = ("float32", "bfloat16", "float16")
INTEGERS = ("int8", "int16", "int32", "uint8", "uint16")
# One above every finite magnitude and infinity: a NaN ranks first, whatever its payload.
NAN_KEY = INFINITY + 1


def prune(w: Array, *, pattern: str = "2:4", scores: Array | None = None) -> Array:
    """The mask of the weights to keep: bool, shape of `w`, in the library of `w`.

    In every group of M consecutive elements of the last axis exactly N are kept: those with the largest |scores|
    (`scores` defaults to `w`; otherwise it has the shape of `w`). Ties keep the lower index, so the mask is a function of
    the scores alone. -0 equals +0. NaN counts as the largest magnitude, above infinity, and all NaNs tie: a NaN is kept
    and stays visible rather than being dropped silently.

    Scores are float32, bfloat16, float16 or integers up to 32 bits (not uint32). Works under `jax.jit` and `vmap`.

    Raises ValueError for a malformed pattern, a last axis that M does not divide, or a shape of `scores` other than
    that of `w`; TypeError for other dtypes.
    """
    kept, group = parse_pattern(pattern)
    w = as_array(w)
    ns = namespace_of(w)
    shape = ns.shape(w)
    check_groups(shape, group, pattern)
    scores = w if scores is None else as_array(scores)
    if ns.shape(scores) != shape:
        raise ValueError(
            f"scores of shape {ns.shape(scores)} do not match w of shape {shape}; give one score per weight"
        )
    key = magnitude_key(namespace_of(scores), scores).reshape(*shape[:-1], shape[-1] // group, group)
    return (rank_in_groups(ns, key, group) < kept).reshape(shape)


def parse_pattern(pattern: str) -> tuple[int, int]:
    """(N, M) of a string "N:M" with 1 <= N <= M; ValueError otherwise, TypeError if it is no string."""
    if not isinstance(pattern, str):
        raise TypeError(
            f"a sparsity pattern is a string such as '2:4', got {type(pattern).__name__}: {pattern!r}"
        )
    match = re.fullmatch(r"([0-9]{1,4}):([0-9]{1,4})", pattern)
    kept, group = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= kept <= group:
        raise ValueError(
            f"a sparsity pattern is 'N:M', 1 <= N <= M (keep N of every M), such as '2:4'; got {pattern!r}"
        )
    return kept, group


def check_groups(shape: tuple[int, ...], group: int, what: str) -> None:
    """ValueError unless the last axis of `shape` exists and is a multiple of `group`."""
    if not shape:
        raise ValueError(
            f"{what} works along the last axis, and a 0-d array has none; reshape it to at least one axis"
        )
    if shape[-1] % group:
        raise ValueError(
            f"{what} needs a last axis that is a multiple of {group}, got shape {shape} "
            f"({shape[-1]} % {group} = {shape[-1] % group}); pad the axis to {-(-shape[-1] // group) * group}"
        )


def float_weights(x: Any, what: str) -> tuple[Namespace, Array, str]:
    """(namespace, array, dtype name) of floats that widen to float32 exactly; TypeError for other dtypes."""
    x = as_array(x)
    ns = namespace_of(x)
    name = ns.dtype_name(x)
    if name not in FLOATS:
        raise TypeError(
            f"{what} takes {', '.join(FLOATS)}, got {name} of shape {ns.shape(x)}; cast it to float32"
        )
    return ns, x, name


def magnitude_key(ns: Namespace, scores: Array) -> Array:
    """int32 that sorts as |score| does, NaN on top."""
    name = ns.dtype_name(scores)
    if name in FLOATS:
        return ns.minimum(float32_bits(ns, scores, name) & MAGNITUDE, NAN_KEY)
    if name in INTEGERS:
        wide = ns.astype(scores, "int32")
        # |score| - 1, because |-2**31| does not fit.
        return ns.where(wide > 0, wide - 1, -(wide + 1))
    raise TypeError(
        f"scores are {', '.join(FLOATS + INTEGERS)}; got {name} of shape {ns.shape(scores)}: cast to float32"
    )


def rank_in_groups(ns: Namespace, key: Array, group: int) -> Array:
    """Place of every element in its group, 0 for the largest: how many elements come before it. Shape of `key`."""
    place = ns.arange(group, key)
    other, own = key[..., None, :], key[..., :, None]
    # With all axes: JAX's strict rank promotion adds none.
    earlier = (place[None, :] < place[:, None]).reshape((1,) * (len(ns.shape(key)) - 1) + (group, group))
    before = (other > own) | ((other == own) & earlier)
    return ns.astype(before, "int32").sum(-1)
