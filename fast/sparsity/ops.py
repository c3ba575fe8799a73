"""`prune`, `compress` and `decompress` below their signatures: kernel, reference and operator; see `fast.dispatch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import reference
from fast.dispatch import Function, execute
from fast.ops import given_of, record_name, register
from reference import Compressed
from reference.schemes.schemes import record_of
from reference.sparsity.prune import check_groups, parse_pattern

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
    made: torch.Tensor = execute(PRUNE, None, (pattern,), (w, scores))
    return made


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
    made: torch.Tensor = execute(DECOMPRESS, None, (None,), (values, metadata))
    return made


def _decompress(record: Any, values: Values, operands: Operands) -> torch.Tensor:
    half = tuple(operands[0].shape)
    full = (*half[:-1], 2 * half[-1]) if half else ()
    if values[0] is not None and tuple(values[0]) != full:
        raise ValueError(
            f"values of shape {half} decompress to {full}, not to {tuple(values[0])}; leave shape out or correct it"
        )
    made: torch.Tensor = torch.ops.ao_lab.decompress(*operands)
    return made


DECOMPRESS = Function(
    "decompress", ("values", "metadata"), lambda r, v, o: reference.decompress(*o, *v), _decompress,
    _kernel("decompress"),
)  # fmt: skip
register(
    "decompress", decompress_op,
    lambda values, metadata: values.new_empty((*values.shape[:-1], 2 * values.shape[-1])),
)  # fmt: skip
