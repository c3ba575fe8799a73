"""N:M masks: of every M consecutive weights along the last axis, keep the N with the largest score; scores; and SR-STE.

**Masks.** Scores are compared as integers derived from their bit patterns, never as floats: XLA flushes subnormals in
comparisons, so 2**-140 > 0 is false there. The integer of a float is its bit pattern without the sign bit, which sorts as the
magnitude does.

Source: Mishra et al., "Accelerating Sparse Deep Neural Networks" (arXiv 2104.08378), section 3, for 2:4; Zhou et al.,
"Learning N:M Fine-grained Structured Sparse Neural Networks" (arXiv 2102.04010), for N:M.

**SR-STE** is the gradient of weights that are masked in the forward pass and trained dense. Forward runs with w where the
mask keeps it and 0 elsewhere; the straight-through estimator passes the gradient g of the masked weights to all weights, and
decay pulls those that the mask drops towards zero, so that they do not come back by chance. It is part of the gradient, so an
optimizer such as Adam scales it as it scales g. With u an operation rounded to float32, nearest even, and decay rounded to
float32:

* kept: g, its bits unchanged;
* dropped: u(g + u(decay * w)), rounded once more to g's dtype; no fused multiply-add.

The mask decides, never the values of w. Finite inputs give no NaN (u(decay * w) may be infinite, and so may the result).

Source: Zhou et al., "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch" (arXiv 2102.04010), the
sparse-refined straight-through estimator; its code has decay = 2e-4 and adds it to the gradient, as the masked decay of Hu et
al., "Accelerating Transformer Pre-training with 2:4 Sparsity" (arXiv 2404.01847), does.

**Scores** for `prune(w, scores=...)`: magnitude, Wanda, RIA, and the sums of inputs that the last two read. With u an
operation rounded to float32, nearest even, w widened to float32 exactly, and s_j the sum of the squares of input channel j
over all tokens:

* magnitude: |w_ij|.
* Wanda: u(|w_ij| * n_j), n_j = u(sqrt(s_j)), correctly rounded.
* RIA: u(u(u(|w_ij| / c_j) + u(|w_ij| / r_i)) * p_j), c_j the sum of |w| over the outputs of channel j and r_i over the
  channels of output i. p_j = n_j**a: n_j for a = 1, u(sqrt(n_j)) for a = 1/2, and 1 without inputs, a = 0. Other powers have
  no correctly rounded rule that a kernel could be held to.

Sums run in float32 over adjacent pairs, a binary tree over n terms filled with zeros to a power of two. A block of 2**k
terms is a subtree, so a kernel adds each block by itself and the blocks' sums likewise, with the same bits in any size of
block; each term meets log2(n) roundings. float64 would need one order too, and has no JAX array by default.

Square sums, not means: authors' code divides by the number of sequences or tokens. In exact arithmetic a constant
changes no mask; rounded, it breaks ties, so it is left out.

Edges: a weight of zero scores 0, unless its channel's sum is NaN: finite weights and inputs give no NaN, also where a sum
overflows. 0 / 0 in RIA, a row or a column of zeros, is 0. NaN goes through, and `prune` keeps it. Sums below 0 give NaN.

Sources: Sun et al., "A Simple and Effective Pruning Approach for Large Language Models" (Wanda, arXiv 2306.11695), section 3,
equation 1; Zhang et al., "Plug-and-Play: An Efficient Post-training Pruning Method for Large Language Models" (RIA, ICLR
2024), section 3. RIA's code sums in the dtype of the weights; here sums are float32.
"""

from __future__ import annotations

import re
from math import isfinite
from typing import Any

from reference.arrays.bridges import bridged
from reference.arrays.namespace import Array, Namespace, as_array, check_companion, namespace_of
from reference.arrays.softfloat import (
    INFINITY,
    MAGNITUDE,
    add,
    bits_of,
    divide,
    float32_bits,
    is_nan,
    multiply,
    square_root,
)
from reference.formats.encode import to_dtype_bits
from reference.quantize.blocks import normalize_axis
from reference.quantize.scales import tree_sum

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


EXPONENTS = (0.0, 0.5, 1.0)


