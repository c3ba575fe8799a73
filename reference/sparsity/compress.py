"""Compressed 2:4 storage: the kept half of the values, and where they were.

The layout is the plain one, row-major and what a checkpoint can hold; the order of metadata in a kernel is derived from it.
For w of shape (..., K), K a multiple of 4:

* `values` (..., K/2), dtype of w: the two kept elements of each group of four, in order;
* `metadata` (..., ceil(K/8)) uint8: for each group the two indices 0..3 of its kept elements, 2 bits each, the first index
  in the low bits; 4 bits a group, two groups a byte, the even group in the low half. If K/4 is odd, the last high half is 0.

A group with fewer than two kept elements stores zeros in the unused places. Each unused place takes the first index out of
2, 3 that is not kept: nothing kept gives (2, 3), only 0 gives (0, 2), only 1 gives (1, 2), only 2 or 3 gives (2, 3). These
are the indices that `torch.sparse` writes, and before CUTLASS reorders it the metadata is the same bytes.

Everything is selection on bit patterns: NaN payloads and codes of any format survive unchanged, so does a -0 that a mask
keeps.

**Codes of a scheme.** 2:4 storage holds the codes of the kept elements alone, so what was pruned must come back as the code
that `quantize` gives a zero, whatever the scale of its block. `zero_code` is that code. Schemes with an integer zero point
have it in the block: their zero is stored there (`FROM_ZERO_POINT`). Where zero has no code (two levels, zero points that are
floats), or another one in each block, there is no such storage: `unsupported_reason`.

`PLAIN_ELEMENTS` are bfloat16 and float16 themselves under one scale of 1. Their scale is given, never found.

Source: Mishra et al., "Accelerating Sparse Deep Neural Networks" (arXiv 2104.08378), section 3.1 and figure 3.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from reference.arrays.namespace import Array, Namespace, as_array, namespace_of
from reference.quantize.quantize import dequantize, quantize
from reference.quantize.stored import Scales
from reference.schemes.schemes import Scale, Scheme
from reference.sparsity.prune import check_groups, parse_pattern, prune

BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
#: Beginnings of the names of float dtypes without a sign, and of those whose sign is below the byte's top bit.
UNSIGNED_FLOATS = ("float8_e8m0",)
SUB_BYTE_FLOATS = ("float4", "float6")


class Compressed(NamedTuple):
    """A 2:4 array: `values` (..., K/2) of the dtype of w, `metadata` (..., ceil(K/8)) uint8. Unpacks like a tuple."""

    values: Array
    metadata: Array


def compress(w: Array, mask: Array | str | None = None) -> Compressed:
    """Store the kept elements of `w` (..., K) in the 2:4 layout of this module.

    `mask` None: `w` is 2:4 already, and its nonzero elements are kept. Zero are the bits 0 and, in a float dtype that has
    it, -0: what w * mask makes of negative weights. It comes back as +0; NaN is not zero. Integers, uint8 codes among them,
    have no -0: give codes of floats a mask. "2:4" means the mask `prune(w)`, so a dense matrix loses half of its elements
    only where that is asked for. Else `mask` is bool of the shape of `w`, with at most two kept in each group of four, and
    decides alone: a kept -0 is stored as it is, and what is not kept is dropped whatever it is.

    `w` has any dtype of 8, 16, 32 or 64 bits; uint8 codes do not sort as their values do, so "2:4" is for numbers. Under
    `jax.jit` and the tracing of `torch.compile` elements cannot be counted: of more than two, the first two stay.

    Raises ValueError, before anything is written, for more than two nonzero or kept elements in a group, with the number
    of such groups, and for K % 4 != 0, another pattern or another shape of `mask`; TypeError for a mask that is not bool,
    or an element type of another width.
    """
    w = as_array(w)
    ns = namespace_of(w)
    shape = ns.shape(w)
    check_groups(shape, 4, "2:4 compression")
    kept = mask_of(w, mask).reshape(*shape[:-1], shape[-1] // 4, 4)
    first, second = _kept_indices(ns, kept)
    bits = _bits(ns, w).reshape(*shape[:-1], shape[-1] // 4, 4)
    held = ns.where(kept, bits, bits[..., :1] * 0)
    pair = ns.stack([_pick(ns, held, first), _pick(ns, held, second)], -1)
    values = pair.reshape(*shape[:-1], shape[-1] // 2).view(w.dtype)
    return Compressed(values, pack_metadata(ns, first | (second << 2)))


def decompress(values: Array, metadata: Array, shape: tuple[int, ...] | None = None) -> Array:
    """The array (..., K) whose kept elements are `values` (..., K/2), with zero bits (+0) elsewhere.

    `metadata` is uint8 (..., ceil(K/8)) as `compress` writes it. `shape`, if given, is checked against the result. The
    result has the dtype and library of `values`. If a group names one index twice, its second value wins.

    Raises ValueError where the shapes do not belong together; TypeError for metadata that is not uint8, or no arrays.
    """
    values, metadata = as_array(values), as_array(metadata)
    ns = namespace_of(values)
    half, stored = ns.shape(values), ns.shape(metadata)
    _check_stored(ns, half, stored, metadata)
    full = (*half[:-1], 2 * half[-1])
    if shape is not None and tuple(shape) != full:
        raise ValueError(
            f"values of shape {half} decompress to {full}, not to {tuple(shape)}; leave shape out or correct it"
        )
    nibble = unpack_metadata(ns, metadata, half[-1] // 2)[..., None]
    pair = _bits(ns, values).reshape(*half[:-1], half[-1] // 2, 2)
    place = ns.arange(4, nibble).reshape(*(1,) * (nibble.ndim - 1), 4)
    low = ns.where((nibble & 3) == place, pair[..., :1], pair[..., :1] * 0)
    return ns.where((nibble >> 2) == place, pair[..., 1:], low).reshape(full).view(values.dtype)


def mask_of(w: Array, mask: Array | str | None) -> Array:
    """The bool mask that a `mask` of `compress` stands for, with the errors that it names."""
    if isinstance(mask, str):
        if parse_pattern(mask) != (2, 4):
            raise ValueError(
                f"compressed storage exists for the pattern '2:4' only, got {mask!r}; keep others as a mask"
            )
        return prune(w, pattern=mask)
    if mask is None:
        nonzero = _nonzero(namespace_of(w), w)
        _check_counts(
            namespace_of(w), nonzero, "are not zero", "w is dense: compress(w, mask='2:4') prunes it"
        )
        return nonzero
    mask = as_array(mask)
    ns = namespace_of(mask)
    if ns.dtype_name(mask) != "bool":
        raise TypeError(
            f"a mask is bool, got {ns.dtype_name(mask)} of shape {ns.shape(mask)}; compare it with 0 first"
        )
    if ns.shape(mask) != ns.shape(w):
        raise ValueError(
            f"mask of shape {ns.shape(mask)} does not match w of shape {ns.shape(w)}; give one bool per element"
        )
    _check_counts(ns, mask, "are kept", "make the mask with prune(w, pattern='2:4')")
    return mask


def _nonzero(ns: Namespace, w: Array) -> Array:
    """Where elements are neither the bits 0 nor -0, on bit patterns: comparisons with 0 flush subnormals in XLA."""
    bits = _bits(ns, w)
    negative = _negative_zero(ns.dtype_name(w), w.dtype.itemsize)
    return (bits != 0) if negative is None else (bits != 0) & (bits != negative)


def _negative_zero(name: str, size: int) -> int | None:
    """Bits of -0 in the unsigned or signed integer of `BITS`, or None for dtypes without it."""
    if name.endswith("fnuz") or name.startswith(UNSIGNED_FLOATS) or "float" not in name:
        return None
    if name.startswith(SUB_BYTE_FLOATS):
        return 0x20 if name.startswith("float6") else 0x08
    return 0x80 if size == 1 else -(1 << (8 * size - 1))


def _check_counts(ns: Namespace, mask: Array, what: str, way_out: str) -> None:
    """ValueError for groups with more than two elements, where they can be counted."""
    if is_traced(ns, mask):
        return
    counts = ns.astype(mask, "int32").reshape(-1, 4).sum(-1)
    crowded = int((counts > 2).sum())
    if crowded:
        raise ValueError(
            f"2:4 storage holds at most two elements of every four; {crowded} of {len(counts)} groups have more that "
            f"{what}; {way_out}"
        )


def is_traced(ns: Namespace, x: Array) -> bool:
    """Whether values are unknown now: under a JAX transformation or torch's compiler."""
    if ns.name == "jax":
        return isinstance(x, sys.modules["jax"].core.Tracer)
    return ns.name == "torch" and bool(ns.xp.compiler.is_compiling())


