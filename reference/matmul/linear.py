"""`linear`: inputs times the transpose of a stored weight, as a layer computes it; `matmul` has the tiers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from reference.arrays.dtypes import DTypeLike
from reference.arrays.namespace import Array, as_array, namespace_of
from reference.matmul.exact import RESULTS
from reference.matmul.matmul import matmul
from reference.quantize.quantize import Quantized, dequantize, unpacked, with_plain_scales


def linear(
    x: Array | Quantized,
    w: Quantized,
    bias: Array | None = None,
    *,
    accumulation: str = "exact",
    out_dtype: DTypeLike | None = None,
    **options: Any,
) -> Array:
    """x (..., K) times the transpose of w (N, K), plus bias (N): (..., N) in `out_dtype`.

    w: a matrix whose blocks lie along K (axis 1), packed or not. accumulation and options: see `matmul`. ``exact`` is the
    product of the dequantized float32 weight, rounded once. out_dtype: by default x's where `matmul` has that, else float32.
    Raises ValueError for a weight of other axes, inputs of another length and a bias of another shape, TypeError for a
    weight that is no `Quantized`; else as `matmul` does.
    """
    x = x if isinstance(x, Quantized) else as_array(x)
    bias = None if bias is None else as_array(bias)
    check_linear(x, w, bias)
    out_dtype = result_dtype(x) if out_dtype is None else out_dtype
    vector = len(x.shape) == 1 and not isinstance(x, Quantized)
    rows: Any = x
    rows = rows[None] if vector else rows
    result = matmul(rows, transposed(w), accumulation=accumulation, out_dtype=out_dtype, bias=bias, **options)
    return result[0] if vector else result


def result_dtype(x: Array | Quantized) -> str:
    """The dtype of a result whose dtype is not given."""
    own = "" if isinstance(x, Quantized) else namespace_of(x).dtype_name(x)
    return own if own in RESULTS else "float32"


def check_linear(x: Any, w: Any, bias: Any) -> None:
    """Raise as `linear` does where shapes do not go together."""
    if not isinstance(w, Quantized):
        raise TypeError(f"linear takes a Quantized weight, got {type(w).__name__}; quantize it first")
    if len(w.shape) != 2 or w.axis != 1:
        raise ValueError(
            f"linear takes a weight (N, K) with blocks along axis 1, got shape {tuple(w.shape)}, axis {w.axis}; "
            f"quantize(weight, scheme, axis=-1) of a matrix"
        )
    shape = tuple(x.shape)
    if not shape or shape[-1] != w.shape[1]:
        raise ValueError(
            f"linear of inputs {shape} and a weight {tuple(w.shape)}: the last axes must be the same"
        )
    if bias is not None and tuple(bias.shape) != (w.shape[0],):
        raise ValueError(f"linear: bias has shape {tuple(bias.shape)}, the weight asks for {(w.shape[0],)}")


def transposed(w: Quantized) -> Any:
    """The weight (N, K) as `matmul` takes it, (K, N): a `Quantized`, or float32 values where blocks are flattened."""
    q = unpacked(with_plain_scales(w))
    if q.scheme.scale.flat_size:
        return _swapped(dequantize(q))
    parts: dict[str, Any] = {name: _swapped(getattr(q, name)) for name in ("codes", "scale", "zero")}
    return replace(q, **parts, shape=q.shape[::-1], axis=0)


def _swapped(part: Any) -> Any:
    return part if part is None or len(part.shape) < 2 else part.swapaxes(0, 1)
