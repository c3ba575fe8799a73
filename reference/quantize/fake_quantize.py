"""Fake quantization: quantize and dequantize at once, with straight-through gradients.

The forward value is `dequantize(quantize(x))` in x's dtype, by definition the same bits as a stored tensor gives. The gradient
with respect to x is the straight-through estimator: 1 where rounding alone changed the value, 0 where saturation did, that
is where the rounded element lies beyond the largest code, of codebooks where the element lies beyond `Format.limit` (Jacob
et al., arXiv 1712.05877, section 3; Bengio et al., arXiv 1308.3432).
No gradient flows through a scale that was computed from x. A scale that is given is a parameter and gets the gradient of
learned step size quantization (Esser et al., arXiv 1902.08153, equation 3).
"""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from reference.arrays.bridges import bridged, over_mesh
from reference.arrays.namespace import Array, Namespace, float_input
from reference.arrays.softfloat import MAGNITUDE, SIGN, bits_of, float32_bits, multiply
from reference.formats.encode import MARK, Arithmetic, check_mode, to_dtype_bits
from reference.quantize.blocks import Blocks
from reference.quantize.quantize import block_values, block_words, dequantize, element_codes, quantize
from reference.quantize.scales import Chosen, check_scales, choose, given_scales, tree_sum, usable
from reference.quantize.stored import Scales
from reference.schemes.schemes import Scheme, scheme_of

Gradients = tuple[Array, Array | None, Array | None]
_quantize, _dequantize = inspect.unwrap(quantize), inspect.unwrap(dequantize)


@bridged
def fake_quantize(
    x: Any, scheme: str | Scheme, *, axis: int = -1, scales: Any = None, random_bits: Any = None
) -> Array:
    """Round x to the values of a scheme (quantize, then dequantize), in x's dtype and shape.

    Arguments and errors as in `quantize`; random_bits where the record rounds stochastically, and only there. Under JAX this
    has the custom gradient of `fake_quantize_vjp`, also under jit and vmap; for torch autograd use `fast.fake_quantize`.
    """
    scheme = scheme_of(scheme)
    ns, x, _ = float_input(x, "fake_quantize")
    check_mode(scheme.rounding, random_bits)
    if ns.name == "jax":
        given = None if scales is None else scales if isinstance(scales, Scales) else Scales(scales)
        return _jax_function()(x, given, random_bits, scheme, axis)
    return _forward(x, scales, random_bits, scheme, axis)


def _forward(x: Array, scales: Any, random_bits: Any, scheme: Scheme, axis: int) -> Array:
    q = _quantize(x, scheme, axis=axis, scales=scales, random_bits=random_bits)
    _, _, name = float_input(x, "fake_quantize")
    return _dequantize(q, name)


@bridged
def fake_quantize_vjp(
    g: Any, x: Any, scheme: str | Scheme, *, axis: int = -1, scales: Any = None, random_bits: Any = None
) -> Gradients:
    """Gradients (dx, dscale, dzero) of fake_quantize at x for an output gradient g of x's shape and dtype.

    dx: g where the element did not saturate, +0 where it did; x's dtype. dscale: None for scales computed from x; for given
    scales float32 of the scale's shape, the sum over each block of g * dy/ds with s the decoded scale and v the code's
    value, v - x/s, or v where saturated, times the outer scale if there is one. dzero: the same for the zero point,
    0 where nothing saturated. Sums run in float32 over adjacent pairs, a binary tree over each block filled with zeros.
    random_bits: those of the forward pass; values and saturation are those of the element as they rounded it.
    Raises ValueError where shapes or dtypes of g and x differ, and as `quantize` does.
    """
    scheme = scheme_of(scheme)
    ns, x, name = float_input(x, "fake_quantize_vjp")
    check_mode(scheme.rounding, random_bits)
    _, g, g_name = float_input(g, "fake_quantize_vjp")
    if g_name != name or ns.shape(g) != ns.shape(x):
        raise ValueError(f"g has the dtype and shape of x, {name} {ns.shape(x)}; got {g_name} {ns.shape(g)}")
    blocks = Blocks.of(ns.shape(x), scheme.scale, axis)
    given = check_scales(ns, scales, scheme, blocks)
    split = blocks.split(ns, float32_bits(ns, x, name))
    learned = given is not None and given.scale is not None
    chosen = (
        usable(ns, given_scales(ns, given, blocks, scheme), scheme, name)
        if learned
        else choose(ns, split, blocks, scheme, name, given)
    )
    words = block_words(ns, blocks, x, random_bits)
    saturated = saturation(ns, split, chosen, scheme, name, words)
    wide = float32_bits(ns, g, name)
    unsaturated = ns.where(blocks.join(ns, ns.astype(saturated, "int32")) > 0, 0, wide)
    dx = to_dtype_bits(ns, unsaturated, name)
    if not learned:
        return dx, None, None
    return (dx, *_parameter_gradients(ns, blocks, split, wide, chosen, saturated, scheme, name, words))


_vjp = inspect.unwrap(fake_quantize_vjp)


class _Marked(Scheme):
    """A record whose codes show which elements saturate (`MARK`). Not for users, and so not checked."""

    def __post_init__(self) -> None:
        """Accept the overflow policy that `check_scheme` does not know."""


