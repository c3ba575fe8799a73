"""SR-STE: the gradient of weights that are masked in the forward pass and trained dense.

Forward runs with w where the mask keeps it and 0 elsewhere; the straight-through estimator passes the gradient g of the masked
weights to all weights, and decay pulls those that the mask drops towards zero, so that they do not come back by chance. It is
part of the gradient, so an optimizer such as Adam scales it as it scales g. With u an operation rounded to float32, nearest
even, and decay rounded to float32:

* kept: g, its bits unchanged;
* dropped: u(g + u(decay * w)), rounded once more to g's dtype; no fused multiply-add.

The mask decides, never the values of w. Finite inputs give no NaN (u(decay * w) may be infinite, and so may the result).

Source: Zhou et al., "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch" (arXiv 2102.04010), the
sparse-refined straight-through estimator; its code has decay = 2e-4 and adds it to the gradient, as the masked decay of Hu et
al., "Accelerating Transformer Pre-training with 2:4 Sparsity" (arXiv 2404.01847), does.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

from reference.arrays.namespace import Array, Namespace, check_companion, namespace_of
from reference.arrays.softfloat import add, bits_of, multiply
from reference.arrays.torch_bridge import bridged
from reference.arrays.widen import float32_bits
from reference.formats.narrow import to_dtype_bits
from reference.sparsity.prune import float_weights

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