def _kept_indices(ns: Namespace, kept: Array) -> tuple[Array, Array]:
    """int32 indices (first, second) of the kept elements of each group (..., 4), with the filling rule above."""
    k0, k1, k2, k3 = (kept[..., i] for i in range(4))
    first = ns.where(k0, 0, ns.where(k1, 1, 2))
    # With one of 0 and 1 kept, 2 is the second unless 3 is kept and 2 is not; with neither, 2 was the first.
    second = ns.where(k0 & k1, 1, ns.where((k0 | k1) & (k2 | ~k3), 2, 3))
    return ns.astype(first, "int32"), ns.astype(second, "int32")


def _pick(ns: Namespace, group: Array, index: Array) -> Array:
    """group[..., index] for groups (..., 4), by selection: no arithmetic touches the bits."""
    low = ns.where(index == 0, group[..., 0], group[..., 1])
    return ns.where(index < 2, low, ns.where(index == 2, group[..., 2], group[..., 3]))


def _bits(ns: Namespace, x: Array) -> Array:
    if x.dtype.itemsize not in BITS or ns.dtype_name(x).startswith("complex"):
        raise TypeError(
            f"2:4 storage takes elements of 8, 16, 32 or 64 bits, got {ns.dtype_name(x)}; store its codes as uint8"
        )
    return ns.bitcast(x, BITS[x.dtype.itemsize])


