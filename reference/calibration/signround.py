"""SignRound: codes and ranges that are learned, a value between two codes by a number added before it is rounded.

    Q = s (clip(round(W / s + V)) - z),   s and z from the block's range [low * min(W), high * max(W)]

with V in [-1/2, 1/2] for each weight and two factors in [0, 1] for each block, moved against the signs of their gradients
(Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent", arXiv 2309.05516, equations 2 to 5, algorithm 1).
Rounding, of codes, zero points and stored scales, passes gradients straight through; a code that saturates passes none to V.

* **In every scheme**: V moves the weight by V steps of the element's format where W / s lies: 1 for integers, the distance of
  the two neighbours for floats and codebooks, so 1/2 always reaches the next value. (auto_round adds V itself to FP4's values.)
  Codes are those of `quantize` for the moved weight, in float32, and with V = 0 and factors of 1 those of `quantize` for W in
  float32. A statistic without zero ("minmax") moves its ends toward their middle instead; maxima of magnitudes are max(-low *
  min, high * max) with the range widened to hold 0. Second levels are those of W itself and stay.
* **Given scales**, as of GPTQ or a search, stay too: then V alone is learned, from `signround_start` on.

What is elementwise runs in float32, each operation rounded, in the order W + V * (step * s); sums over blocks are trees over
adjacent pairs in float32; a block's chain from scales to factors is float64.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

import numpy as np

from reference.arrays.namespace import Array, Namespace, namespace_of
from reference.arrays.softfloat import float32_bits
from reference.calibration.inputs import check_finite, float_array, tree_sum, weight_matrix
from reference.quantize.blocks import Blocks
from reference.quantize.fake_quantize import fake_quantize_vjp
from reference.quantize.quantize import dequantize, quantize
from reference.quantize.scales import Chosen, check_scales, choose, given_scales, value_range
from reference.quantize.stored import Quantized, Scales
from reference.schemes.schemes import Scheme, scheme_of


class SignRoundState(NamedTuple):
    """What is learned, float32: v of the shape of W, low and high of the shape of its scales (None beside given scales)."""

    v: Any
    low: Any
    high: Any


class SignRounded(NamedTuple):
    """values of W's shape and dtype, and vjp(g): gradients of the sum of g * values, a `SignRoundState`."""

    values: Any
    vjp: Callable[[Any], SignRoundState]


@dataclass(frozen=True)
class Functions:
    """What a library computes the steps with."""

    quantize: Callable[..., Quantized]
    dequantize: Callable[..., Any]
    vjp: Callable[..., tuple[Any, Any, Any]]


NUMPY = Functions(inspect.unwrap(quantize), inspect.unwrap(dequantize), inspect.unwrap(fake_quantize_vjp))


def signround_start(w: Any, scheme: str | Scheme, quantized: Quantized | None = None) -> SignRoundState:
    """Where learning starts: V = 0 and factors of 1, or the codes of `quantized` under its scales, which then stay.

    w: finite float32, bfloat16, float16 or float64 (N, K), NumPy. quantized: of w's shape in that scheme. V is its distance
    from w in steps, cut at 1/2: a code that lies farther starts at the nearest that V reaches.

    Raises TypeError for other arrays; ValueError for other shapes, NaN and infinities, and a scheme that rounds stochastically.
    """
    w, scheme = weight_matrix(w, "signround_start"), scheme_of(scheme)
    with np.errstate(all="ignore"):
        return start(NUMPY, w, scheme, quantized)


def signround_quantize(
    w: Any, v: Any, low: Any, high: Any, scheme: str | Scheme, *, scales: Scales | None = None
) -> SignRounded:
    """The values that a scheme stores for w under v, low and high, and their gradients: (values, vjp).

    w: finite float32, bfloat16, float16 or float64 (N, K), NumPy. v: float32 (N, K) in [-1/2, 1/2]. low, high: float32 in [0,
    1] of the shape of the scheme's scales for w, or None beside scales. scales: None, or given ones as `quantize` takes them.
    vjp takes a float array (N, K) and gives float32 gradients of v, low and high (None where these are).

    Raises TypeError for other arrays; ValueError for other shapes, NaN and infinities, values out of range, blocks that do not
    divide w, and a scheme that rounds stochastically.
    """
    w, scheme = weight_matrix(w, "signround_quantize"), scheme_of(scheme)
    for name, part in (("v", v), ("low", low), ("high", high)):
        if part is not None:
            check_finite(float_array(part, "signround_quantize", name), "signround_quantize", name)
    with np.errstate(all="ignore"):
        return Rounding(NUMPY, w, SignRoundState(v, low, high), scheme, scales).result()


