"""`search_scales`: the scales of each block by the error of what is stored, weighted by what the inputs say.

Candidates are *stored* scales: each is rounded as its record stores scales before its error is counted, and a second level over
all elements is fixed first. Of each block the candidate with the least error is taken, of two as good the earlier one, and the
first candidate is the scale of `choose_scales`. The error of a block with d = dequantized - w is

* sum of |d_j|^norm without weights, sum of weights_j |d_j|^norm with weights (K,), the diagonal of the Hessian;
* d^T H_b d with weights (K/g, g, g), the diagonal blocks of the Hessian, for blocks of g along K.

What candidates are depends on how the record stores scales:

* In at most 8 bits (e8m0, e4m3, NF4's int8): steps of the stored code, by default 0, -1, 1 for powers of two, up to 6 each way
  for float codes, 32 for integers. So of e2m1 elements 6 / 4 of their scale is among them, which has the
  block's maximum on 4 in place of 6 (four over six).
* Otherwise (float32, bfloat16, float16): ratios by which the block's range is shrunk before the record's own rule sees it;
  with zero points pairs of ratios, for the low and the high end.

Everything runs in float64 on NumPy arrays; sums have no stated order.

Source: Lin et al., AWQ (arXiv 2306.00978), and the GPTQ authors' code for clipping by a grid; llama.cpp's importance matrix for
weights by the diagonal; Cook et al., "Four Over Six" (arXiv 2512.02010).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reference.arrays.namespace import Array, Namespace, namespace_of
from reference.arrays.softfloat import float32_bits
from reference.calibration.inputs import LARGEST, Matrix
from reference.calibration.nearest import Nearest, checked_weights
from reference.formats.formats import FORMATS
from reference.quantize.blocks import Blocks
from reference.quantize.scales import check_scales, choose, floor_value
from reference.quantize.stored import Scales
from reference.schemes.schemes import Scheme, scheme_of

Candidate = int | float | tuple[float, float]
#: Steps of a stored code by default: powers of two, float codes, integer codes.
POWER_STEPS = (0, -1, 1)
FLOAT_STEPS = (0, *(sign * step for step in range(1, 7) for sign in (-1, 1)))
INTEGER_STEPS = (0, *(sign * step for step in (1, 2, 4, 6, 8, 12, 16, 20, 24, 32) for sign in (-1, 1)))
#: Ratios of the range by default: one for both ends, or one for each.
RATIOS = tuple(1 - 0.03 * step for step in range(20))
END_RATIOS = tuple(1 - 0.09 * step for step in range(8))
LARGEST_RATIO = 2.0**10
#: Elements of a chunk of rows, whose temporaries stay in a core's cache.
CHUNK = 1 << 16


def search_scales(
    w: Any,
    scheme: str | Scheme,
    *,
    weights: Any = None,
    candidates: Sequence[Candidate] | None = None,
    norm: float = 2.0,
    outer: Any = None,
) -> Scales:
    """Scales for w by the rule of this module, for `quantize(w, scheme, scales=...)`.

    w: finite float32, bfloat16, float16 or float64 (N, K), a NumPy array; K is the contraction axis. weights: None, or finite
    float32 or float64, 0 or more, of shape (K,), or symmetric (K/g, g, g) for a scheme with blocks of g along K, norm 2 alone.
    candidates: None, or steps (integers) of the stored code, or ratios of the range (positive numbers, pairs of them for a
    scheme with zero points). norm: above 0. outer: None, or the second level over all elements, a 0-d float32 array.

    Raises TypeError for other dtypes or arrays of another library; ValueError for other shapes, values that are not finite,
    candidates that the scheme's scales cannot take, an outer scale that the scheme does not have, and a scheme that rounds
    stochastically.
    """
    record = scheme_of(scheme)
    w, name, _ = checked_weights(w, record, "search_scales")
    ns, blocks = namespace_of(w), Blocks.of(w.shape, record.scale, -1)
    search = Search.of(record, name, weights, candidates, norm, blocks)
    fixed = None if outer is None else check_scales(ns, Scales(outer=outer), record, blocks)
    if record.outer is not None and record.outer.statistic == "absmax_elements" and fixed is None:
        split = blocks.split(ns, float32_bits(ns, w, name))
        fixed = Scales(outer=choose(ns, split, blocks, record, name, None).stored.outer)
    if not isinstance(record.scale.block, int) or is_double(record):
        return search.best(ns, w, fixed)
    step = max(CHUNK // w.shape[1], 1)
    parts = [search.best(ns, w[row : row + step], fixed) for row in range(0, max(len(w), 1), step)]
    scale, zero = (_joined([getattr(part, field) for part in parts]) for field in ("scale", "zero"))
    return Scales(scale, parts[0].outer, zero)


def _joined(parts: list[Any]) -> Any:
    return None if parts[0] is None else np.concatenate(parts)


@dataclass(frozen=True)
class Search:
    """What is the same for all rows: the record, the weights in blocks or their local Hessians, and the candidates."""

    scheme: Scheme
    dtype: str
    weights: Matrix
    candidates: tuple[Candidate, ...]
    norm: float

    @classmethod
    def of(
        cls, scheme: Scheme, dtype: str, weights: Any, candidates: Any, norm: float, blocks: Blocks
    ) -> Search:
        if isinstance(norm, bool) or not 0 < norm < float("inf"):
            raise ValueError(f"norm is a positive number, 2 for squared errors; got {norm!r}")
        array = checked_search_weights(weights, blocks, norm)
        chosen = default_candidates(scheme) if candidates is None else checked_candidates(candidates, scheme)
        return cls(scheme, dtype, array, chosen, norm)

    def best(self, ns: Namespace, w: Any, fixed: Scales | None) -> Scales:
        """The scales of a matrix, or of rows of one."""
        blocks = Blocks.of(w.shape, self.scheme.scale, -1)
        split = blocks.split(ns, float32_bits(ns, w, self.dtype))
        x, weights = ns.bitcast(split, "float32"), self._in_blocks(ns, blocks)
        tried = (
            (scales, self._errors(self._values(ns, scales, blocks, x).astype(np.float64) - x, weights))
            for scales in self._scales(ns, split, blocks, fixed)
        )
        return least_error(ns, tried, blocks, self.scheme)

    def _values(self, ns: Namespace, scales: Scales, blocks: Blocks, x: Any) -> Any:
        return Nearest.of(ns, scales, blocks, self.scheme, self.dtype).values(ns, x)

    def _in_blocks(self, ns: Namespace, blocks: Blocks) -> Matrix:
        """The weights as they broadcast against blocks; filled up with zeros where a last block is short."""
        if self.weights.ndim == 3:
            return self.weights
        rows = self.weights[None]
        if isinstance(blocks.block, int):
            return np.asarray(Blocks.of(rows.shape, self.scheme.scale, -1).split(ns, rows, zeros=True))
        return np.asarray(blocks.split(ns, np.broadcast_to(rows, blocks.shape), zeros=True))

    def _errors(self, off: Matrix, weights: Matrix) -> Matrix:
        """Errors (..., blocks, 1) of the differences of blocks."""
        if self.weights.ndim == 3:
            turned = off.swapaxes(0, 1)
            return np.asarray((turned @ weights * turned).sum(-1).T[..., None])
        power = power_of(off, self.norm)
        return np.asarray(np.multiply(power, weights, out=power).sum(-1, keepdims=True))

    def _scales(self, ns: Namespace, split: Array, blocks: Blocks, fixed: Scales | None) -> Iterator[Scales]:
        """The stored scales of each candidate in turn."""
        base = choose(ns, split, blocks, self.scheme, self.dtype, fixed).stored
        x = ns.bitcast(split, "float32")
        low, high = x.min(axis=-1), x.max(axis=-1)
        for candidate in self.candidates:
            if isinstance(candidate, int):
                yield Scales(stepped(base.scale, candidate, self.scheme, self.dtype), base.outer, base.zero)
                continue
            down, up = candidate if isinstance(candidate, tuple) else (candidate, candidate)
            with np.errstate(over="ignore"):  # what a ratio above 1 makes of the largest weights
                ends = np.stack([low * np.float32(down), high * np.float32(up)], axis=-1)
            ends = np.clip(ends, -LARGEST, LARGEST)
            yield choose(ns, ends.view(np.int32), blocks, self.scheme, self.dtype, fixed).stored


def least_error(
    ns: Namespace, tried: Iterable[tuple[Scales, Array]], blocks: Blocks, scheme: Scheme
) -> Scales:
    """Of each block the stored scales with the least error, of two as good the earlier ones; those of any library.

    tried: (scales, errors (..., blocks, 1)) of each candidate in turn. Raises ValueError where there is none.
    """
    first: Scales | None = None
    for scales, error in tried:
        parts = [scales.scale] if scheme.zero is None else [scales.scale, scales.zero]
        stored = [signed(ns, blocks.accept(part, ns)) for part in parts]
        if first is None:
            first, chosen, least = scales, stored, error
            continue
        closer = error < least
        chosen = [ns.where(closer, new, old) for new, old in zip(stored, chosen, strict=True)]
        least = ns.where(closer, error, least)
    if first is None:
        raise ValueError("candidates are one step or ratio at least, got none; leave them out")
    scale, *zero = (
        blocks.expose(ns.bitcast(part, ns.dtype_name(like)), ns)
        for part, like in zip(chosen, parts, strict=True)
    )
    return Scales(scale, first.outer, zero[0] if zero else first.zero)


def signed(ns: Namespace, stored: Array) -> Array:
    """16-bit scales as int16: torch selects no uint16."""
    return ns.bitcast(stored, "int16") if ns.dtype_name(stored) == "uint16" else stored


def default_candidates(scheme: Scheme) -> tuple[Candidate, ...]:
    """The candidates of this module's rule, that of `choose_scales` first."""
    if not has_steps(scheme):
        pairs = tuple((down, up) for down in END_RATIOS for up in END_RATIOS)
        return RATIOS if scheme.zero is None else pairs
    if scheme.scale.power_of_two:
        return POWER_STEPS
    if FORMATS[scheme.scale.storage].kind == "int":
        return INTEGER_STEPS
    return FLOAT_STEPS


