"""HQQ: scales and zero points by half-quadratic splitting, without data.

The weights' error is measured by |e|^p with p < 1, which lets outliers go, instead of e^2. It is split: e = w - v (v what is
stored) stands in for the error and is pulled toward it by beta; in turn e is the proximal step of |e|^p, and the zero point the
mean that answers it (Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023, equations 3 to 6):

    q = clip(round(w / s + z), 0, 2^b - 1)
    e = shrink(w - (q - z) s),   shrink(x) = sign(x) max(|x| - |x|^(p - 1) / beta, 0)
    z = mean of q - (w - e) / s over the block

* **Scales first, codes after**: s is the scheme's own scale and stays. z is rounded to its storage in every step, so what is
  judged is what will be stored; codes are those of `quantize` under the result.
* **stop="block"**, the default: a block ends with the first step that does not lower its mean |error|, and keeps the zero point
  of the least. So no block is worse than rounding, and a part of a tensor has the bits that it has in the whole.
* **stop="tensor"** is what the package hqq does: the mean |error| of the whole tensor decides, all blocks take the zero points
  of the step after the last, and at 4 bits the first ones are rounded to integers. Its bounds for flat blocks (a range below
  1e-4, a scale below 5e-5) are not here. Its kappa, which lets beta grow, is read there and not used.
* **Schemes without zero points**: the same split with the scale as the unknown, s = sum((w - e) c) / sum(c^2) over the block
  with c the elements' values, rounded to its storage in every step. This form is ours.

Float64 inside. Means and sums of a block are trees over adjacent pairs, so they are equal everywhere; powers may differ between
libraries in their last bit.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from reference.arrays.namespace import choice, namespace_of
from reference.calibration.inputs import LARGEST, Matrix, tree_sum, weight_matrix
from reference.formats.storage import load, store
from reference.quantize.blocks import Blocks
from reference.quantize.quantize import dequantize, quantize
from reference.quantize.scales import choose_scales
from reference.quantize.stored import Quantized, Scales
from reference.schemes.schemes import Scheme, Zero, scheme_of

STOPS = ("block", "tensor")
#: Elements that are split at a time.
CHUNK = 1 << 20

_quantize: Callable[..., Quantized] = inspect.unwrap(quantize)
_dequantize: Callable[..., Any] = inspect.unwrap(dequantize)


def hqq(
    w: Any,
    scheme: str | Scheme,
    *,
    steps: int = 20,
    p: float = 0.7,
    beta: float = 10.0,
    stop: str = "block",
) -> Quantized:
    """w quantized in a scheme whose zero points, or scales where it has none, are found by half-quadratic splitting.

    w: finite float32, bfloat16, float16 or float64 (N, K), NumPy. scheme: one with zero points that are numbers
    (`Zero(rule="value")`, as `hqq.int4_g64`), or without zero points. steps: at least 0; 0 is `quantize`. p: above 0, to 1.
    beta: positive. stop: "block" or "tensor", see above. Codes, scales and zero points are stored as the scheme states.

    Raises TypeError for other arrays; ValueError for NaN and infinities, options out of range, blocks that do not divide w, and
    schemes with integer zero points, quantized scales or stochastic rounding.
    """
    w, scheme = weight_matrix(w, "hqq"), scheme_of(scheme)
    check_scheme(scheme, stop)
    check_options(steps, p, beta)
    blocks = Blocks.of(w.shape, scheme.scale, -1)
    scales = choose_scales(w, scheme)
    if not steps or not w.size:
        return _quantize(w, scheme, scales=scales)
    # Conventions of other projects have blocks without a finite scale; those stay as they are.
    with np.errstate(all="ignore"):
        if scheme.zero is None:
            return _by_scales(w, scheme, blocks, scales, steps, p, beta)
        zero = _zero_points(w, scheme, blocks, scales, (steps, p, beta, stop))
        return _quantize(w, scheme, scales=replace(scales, zero=zero))


def shrink(x: Matrix, p: float, beta: float) -> Matrix:
    """sign(x) max(|x| - |x|^(p - 1) / beta, 0), and 0 at 0."""
    size = np.abs(x)
    with np.errstate(divide="ignore", over="ignore"):
        left = np.maximum(size - size ** (p - 1) / beta, 0)
    return np.copysign(left, x)


def _zero_points(
    w: Any, scheme: Scheme, blocks: Blocks, scales: Scales, options: tuple[int, float, float, str]
) -> Any:
    """Stored zero points in the shape of the scales."""
    ns = namespace_of(w)
    record, middle = zero_of(scheme), _middle(scheme)
    split = blocks.split(ns, w.astype(np.float64))
    rows = split.reshape((-1, split.shape[-1]))
    s = _decoded(load(ns, blocks.accept(scales.scale, ns), scheme.scale.storage)).reshape((-1, 1))
    value = _decoded(load(ns, blocks.accept(scales.zero, ns), record.storage)).reshape((-1, 1))

    def as_stored(z: Matrix, s: Matrix) -> Matrix:
        return middle - _decoded(load(ns, _stored(ns, (middle - z) * s, record.storage), record.storage)) / s

    steps, p, beta, stop = options
    search = (s, middle - value / s, 2**scheme.format.bits - 1, steps, p, beta, as_stored)
    found = _by_tensor(rows, *search) if stop == "tensor" else _by_blocks(rows, *search)
    shape = (*split.shape[:-1], 1)
    return blocks.expose(_stored(ns, (middle - found) * s, record.storage).reshape(shape), ns)


def _by_blocks(
    rows: Matrix, s: Matrix, z: Matrix, top: int, steps: int, p: float, beta: float, as_stored: Any
) -> Matrix:
    """The zero point of the least mean |error| of each block (n, 1), some blocks at a time."""
    out = np.empty_like(z)
    count = max(CHUNK // rows.shape[1], 1)
    for start in range(0, len(rows), count):
        part = slice(start, start + count)
        out[part] = _search(rows[part], s[part], z[part], top, steps, p, beta, as_stored)
    return out


def _search(
    w: Matrix, s: Matrix, z: Matrix, top: int, steps: int, p: float, beta: float, as_stored: Any
) -> Matrix:
    best, least = z.copy(), np.full(len(z), np.inf)
    active = np.arange(len(z))
    for _ in range(steps):
        error, following = _step(w, s, z, top, p, beta)
        lower = error < least[active]
        active, w, s = active[lower], w[lower], s[lower]
        if not len(active):
            break
        best[active], least[active] = z[lower], error[lower]
        z = as_stored(following[lower], s)
    return best


def _by_tensor(
    w: Matrix, s: Matrix, z: Matrix, top: int, steps: int, p: float, beta: float, as_stored: Any
) -> Matrix:
    """The zero points (n, 1) of the step after the last one that lowered the mean |error| of the tensor."""
    z = np.rint(z) if top == 15 else z
    least = np.inf
    for _ in range(steps):
        errors, z = _step(w, s, z, top, p, beta)
        error = float(tree_sum(errors))
        if not error < least:
            break
        least = error
    return z


def _step(w: Matrix, s: Matrix, z: Matrix, top: int, p: float, beta: float) -> tuple[Matrix, Matrix]:
    """(mean |error| of each block (n,), the next zero points (n, 1))."""
    q = np.clip(np.rint(w / s + z), 0, top)
    error = w - (q - z) * s
    size = w.shape[1]
    following = tree_sum(q - (w - shrink(error, p, beta)) / s)[:, None] / size
    return tree_sum(np.abs(error)) / size, following


def _by_scales(
    w: Any, scheme: Scheme, blocks: Blocks, scales: Scales, steps: int, p: float, beta: float
) -> Quantized:
    """The same with scales as the unknown; each step is a `quantize` under the scales so far."""
    ns = namespace_of(w)
    split = blocks.split(ns, w.astype(np.float64))
    counts = blocks.split(ns, np.ones(w.shape), zeros=True)
    storage = scheme.scale.storage
    scale = _decoded(load(ns, blocks.accept(scales.scale, ns), storage))
    best, least = scale, np.full(scale.shape, np.inf)
    for _ in range(steps):
        q = _quantize(w, scheme, scales=replace(scales, scale=_exposed(ns, scale, blocks, storage)))
        values = blocks.split(ns, np.asarray(_dequantize(q), np.float64))
        error = split - values
        loss = tree_sum(np.abs(error) * counts)[..., None]
        lower = loss < least
        if not lower.any():
            break
        best, least = np.where(lower, scale, best), np.where(lower, loss, least)
        scale = np.where(
            lower, _refined(ns, scale, split - shrink(error, p, beta), values * counts, scheme), best
        )
    return _quantize(w, scheme, scales=replace(scales, scale=_exposed(ns, best, blocks, storage)))


def _refined(ns: Any, scale: Matrix, target: Matrix, values: Matrix, scheme: Scheme) -> Matrix:
    """Decoded scales after one step, as stored: times sum(target v) / sum(v^2), or over it for an encoding scale."""
    above, below = tree_sum(target * values)[..., None], tree_sum(values**2)[..., None]
    if scheme.scale.stored == "encode":
        above, below = below, above
    good = (above > 0) & (below > 0)
    moved = scale * np.where(good, above, 1.0) / np.where(good, below, 1.0)
    return _decoded(load(ns, _stored(ns, moved, scheme.scale.storage), scheme.scale.storage))


def _exposed(ns: Any, scale: Matrix, blocks: Blocks, storage: str) -> Any:
    return blocks.expose(_stored(ns, scale, storage), ns)


def _stored(ns: Any, values: Matrix, storage: str) -> Any:
    """float64 rounded to float32 and to the storage; finite stays finite."""
    short = np.clip(values, -LARGEST, LARGEST).astype(np.float32)
    return store(ns, short.view(np.int32), storage)


def _decoded(bits: Any) -> Matrix:
    """float32 patterns as float64."""
    wide: Matrix = np.ascontiguousarray(bits).view(np.float32).astype(np.float64)
    return wide


def _middle(scheme: Scheme) -> float:
    """The code that a zero point of rule "value" is the value of."""
    low, high = scheme.format.integer_range
    return (low + high + 1) / 2


def zero_of(scheme: Scheme) -> Zero:
    """The record of the zero points; ValueError where there are none."""
    if scheme.zero is None:
        raise ValueError(f"scheme {scheme.name} has no zero points")
    return scheme.zero


def check_scheme(scheme: Scheme, stop: str) -> None:
    """ValueError for a scheme that HQQ is not defined for, and for an unknown way to stop."""
    choice(stop, STOPS, "stop")
    if scheme.zero is not None and scheme.zero.rule == "code":
        raise ValueError(
            f"hqq: the zero points of scheme {scheme.name} are integers, and HQQ's are numbers; take hqq.int4_g64, or a record "
            f"with zero=Zero(rule='value') and an unsigned element"
        )
    if scheme.outer is not None and scheme.outer.statistic != "absmax_elements":
        raise ValueError(
            f"hqq: the scales of scheme {scheme.name} are quantized themselves; take a scheme of one level, as int4_g64"
        )
    if scheme.rounding == "stochastic":
        raise ValueError(f"hqq: scheme {scheme.name} rounds stochastically; take rounding='nearest_even'")
    if scheme.zero is None and stop == "tensor":
        raise ValueError(
            f"hqq: stop='tensor' is what the package hqq does with zero points, and scheme {scheme.name} has none; "
            f"leave stop out"
        )


def check_options(steps: int, p: float, beta: float) -> None:
    """ValueError for options out of range."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"steps is an integer of at least 0, got {steps!r}; 20 is usual")
    if not 0 < p <= 1:
        raise ValueError(f"p is above 0 and at most 1, got {p!r}; 0.7 is usual")
    if not 0 < beta < float("inf"):
        raise ValueError(f"beta is a positive number, got {beta!r}; 10 is usual")


__all__ = ["hqq"]