def signround_codes(
    w: Any, v: Any, low: Any, high: Any, scheme: str | Scheme, *, scales: Scales | None = None
) -> Quantized:
    """What `signround_quantize` stores: its values are those of `dequantize`. Arguments and errors are the same."""
    w, scheme = weight_matrix(w, "signround_codes"), scheme_of(scheme)
    with np.errstate(all="ignore"):
        return Rounding(NUMPY, w, SignRoundState(v, low, high), scheme, scales).quantized


def signround_step(
    state: SignRoundState, grads: SignRoundState, rate: float, *, range_rate: float | None = None
) -> SignRoundState:
    """state moved by the rate against the signs of its gradients, v within [-1/2, 1/2] and factors within [0, 1].

    range_rate: that of low and high, `rate` by default. auto_round takes 200 steps of rates that fall from 1 / 200 to 0 by
    equal steps. A gradient of 0 moves nothing. Raises ValueError for a rate that is no finite number of at least 0.
    """
    return step(state, grads, rate, range_rate)


def step(
    state: SignRoundState, grads: SignRoundState, rate: float, range_rate: float | None
) -> SignRoundState:
    """`signround_step` of NumPy arrays or tensors."""
    factor_rate = rate if range_rate is None else range_rate
    for one in (rate, factor_rate):
        if not 0 <= one < inf:
            raise ValueError(f"a rate is a finite number of at least 0, got {one!r}; 1 / steps is usual")
    v = _moved(state.v, grads.v, rate, -0.5, 0.5)
    if state.low is None or state.high is None:
        return SignRoundState(v, None, None)
    low = _moved(state.low, grads.low, factor_rate, 0.0, 1.0)
    return SignRoundState(v, low, _moved(state.high, grads.high, factor_rate, 0.0, 1.0))


def _moved(value: Array, gradient: Array, rate: float, least: float, most: float) -> Array:
    ns = namespace_of(value)
    moved = value - ns.astype(ns.xp.sign(gradient) * rate, "float32")
    return ns.xp.clip(moved, least, most)


def start(functions: Functions, w: Array, scheme: Scheme, quantized: Quantized | None) -> SignRoundState:
    """`signround_start` for a checked w of any library."""
    ns, blocks = namespace_of(w), Blocks.of(tuple(w.shape), scheme.scale, -1)
    v = ns.full(tuple(w.shape), 0, "float32", w)
    one = ns.full(blocks.scale_shape, 1, "float32", w)
    if quantized is None:
        return SignRoundState(v, one, one)
    if quantized.scheme != scheme or quantized.shape != tuple(w.shape):
        raise ValueError(
            f"signround_start takes w quantized in {scheme.name}, got {quantized.scheme.name} of shape {quantized.shape}"
        )
    rounding = Rounding(functions, w, SignRoundState(v, None, None), scheme, quantized.scales)
    distance = ns.astype(functions.dequantize(quantized, "float32"), "float32") - ns.astype(w, "float32")
    good = ns.xp.isfinite(distance) & (rounding.unit > 0)
    steps = ns.where(good, distance, 0.0) / ns.where(good, rounding.unit, 1.0)
    return SignRoundState(ns.astype(ns.xp.clip(steps, -0.5, 0.5), "float32"), None, None)


