"""Operands of `reference.matmul` on the host: any library's array, or a `Quantized`, as NumPy float64.

float64 is only the carrier: the values are those of float32, of narrower floats or of integers up to 32 bits. A `Quantized`
whose value is (code - zero) * scale [* outer scale] is held in these parts, because the tiers say where scales enter.
Other schemes (a float zero point, blocks of the flattened tensor, centred scales) have one part: their dequantized float32
values, with no scale left over.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reference.arrays.namespace import Array, as_array, namespace_of
from reference.formats.formats import FORMATS, Format
from reference.formats.storage import load
from reference.matmul.exact import F64, Host
from reference.matmul.tensor_core_model import power_of
from reference.quantize.quantize import Quantized, check_quantized, dequantize, unpacked, with_plain_scales
from reference.quantize.scales import unpack_zero
from reference.schemes.schemes import Block

INTEGERS = ("int8", "int16", "int32")
FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Operand:
    """One matmul operand. `axis` is the axis of K: -1 for a, -2 for b."""

    #: What the element is: float32 values of the whole operand, in the shape of the tensor.
    values: F64
    #: Code values less the zero point; `values` where nothing is factored out.
    codes: F64
    #: Scale per element of the other axes, and per `group` along K (one entry if the scale is constant along K).
    scale: F64 | None
    #: Elements of K per scale, None if the scale does not change along K.
    group: int | None
    outer: F64 | None
    #: For the scale and the outer scale, if present: whether it is the rounded reciprocal of what was stored.
    inverted: tuple[bool, ...]
    axis: int
    #: Name of the type or element format.
    kind: str

    @property
    def k(self) -> int:
        """Length of K."""
        return int(self.codes.shape[self.axis])

    def part(self, part: slice) -> F64:
        """The codes of a slice of K."""
        return self.codes[..., part] if self.axis == -1 else self.codes[..., part, :]

    def scale_at(self, start: int) -> F64 | None:
        """The scale that changes along K, at element `start`; None if it does not change. Broadcasts to the product."""
        if self.scale is None or self.group is None:
            return None
        place = slice(start // self.group, start // self.group + 1)
        return self.scale[..., place] if self.axis == -1 else self.scale[..., place, :]

    @property
    def final_scales(self) -> list[F64]:
        """The scales that do not change along K, applied after the last sum: the block scale, then the outer one."""
        constant = [] if self.scale is None or self.group is not None else [self.scale]
        return constant + ([] if self.outer is None else [self.outer])


def operand_of(x: Any, axis: int, name: str) -> Operand:
    """`x` (an array of any library, or a `Quantized`) as an `Operand`; TypeError or ValueError name the argument."""
    if isinstance(x, Quantized):
        _check_rank(tuple(x.shape), name)
        return _quantized_operand(x, axis)
    host, kind = to_host(x, name)
    _check_rank(host.shape, name)
    return Operand(host, host, None, None, None, (), axis, kind)


def to_host(x: Any, name: str) -> tuple[F64, str]:
    """(values as NumPy float64, dtype name) of an array; exact. TypeError for float64, unsigned integers and tracers."""
    x = as_array(x)
    ns = namespace_of(x)
    kind = ns.dtype_name(x)
    if kind not in (*INTEGERS, *FLOATS) and not kind.startswith("float8_e"):
        raise TypeError(
            f"{name} is float32, bfloat16, float16, float8 or a signed integer up to 32 bits, or a Quantized; got {kind} of "
            f"shape {ns.shape(x)}: cast it to float32 first, or decode it if these are codes"
        )
    # A signaling NaN is no event here.
    with np.errstate(invalid="ignore"):
        return host_array(x, name).astype(np.float64), kind


def host_array(x: Any, name: str) -> Host:
    """An array as NumPy's, on the host, bits unchanged (torch's narrow floats widen to float32). TypeError for tracers."""
    ns = namespace_of(x)
    if ns.name == "torch":
        x = x.detach().cpu()
        return np.asarray(
            (x if ns.dtype_name(x) in ("float32", *INTEGERS, "uint8", "uint16") else x.float()).numpy()
        )
    if ns.name == "jax" and isinstance(x, sys.modules["jax"].core.Tracer):
        raise TypeError(
            f"matmul runs on the host, and {name} is traced by a JAX transformation; call it outside jit"
        )
    return np.asarray(x)


def from_host(values: F64, dtype: str, like: Any) -> Array:
    """float64 values that `dtype` holds exactly, as an array of the library and device of `like`."""
    like = like.codes if isinstance(like, Quantized) else as_array(like)
    ns, host_ns = namespace_of(like), namespace_of(values)
    host = host_ns.astype(values, dtype)
    if ns.name == "torch":
        bits = host.view({2: np.int16, 4: np.int32, 8: np.int64}[host.dtype.itemsize])
        return ns.bitcast(ns.constant(bits, like), dtype)
    return ns.constant(host, like)


def format_of_operand(operand: Operand, given: str | None, name: str) -> Format:
    """The float format whose exponents the tensor core sees; ValueError if a value is not representable in it."""
    kind = given or ("float8_e4m3fn" if operand.kind in FLOATS else operand.kind)
    fmt = FORMATS.get(kind)
    if fmt is None or fmt.kind != "float":
        raise ValueError(
            f"the tensor core model takes floats of at most 16 bits, and {name} is {kind}; use accumulation='blocked'"
        )
    x = np.where(np.isfinite(operand.codes), operand.codes, 0.0)
    quantum = power_of(x, fmt.emin) * 2.0**-fmt.mantissa_bits
    odd = (np.rint(x / np.where(quantum == 0, 1.0, quantum)) * quantum != x) | (np.abs(x) > fmt.max)
    if odd.any():
        raise ValueError(
            f"{name} holds {float(x[odd][0])!r}, which {kind} does not ({odd.sum()} such values); quantize it first, or "
            f"name the formats with operand_formats"
        )
    return fmt


def _check_rank(shape: tuple[int, ...], name: str) -> None:
    if len(shape) < 2:
        raise ValueError(
            f"{name} is a matrix (..., rows, columns), got shape {shape}; reshape it to two axes"
        )


def _quantized_operand(q: Quantized, axis: int) -> Operand:
    # In NumPy from here on: every library dequantizes to the same bits.
    parts: dict[str, Any] = {name: getattr(q, name) for name in ("codes", "scale", "outer", "zero")}
    q = replace(q, **{name: _host_part(part, name) for name, part in parts.items()})
    check_quantized(q)
    q = with_plain_scales(unpacked(q))
    scheme = q.scheme
    values = dequantize(q, "float32").astype(np.float64)
    factored = (
        not scheme.scale.flat_size
        and (scheme.zero is None or scheme.zero.rule == "code")
        and scheme.format.kind != "codebook"
        and (scheme.outer is None or (scheme.outer.block == "tensor" and scheme.outer.center == "none"))
    )
    if not factored:
        return Operand(values, values, None, None, None, (), axis, "float32")
    codes = scheme.format.values[q.codes & ((1 << scheme.format.bits) - 1)].astype(np.float64)
    if scheme.zero is not None:
        zero = np.asarray(unpack_zero(namespace_of(q.zero), q.zero, scheme)).astype(np.float64)
        codes = codes - _spread(zero, q, range(len(q.shape)))
    invert = scheme.scale.stored == "encode"
    scale, group = _along_k(_factor(q.scale, scheme.scale.storage, invert), q, axis)
    if scheme.outer is None:
        return Operand(values, codes, scale, group, None, (invert,), axis, scheme.element)
    invert_outer = scheme.outer_order in ("folded", "encode")
    outer = _factor(q.outer, scheme.outer.storage, invert_outer)
    return Operand(values, codes, scale, group, outer, (invert, invert_outer), axis, scheme.element)


def _host_part(part: Any, name: str) -> Any:
    return None if part is None else host_array(part, name)


def _factor(stored: Array, storage: str, invert: bool) -> F64:
    """Stored scales as float32 factors of the code; encoding scales by their correctly rounded reciprocal."""
    bits = np.asarray(load(namespace_of(stored), stored, storage))
    factor = np.ascontiguousarray(bits).reshape(bits.shape).view(np.float32)
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        return (np.float32(1) / factor if invert else factor).astype(np.float64)


def _along_k(scale: F64, q: Quantized, axis: int) -> tuple[F64, int | None]:
    """The scale spread over every axis but K's, and the elements per scale along K."""
    if scale.ndim == 0:
        return scale, None
    others = [place for place in range(len(q.shape)) if place != axis % len(q.shape)]
    group = None if scale.shape[axis] == 1 else _block_sizes(q)[axis % len(q.shape)]
    return _spread(scale, q, others), group


def _spread(x: F64, q: Quantized, axes: Any) -> F64:
    """Blockwise entries repeated along `axes` to the shape of the tensor."""
    if x.ndim == 0:
        return x
    sizes = _block_sizes(q)
    for axis in axes:
        x = np.repeat(x, sizes[axis], axis=axis)[(slice(None),) * axis + (slice(0, q.shape[axis]),)]
    return x


def _block_sizes(q: Quantized) -> list[int]:
    """Elements per block along every axis."""
    block: Block = q.scheme.scale.block
    rank, axis = len(q.shape), q.axis % len(q.shape)
    rows, columns = block if isinstance(block, tuple) else (1, block)
    sizes = [1] * rank
    sizes[axis] = int(columns) if columns != -1 else max(q.shape[axis], 1)
    if rows != 1:
        sizes[max(place for place in range(rank) if place != axis)] = rows
    return sizes
