"""Transposable 2:4 masks: two kept in every row and every column of each 4 x 4 tile, so w and its transpose are both 2:4.

**exact**: the best of the 90 masks of a tile. Masks are in lexicographic order of their four rows, and a row's pairs in the
order (0,1), (0,2), (0,3), (1,2), (1,3), (2,3). With a the magnitudes of the scores, widened to float32, and u an operation
rounded to float32, a mask's sum is u(u(P0 + P1) + u(P2 + P3)), P_r = u(a_rc + a_rd) for the kept pair c < d of row r. The
largest sum wins; of equal sums the first mask, which keeps lower indices. The order of addition is part of the rule: a kernel
needs 24 pair sums, 72 sums of two rows and 90 of four. Three roundings are at most 3 * 2**-24 of a sum, so what is kept is
within 6 * 2**-24 of the true maximum. Sums beyond the largest float32 are equal.

**greedy**: elements in descending order of magnitude, ties to the lower row, then the lower column; each is kept if its row
and its column have kept fewer than two. Rows and columns may end with one or none kept: on normal weights 7 of 8 in one tile of
six. `compress` takes such masks. This is what torch's tile kernel does with absolute values (its default ranks signed ones).

NaN and infinities, as in `prune`: as many NaNs are kept as a mask can, then as many infinities, then the largest sum of the
finite magnitudes. greedy takes NaN first, then infinities.

Sources: Hubara et al., "Accelerated Sparse Neural Training: A Provable and Efficient Method to Find N:M Transposable Masks"
(arXiv 2102.08124); Hu et al., "Accelerating Transformer Pre-training with 2:4 Sparsity" (arXiv 2404.01847), for the search
over 90 masks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from reference.arrays.bridges import bridged
from reference.arrays.namespace import Array, Namespace, as_array, choice, namespace_of
from reference.arrays.softfloat import INFINITY, MAGNITUDE, add, float32_bits
from reference.sparsity.compress import Compressed, compress
from reference.sparsity.prune import NAN_KEY, float_weights, rank_in_groups

METHODS = ("exact", "greedy")
PAIRS = tuple(itertools.combinations(range(4), 2))
#: What a NaN counts beside an infinity: more than a mask can keep of these.
NAN_COUNT = 9


def _all_masks() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(90, 4) index into PAIRS of each row, and (90, 16) bool, in the order of the module."""
    rows = np.array([[column in pair for column in range(4)] for pair in PAIRS])
    choices = np.array(list(itertools.product(range(6), repeat=4)), np.int32)
    tiles = rows[choices]
    good = (tiles.sum(1) == 2).all(-1)
    picked, masks = choices[good], tiles[good].reshape(-1, 16)
    for table in (picked, masks):
        table.setflags(write=False)  # so that tables are kept on their device
    return picked, masks


ROW_PAIRS, MASKS = _all_masks()
ROW_COLUMNS = tuple(np.ascontiguousarray(ROW_PAIRS[:, row]) for row in range(4))
for _column in ROW_COLUMNS:
    _column.setflags(write=False)


@bridged
def prune_transposable(w: Any, *, scores: Any = None, method: str = "exact") -> Array:
    """The mask of the weights to keep: bool, shape of `w` (..., R, C), both multiples of 4, in the library of `w`.

    At most two are kept in every row and every column of each 4 x 4 tile, exactly two by "exact", so the mask and its
    transpose over the last two axes are 2:4 and `compress` takes both. `scores` (default: w) has the shape and library of
    w and dtype float32, bfloat16 or float16, as w itself has where it is ranked; magnitudes count. method: "exact" or
    "greedy", as the module says, with its ties and NaN. `method="exact"` of the scores of a transpose may keep another of two
    equal masks than the transpose of the mask.

    Raises ValueError for fewer than two axes, lengths that 4 does not divide, another method, or scores of another
    shape or library; TypeError for other dtypes.
    """
    choice(method, METHODS, "method")
    w = as_array(w)
    shape = namespace_of(w).shape(w)
    _check_tiles(shape)
    ns, ranked, name = float_weights(w if scores is None else scores, "prune_transposable")
    if ns is not namespace_of(w) or ns.shape(ranked) != shape:
        raise ValueError(
            f"scores are of w's library and shape {shape}, got {ns.name} of shape {ns.shape(ranked)}; give one per weight"
        )
    magnitude = ns.minimum(float32_bits(ns, ranked, name) & MAGNITUDE, NAN_KEY)
    lead = (*shape[:-2], shape[-2] // 4, shape[-1] // 4)
    tiles = ns.moveaxis(magnitude.reshape(*shape[:-2], lead[-2], 4, lead[-1], 4), -2, -3)
    kept = (_exact if method == "exact" else _greedy)(ns, tiles)
    return ns.moveaxis(kept.reshape(*lead, 4, 4), -2, -3).reshape(shape)


def _check_tiles(shape: tuple[int, ...]) -> None:
    if len(shape) < 2:
        raise ValueError(f"a transposable mask needs a matrix, got shape {shape}; reshape to (rows, columns)")
    if shape[-2] % 4 or shape[-1] % 4:
        padded = tuple(-(-n // 4) * 4 for n in shape[-2:])
        raise ValueError(
            f"a transposable mask needs rows and columns in multiples of 4, got shape {shape}; pad them to {padded}"
        )


def _exact(ns: Namespace, tiles: Array) -> Array:
    """Bool (..., 16) of tiles (..., 4, 4) of float32 patterns without sign."""
    special = ns.where(tiles > INFINITY, NAN_COUNT, ns.where(tiles == INFINITY, 1, 0))
    counts = _sums(ns, special, lambda a, b: a + b)
    finite = _sums(ns, ns.where(tiles < INFINITY, tiles, 0), lambda a, b: add(ns, a, b))
    # Sums have no sign, so their patterns sort as they do; -1 is below all.
    key = ns.where(counts == ns.reduce_max(counts, -1), finite, -1)
    first = ns.where(key == ns.reduce_max(key, -1), ns.arange(len(MASKS), key), len(MASKS) - 1)
    return ns.take(ns.constant(MASKS, key), ns.reduce_min(first, -1)[..., 0])


def _sums(ns: Namespace, tiles: Array, plus: Callable[[Array, Array], Array]) -> Array:
    """The sum of what each of the 90 masks keeps, (..., 90), added as the module says."""
    pairs = ns.stack([plus(tiles[..., i], tiles[..., j]) for i, j in PAIRS], -1)
    rows = [pairs[..., row, :][..., ns.constant(ROW_COLUMNS[row], tiles)] for row in range(4)]
    return plus(plus(rows[0], rows[1]), plus(rows[2], rows[3]))


def _greedy(ns: Namespace, tiles: Array) -> Array:
    """Bool (..., 4, 4) of tiles (..., 4, 4) of float32 patterns without sign."""
    shape = ns.shape(tiles)
    rank = rank_in_groups(ns, tiles.reshape(*shape[:-2], 16), 16).reshape(shape)
    kept = rank < 0
    for place in range(16):
        held = ns.astype(kept, "int32")
        in_row, in_column = held.sum(-1), held.sum(-2)
        room = (in_row < 2)[..., :, None] & (in_column < 2)[..., None, :]
        kept = kept | ((rank == place) & room)
    return kept


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
