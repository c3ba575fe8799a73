"""Whether a `Quantized` is what `quantize` returns: dtypes and shapes of its codes and scales, and what errors say if not."""

from __future__ import annotations

import inspect
from dataclasses import replace
from math import prod
from typing import Any

from reference.arrays.namespace import Array, Namespace, code_input
from reference.formats.storage import packed_shape, unpack
from reference.quantize.blocks import Blocks
from reference.quantize.scales import check_stored, stored_parts
from reference.quantize.stored import Quantized, check_tiled, tiled_size
from reference.schemes.schemes import Scheme

# Inside a rule the plain function: no conversion from torch, no JAX program of its own.
_unpack = inspect.unwrap(unpack)
#: Fields of a `Quantized` that hold scales and zero points.
SCALES = ("scale", "outer", "zero")


def check_quantized(q: Quantized) -> Blocks:
    """The blocks of q; TypeError or ValueError where a field is not what `quantize` returns."""
    if not isinstance(q.scheme, Scheme):
        raise TypeError(
            f"the scheme of a Quantized is a record, got {type(q.scheme).__name__}: {q.scheme!r}; SCHEMES has those of names"
        )
    lengths = q.shape if isinstance(q.shape, tuple) else (None,)
    if not all(hasattr(n, "__index__") and not isinstance(n, bool) for n in lengths):
        raise TypeError(f"the shape of a Quantized is a tuple of integers, got {q.shape!r}")
    ns, _ = _checked_codes(q)
    try:
        blocks = Blocks.of(q.shape, q.scheme.scale, q.axis)
        if q.tiled:
            check_tiled(q.scheme, q.shape, q.axis)
        check_stored(ns, q, q.scheme, blocks, q.tiled)
    except ValueError as error:
        raise ValueError(f"{error}{_batch_message(ns, q)}") from None
    return blocks


def _batch_message(ns: Namespace, q: Quantized) -> str:
    """What is added to a message where leading axes count tensors that were quantized apart, with scales of each; else ""."""
    got = {part: ns.shape(getattr(q, part)) for part in SCALES if hasattr(getattr(q, part), "shape")}
    if got == _scale_shapes(q, q.shape):
        return ""
    for at in range(1, len(q.shape) + 1):
        batch, one = q.shape[:at], q.shape[at:]
        if got == {part: (*batch, *shape) for part, shape in _scale_shapes(q, one).items()}:
            return (
                f"; these are the scales of {prod(batch)} tensors of shape {one}, as jax.vmap(quantize) makes them: use "
                f"jax.vmap(dequantize) or lax.scan, or quantize the whole array without vmap"
            )
    return ""


def _scale_shapes(q: Quantized, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Shapes of the scales that a tensor of this shape has in the scheme of q, {} where it has none."""
    axis = q.axis - len(q.shape) + len(shape)
    if (axis < 0 and shape) or (q.tiled and len(shape) != 2):
        return {}
    try:
        blocks = Blocks.of(shape, q.scheme.scale, max(axis, 0))
    except ValueError:
        return {}
    parts = {part: want[1] for part, want in stored_parts(q.scheme, blocks).items() if want is not None}
    return {**parts, "scale": (tiled_size(parts["scale"]),)} if q.tiled else parts  # type: ignore[arg-type]


def _checked_codes(q: Quantized) -> tuple[Namespace, Array]:
    """The codes; TypeError for another dtype than the element has, ValueError for another shape than q says."""
    ns, codes = code_input(q.codes, "dequantize")
    stored = "uint8" if q.scheme.format.bits <= 8 else "uint16"
    if ns.dtype_name(codes) != stored:
        raise TypeError(
            f"codes of {q.scheme.element} are {stored}, got {ns.dtype_name(codes)} of shape {ns.shape(codes)}; cast them"
        )
    wanted = packed_shape(q.shape, q.scheme.format) if q.packed else q.shape
    if ns.shape(codes) != wanted:
        raise ValueError(_wrong_shape_message(q, wanted, ns.shape(codes)))
    return ns, codes


def _wrong_shape_message(q: Quantized, wanted: tuple[int, ...], got: tuple[int, ...]) -> str:
    """The message for codes of another shape than q's: a batch, as vmap adds one, the other form of codes, or anything."""
    kind, other = ("packed codes", "packed=False") if q.packed else ("codes", "packed=True")
    message = f"{kind} of a tensor of shape {q.shape} in {q.scheme.name} have shape {wanted}, got {got}"
    if len(got) > len(wanted) and got[len(got) - len(wanted) :] == wanted:
        batch = got[: len(got) - len(wanted)]
        return (
            f"{message}: a batch {batch} of them, as jax.vmap(quantize) returns it; jax.vmap(dequantize) takes it, and "
            f"quantize without vmap takes the whole array"
        )
    if got == (q.shape if q.packed else packed_shape(q.shape, q.scheme.format)):
        return f"{message}; codes of the other form belong in a Quantized with {other}"
    return f"{message}; give the codes, the shape and the scheme of one quantize"


def not_quantized_message(q: Any) -> str:
    """The message for anything but a Quantized in `dequantize`. (A CPU tensor of torch is a NumPy array here.)"""
    message = "dequantize takes a Quantized, as quantize returns it"
    if hasattr(q, "quantized"):
        return f"{message}; a {type(q).__name__} has a dequantize() of its own"
    if hasattr(q, "dtype") and hasattr(q, "shape"):
        return f"{message}, got an array of dtype {q.dtype} and shape {tuple(q.shape)}; quantize it first, or decode codes"
    return f"{message}, got {type(q).__name__}"


def unpacked(q: Quantized) -> Quantized:
    """q with one code per element; TypeError or ValueError where its codes are not what it says."""
    codes = _checked_codes(q)[1]
    return replace(q, codes=_unpack(codes, q.scheme.format, q.shape), packed=False) if q.packed else q


__all__ = ["check_quantized", "not_quantized_message", "unpacked"]
