"""A 2:4 tensor in low precision: pruned in its own dtype, quantized with given scales, and stored compressed."""

from __future__ import annotations

from typing import Any

from reference.arrays.namespace import Array, as_array
from reference.quantize.quantize import quantize
from reference.schemes.schemes import Scheme
from reference.sparsity.compress import Compressed, compress, mask_of


def quantize_compressed(w: Array, scheme: str | Scheme, scales: Any, mask: Array | str = "2:4") -> Compressed:
    """The codes of the kept elements of `w` (..., K) in the 2:4 layout.

    They are compress(quantize(w, scheme, scales=scales).codes, mask). `mask` "2:4" is `prune(w)`, by the magnitudes before they
    are rounded: of codes with three bits of mantissa every sixteenth group ties between its second and third. A bool mask is
    taken as it is; None stands for the elements of `w` that are not zero, if they are 2:4. `scheme`, with codes of 8 bits or
    fewer, and `scales` are those of `quantize`; blocks run along the last axis. Of "2:4" the scales of whole groups are
    `choose_scales(w, scheme)`: the largest magnitude of a group is always kept. Values are codes, uint8 (..., K/2); a kept
    element may round to the code of 0.

    Raises what `compress` raises for shapes and masks, and `quantize` for schemes and scales.
    """
    w = as_array(w)
    kept = mask_of(w, mask)
    return compress(quantize(w, scheme, scales=scales).codes, kept)
