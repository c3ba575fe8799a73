"""Blocks on which quantizers disagree, by family, for any element format, block size and input dtype.

Every value is exact in the asked dtype, so one step of the dtype is one unit in the last place. A family is an array of
shape (blocks, size); `edge_blocks` returns all of them by name, so that a failing comparison can say which edge it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import ml_dtypes
import numpy as np
import numpy.typing as npt

from reference.formats.formats import FORMATS

Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint32]

SIGN, INFINITY, LARGEST, NAN = 0x80000000, 0x7F800000, 0x7F7FFFFF, 0x7FC00000
NUMPY_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@dataclass(frozen=True)
class Edges:
    """What the edges depend on: the element format, what the block maximum maps onto, the block size, the dtype."""

    element: str
    target: float
    size: int
    dtype: str = "float32"
    seed: int = 0

    @property
    def step(self) -> int:
        """One unit in the last place of the dtype, in float32 bit patterns."""
        return {"float32": 1, "bfloat16": 1 << 16}[self.dtype]

    def exact(self, values: npt.ArrayLike) -> Floats:
        """Values rounded to the dtype, as float32."""
        with np.errstate(all="ignore"):
            return np.asarray(values, np.float32).astype(NUMPY_DTYPES[self.dtype]).astype(np.float32)


def edge_blocks(edges: Edges, *, specials: bool = True) -> dict[str, Floats]:
    """All families; without `specials` only finite values."""
    families = {
        "random": _random(edges),
        "patterns": _patterns(edges),
        "power of two": _with_maxima(edges, _around(edges, 1.0)),
        "target": _with_maxima(edges, _around(edges, edges.target)),
        "ties": _ties(edges),
        "subnormal": _subnormal(edges),
        "zero": _zeros(edges),
        "largest": _largest(edges),
    }
    return {**families, "special": _specials(edges)} if specials else families


def stack(families: dict[str, Floats]) -> Floats:
    """All blocks in one array (blocks, size)."""
    return np.concatenate(list(families.values()))


def _rng(edges: Edges, salt: int) -> np.random.Generator:
    return np.random.default_rng([edges.seed, salt, edges.size])


def _random(edges: Edges) -> Floats:
    """Normal values in blocks of very different magnitude."""
    rng = _rng(edges, 1)
    scale = np.exp2(rng.integers(-30, 30, (400, 1)))
    return edges.exact(rng.standard_normal((400, edges.size)) * scale)


def _patterns(edges: Edges) -> Floats:
    """Uniformly random finite bit patterns; half of the blocks span only a few binades."""
    rng = _rng(edges, 2)
    bits = rng.integers(0, 1 << 32, (400, edges.size), dtype=np.uint64).astype(np.uint32)
    centre = rng.integers(0, 250, (200, 1), dtype=np.uint64).astype(np.uint32)
    bits[:200] = bits[:200] & 0x807FFFFF | (centre + (bits[:200] >> 23) % 5) << 23
    bits &= np.uint32(0x100000000 - edges.step)
    return np.where(bits & INFINITY == INFINITY, bits & 0x80000000, bits).astype(np.uint32).view(np.float32)


def _around(edges: Edges, factor: float) -> Floats:
    """factor * 2**k for every k, with two steps of the dtype on each side."""
    with np.errstate(over="ignore"):
        centres = np.float32(factor) * np.exp2(np.arange(-160.0, 128.0)).astype(np.float32)
        centres = edges.exact(
            np.concatenate([centres, np.ldexp(factor, np.arange(-160, 128)).astype(np.float32)])
        )
    bits = np.unique(centres.view(np.uint32)).astype(np.int64)
    near = (bits[:, None] + edges.step * np.arange(-2, 3)).reshape(-1)
    return np.unique(near[(near >= 0) & (near < INFINITY)]).astype(np.uint32).view(np.float32)


def _with_maxima(edges: Edges, maxima: Floats) -> Floats:
    """One block for each maximum: it stands at a random place with a random sign, the others are smaller."""
    rng = _rng(edges, 3)
    fractions = rng.uniform(-1, 1, (len(maxima), edges.size)) * np.exp2(
        rng.integers(-9, 1, (len(maxima), edges.size))
    )
    # Toward zero, so that nothing exceeds the maximum.
    bits = (maxima[:, None] * fractions).astype(np.float32).view(np.uint32) & np.uint32(
        0x100000000 - edges.step
    )
    blocks = bits.view(np.float32).copy()
    place = rng.integers(0, edges.size, len(maxima))
    blocks[np.arange(len(maxima)), place] = maxima * rng.choice([-1, 1], len(maxima))
    return blocks


def _ties(edges: Edges) -> Floats:
    """Midpoints between neighbouring values of the element, and one step beside them, under many scales."""
    values = np.unique(np.abs(FORMATS[edges.element].values[np.isfinite(FORMATS[edges.element].values)]))
    middle = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    bits = (middle.view(np.uint32).astype(np.int64)[:, None] + edges.step * np.arange(-1, 2)).reshape(-1)
    near = edges.exact(bits.astype(np.uint32).view(np.float32))
    near = np.concatenate([near, -near])
    filled = np.resize(near, (-(-len(near) // (edges.size - 1)), edges.size - 1))
    top = np.full((len(filled), 1), edges.target, np.float32)
    base = np.concatenate([top, filled], 1)
    scales = [1.0, 2.0**-1, 2.0**40, 2.0**-60, 2.0**-118, 2.0**-130, 1.5, 1 / 3, 1.25]
    return edges.exact(np.concatenate([base.astype(np.float64) * scale for scale in scales]))


def _subnormal(edges: Edges) -> Floats:
    """Only float32 subnormals, of every width; the smallest normal number and its neighbours; 2**-127."""
    rng = _rng(edges, 5)
    width = np.arange(64)[:, None] % 23 + 1
    bits = rng.integers(0, 1 << 32, (64, edges.size)) % (1 << width) * edges.step % 0x800000
    edge = [
        0x800000,
        0x800000 - edges.step,
        0x800000 + edges.step,
        0x400000,
        0x400000 + edges.step,
        edges.step,
    ]
    lone = np.zeros((2 * len(edge), edges.size), np.int64)
    lone[: len(edge), 3] = lone[len(edge) :, :] = 0
    lone[: len(edge), 3] = edge
    lone[len(edge) :] = np.array(edge)[:, None]
    both = np.concatenate([bits, lone]) | rng.integers(0, 2, (64 + 2 * len(edge), edges.size)) << 31
    return both.astype(np.uint32).view(np.float32)


def _zeros(edges: Edges) -> Floats:
    """+0, -0, and both."""
    blocks = np.zeros((3, edges.size), np.float32)
    blocks[1] = -0.0
    blocks[2, ::3] = -0.0
    return blocks


def _largest(edges: Edges) -> Floats:
    """The largest finite values, alone and everywhere, beside small ones."""
    top = np.array([LARGEST & -edges.step, (LARGEST & -edges.step) - edges.step, 0x7F000000, 0x7F400000])
    tops = top.astype(np.uint32).view(np.float32)
    blocks = np.zeros((3 * len(tops), edges.size), np.float32)
    blocks[0::3] = tops[:, None]
    blocks[1::3, 1], blocks[1::3, 2:] = -tops, 1.0
    blocks[2::3, 0], blocks[2::3, 1:] = tops, np.float32(2.0**-126)
    return blocks


def _specials(edges: Edges) -> Floats:
    """One or several NaNs and infinities of both signs, beside ordinary values, zeros and the largest floats."""
    patterns = [(NAN,), (NAN | SIGN,), (INFINITY,), (INFINITY | SIGN,), (NAN, NAN | SIGN), (INFINITY, INFINITY | SIGN),
                (NAN, INFINITY), (NAN | SIGN, INFINITY | SIGN)]  # fmt: skip
    rows = []
    for background in (
        edges.exact(_rng(edges, 7).standard_normal(edges.size)),
        np.zeros(edges.size),
        -_largest(edges)[0],
    ):
        for pattern in patterns:
            row = np.array(background, np.float32).view(np.uint32)
            row[2 : 2 + len(pattern)] = pattern
            rows.append(row.view(np.float32))
    rows += [
        np.full(edges.size, value, np.uint32).view(np.float32) for value in (NAN, INFINITY, INFINITY | SIGN)
    ]
    return np.stack(rows)


@lru_cache(maxsize=32)
def all_blocks(edges: Edges, specials: bool = True) -> Floats:
    """`stack(edge_blocks(edges))`, kept; do not change it."""
    blocks = stack(edge_blocks(edges, specials=specials))
    blocks.setflags(write=False)
    return blocks
