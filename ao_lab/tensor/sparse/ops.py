"""Operations that copy into a `SparseQuantizedTensor`, join, compare and make new ones."""

from __future__ import annotations

from typing import Any

import torch

from ao_lab.gemm.sparse import forget_arranged
from ao_lab.tensor.flat_concat import Bundle, joins
from ao_lab.tensor.op_registry import OPERATIONS
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.tensor.sparse import slicing
from ao_lab.tensor.sparse.compress import not_sparse, quantized_compressed
from ao_lab.tensor.sparse.registry import sparse_operation
from ao_lab.tensor.sparse.sparse_tensor import SparseQuantizedTensor
from ao_lab.tensor.value_ops import requantized
from ao_lab.tensor.view_ops import check_part, stored_as
from reference.sparsity.stored_codes import is_plain

aten = torch.ops.aten


@sparse_operation(aten.copy_.default)
def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    """Between 2:4 tensors of one description part by part; a dense source, if it is 2:4, is quantized and compressed."""
    target, source = args[0], args[1]
    if not isinstance(target, SparseQuantizedTensor):
        if isinstance(target, QuantizedTensor):
            raise ValueError(
                f"copy_ of {source!r} into {target!r}: 2:4 storage into a dense one; to_layout('plain') it first"
            )
        return target.copy_(source.dequantize(target.dtype))
    if isinstance(source, QuantizedTensor) and not isinstance(source, SparseQuantizedTensor):
        raise ValueError(
            f"copy_ of {source!r} into {target!r}: a dense one into 2:4 storage; dequantize() it first"
        )
    if not isinstance(source, SparseQuantizedTensor):
        source = like(target, source)
    if stored_as(source) != stored_as(target):
        raise ValueError(f"copy_ of {source!r} into {target!r}: recipes, shapes and axes must be the same")
    check_part(target, source)
    for name, ours in target.parts.items():
        theirs = source.parts[name]
        if (ours is None) != (theirs is None):
            raise ValueError(f"copy_ of {source!r} into {target!r}: only one of them has {name}")
    for name, ours in target.parts.items():
        theirs = source.parts[name]
        if ours is not None and theirs is not None:
            ours.copy_(theirs)
    forget_arranged(target.codes)
    return target


def like(t: SparseQuantizedTensor, dense: torch.Tensor) -> SparseQuantizedTensor:
    """A dense 2:4 tensor, stored as t is; ValueError where it is not 2:4."""
    if tuple(dense.shape) != tuple(t.shape):
        raise ValueError(f"copy_ of shape {tuple(dense.shape)} into {t!r}: shapes must be the same")
    oriented = dense.transpose(-2, -1).contiguous() if t.turned else dense
    if is_plain(t.scheme):
        oriented = oriented.to(getattr(torch, t.scheme.element))
    elif oriented.dtype != t.dtype:
        oriented = oriented.to(t.dtype)
    oriented = oriented.to(t.device)
    if (reason := not_sparse(oriented, t.recipe)) is not None:
        raise ValueError(
            f"{t!r} takes dense numbers that are 2:4: {reason}. An update that fills pruned places, as a merged adapter's "
            f"does, stays beside the weight, or goes to its to_dense()"
        )
    made = quantized_compressed(oriented, t.recipe, input_scales=t.input_scales)
    made = made.remade(made.parts, dtype=t.dtype)
    return made.transposed() if t.turned else made


@sparse_operation(aten.empty_like.default, aten.zeros_like.default)
def _zeros_like(func: Any, args: Any, kwargs: Any) -> SparseQuantizedTensor:
    """Zeros in the same scheme: parts without a value would be no tensor of the scheme."""
    return _zeros(args[0], args[0].shape, kwargs)


@sparse_operation(aten.new_zeros.default, aten.new_empty.default)
def _new_zeros(func: Any, args: Any, kwargs: Any) -> SparseQuantizedTensor:
    return _zeros(args[0], args[1], kwargs)


@sparse_operation(aten.cat.default)
def _cat(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    tensors = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if joins(tensors, [isinstance(t, QuantizedTensor) and t.meta.flat is not None for t in tensors]):
        return Bundle(tensors)
    if not all(isinstance(t, SparseQuantizedTensor) for t in tensors):
        raise TypeError("cat of a 2:4 tensor and one of another kind; dequantize() first")
    return slicing.concatenate(tensors, dim)


@sparse_operation(aten.constant_pad_nd.default)
def _pad(func: Any, args: Any, kwargs: Any) -> SparseQuantizedTensor:
    """Zeros behind the last element of one axis, as DTensor makes shards equally long; they share the scales that hold for
    all."""
    t, added, value = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("value", 0)
    places = [place for place, count in enumerate(added) if count]
    if not places:
        return t.mapped(torch.Tensor.clone)  # type: ignore[no-any-return]
    if len(places) > 1 or places[0] % 2 == 0 or added[places[0]] < 0 or value != 0:
        raise ValueError(
            f"padding of {t!r} by {list(added)} with {value}: only zeros at the end of one axis; dequantize() first"
        )
    dim = len(t.shape) - 1 - places[0] // 2
    shape = [*t.shape[:dim], added[places[0]], *t.shape[dim + 1 :]]
    zeros = _zeros(t, shape, {})
    stored, place, _ = slicing.in_stored(t, dim)
    shared = {
        name: part for name, part in stored.parts.items()
        if name in ("scale", "outer", "zero") and part is not None and not slicing.differs(stored, name, place)
    }  # fmt: skip
    if "scale" in shared and t.zero is not None and "zero" not in shared:
        raise ValueError(f"padding of {t!r}: its zero points differ between pieces; dequantize() first")
    return slicing.concatenate([t, zeros.remade({**zeros.parts, **shared})], dim)


@sparse_operation(aten.equal.default)
def _equal(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether both store the same: one description, and equal parts."""
    first, second = args
    if not (isinstance(first, SparseQuantizedTensor) and isinstance(second, SparseQuantizedTensor)):
        return False
    if first.meta != second.meta or first.shape != second.shape:
        return False
    pairs = [(part, second.parts[name]) for name, part in first.parts.items()]
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


@sparse_operation(aten.mul_.Tensor, aten.mul_.Scalar, aten.div_.Tensor, aten.div_.Scalar)
def _scaled(func: Any, args: Any, kwargs: Any) -> Any:
    """Elements without scales are multiplied themselves; else a power of two changes scales."""
    plain = isinstance(args[0], SparseQuantizedTensor) and is_plain(args[0].scheme)
    return (requantized if plain else OPERATIONS[func])(func, args, kwargs)


def _zeros(t: SparseQuantizedTensor, shape: Any, options: dict[str, Any]) -> SparseQuantizedTensor:
    """Zeros as t is stored, under copies of its scales where they hold for any shape."""
    device, dtype = options.get("device") or t.device, options.get("dtype") or t.dtype
    shape = (*shape[:-2], shape[-1], shape[-2]) if t.turned else tuple(shape)
    plain = getattr(torch, t.scheme.element) if is_plain(t.scheme) else dtype
    made = quantized_compressed(
        torch.zeros(shape, dtype=plain, device=device), t.recipe, input_scales=t.input_scales
    )
    held = {name: t.parts[name] for name in ("scale", "outer", "zero")}
    copies = {
        name: part.to(device, copy=True)
        for name, part in held.items()
        if part is not None and part.dim() == 0
    }
    made = made.remade({**made.parts, **copies}, dtype=dtype)
    return made.transposed() if t.turned else made


__all__ = ["like"]
