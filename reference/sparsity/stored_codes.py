"""What a scheme's codes are in 2:4 storage: the code of zero, and records for elements that are stored as they are.

2:4 storage holds the codes of the kept elements alone, so what was pruned must come back as the code that `quantize` gives a
zero, whatever the scale of its block. `zero_code` is that code. Schemes with an integer zero point have it in the block: their
zero is stored there (`FROM_ZERO_POINT`). Where zero has no code (two levels, zero points that are floats), or another one in
each block, there is no such storage: `unsupported_reason`.

`PLAIN_ELEMENTS` are bfloat16 and float16 themselves under one scale of 1. Their scale is given, never found.

Source: Mishra et al., "Accelerating Sparse Deep Neural Networks" (arXiv 2104.08378), section 3.1, for the storage.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from reference.arrays.namespace import Array, as_array
from reference.quantize.quantize import dequantize, quantize
from reference.quantize.stored import Scales
from reference.schemes.schemes import Scale, Scheme
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


#: In place of a code: zero is the zero point of its block.
FROM_ZERO_POINT = -1


def _plain(element: str) -> Scheme:
    scale = Scale(block="tensor", target=1.0)
    return Scheme(name=element, element=element, scale=scale, overflow="inf", nan="ieee", dequantize="ieee")


#: Elements of 16 bits as they are, by format.
PLAIN_ELEMENTS = {element: _plain(element) for element in ("bfloat16", "float16")}


def is_plain(scheme: Scheme) -> bool:
    """Whether a scheme stores 16-bit elements as they are, whatever it is called."""
    plain = PLAIN_ELEMENTS.get(scheme.element)
    return plain is not None and (plain.scale, plain.outer, plain.zero) == (
        scheme.scale,
        scheme.outer,
        scheme.zero,
    )


@lru_cache(maxsize=1024)
def unsupported_reason(scheme: Scheme) -> str | None:
    """Why 2:4 storage does not hold codes of a scheme; None where it does."""
    if is_plain(scheme):
        return None
    if scheme.scale.flat_size:
        return "its blocks are of the flattened tensor, and 2:4 storage is of rows"
    if scheme.format.bits > 8:
        return f"codes of {scheme.element} are stored in 2:4 as they are alone"
    if scheme.zero is not None and scheme.zero.rule != "code":
        return "its zero points are floating-point numbers, under which no code is zero"
    if not _keeps_zero(scheme):
        return "it stores zeros as other values"
    return None


@lru_cache(maxsize=1024)
def zero_code(scheme: Scheme) -> int:
    """The code of 0, or `FROM_ZERO_POINT`; ValueError for schemes that 2:4 storage does not hold."""
    if (reason := unsupported_reason(scheme)) is not None:
        raise ValueError(
            f"2:4 storage does not hold {scheme.name}: {reason}; take symmetric integers or floats, as int8_rowwise"
        )
    if is_plain(scheme):
        return 0
    if scheme.zero is not None:
        return FROM_ZERO_POINT
    return int(quantize(_sample(scheme), scheme).codes.reshape(-1)[-1])


def _keeps_zero(scheme: Scheme) -> bool:
    """Whether zeros come back from blocks with other elements and from blocks without."""
    found = []
    for first in (0.0, 1.0, -3.5):
        x = _sample(scheme)
        x[..., 0] = first
        q = quantize(x, scheme)
        zeros = np.ones(x.shape, bool)
        zeros[..., 0] = False
        values, codes = dequantize(q)[zeros], q.codes[zeros]
        found.append(bool((values == 0).all()) and len(np.unique(codes)) == 1)
        found.append(
            scheme.zero is not None or codes[0] == quantize(_sample(scheme), scheme).codes.reshape(-1)[-1]
        )
    return all(found)


def _sample(scheme: Scheme) -> np.ndarray:
    """Zeros that make one whole block, and its outer block."""
    block = scheme.scale.block
    rows, columns = (
        block if isinstance(block, tuple) else (1, block if isinstance(block, int) and block > 0 else 4)
    )
    return np.zeros(
        (rows, columns * (scheme.outer.block if scheme.outer and isinstance(scheme.outer.block, int) else 1)),
        np.float32,
    )


def unit_scales() -> Scales:
    """The scale that elements of `PLAIN_ELEMENTS` have."""
    return Scales(np.float32(1).reshape(()))


__all__ = ["FROM_ZERO_POINT", "PLAIN_ELEMENTS", "is_plain", "unit_scales", "unsupported_reason", "zero_code"]