def pack_metadata(ns: Namespace, nibbles: Array) -> Array:
    """int32 nibbles (..., G) to uint8 (..., ceil(G/2)), the even one in the low half."""
    shape = ns.shape(nibbles)
    if shape[-1] % 2:
        nibbles = ns.concatenate([nibbles, nibbles[..., :1] * 0], -1)
    pairs = nibbles.reshape(*shape[:-1], (shape[-1] + 1) // 2, 2)
    return ns.astype(pairs[..., 0] | (pairs[..., 1] << 4), "uint8")


def unpack_metadata(ns: Namespace, metadata: Array, groups: int) -> Array:
    """uint8 (..., B) to the first `groups` of its int32 nibbles (..., 2 * B)."""
    wide = ns.astype(metadata, "int32")
    both = ns.stack([wide & 15, wide >> 4], -1)
    shape = ns.shape(metadata)
    return both.reshape(*shape[:-1], 2 * shape[-1])[..., :groups]


def _check_stored(ns: Namespace, half: tuple[int, ...], stored: tuple[int, ...], metadata: Array) -> None:
    if ns.dtype_name(metadata) != "uint8":
        raise TypeError(f"2:4 metadata is uint8, got {ns.dtype_name(metadata)}; pass what compress returned")
    if not half or half[-1] % 2:
        raise ValueError(
            f"2:4 values come in pairs along the last axis, got shape {half}; pass what compress returned"
        )
    wanted = (*half[:-1], (half[-1] // 2 + 1) // 2)
    if stored != wanted:
        raise ValueError(
            f"values of shape {half} go with metadata of shape {wanted} (4 bits a group), got {stored}"
        )


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
    result = []
    for first in (0.0, 1.0, -3.5):
        x = _sample(scheme)
        x[..., 0] = first
        q = quantize(x, scheme)
        zeros = np.ones(x.shape, bool)
        zeros[..., 0] = False
        values, codes = dequantize(q)[zeros], q.codes[zeros]
        result.append(bool((values == 0).all()) and len(np.unique(codes)) == 1)
        result.append(
            scheme.zero is not None or codes[0] == quantize(_sample(scheme), scheme).codes.reshape(-1)[-1]
        )
    return all(result)


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
