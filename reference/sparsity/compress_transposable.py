"""A matrix and its transpose in 2:4 storage, by one mask: what sparse training multiplies forward and backward."""

from __future__ import annotations

from reference.arrays.namespace import Array, as_array
from reference.sparsity.compress import Compressed, compress
from reference.sparsity.transposable import prune_transposable


def compress_transposable(w: Array) -> tuple[Compressed, Compressed]:
    """`compress` of w (..., R, C) and of its transpose (..., C, R), both by the mask `prune_transposable(w)`.

    The first has values (..., R, C/2), the second (..., C, R/2); each group of both has exactly two elements. w is float32,
    bfloat16 or float16, R and C are multiples of 4. What is kept keeps its bits, NaN and -0 too.

    Raises what `prune_transposable` raises for shapes and dtypes.

    Source: Hubara et al., "Accelerated Sparse Neural Training: A Provable and Efficient Method to Find N:M Transposable Masks"
    (arXiv 2102.08124), section 3.
    """
    w = as_array(w)
    mask = prune_transposable(w)
    return compress(w, mask), compress(w.swapaxes(-1, -2), mask.swapaxes(-1, -2))