@bridged
def square_sums(x: Any, before: Any = None) -> Array:
    """The sum of squares of every input channel: float32 (K,) of x (..., K), float32, bfloat16 or float16.

    All axes but the last are tokens, in row-major order: S = the sum of u(x * x) as the module adds. `before`: float32 (K,),
    the result of earlier inputs; the result is u(before + S). So how a calibration set is cut into calls is part of its
    result. Sums beyond the largest float32 are infinite.

    Raises TypeError for other dtypes; ValueError for a 0-d x, or a `before` of another shape, dtype or library.
    """
    ns, x, name = float_weights(x, "square_sums")
    shape = ns.shape(x)
    if not shape:
        raise ValueError(
            "square_sums takes x of shape (..., channels), got a 0-d array; give tokens by channels"
        )
    bits = float32_bits(ns, x, name).reshape(-1, shape[-1])
    total = sum_over(ns, multiply(ns, bits, bits), 0).reshape(-1)
    if before is not None:
        before = check_companion(ns, before, "float32", shape[-1:], "before")
        total = add(ns, ns.bitcast(before, "int32"), total)
    return ns.bitcast(total, "float32")


@bridged
def magnitude_scores(w: Any) -> Array:
    """|w|: float32 of the shape of w (float32, bfloat16 or float16), what `prune` ranks by without scores.

    Raises TypeError for other dtypes.
    """
    ns, w, name = float_weights(w, "magnitude_scores")
    return ns.bitcast(float32_bits(ns, w, name) & MAGNITUDE, "float32")


@bridged
def wanda_scores(w: Any, sums: Any, *, axis: int = -1) -> Array:
    """Wanda's scores: float32 of the shape of w, |w_ij| times the norm of input channel j, rounded as the module says.

    w: float32, bfloat16 or float16 of at least one axis. axis: the contraction axis of w, that of its input channels: -1 for
    (outputs, inputs) as `torch.nn.Linear` has it, 0 for a matrix that stands the other way. sums: float32 (K,) of
    `square_sums`, K the length of that axis. `prune` groups the last axis: turn scores and weights so that it is this one.

    Raises TypeError for other dtypes of w, or an axis that is no integer; ValueError for an axis that w does not have, and
    for sums of another shape, dtype or library.
    """
    ns, magnitude, axis = _weights(w, axis, "wanda_scores")
    norms = _norms(ns, sums, magnitude, axis)
    return ns.bitcast(_weighted(ns, magnitude, norms), "float32")


@bridged
def ria_scores(w: Any, sums: Any = None, *, axis: int = -1, exponent: float = 0.5) -> Array:
    """RIA's scores: float32 of the shape of w, relative importance times norm**exponent, rounded as the module says.

    w: a matrix of float32, bfloat16 or float16. axis: its contraction axis, 1 or -1 for (outputs, inputs), else 0. sums:
    float32 (K,) of `square_sums`; None only for exponent 0, which looks at weights alone. exponent: 0, 0.5 or 1.

    Raises TypeError for other dtypes of w, or an axis that is no integer; ValueError for w that is no matrix, another
    exponent, and sums that are missing or of another shape, dtype or library.
    """
    ns, magnitude, axis = _weights(w, axis, "ria_scores")
    if len(ns.shape(magnitude)) != 2:
        raise ValueError(
            f"ria_scores takes a matrix, got shape {ns.shape(magnitude)}; give the matrices one by one"
        )
    if exponent not in EXPONENTS:
        raise ValueError(f"the exponent of RIA is 0, 0.5 or 1, got {exponent!r}; its authors use 0.5")
    relative = add(ns, _share(ns, magnitude, 1 - axis), _share(ns, magnitude, axis))
    if exponent == 0:
        return ns.bitcast(relative, "float32")
    norms = _norms(ns, sums, magnitude, axis)
    norms = square_root(ns, norms) if exponent == 0.5 else norms
    return ns.bitcast(_weighted(ns, relative, norms), "float32")