def saturation(
    ns: Namespace, split: Array, chosen: Chosen, scheme: Scheme, dtype: str, words: Array | None = None
) -> Array:
    """Whether saturation changed the rounded element, per element of the blocks."""
    if scheme.format.kind == "codebook":
        divisor = chosen.exact if scheme.codes_from == "exact" else chosen.scale
        ratio = _ratio(ns, split, replace(chosen, scale=divisor), scheme)
        return (ratio & MAGNITUDE) > bits_of(scheme.format.limit)
    values = {field.name: getattr(scheme, field.name) for field in fields(Scheme)}
    marked = _Marked(**{**values, "overflow": "mark", "nan": "ieee", "nan_code": None})
    return (element_codes(ns, split, chosen, marked, dtype, words) & MARK) != 0


def _ratio(ns: Namespace, split: Array, chosen: Chosen, scheme: Scheme) -> Array:
    """x / s in float32 (x * S for an encoding scale), for tinygemm (x - z) / s."""
    unit = Arithmetic(ns, "float32")
    if scheme.zero is not None and scheme.zero.rule == "value":
        split = unit.subtract(split, chosen.zero)
    if scheme.scale.stored == "encode":
        return unit.multiply(split, chosen.scale)
    return unit.divide(unit.divide(split, chosen.scale), _outer(unit, chosen, scheme))


def _outer(unit: Arithmetic, chosen: Chosen, scheme: Scheme) -> Array:
    """The outer decoding scale, or 1."""
    if chosen.outer is None:
        return unit.constant(1.0, chosen.scale)
    stored = scheme.outer.stored if scheme.outer is not None else "decode"
    return unit.reciprocal(chosen.outer) if stored == "encode" else chosen.outer


def _parameter_gradients(
    ns: Namespace,
    blocks: Blocks,
    split: Array,
    g: Array,
    chosen: Chosen,
    saturated: Array,
    scheme: Scheme,
    dtype: str,
    words: Array | None,
) -> tuple[Array, Array | None]:
    """Sums over blocks of g * dy/ds and g * dy/dz."""
    unit = Arithmetic(ns, "float32")
    codes = element_codes(ns, split, chosen, scheme, dtype, words)
    value = block_values(ns, codes, chosen, scheme)
    ratio = ns.where(saturated, 0, _ratio(ns, split, chosen, scheme))
    slope = unit.subtract(value, ratio)
    if scheme.scale.stored == "encode":
        # y = v / S: the derivative of 1 / S is -1 / S**2.
        slope = unit.divide(slope, unit.multiply(chosen.scale, chosen.scale)) ^ SIGN
    slope = unit.multiply(slope, _outer(unit, chosen, scheme))
    # A short last block is filled with elements that do not count.
    g = blocks.split(ns, g, zeros=True)
    dscale = blocks.expose(ns.bitcast(tree_sum(ns, multiply(ns, g, slope)), "float32"), ns)
    if scheme.zero is None:
        return dscale, None
    one = unit.constant(1.0, chosen.scale)
    per_element = one if scheme.zero.rule == "value" else chosen.scale ^ SIGN
    dzero = tree_sum(ns, ns.where(saturated, multiply(ns, g, per_element), 0))
    return dscale, blocks.expose(ns.bitcast(dzero, "float32"), ns)


@lru_cache
def _jax_function() -> Any:
    """fake_quantize for JAX with its gradient; built when the first JAX array arrives."""
    import jax

    def forward(x: Array, scales: Any, random_bits: Any, scheme: Scheme, axis: int) -> Array:
        return _forward(x, scales, random_bits, scheme, axis)

    def forward_saved(
        x: Array, scales: Any, random_bits: Any, scheme: Scheme, axis: int
    ) -> tuple[Array, tuple[Array, Any, Any]]:
        return _forward(x, scales, random_bits, scheme, axis), (x, scales, random_bits)

    def backward(
        scheme: Scheme, axis: int, saved: tuple[Array, Any, Any], g: Array
    ) -> tuple[Array, Any, Any]:
        x, scales, words = saved
        options = {"axis": axis, "scales": scales, "random_bits": words}
        dx, dscale, dzero = over_mesh(_vjp, (g, x, scheme), options)
        return dx, scale_cotangents(jax, scales, dscale, dzero), no_cotangent(jax, words)

    function = jax.custom_vjp(forward, nondiff_argnums=(3, 4))
    function.defvjp(forward_saved, backward)
    return function


def no_cotangent(jax: Any, integers: Any) -> Any:
    """JAX's cotangent of an integer array."""
    return None if integers is None else np.zeros(integers.shape, jax.dtypes.float0)


def scale_cotangents(jax: Any, scales: Any, dscale: Any, dzero: Any) -> Any:
    """Cotangents in the structure of `scales`: float parts get theirs, codes have none."""
    if scales is None:
        return None

    def fit(value: Any, gradient: Any) -> Any:
        if value is None:
            return None
        if not jax.numpy.issubdtype(value.dtype, jax.numpy.floating):
            return no_cotangent(jax, value)
        return jax.numpy.zeros_like(value) if gradient is None else gradient.astype(value.dtype)

    return Scales(fit(scales.scale, dscale), fit(scales.outer, None), fit(scales.zero, dzero))
