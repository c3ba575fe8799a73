"""Tables of codebook formats that are computed: the dynamic tree maps of optimizers' states.

``dynamic8`` and ``dynamic8_unsigned`` are those of bitsandbytes and torchao, value for value, ``dynamic4`` and
``linear4_unsigned`` (which has no 0) torchao's of 4 bits.

Sources: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861), section 2; of 4 bits Li et al.,
Memory Efficient Optimizers with 4-bit States (arXiv 2309.01507).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def dynamic_map(signed: bool, exponents: int, bits: int) -> tuple[float, ...]:
    """The values of the dynamic tree format: decimal exponents down to 10**(1 - exponents), fractions finer toward 1.

    Ascending float32. As bitsandbytes and torchao compute them: midpoints of linspace(0.1, 1) in float32, each of its points
    rounded once, times 10**k rounded to float32.
    """
    values = [0.0, 1.0]
    for exponent in range(exponents):
        count = 2 ** (bits - 1 - exponents + exponent + (not signed)) + 1
        points = _linspace(count)
        middle = (points[:-1] + points[1:]) / np.float32(2) * np.float32(10.0 ** (exponent - exponents + 1))
        values += [*middle.tolist(), *((-middle).tolist() if signed else ())]
    return tuple(sorted(values))


def _linspace(count: int) -> Floats:
    """torch.linspace(0.1, 1, count): from both ends, with the step in float32 and one rounding a point."""
    start, end = np.float32(0.1), np.float32(1)
    step = np.float64(np.float32((end - start) / np.float32(count - 1)))
    at = np.arange(count)
    low, high = np.float64(start) + step * at, np.float64(end) - step * (count - 1 - at)
    return np.where(at < count // 2, low, high).astype(np.float32)


#: Name, bits, whether it has negative values, table.
CODEBOOKS: tuple[tuple[str, int, bool, tuple[float, ...]], ...] = (
    ("dynamic8", 8, True, dynamic_map(True, 7, 8)),
    ("dynamic8_unsigned", 8, False, dynamic_map(False, 7, 8)),
    ("dynamic4", 4, True, dynamic_map(True, 3, 4)),
    ("linear4_unsigned", 4, False, tuple(i / 16 for i in range(1, 17))),
)