def sum_over(ns: Namespace, bits: Array, axis: int) -> Array:
    """The sum along one axis (kept, of length 1) of float32 patterns, adjacent pairs first; +0 along an empty one."""
    moved = ns.moveaxis(bits, axis, -1)
    shape = ns.shape(moved)
    if not shape[-1]:
        moved = ns.full((*shape[:-1], 1), 0, "int32", bits)
    return ns.moveaxis(tree_sum(ns, moved), -1, axis)


def _weights(w: Any, axis: int, what: str) -> tuple[Namespace, Array, int]:
    """(namespace, float32 patterns of |w|, contraction axis from 0 on)."""
    ns, w, name = float_weights(w, what)
    axis = normalize_axis(axis, ns.shape(w))
    return ns, float32_bits(ns, w, name) & MAGNITUDE, axis


def _norms(ns: Namespace, sums: Any, magnitude: Array, axis: int) -> Array:
    """Patterns of the square roots of `sums`, with the axes of w."""
    shape = ns.shape(magnitude)
    sums = check_companion(ns, sums, "float32", (shape[axis],), "sums (see square_sums)")
    along = [1] * len(shape)
    along[axis] = shape[axis]
    return square_root(ns, ns.bitcast(sums, "int32")).reshape(tuple(along))


def _share(ns: Namespace, magnitude: Array, axis: int) -> Array:
    """u(|w| / sum of |w| along an axis), where a sum of 0 gives 0."""
    total = sum_over(ns, magnitude, axis)
    return ns.where(total == 0, 0, divide(ns, magnitude, total))


def _weighted(ns: Namespace, score: Array, norms: Array) -> Array:
    """u(score * norm), where a score of 0 stays 0 although a norm may be infinite; NaN stays."""
    return ns.where((score == 0) & ~is_nan(norms), 0, multiply(ns, score, norms))


LARGEST_DECAY = 2.0**127


@bridged
def sr_ste_gradient(g: Any, w: Any, mask: Any, *, decay: float = 2e-4) -> Array:
    """g + decay * (1 - mask) * w, the gradient of the dense weights: shape, dtype and library of g.

    g: the gradient of the masked weights, float32, bfloat16 or float16 of any shape. w: the dense weights, of g's shape, dtype
    and library. mask: bool of that shape, True where w was kept. decay: 0 <= decay < 2**127; 0 is the plain straight-through
    estimator, with a dropped -0 as it is. Rounding and edges as the module says.

    Raises TypeError for other dtypes of g, or a mask that is not bool; ValueError where shape, dtype or library differ, or for
    decay out of range.
    """
    ns, g, name = float_weights(g, "sr_ste_gradient")
    shape = ns.shape(g)
    w = check_companion(ns, w, name, shape, "w")
    _check_mask(ns, mask, shape)
    if isinstance(decay, bool) or not (isfinite(decay) and 0 <= decay < LARGEST_DECAY):
        raise ValueError(f"decay is a number from 0 to 2**127, got {decay!r}; 2e-4 is usual")
    carrier = "int32" if name == "float32" else "int16"
    if decay == 0:
        return ns.bitcast(ns.bitcast(g, carrier) | 0, name)  # not the caller's own array
    pull = multiply(ns, float32_bits(ns, w, name), ns.full((1,), bits_of(decay), "int32", g))
    decayed = to_dtype_bits(ns, add(ns, float32_bits(ns, g, name), pull), name)
    return ns.bitcast(_select(ns, mask, g, decayed, carrier), name)


def _select(ns: Namespace, mask: Array, a: Array, b: Array, carrier: str) -> Array:
    """Bits of a where mask, else of b: floats would lose payloads of NaN in some libraries."""
    return ns.where(mask, ns.bitcast(a, carrier), ns.bitcast(b, carrier))


def _check_mask(ns: Namespace, mask: Any, shape: tuple[int, ...]) -> None:
    same = hasattr(mask, "dtype") and namespace_of(mask) is ns
    if not same or ns.dtype_name(mask) != "bool":
        kind = ns.dtype_name(mask) if same else type(mask).__name__
        raise TypeError(f"mask is bool of g's library, as prune returns it, got {kind}")
    if ns.shape(mask) != shape:
        raise ValueError(
            f"mask of shape {ns.shape(mask)} does not match g of shape {shape}; give one bool per weight"
        )