def has_steps(scheme: Scheme) -> bool:
    """Whether scales are stored in so few bits that candidates are neighbours of the stored code."""
    storage = scheme.scale.storage
    return storage != "float32" and FORMATS[storage].bits <= 8


def stepped(stored: Any, step: int, scheme: Scheme, dtype: str) -> Any:
    """Stored codes moved by a step, within the positive finite codes from the record's floor on."""
    low, high = code_range(scheme, dtype)
    ns = namespace_of(stored)
    codes = ns.xp.clip(ns.astype(stored, "int32") + step, low, high)
    return ns.astype(codes, ns.dtype_name(stored))


def code_range(scheme: Scheme, dtype: str) -> tuple[int, int]:
    """The least and the largest code of a scale, as integers of the stored array."""
    storage, floor = FORMATS[scheme.scale.storage], scheme.scale.floor
    if storage.kind == "int":
        return storage.integer_range
    if storage.kind == "scale":
        return 0, storage.max_code
    least = floor_value(floor[1], dtype) if floor is not None and floor[0] in ("stored", "scale") else 0.0
    codes = storage.values[: storage.max_code + 1]
    return max(int(np.searchsorted(codes, np.float32(least))), 1), storage.max_code


def power_of(off: Array, norm: float) -> Array:
    """|off|^norm of arrays of any library, maybe in its memory; squares and cubes are products, which devices round alike."""
    if norm == 2:
        off *= off
        return off
    size = abs(off)
    return size * size * size if norm == 3 else size**norm