class Rounding:
    """One evaluation: scales from the ranges, the moved weight, its codes, and the gradients of its values.

    checked: whether to look at the state, which a loop of `step` need not, and for which a GPU would have to be waited for.
    span: `Span.of` w, where the caller has it already.
    """

    def __init__(
        self, functions: Functions, w: Array, state: SignRoundState, scheme: Scheme, scales: Scales | None,
        checked: bool = True, span: Span | None = None,
    ) -> None:  # fmt: skip
        self.functions, self.w, self.scheme, self.checked = functions, w, scheme, checked
        self.ns, self.blocks = namespace_of(w), Blocks.of(tuple(w.shape), scheme.scale, -1)
        self.v = self._checked(state.v, "v", tuple(w.shape), (-0.5, 0.5))
        self.ranges: Ranges | None = None
        self.span = span
        if scheme.rounding == "stochastic":
            raise ValueError(f"signround: scheme {scheme.name} rounds stochastically; take nearest_even")
        self.chosen = self._given(state, scales) if scales is not None else self._from_ranges(state)
        self.scale = self._whole_scale()
        self.moved = self._moved()
        self.quantized = functions.quantize(self.moved, scheme, scales=self.chosen.stored)

    def result(self) -> SignRounded:
        """Values and gradients."""
        values = self.functions.dequantize(self.quantized, self.ns.dtype_name(self.w))
        # Gradients need no codes, and are asked for when a whole block has run.
        del self.quantized
        return SignRounded(values, self.gradients)

    def gradients(self, g: Any) -> SignRoundState:
        """Gradients of the sum of g * values."""
        with np.errstate(all="ignore"):
            return self._gradients(g)

    def _gradients(self, g: Any) -> SignRoundState:
        if tuple(g.shape) != tuple(self.w.shape):
            raise ValueError(f"g has the shape of w, {tuple(self.w.shape)}; got {tuple(g.shape)}")
        g = self.ns.astype(g, "float32")
        dx, dscale, dzero = self.functions.vjp(g, self.moved, self.scheme, scales=self.chosen.stored)
        dv, through = self._by_v(dx)
        if self.ranges is None:
            return SignRoundState(dv, None, None)
        # The moved weight depends on the scale as well.
        wide = self._accepted(dscale) + self._sign * _wide(self.ns, through) / self._stored_scale
        low, high = self.ranges.gradients(wide, None if dzero is None else self._accepted(dzero), self)
        return SignRoundState(dv, self._exposed(low), self._exposed(high))

    def _by_v(self, dx: Array) -> tuple[Array, Array]:
        """The gradient of v, and the sums over blocks of that times v, (..., blocks, 1)."""
        dv = dx * self.unit
        return dv, None if self.ranges is None else self._sums(dv)

    def _sums(self, dv: Array) -> Array:
        return tree_sum(self.blocks.split(self.ns, dv * self.v, zeros=True))[..., None]

    @property
    def _sign(self) -> float:
        """Of the derivative of the decoded scale by the stored one."""
        return -1.0 if self.scheme.scale.stored == "encode" else 1.0

    @property
    def _stored_scale(self) -> Array:
        return _wide(self.ns, self.ns.bitcast(self.chosen.scale, "float32"))

    def _accepted(self, gradient: Array) -> Array:
        return _wide(self.ns, self.blocks.accept(gradient, self.ns))

    def _exposed(self, gradient: Array) -> Array:
        finite = self.ns.where(self.ns.xp.isfinite(gradient), gradient, 0.0)
        return self.blocks.expose(self.ns.astype(finite, "float32"), self.ns)

    def _checked(self, part: Any, name: str, shape: tuple[int, ...], bounds: tuple[float, float]) -> Array:
        """A float32 array of this shape within bounds; ValueError otherwise."""
        got = tuple(getattr(part, "shape", ()))
        if not hasattr(part, "dtype") or self.ns.dtype_name(part) != "float32" or got != shape:
            kind = getattr(part, "dtype", type(part).__name__)
            raise ValueError(f"signround takes {name} as float32 of shape {shape}, got {kind} of shape {got}")
        if self.checked and not bool(((part >= bounds[0]) & (part <= bounds[1])).all()):
            raise ValueError(
                f"signround takes {name} from {bounds[0]} to {bounds[1]}; clip it, or use signround_step"
            )
        return part

    def _given(self, state: SignRoundState, scales: Scales) -> Chosen:
        if state.low is not None or state.high is not None:
            raise ValueError(
                "signround: given scales stay as they are, and low and high are None; leave one of them out"
            )
        checked = check_scales(self.ns, scales, self.scheme, self.blocks)
        return given_scales(self.ns, checked, self.blocks, self.scheme)

    def _from_ranges(self, state: SignRoundState) -> Chosen:
        ns, shape, name = self.ns, self.blocks.scale_shape, self.ns.dtype_name(self.w)
        low, high = (
            _wide(ns, self.blocks.accept(self._checked(part, what, shape, (0.0, 1.0)), ns))
            for part, what in ((state.low, "low"), (state.high, "high"))
        )
        span = self.span if self.span is not None else Span.of(self.w, self.scheme)
        self.ranges = Ranges.of(ns, span, low, high, self.scheme)
        ends = ns.bitcast(ns.astype(self.ranges.ends(ns), "float32"), "int32")
        outer = None if span.outer is None else Scales(outer=span.outer)
        return choose(ns, ends, self.blocks, self.scheme, name, outer)

    def _whole_scale(self) -> Array:
        """What a step of 1 is worth, float32 (..., blocks, 1): both levels, decoding."""
        ns = self.ns
        scale = ns.bitcast(self.chosen.scale, "float32")
        scale = 1 / scale if self.scheme.scale.stored == "encode" else scale
        outer = self.chosen.outer
        if outer is None or self.scheme.outer is None:
            return scale
        outer = ns.bitcast(outer, "float32")
        return scale / outer if self.scheme.outer.stored == "encode" else scale * outer

    @cached_property
    def unit(self) -> Array:
        """What V = 1 moves each weight by, float32 (N, K): a step of the element's format, in the weight's own scale."""
        ns, fmt = self.ns, self.scheme.format
        whole = self.blocks.split(ns, ns.full(tuple(self.w.shape), 1, "float32", self.w)) * self.scale
        scale = self.blocks.join(ns, whole)
        if fmt.kind == "int":
            return scale * 2.0**-fmt.fraction_bits
        good = ns.xp.isfinite(scale) & (scale > 0)
        ratio = ns.astype(self.w, "float32") / ns.where(good, scale, 1.0)
        table = np.unique(fmt.values[np.isfinite(fmt.values)]).astype(np.float32)
        at = ns.xp.searchsorted(ns.constant(table[1:-1], self.w), ratio, side="right")
        return ns.take(ns.constant(np.diff(table), self.w), at) * scale

    def _moved(self) -> Array:
        """W + V * unit in float32; W itself where there is no such number."""
        w = self.ns.astype(self.w, "float32")
        moved = w + self.v * self.unit
        return self.ns.where(self.ns.xp.isfinite(moved), moved, w)


