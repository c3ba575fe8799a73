"""`choose_scales`, `quantize`, `dequantize` and `fake_quantize` for JAX arrays; see `reference` for the rules.

Arguments are checked by the code of `reference`, in its order, so that errors agree. Calls with concrete arrays are compiled
once for each combination of record, axis and shapes, checks included; later calls only look the program up (`programs`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax

import reference
from ao_lab.jax import programs
from ao_lab.jax.device import is_traced, place_of, require_array
from ao_lab.jax.operations import PARTS, Arrays, Operation, dispatch, quantized, scales_of
from fast.kernels.launch.cache import scale_parts, settings
from reference import Quantized, Scales, Scheme
from reference.arrays.dtypes import DTypeLike, dtype_name
from reference.arrays.namespace import FLOAT_DTYPES, float_input
from reference.arrays.pytrees import register_jax
from reference.formats.encode import check_random_bits
from reference.formats.pack import packed_shape
from reference.formats.rounding import check_mode
from reference.quantize.blocks import Blocks
from reference.quantize.fake_quantize import no_cotangent, scale_cotangents
from reference.quantize.provided_scales import check_scales
from reference.quantize.quantize import check_quantized, with_tiled_scales
from reference.quantize.tiled_scales import check_tiled
from reference.schemes.schemes import scheme_of


def choose_scales(x: jax.Array, scheme: str | Scheme, *, axis: int = -1) -> Scales:
    """Scales of x, as in `reference.choose_scales`."""
    key, known = programs.call("jax choose_scales", scheme, (axis,), x)
    if known is not None:
        return known  # type: ignore[no-any-return]
    place = _place(require_array(x, "choose_scales"), axis)
    if place is None:
        return reference.choose_scales(x, scheme, axis=axis)
    made: Scales = _call(_choose_scales, (x,), (scheme, int(axis), place), key)
    return made


def quantize(
    x: jax.Array,
    scheme: str | Scheme,
    *,
    axis: int = -1,
    scales: Scales | jax.Array | None = None,
    random_bits: jax.Array | None = None,
    packed: bool = False,
    tiled: bool = False,
) -> Quantized:
    """x as codes and scales. Arguments, edges and errors as in `reference.quantize`; no gradient flows through."""
    key, known = programs.call(
        "jax quantize", scheme, (axis, packed, tiled), x, *scale_parts(scales), random_bits
    )
    if known is not None:
        return known  # type: ignore[no-any-return]
    place = _place(require_array(x, "quantize"), axis, scales, random_bits)
    if place is None:
        return reference.quantize(
            x, scheme, axis=axis, scales=scales, random_bits=random_bits, packed=packed, tiled=tiled
        )
    constants = (scheme, int(axis), place, bool(packed), bool(tiled))
    made: Quantized = _call(_quantize, (x, scales, random_bits), constants, key)
    return made


def dequantize(q: Quantized, dtype: DTypeLike = "float32") -> jax.Array:
    """The tensor that q stands for; dtype as in `reference.dequantize`."""
    dtype = dtype_name(dtype, FLOAT_DTYPES, "dtype")
    if not isinstance(q, Quantized) or dtype == "float64":
        return reference.dequantize(q, dtype)
    parts = (q.codes, q.scale, q.outer, q.zero)
    key, known = programs.call("jax dequantize", q.scheme, (dtype, *settings(q)), *parts)
    if known is not None:
        return known
    place = _place(require_array(q.codes, "dequantize"), q.axis, Scales(*parts[1:]))
    if place is None:
        return reference.dequantize(q, dtype)
    check_quantized(q)
    operation = Operation("dequantize", q.scheme, q.shape, q.axis, dtype, q.packed)
    # Tiled scales are taken apart first.
    made: jax.Array = _call(_dequantize, (q.codes, q.scales), (operation, place), None if q.tiled else key)
    return made


def fake_quantize(
    x: jax.Array,
    scheme: str | Scheme,
    *,
    axis: int = -1,
    scales: Scales | jax.Array | None = None,
    random_bits: jax.Array | None = None,
) -> jax.Array:
    """x rounded to what its scheme represents, in x's dtype, with the gradients of `reference.fake_quantize_vjp`.

    Arguments and errors as in `reference.fake_quantize`.
    """
    key, known = programs.call("jax fake_quantize", scheme, (axis,), x, *scale_parts(scales), random_bits)
    if known is not None:
        return known
    place = _place(require_array(x, "fake_quantize"), axis, scales, random_bits)
    if place is None:
        return reference.fake_quantize(x, scheme, axis=axis, scales=scales, random_bits=random_bits)
    made: jax.Array = _call(_fake_quantize, (x, scales, random_bits), (scheme, int(axis), place), key)
    return made


def _place(x: Any, axis: Any, *others: Any) -> str | None:
    """`place_of` of x. None where the specification is called as it is: for arguments that are none of JAX's, so that it says
    what is wrong, and for traced arrays that can meet no kernel.
    """
    leaves = [x, *(leaf for other in others for leaf in _leaves(other) if leaf is not None)]
    known = all(isinstance(leaf, jax.Array) for leaf in leaves)
    if not known or not hasattr(axis, "__index__") or isinstance(axis, bool):
        return None
    place = place_of(x)
    return None if place == "" and any(map(is_traced, leaves)) else place


def _leaves(value: Any) -> list[Any]:
    return [value.scale, value.outer, value.zero] if isinstance(value, Scales) else [value]


def _call(function: Callable[..., Any], arrays: tuple[Any, ...], constants: tuple[Any, ...], key: Any) -> Any:
    """function(*constants, *arrays), as a program where all arrays are concrete. The key has the id of the first constant."""
    if any(map(is_traced, jax.tree.leaves(arrays))):
        return function(*constants, *arrays)
    return programs.run(function, constants, arrays, key, constants[0])


def _choose_scales(scheme: str | Scheme, axis: int, place: str, x: Any) -> Scales:
    scheme = scheme_of(scheme)
    ns, x, name = float_input(x, "choose_scales")
    blocks = Blocks.of(ns.shape(x), scheme.scale, axis)
    operation = Operation("choose", scheme, blocks.shape, blocks.axis, name)
    return scales_of(dispatch(operation, _named(x=x), place)) or Scales()


def _quantize(
    scheme: str | Scheme, axis: int, place: str, packed: bool, tiled: bool, x: Any, scales: Any, words: Any
) -> Quantized:
    scheme = scheme_of(scheme)
    ns, x, name = float_input(x, "quantize")
    check_mode(scheme.rounding, words)
    if packed:
        packed_shape(ns.shape(x), scheme.format)  # refuses a 0-d tensor
    if tiled:
        check_tiled(scheme, ns.shape(x), axis)
    blocks, given = _checked(x, scheme, axis, scales, words)
    operation = Operation("quantize", scheme, blocks.shape, blocks.axis, name, packed, tiled)
    made = dispatch(operation, _named(x=x, words=words, **_parts(given)), place)
    q = quantized(operation, made["codes"], scales_of({**_parts(given), **made}) or Scales())
    # Given scales are not tiled yet.
    return replace(q, tiled=True) if tiled and "scale" in made else with_tiled_scales(q) if tiled else q


def _checked(x: Any, scheme: Scheme, axis: int, scales: Any, words: Any) -> tuple[Blocks, Scales | None]:
    """Blocks and given scales; ValueError as the specification raises it."""
    ns, x, _ = float_input(x, "quantize")
    blocks = Blocks.of(ns.shape(x), scheme.scale, axis)
    given = check_scales(ns, scales, scheme, blocks)
    check_random_bits(ns, x, words)
    return blocks, given


def _parts(given: Scales | None) -> Arrays:
    return {} if given is None else {part: getattr(given, part) for part in PARTS}


def _named(**arrays: Any) -> Arrays:
    """The arrays that there are, without gradients: codes have none, and `fake_quantize` brings its own."""
    return {name: jax.lax.stop_gradient(value) for name, value in arrays.items() if value is not None}


def _dequantize(operation: Operation, place: str, codes: Any, scales: Scales) -> Any:
    return dispatch(operation, _named(codes=codes, **vars(scales)), place)["y"]


def _fake_quantize(scheme: str | Scheme, axis: int, place: str, x: Any, scales: Any, words: Any) -> Any:
    scheme = scheme_of(scheme)
    _, x, _ = float_input(x, "fake_quantize")
    check_mode(scheme.rounding, words)
    given = scales if scales is None or isinstance(scales, Scales) else Scales(scales)
    return _differentiable()(x, given, words, scheme, axis, place)


@lru_cache(maxsize=1)
def _differentiable() -> Any:
    """fake_quantize with its gradient."""
    register_jax()
    function = jax.custom_vjp(_forward, nondiff_argnums=(3, 4, 5))
    function.defvjp(_forward_saved, _backward)
    return function


def _forward(x: Any, scales: Any, words: Any, scheme: Scheme, axis: int, place: str) -> Any:
    blocks, given = _checked(x, scheme, axis, scales, words)
    _, x, name = float_input(x, "fake_quantize")
    operation = Operation("fake", scheme, blocks.shape, blocks.axis, name)
    return dispatch(operation, _named(x=x, words=words, **_parts(given)), place)["y"]


def _forward_saved(x: Any, scales: Any, words: Any, scheme: Scheme, axis: int, place: str) -> Any:
    return _forward(x, scales, words, scheme, axis, place), (x, scales, words)


def _backward(scheme: Scheme, axis: int, place: str, saved: Any, g: Any) -> Any:
    """Straight through where nothing saturated, by a kernel; gradients of given scales by the specification."""
    x, scales, words = saved
    if scales is not None:
        made = reference.fake_quantize_vjp(g, x, scheme, axis=axis, scales=scales, random_bits=words)
        dx, dscale, dzero = made
        return dx, scale_cotangents(jax, scales, dscale, dzero), no_cotangent(jax, words)
    name = float_input(x, "fake_quantize")[2]
    blocks = Blocks.of(x.shape, scheme.scale, axis)
    operation = Operation("mask", scheme, blocks.shape, blocks.axis, name)
    dx = dispatch(operation, _named(x=x, g=g, words=words), place)["y"]
    return dx, None, no_cotangent(jax, words)
