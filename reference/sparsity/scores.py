"""Scores of weights for `prune(w, scores=...)`: magnitude, Wanda, RIA, and the sums of inputs that the last two read.

With u an operation rounded to float32, nearest even, w widened to float32 exactly, and s_j the sum of the squares of input
channel j over all tokens:

* magnitude: |w_ij|.
* Wanda: u(|w_ij| * n_j), n_j = u(sqrt(s_j)), correctly rounded.
* RIA: u(u(u(|w_ij| / c_j) + u(|w_ij| / r_i)) * p_j), c_j the sum of |w| over the outputs of channel j and r_i over the
  channels of output i. p_j = n_j**a: n_j for a = 1, u(sqrt(n_j)) for a = 1/2, and 1 without inputs, a = 0. Other powers have
  no correctly rounded rule that a kernel could be held to.

**Sums** run in float32 over adjacent pairs, a binary tree over n terms filled with zeros to a power of two. A block of 2**k
terms is a subtree, so a kernel adds each block by itself and the blocks' sums likewise, with the same bits in any size of
block; each term meets log2(n) roundings. float64 would need one order too, and has no JAX array by default.

**Square sums, not means.** Authors' code divides by the number of sequences or tokens. In exact arithmetic a constant
changes no mask; rounded, it breaks ties, so it is left out.

**Edges.** A weight of zero scores 0, unless its channel's sum is NaN: finite weights and inputs give no NaN, also where a sum
overflows. 0 / 0 in RIA, a row or a column of zeros, is 0. NaN goes through, and `prune` keeps it. Sums below 0 give NaN.

Sources: Sun et al., "A Simple and Effective Pruning Approach for Large Language Models" (Wanda, arXiv 2306.11695), section 3,
equation 1; Zhang et al., "Plug-and-Play: An Efficient Post-training Pruning Method for Large Language Models" (RIA, ICLR
2024), section 3. RIA's code sums in the dtype of the weights; here sums are float32.
"""

from __future__ import annotations

from typing import Any

from reference.arrays.namespace import Array, Namespace, check_companion
from reference.arrays.softfloat import add, divide, is_nan, multiply, square_root
from reference.arrays.torch_bridge import bridged
from reference.arrays.widen import MAGNITUDE, float32_bits
from reference.quantize.blocks import normalize_axis
from reference.quantize.statistics import tree_sum
from reference.sparsity.prune import float_weights

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
