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
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reference.arrays.namespace import Array, Namespace, choice, namespace_of
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
            stored = scales_by_steps(w, scheme, blocks, scales, (steps, p, beta), (_quantize, _dequantize))
            return _quantize(w, scheme, scales=stored)
        rule = ZeroSteps.of(scheme, steps, p, beta)
        zero = zero_points(w, scheme, blocks, scales, rule, _by_tensor if stop == "tensor" else _by_blocks)
        return _quantize(w, scheme, scales=replace(scales, zero=zero))


def shrink(x: Array, p: float, beta: float) -> Array:
    """sign(x) max(|x| - |x|^(p - 1) / beta, 0), and 0 at 0."""
    ns, size = namespace_of(x), abs(x)
    with np.errstate(divide="ignore", over="ignore"):
        left = ns.maximum(size - size ** (p - 1) / beta, 0)
    return ns.xp.copysign(left, x)


@dataclass(frozen=True)
class ZeroSteps:
    """The steps of zero points, of NumPy arrays or tensors: w (n, size), s and z (n, 1) in float64, z in steps of the scale.

    storage: that of the zero points. middle: the code that a zero point is the value of. top: the largest code.
    """

    storage: str
    middle: float
    top: int
    steps: int
    p: float
    beta: float

    @classmethod
    def of(cls, scheme: Scheme, steps: int, p: float, beta: float) -> ZeroSteps:
        low, high = scheme.format.integer_range
        top = 2**scheme.format.bits - 1
        return cls(zero_of(scheme).storage, (low + high + 1) / 2, top, steps, p, beta)

    def codes_of(self, value: Array, s: Array) -> Array:
        """Zero points in steps of the scale, of zero points as values."""
        return self.middle - value / s

    def values_of(self, z: Array, s: Array) -> Array:
        """The other direction."""
        return (self.middle - z) * s

    def as_stored(self, z: Array, s: Array) -> Array:
        """Zero points as their stored values give them back."""
        ns = namespace_of(z)
        return self.codes_of(
            decoded(ns, stored_floats(ns, self.values_of(z, s), self.storage), self.storage), s
        )

    def step(self, w: Array, s: Array, z: Array) -> tuple[Array, Array]:
        """(mean |error| of each block (n, 1), the next zero points (n, 1))."""
        xp, size = namespace_of(w).xp, w.shape[1]
        q = xp.clip(xp.round(w / s + z), 0, self.top)
        error = w - (q - z) * s
        following = tree_sum(q - (w - shrink(error, self.p, self.beta)) / s)[:, None] / size
        return tree_sum(abs(error))[:, None] / size, following

    def by_tensor(self, w: Array, s: Array, z: Array) -> Array:
        """The zero points (n, 1) of the step after the last one that lowered the mean |error| of the tensor."""
        z = namespace_of(z).xp.round(z) if self.top == 15 else z
        least = np.inf
        for _ in range(self.steps):
            errors, z = self.step(w, s, z)
            error = float(tree_sum(errors[:, 0]))
            if not error < least:
                break
            least = error
        return z


def zero_points(
    w: Array, scheme: Scheme, blocks: Blocks, scales: Scales, rule: ZeroSteps, search: Callable[..., Array]
) -> Array:
    """Stored zero points in the shape of the scales, for w of any library.

    search: from blocks of w (n, size) in its dtype, their scales and first zero points, values (n, 1) in float64, and the rule
    to zero points, values (n, 1) in float64.
    """
    ns = namespace_of(w)
    split = blocks.split(ns, w)
    levels = ((scales.scale, scheme.scale.storage), (scales.zero, rule.storage))
    s, value = (decoded(ns, blocks.accept(part, ns), storage).reshape((-1, 1)) for part, storage in levels)
    values = search(split.reshape((-1, split.shape[-1])), s, value, rule)
    return blocks.expose(stored_floats(ns, values, rule.storage).reshape((*split.shape[:-1], 1)), ns)