@dataclass(frozen=True)
class Span:
    """What does not change while a weight is learned: the ends of its blocks in float64 (..., blocks, 1), and the second-level
    scale of its elements, or None."""

    least: Array
    most: Array
    outer: Array

    @classmethod
    def of(cls, w: Array, scheme: Scheme) -> Span:
        """Of w (N, K), of any library, in blocks of the scheme."""
        ns, blocks = namespace_of(w), Blocks.of(tuple(w.shape), scheme.scale, -1)
        name = ns.dtype_name(w)
        split, outer = blocks.split(ns, float32_bits(ns, w, name)), None
        if scheme.outer is not None and scheme.outer.statistic == "absmax_elements":
            outer = choose(ns, split, blocks, scheme, name, None).stored.outer
        span = value_range(ns, split)
        least, most = (_wide(ns, ns.bitcast(bits, "float32")) for bits in (span.low, span.high))
        return cls(least, most, outer)


@dataclass(frozen=True)
class Ranges:
    """The ends of the ranges in float64 (..., blocks, 1) that scales are chosen from, and their derivatives by the factors."""

    low: Array
    high: Array
    by_low: Array
    by_high: Array

    @classmethod
    def of(cls, ns: Namespace, span: Span, low: Array, high: Array, scheme: Scheme) -> Ranges:
        """Ends of the blocks' ranges under factors."""
        least, most = span.least, span.most
        if scheme.scale.statistic == "minmax":
            half = most / 2 - least / 2
            ends = (
                least * ((1 + low) / 2) + most * ((1 - low) / 2),
                most * ((1 + high) / 2) + least * ((1 - high) / 2),
            )
            return cls(*ends, -half, half)
        least, most = ns.xp.clip(least, None, 0.0), ns.xp.clip(most, 0.0, None)
        return cls(least * low, most * high, least, most)

    def ends(self, ns: Namespace) -> Array:
        """Both as (..., blocks, 2): a block of these two numbers has the range."""
        return ns.concatenate([self.low, self.high], -1)

    def gradients(self, dscale: Array, dzero: Array | None, rounding: Rounding) -> tuple[Array, Array]:
        """Gradients of low and high from those of the stored scale and of the zero point."""
        ns, scheme = rounding.ns, rounding.scheme
        s = rounding._stored_scale
        by_low, by_high = self._slopes(ns, scheme, s)
        if dzero is None:
            return dscale * by_low, dscale * by_high
        if scheme.zero is not None and scheme.zero.rule == "value":
            least, most = scheme.format.integer_range
            dscale = dscale + dzero * ((least + most + 1) / 2)
            direct = dzero * self.by_low
        else:
            dscale = dscale + dzero * (self.low / s / s)
            direct = -dzero * self.by_low / s
        return dscale * by_low + direct, dscale * by_high

    def _slopes(self, ns: Namespace, scheme: Scheme, s: Array) -> tuple[Array, Array]:
        """Derivatives of the stored scale by low and high: it is proportional to its statistic, or to the inverse of it."""
        record = scheme.scale
        if record.statistic in ("minmax", "minmax_with_zero"):
            width = self.high - self.low
            slopes = -self.by_low * s / width, self.by_high * s / width
        else:
            split = record.statistic == "minmax_split"
            below, above = (-scheme.format.min, record.target) if split else (1.0, 1.0)
            least, most = -self.low / below, self.high / above
            upper = most >= least
            slopes = (
                ns.where(upper, 0.0, -self.by_low / below / least * s),
                ns.where(upper, self.by_high / above / most * s, 0.0),
            )
        return (-slopes[0], -slopes[1]) if record.stored == "encode" else slopes


def _wide(ns: Namespace, x: Array) -> Array:
    return ns.astype(x, "float64")


__all__ = [
    "SignRoundState",
    "SignRounded",
    "signround_codes",
    "signround_quantize",
    "signround_start",
    "signround_step",
]
