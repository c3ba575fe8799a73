"""`linear_sparse`: inputs times a compressed 2:4 weight, for torch tensors; and metadata as its kernel reads it.

`linear_sparse` and `arrange_sparse_metadata` below their signatures: kernel, reference and operator; see `fast.dispatch`.

Operands are x, values, metadata (canonical or arranged), bias, x_scale and scale; values the output's dtype and fast_sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import reference
from fast.dispatch import Function, execute, run
from fast.gemm.families import MULTIPLES_24
from fast.kernels.sm90_sparse24_gemm.arrange import arrange, count_undefined, restore, shape_of
from fast.ops import no_gradient, register
from reference.arrays.namespace import DTypeLike, dtype_name
from reference.matmul.exact import RESULTS
from reference.sparsity.linear_sparse import check

Values = tuple[Any, ...]
Operands = Sequence[Any]

#: Bits of an element, by the dtypes of values.
BITS = {
    torch.bfloat16: 16, torch.float16: 16, torch.int8: 8, torch.float8_e4m3fn: 8, torch.float8_e5m2: 8,
}  # fmt: skip
#: The kernels are of this compute capability alone.
HOPPER = (9, 0)


def checked(values: Values, operands: Operands) -> str:
    """The name of the output's dtype; errors are those of the reference."""
    x, stored, metadata, bias, x_scale, scale = operands
    dtype, fast_sums = values
    for one, what in ((stored, "values"), (metadata, "metadata")):
        if not isinstance(one, torch.Tensor):
            raise TypeError(f"linear_sparse takes torch tensors, got {what} as {type(one).__name__}")
    if not isinstance(fast_sums, bool):
        raise TypeError(f"linear_sparse takes fast_sums as a bool, got {fast_sums!r}")
    name = check(
        x,
        stored,
        metadata,
        bias,
        x_scale,
        scale,
        None if dtype is None else str(dtype).removeprefix("torch."),
    )
    _check_metadata(stored, metadata)
    return name


def _check_metadata(values: torch.Tensor, metadata: torch.Tensor) -> None:
    if metadata.dtype != torch.uint8:
        raise TypeError(
            f"2:4 metadata is uint8, got {str(metadata.dtype).removeprefix('torch.')}; pass what compress returned"
        )
    rows, stored = canonical_shape(values)
    wanted = {2: (rows, stored), 3: shape_of(rows, stored, BITS[values.dtype])}.get(metadata.dim())
    if wanted is None or tuple(metadata.shape) != wanted:
        raise ValueError(
            f"values of shape {tuple(values.shape)} in {values.dtype} go with metadata of shape {(rows, stored)}, or "
            f"{shape_of(rows, stored, BITS[values.dtype])} where it is arranged, got {tuple(metadata.shape)}"
        )