def _by_tensor(rows: Array, s: Matrix, value: Matrix, rule: ZeroSteps) -> Any:
    return rule.values_of(rule.by_tensor(rows.astype(np.float64), s, rule.codes_of(value, s)), s)


def _by_blocks(rows: Array, s: Matrix, value: Matrix, rule: ZeroSteps) -> Any:
    """The zero point of the least mean |error| of each block, some blocks at a time."""
    z = rule.codes_of(value, s)
    best = np.empty_like(z)
    count = max(CHUNK // rows.shape[1], 1)
    for start in range(0, len(rows), count):
        part = slice(start, start + count)
        best[part] = _search(rows[part].astype(np.float64), s[part], z[part], rule)
    return rule.values_of(best, s)


def _search(w: Matrix, s: Matrix, z: Matrix, rule: ZeroSteps) -> Matrix:
    """Blocks that have ended are left out of the steps that follow."""
    best, least = z.copy(), np.full(z.shape, np.inf)
    active = np.arange(len(z))
    for _ in range(rule.steps):
        error, following = rule.step(w, s, z)
        lower = (error < least[active])[:, 0]
        active, w, s = active[lower], w[lower], s[lower]
        if not len(active):
            break
        best[active], least[active] = z[lower], error[lower]
        z = rule.as_stored(following[lower], s)
    return best


def scales_by_steps(
    w: Array,
    scheme: Scheme,
    blocks: Blocks,
    scales: Scales,
    options: tuple[int, float, float],
    functions: tuple[Callable[..., Quantized], Callable[..., Array]],
) -> Scales:
    """The same with scales as the unknown, for w of any library; each step is a `quantize` under the scales so far.

    options: steps, p and beta. functions: `quantize` and `dequantize` of the library.
    """
    ns, storage = namespace_of(w), scheme.scale.storage
    (steps, p, beta), (quantized, dequantized) = options, functions
    split = ns.astype(blocks.split(ns, w), "float64")
    counts = blocks.split(ns, ns.full(tuple(w.shape), 1, "float64", w), zeros=True)

    def under(scale: Array) -> Scales:
        return replace(scales, scale=blocks.expose(stored_floats(ns, scale, storage), ns))

    scale = decoded(ns, blocks.accept(scales.scale, ns), storage)
    best, least = scale, ns.full(tuple(scale.shape), np.inf, "float64", scale)
    for _ in range(steps):
        q = quantized(w, scheme, scales=under(scale))
        values = ns.astype(blocks.split(ns, dequantized(q, "float32")), "float64")
        error = split - values
        loss = tree_sum(abs(error) * counts)[..., None]
        lower = loss < least
        if not bool(lower.any()):
            break
        best, least = ns.where(lower, scale, best), ns.where(lower, loss, least)
        target = split - shrink(error, p, beta)
        scale = ns.where(lower, _refined(ns, scale, target, values * counts, scheme), best)
    return under(best)


def _refined(ns: Namespace, scale: Array, target: Array, values: Array, scheme: Scheme) -> Array:
    """Decoded scales after one step, as stored: times sum(target v) / sum(v^2), or over it for an encoding scale."""
    above, below = tree_sum(target * values)[..., None], tree_sum(values * values)[..., None]
    if scheme.scale.stored == "encode":
        above, below = below, above
    good = (above > 0) & (below > 0)
    moved = scale * ns.where(good, above, 1.0) / ns.where(good, below, 1.0)
    return decoded(ns, stored_floats(ns, moved, scheme.scale.storage), scheme.scale.storage)


def stored_floats(ns: Namespace, values: Array, storage: str) -> Array:
    """float64 rounded to float32 and to the storage; finite stays finite."""
    short = ns.astype(ns.xp.clip(values, -LARGEST, LARGEST), "float32")
    return store(ns, ns.bitcast(short, "int32"), storage)


def decoded(ns: Namespace, stored: Array, storage: str) -> Array:
    """Stored floats as float64."""
    return ns.astype(ns.bitcast(load(ns, stored, storage), "float32"), "float64")


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
