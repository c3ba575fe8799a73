"""`compress`, `decompress` and `quantize_compressed` for torch tensors; see `reference.compress` for the 2:4 layout.

`compress_masked`: a masked weight, or its transpose, compressed for the kernel of `linear_sparse`: what products of training
multiply by. It is `reference.compress` of the weight and its mask, whose metadata `fast.kernels.sm90_sparse24_gemm.arrange`
puts in order; on a GPU in one kernel. Masks are bool, or bits (`fast.kernels.sm90_sparse24_gemm.arrange`); `masked` gives the
masked weight as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import reference
from fast.dispatch import Function, execute, is_operator, run, scale_parts
from fast.kernels.sm90_sparse24_gemm.arrange import OCTET, arrange, packed_shape, unpack_bits
from fast.ops import given_of, record_name, register
from reference import Compressed, Scales, Scheme
from reference.schemes.schemes import record_of
from reference.sparsity.prune import check_groups, parse_pattern


def compress(w: torch.Tensor, mask: torch.Tensor | str | None = None) -> Compressed:
    """Kept values and metadata of w on its device, as in `reference.compress`. No gradient flows through.

    On a GPU one kernel reads w once. Unless mask is "2:4" it notes groups with more than two elements, and the host waits for
    that number before anything is returned, so the call is no part of a CUDA graph.

    Elements are counted here in compiled programs too: the operator runs on tensors that have values, and raises there.
    """
    pattern, given = (mask, None) if isinstance(mask, str) else (None, mask)
    result: Compressed = run(COMPRESS, None, (pattern,), (w, given))
    return result


def decompress(
    values: torch.Tensor, metadata: torch.Tensor, shape: tuple[int, ...] | None = None
) -> torch.Tensor:
    """The dense tensor, zeros where nothing was kept, as in `reference.decompress`. No gradient flows through."""
    result: torch.Tensor = run(
        DECOMPRESS, None, (None if shape is None else tuple(shape),), (values, metadata)
    )
    return result


# `quantize_compressed` for torch tensors; see `reference.quantize_compressed`.


def quantize_compressed(
    w: torch.Tensor,
    scheme: str | Scheme,
    scales: Scales | torch.Tensor,
    mask: torch.Tensor | str | None = "2:4",
) -> Compressed:
    """Codes and metadata of w on its device, as in `reference.quantize_compressed`. No gradient flows through.

    One kernel reads bfloat16 and float16 once for the 8-bit float schemes with a scale for each row, or one scale, where it
    prunes ("2:4"); other schemes and given masks are quantized and compressed one after the other.
    """
    pattern, given = (mask, None) if isinstance(mask, str) else (None, mask)
    result: Compressed = run(QUANTIZE_COMPRESSED, scheme, (pattern,), (w, given, *scale_parts(scales)))
    return result


# `prune`, `compress` and `decompress` below their signatures: kernel, reference and operator; see `fast.dispatch`.

Values = tuple[Any, ...]
Operands = Sequence[Any]


def _kernel(name: str) -> Callable[..., Any]:
    """A function of `kernels.sparsity.host` as `Function` has it."""

    def run(record: Any, values: Values, operands: Operands, key: Any) -> Any:
        from fast.kernels.sparsity import host

        return getattr(host, name)(*operands, *values, key)

    return run


def prune_op(w: torch.Tensor, scores: torch.Tensor | None, pattern: str) -> torch.Tensor:
    """Bool mask of the weights to keep."""
    result: torch.Tensor = execute(PRUNE, None, (pattern,), (w, scores))
    return result


def _prune_fake(w: torch.Tensor, scores: Any, pattern: str) -> torch.Tensor:
    check_groups(tuple(w.shape), parse_pattern(pattern)[1], pattern)
    return w.new_empty(w.shape, dtype=torch.bool)


PRUNE = Function(
    "prune", ("w", "scores"), lambda r, v, o: reference.prune(o[0], pattern=v[0], scores=o[1]),
    lambda r, v, o: torch.ops.ao_lab.prune(*o, *v), _kernel("prune"),
)  # fmt: skip
register("prune", prune_op, _prune_fake)


def compress_op(w: torch.Tensor, mask: torch.Tensor | None, pattern: str | None) -> list[torch.Tensor]:
    """Values and metadata."""
    return list(execute(COMPRESS, None, (pattern,), (w, mask)))


def _compress_fake(w: torch.Tensor, mask: Any, pattern: str | None) -> list[torch.Tensor]:
    check_groups(tuple(w.shape), 4, "2:4 compression")
    *rest, length = w.shape
    return [w.new_empty((*rest, length // 2)), w.new_empty((*rest, (length + 7) // 8), dtype=torch.uint8)]


def _mask(values: Values, operands: Operands) -> Any:
    """A mask, a pattern in place of one, or None."""
    return values[0] if operands[1] is None else operands[1]


COMPRESS = Function(
    "compress", ("w", "mask"), lambda r, v, o: reference.compress(o[0], _mask(v, o)),
    lambda r, v, o: Compressed(*torch.ops.ao_lab.compress(*o, *v)), _kernel("compress"),
)  # fmt: skip
register("compress", compress_op, _compress_fake)


def quantize_compressed_op(
    w: torch.Tensor,
    mask: torch.Tensor | None,
    scale: torch.Tensor | None,
    outer: torch.Tensor | None,
    zero: torch.Tensor | None,
    scheme: str,
    pattern: str | None,
) -> list[torch.Tensor]:
    """Codes and metadata."""
    return list(execute(QUANTIZE_COMPRESSED, record_of(scheme), (pattern,), (w, mask, scale, outer, zero)))


def _quantize_compressed_fake(
    w: torch.Tensor, mask: Any, scale: Any, outer: Any, zero: Any, scheme: str, pattern: str | None
) -> list[torch.Tensor]:
    values, metadata = _compress_fake(w, mask, pattern)
    return [values.new_empty(values.shape, dtype=torch.uint8), metadata]


def _quantize_compressed_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    from fast.kernels.sparsity.host import quantize_compressed

    return quantize_compressed(record, *values, *operands, key)


QUANTIZE_COMPRESSED = Function(
    "quantize_compressed", ("w", "mask", "scale", "outer", "zero"),
    lambda r, v, o: reference.quantize_compressed(o[0], r, given_of(*o[2:]), _mask(v, o)),
    lambda r, v, o: Compressed(*torch.ops.ao_lab.quantize_compressed(*o, record_name(r), *v)),
    _quantize_compressed_kernel,
)  # fmt: skip
register("quantize_compressed", quantize_compressed_op, _quantize_compressed_fake)


def decompress_op(values: torch.Tensor, metadata: torch.Tensor) -> torch.Tensor:
    """The dense tensor."""
    result: torch.Tensor = execute(DECOMPRESS, None, (None,), (values, metadata))
    return result


def _decompress(record: Any, values: Values, operands: Operands) -> torch.Tensor:
    half = tuple(operands[0].shape)
    full = (*half[:-1], 2 * half[-1]) if half else ()
    if values[0] is not None and tuple(values[0]) != full:
        raise ValueError(
            f"values of shape {half} decompress to {full}, not to {tuple(values[0])}; leave shape out or correct it"
        )
    result: torch.Tensor = torch.ops.ao_lab.decompress(*operands)
    return result


DECOMPRESS = Function(
    "decompress", ("values", "metadata"), lambda r, v, o: reference.decompress(*o, *v), _decompress,
    _kernel("decompress"),
)  # fmt: skip
register(
    "decompress", decompress_op,
    lambda values, metadata: values.new_empty((*values.shape[:-1], 2 * values.shape[-1])),
)  # fmt: skip


#: What the kernel of 16-bit elements takes.
DTYPES = (torch.float16, torch.bfloat16)


def compress_masked(w: torch.Tensor, mask: torch.Tensor, transposed: bool = False) -> Compressed:
    """Values (N, K/2) and arranged metadata of w (N, K) where mask is True; transposed: of the transposes, values (K, N/2).

    w: float16 or bfloat16, lengths in multiples of 8. mask: bool of its shape or uint8 (N, K/8), the bits of one, with at most
    two of every four True along the axis that is compressed. That is not checked on a GPU, where the host waits for nothing: of
    more the first two stay. The CPU raises ValueError as `reference.compress` does. TypeError for other dtypes, ValueError for
    other shapes.
    """
    result: Compressed = execute(COMPRESS_MASKED, None, (transposed,), (w, mask))
    return result


def masked(w: torch.Tensor, mask: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """w (..., K) where mask is True, the same bits, +0 elsewhere, also where w is NaN. out: w itself or memory like it.

    For calls in which no gradient is recorded. mask: bool of its shape, or uint8 (..., ceil(K/8)), the bits of one: on a GPU by
    one kernel where 8 divides K; where a mode or a compiler listens by torch's operators. ValueError for other shapes.
    """
    if mask.dtype == torch.bool:
        return _written(w, mask, out)
    if mask.dtype != torch.uint8 or mask.shape != packed_shape(w.shape):
        raise ValueError(
            f"masked takes a bool mask of the weight's shape {tuple(w.shape)}, or uint8 of {packed_shape(tuple(w.shape))}, got "
            f"{mask.dtype} of {tuple(mask.shape)}; `pack_bits` makes such"
        )
    if is_operator(w) or not (w.is_cuda and _served(w, out)):
        return _written(w, unpack_bits(mask, w.shape[-1]), out)
    result: torch.Tensor = execute(MASKED, None, (), (w, mask, out))
    if out is None:
        return result
    torch.autograd.graph.increment_version(out)  # written by its address, of which torch knows nothing
    return out


def _served(w: torch.Tensor, out: torch.Tensor | None) -> bool:
    """Asked in every call: one that is remembered reads its tensors as contiguous copies, and would write to one."""
    if out is not None and (
        (out.dtype, out.shape) != (w.dtype, w.shape) or not out.is_contiguous() or out.is_neg()
    ):
        return False
    return w.dtype.itemsize in (2, 4) and w.shape[-1] % OCTET == 0 and w.numel() > 0


def _written(w: torch.Tensor, mask: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """By torch."""
    if out is not None and out is w:
        return out.masked_fill_(~mask, 0)
    result = torch.where(mask, w, 0)
    return result if out is None else out.copy_(result)


def _check(w: torch.Tensor, mask: torch.Tensor) -> None:
    """The errors that both ways have."""
    if w.dtype not in DTYPES or mask.dtype not in (torch.bool, torch.uint8):
        raise TypeError(
            f"compress_masked takes float16 or bfloat16 and a bool mask, or uint8 of its bits, got {w.dtype} and {mask.dtype}; "
            f"cast them first"
        )
    shape = tuple(w.shape) if mask.dtype == torch.bool else packed_shape(tuple(w.shape))
    if w.dim() != 2 or mask.shape != shape or w.shape[0] % 8 or w.shape[1] % 8 or not w.numel():
        raise ValueError(
            f"compress_masked takes a matrix and a mask of its shape, or its bits, lengths in multiples of 8, got "
            f"{tuple(w.shape)} and {mask.dtype} of {tuple(mask.shape)}; pad them with zeros"
        )


def _reference(record: Any, values: tuple[Any, ...], operands: Sequence[Any]) -> Compressed:
    w, mask = operands
    _check(w, mask)
    mask = mask if mask.dtype == torch.bool else unpack_bits(mask, w.shape[1])
    sides = [side.t().contiguous() for side in (w, mask)] if values[0] else [w, mask]
    kept, metadata = reference.compress(*sides)
    return Compressed(kept, arrange(metadata, 16, defined=True))


def _masked_kernel(record: Any, values: tuple[Any, ...], operands: Sequence[Any], key: Any) -> Compressed:
    from fast.kernels.sm90_sparse24_gemm.masked import compress_masked

    _check(*operands)
    return compress_masked(*operands, *values, key)


def _unpacked(record: Any, values: tuple[Any, ...], operands: Sequence[Any]) -> torch.Tensor:
    w, bits, out = operands
    return _written(w, unpack_bits(bits, w.shape[-1]), out)


def _keep(record: Any, values: tuple[Any, ...], operands: Sequence[Any], key: Any) -> torch.Tensor:
    from fast.kernels.sm90_sparse24_gemm.masked import keep

    return keep(*operands, key)


# No operators: they are parts of what operators are implemented by.
COMPRESS_MASKED = Function("compress_masked", ("w", "mask"), _reference, _reference, _masked_kernel)
MASKED = Function("masked", ("w", "bits", "out"), _unpacked, _unpacked, _keep)