def checked_search_weights(weights: Any, blocks: Blocks, norm: float) -> Matrix:
    """float64 weights, ones for None; the errors of `search_scales`."""
    k = blocks.shape[1]
    if weights is None:
        return np.ones(k)
    if not isinstance(weights, np.ndarray) or weights.dtype not in (np.float32, np.float64):
        kind = getattr(weights, "dtype", type(weights).__name__)
        raise TypeError(f"weights are a NumPy array of float32 or float64, got {kind}; convert them first")
    size = blocks.block if isinstance(blocks.block, int) else 0
    local = size > 0 and k % size == 0 and norm == 2
    if weights.shape != (k,) and not (local and weights.shape == (k // size, size, size)):
        also = f" or {(k // size, size, size)}" if local else ""
        raise ValueError(
            f"weights have shape ({k},){also}, got {weights.shape}; local Hessians take norm 2 and equal blocks along K"
        )
    negative = weights.ndim == 1 and bool((weights < 0).any())
    if negative or not np.isfinite(weights).all():
        raise ValueError("weights are finite, those of columns 0 or more; take the diagonal of a Hessian")
    return weights.astype(np.float64)


def checked_candidates(candidates: Any, scheme: Scheme) -> tuple[Candidate, ...]:
    """ValueError for candidates that the record's scales cannot take."""
    return tuple(_checked_candidate(candidate, scheme) for candidate in candidates)


def _checked_candidate(candidate: Any, scheme: Scheme) -> Candidate:
    whole = isinstance(candidate, (int, np.integer)) and not isinstance(candidate, bool)
    if has_steps(scheme) and whole:
        return int(candidate)
    ends = candidate if isinstance(candidate, tuple) else (candidate,)
    counts = (1,) if scheme.zero is None else (1, 2)
    number = (float, int, np.integer, np.floating)
    positive = all(
        isinstance(end, number) and not isinstance(end, bool) and 0 < end <= LARGEST_RATIO for end in ends
    )
    if is_double(scheme) or len(ends) not in counts or not positive:
        steps = "integers, steps of the stored code" if has_steps(scheme) else ""
        ratios = "" if is_double(scheme) else f"ratios of the range, above 0 and up to {LARGEST_RATIO:g}"
        pairs = ", or pairs of them for both ends" if scheme.zero is not None else ""
        kinds = " or ".join(kind for kind in (steps, ratios) if kind)
        raise ValueError(f"candidates of {scheme.name} are {kinds}{pairs}; got {candidate!r}")
    return (float(ends[0]), float(ends[1])) if len(ends) == 2 else float(ends[0])


def is_double(scheme: Scheme) -> bool:
    """Whether scales are quantized in blocks, about their mean."""
    return scheme.outer is not None and scheme.outer.statistic != "absmax_elements"


__all__ = ["search_scales"]