def canonical_shape(values: torch.Tensor) -> tuple[int, int]:
    """The shape of the metadata that `compress` makes beside values (N, K/2)."""
    return values.shape[0], (values.shape[1] // 2 + 1) // 2


def linear_sparse_op(
    x: torch.Tensor,
    values: torch.Tensor,
    metadata: torch.Tensor,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    scale: torch.Tensor | None,
    dtype: torch.dtype | None,
    fast_sums: bool,
) -> torch.Tensor:
    """x times the transpose of a compressed weight, with scales and a bias."""
    operands = (x, values, metadata, bias, x_scale, scale)
    result: torch.Tensor = execute(LINEAR_SPARSE, None, (dtype, fast_sums), operands)
    return result


def _fake(
    x: torch.Tensor, values: torch.Tensor, metadata: torch.Tensor, bias: Any, x_scale: Any, scale: Any, dtype: Any,
    fast_sums: bool,
) -> torch.Tensor:  # fmt: skip
    name = checked((dtype, fast_sums), (x, values, metadata, bias, x_scale, scale))
    return x.new_empty((*x.shape[:-1], values.shape[0]), dtype=getattr(torch, name))


def _kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    name = checked(values, operands)
    x, stored = operands[0], operands[1]
    if torch.cuda.get_device_capability(x.device) != HOPPER or not x.numel() or not stored.numel():
        return None
    step = MULTIPLES_24[BITS[stored.dtype]]
    if x.shape[-1] % step:
        raise ValueError(
            f"linear_sparse on a GPU takes K in multiples of {step} for {stored.dtype}, got {x.shape[-1]}; use "
            f"decompress(values, metadata) and a dense product, or pad x and the weight with zeros"
        )
    from fast.kernels.sm90_sparse24_gemm.host import linear_sparse

    return linear_sparse(name, values[1], operands, key)


def _reference(record: Any, values: Values, operands: Operands) -> Any:
    name = checked(values, operands)
    x, stored, metadata, bias, x_scale, scale = operands
    if metadata.dim() == 3:
        metadata = restore(metadata, BITS[stored.dtype], canonical_shape(stored))
    return reference.linear_sparse(x, stored, metadata, bias, x_scale=x_scale, scale=scale, out_dtype=name)


LINEAR_SPARSE = Function(
    "linear_sparse", ("x", "values", "metadata", "bias", "x_scale", "scale"), _reference,
    lambda r, v, o: LINEAR_SPARSE_OP(*o, *v), _kernel, differentiable=True,
)  # fmt: skip
LINEAR_SPARSE_OP = register(
    "linear_sparse", linear_sparse_op, _fake,
    no_gradient("linear_sparse", "multiply by the decompressed weight where x or the weight is trained"),
)  # fmt: skip


def arrange_op(metadata: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Metadata in the kernel's order."""
    result: torch.Tensor = execute(ARRANGE_SPARSE_METADATA, None, (dtype,), (metadata,))
    return result


def _arrange_fake(metadata: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    _check_arrangeable(metadata, dtype)
    return metadata.new_empty(shape_of(*metadata.shape, BITS[dtype]))


def _check_arrangeable(metadata: torch.Tensor, dtype: Any) -> None:
    if metadata.dtype != torch.uint8 or dtype not in BITS:
        raise TypeError(
            f"arrange_sparse_metadata takes uint8 metadata of values in {', '.join(map(str, BITS))}; got {metadata.dtype} and "
            f"{dtype}"
        )
    if metadata.dim() != 2:
        raise ValueError(
            f"arrange_sparse_metadata takes metadata (N, ceil(K/8)) of compress, got shape {tuple(metadata.shape)}"
        )


def _arrange(metadata: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    _check_arrangeable(metadata, dtype)
    bad = count_undefined(metadata)
    if bad:
        raise ValueError(
            f"{bad} bytes of metadata name no two elements in order; pass what compress returned (uint8, two groups a byte)"
        )
    return arrange(metadata, BITS[dtype])


# The same torch operations on every device.
ARRANGE_SPARSE_METADATA = Function(
    "arrange_sparse_metadata", ("metadata",), lambda r, v, o: _arrange(*o, *v),
    lambda r, v, o: torch.ops.ao_lab.arrange_sparse_metadata(*o, *v),
)  # fmt: skip
register("arrange_sparse_metadata", arrange_op, _arrange_fake)


def linear_sparse(
    x: torch.Tensor,
    values: torch.Tensor,
    metadata: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    out_dtype: DTypeLike | None = None,
    fast_sums: bool = True,
) -> torch.Tensor:
    """(x @ decompress(values, metadata).T) * x_scale * scale + bias, as in `reference.linear_sparse`, on x's device.

    On a Hopper GPU sparse tensor cores multiply; scales and bias are applied on the way out. metadata may be what `compress`
    made, uint8 (N, K/8), which each call puts in order anew, or what `arrange_sparse_metadata` made of it once, for the dtype
    of values: keep that beside a weight that does not change (there is no cache, which could not see that metadata changed).

    Sums of int8 are exact in int32, results the bits of the reference. Float sums are float32 of the tensor core; those of
    float8 keep about 14 bits there (13 fraction bits below the largest term), with fast_sums in one chain over K, without it in
    chains of 128 elements that are added in float32. Results lie within `reference.linear_sparse_error_bound`. Two calls give
    the same bits. CPU tensors run the reference, exact and slow, and so do GPUs that are not of compute capability 9.0.

    Errors are the reference's; on a GPU ValueError where K is no multiple of 32 (8-bit elements) or 16 (16-bit ones), rows of
    the tensor copy engine being multiples of 16 bytes: multiply by the decompressed weight there. RuntimeError where NVRTC,
    which compiles the kernel at first use, is missing. No gradient: NotImplementedError where one is asked for.
    """
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        out_dtype = getattr(torch, dtype_name(out_dtype, (*RESULTS, "int32"), "out_dtype"))
    operands = (x, values, metadata, bias, x_scale, scale)
    y: torch.Tensor = run(LINEAR_SPARSE, None, (out_dtype, fast_sums), operands)
    return y


def arrange_sparse_metadata(metadata: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """2:4 metadata (N, ceil(K/8)) of `compress` in the order of `linear_sparse`'s kernel: uint8 (ceil(N/64), panels, bytes).

    dtype: of the values. A permutation of the bytes, filled up to 64 rows and 256 elements of 8 bits (128 of 16); see
    `fast.kernels.sm90_sparse24_gemm.arrange`. Groups that name 0, 0 become 2, 3: their values must be zeros. On metadata's
    device; the host waits for one number. ValueError for 4 bits that name no two elements in order, and for other shapes;
    TypeError for other dtypes.
    """
    result: torch.Tensor = run(ARRANGE_SPARSE_METADATA, None, (dtype,), (metadata,))
    return result


__all__ = ["LINEAR_SPARSE", "arrange_sparse_metadata", "linear_sparse"]
