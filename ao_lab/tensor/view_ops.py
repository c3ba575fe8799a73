"""Operations of `QuantizedTensor` that move, slice, copy and view it. Views share the parts.

`Bundle`: DistributedDataParallel flattens the parameters of a model, joins them, broadcasts the result from rank 0, cuts it
again and copies the pieces back. A quantized weight has no elements that could lie beside those of a dense one, so the joined
tensor here is a list of its pieces. It can be broadcast, piece by piece as they are stored, and cut where they were joined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

import fast
from ao_lab.gemm.operand import forget_arranged
from ao_lab.tensor import slicing
from ao_lab.tensor.experts import chosen, gathered, waits
from ao_lab.tensor.metadata import DTYPES, PARTS, PRESHUFFLED, moved_to_gpu, stays
from ao_lab.tensor.op_registry import operation
from ao_lab.tensor.quantized_tensor import QuantizedTensor, SparseQuantizedTensor, from_quantized
from ao_lab.tensor.sparse import stored_like
from fast.layers.hadamard import hadamard
from reference import Scales

aten = torch.ops.aten


def view(*operators: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function of the tensor and the other arguments whose results share its memory."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # Torch fails to make views of an outer tensor where the subclass makes them of inference mode's kind.
            if torch.is_inference_mode_enabled() and not args[0].is_inference():
                with torch.inference_mode(False):
                    return run(func, args, kwargs)
            result = function(*args, **kwargs)
            if type(result) is torch.Tensor:  # dense: a copy, which shares nothing
                return result
            return return_and_correct_aliasing(func, args, kwargs, result)  # type: ignore[no-untyped-call]

        operation(*operators)(run)
        return function

    return register


@view(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _detach(t: QuantizedTensor) -> QuantizedTensor:
    return t.mapped(torch.Tensor.detach)


@operation(aten.clone.default)
def _clone(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    """A copy in the stored orientation, whatever memory format is asked for."""
    return args[0].mapped(torch.Tensor.clone)  # type: ignore[no-any-return]


@operation(aten._to_copy.default)
def _to_copy(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    """Another device moves the parts, preshuffled there if that is quicker (`ao_lab.tensor.metadata`); another dtype is that
    of the dense tensor: codes and scales stay."""
    t, device = args[0], kwargs.get("device")
    dtype = kwargs.get("dtype") or t.dtype
    if dtype not in DTYPES:
        raise TypeError(
            f"a QuantizedTensor stands for floating-point values of 16 bits or more, not {dtype}; dequantize() first"
        )
    blocking = kwargs.get("non_blocking", False)
    stored = t if stays(t.device if device is None else torch.device(device), dtype) else t.plain
    copy = stored.mapped(
        lambda part: torch.ops.aten._to_copy(part, device=device, non_blocking=blocking), dtype=dtype
    )
    return moved_to_gpu(t, copy)  # type: ignore[no-any-return]


@operation(aten.copy_.default)
def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    """Between QuantizedTensors of one description part by part; a dense source is quantized (into 2:4 storage, if it is 2:4), a
    dense target is filled."""
    target, source = args[0], args[1]
    if not isinstance(target, QuantizedTensor):
        return target.copy_(source.dequantize(target.dtype))
    sparse = isinstance(target, SparseQuantizedTensor)
    if not isinstance(source, QuantizedTensor):
        if source.shape != target.shape:
            raise ValueError(f"copy_ of shape {tuple(source.shape)} into {target!r}: shapes must be the same")
        source = _like(target, source.to(target.device) if sparse else source)
    if isinstance(source, SparseQuantizedTensor) != sparse:
        told = (
            "a dense one into 2:4 storage; dequantize() it first"
            if sparse
            else "2:4 storage into a dense one; to_layout('plain') it first"
        )
        raise ValueError(f"copy_ of {source!r} into {target!r}: {told}")
    source = source.to_layout(target.meta.layout)
    if stored_as(source) != stored_as(target):
        raise ValueError(f"copy_ of {source!r} into {target!r}: recipes, shapes and axes must be the same")
    check_part(target, source)
    pairs = {name: (ours, source.parts[name]) for name, ours in target.parts.items()}
    for name, (ours, theirs) in pairs.items():
        if (ours is None) != (theirs is None):
            raise ValueError(f"copy_ of {source!r} into {target!r}: only one of them has {name}")
    for ours, theirs in pairs.values():
        if ours is not None and theirs is not None:
            ours.copy_(theirs)
    forget_arranged(target.codes)
    return target


@operation(aten.empty_like.default, aten.zeros_like.default)
def _zeros_like(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    """Zeros in the same scheme: parts without a value would be no tensor of the scheme."""
    return _zeros(args[0], args[0].shape, kwargs)


@operation(aten.new_zeros.default, aten.new_empty.default)
def _new_zeros(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    return _zeros(args[0], args[1], kwargs)


@view(aten.t.default)
def _t(t: QuantizedTensor) -> QuantizedTensor:
    return t.transposed() if len(t.shape) == 2 else t.remade(t.parts)


@view(aten.transpose.int)
def _transpose(t: QuantizedTensor, first: int, second: int) -> QuantizedTensor:
    rank = len(t.shape)
    axes = {first % rank, second % rank}
    if len(axes) == 1:
        return t.remade(t.parts)
    if axes != {rank - 1, rank - 2}:
        raise ValueError(
            f"transpose of axes {first} and {second} of {t!r}: only the last two; dequantize() first"
        )
    return t.transposed()


@view(aten.permute.default)
def _permute(t: QuantizedTensor, order: Any) -> QuantizedTensor:
    rank = len(t.shape)
    axes = [axis % rank for axis in order]
    if axes == list(range(rank)):
        return t.remade(t.parts)
    if axes == [*range(rank - 2), rank - 1, rank - 2]:
        return t.transposed()
    raise ValueError(f"permute of {t!r} to {axes}: only the last two axes; dequantize() first")


@view(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(t: QuantizedTensor, shape: Any) -> QuantizedTensor:
    return slicing.view(t, shape)


@view(aten.as_strided.default)
def _as_strided(t: QuantizedTensor, shape: Any, strides: Any, offset: int | None = None) -> QuantizedTensor:
    """Only what is the tensor itself."""
    if (tuple(shape), tuple(strides), offset or 0) != (tuple(t.shape), t.stride(), 0):
        raise ValueError(f"as_strided of {t!r}: only to its own shape and strides; dequantize() first")
    return t.remade(t.parts)


@view(aten.expand.default)
def _expand(t: QuantizedTensor, shape: Any, implicit: bool = False) -> torch.Tensor:
    """To its own shape, or to a batch of itself, as products with a batch ask for."""
    rank = len(t.shape)
    wanted = tuple(n if want == -1 else want for n, want in zip(t.shape, shape[-rank:], strict=False))
    if wanted != tuple(t.shape):
        raise ValueError(f"expand of {t!r} to {tuple(shape)}: only to its own shape; dequantize() first")
    return slicing.expand(t, tuple(shape[:-rank])) if len(shape) > rank else t.remade(t.parts)


@view(aten.slice.Tensor)
def _slice(
    t: QuantizedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> QuantizedTensor:
    if step != 1:
        raise ValueError(f"slice of {t!r} with step {step}: only step 1; dequantize() first")
    dim = stored_dim(t, dim)
    length = t.stored_shape[dim]
    if t.meta.flat is None and not start and (end is None or end >= length):
        return t.remade(t.parts)
    return slicing.slice_axis(t, dim, 0 if start is None else start, length if end is None else end)


@view(aten.split.Tensor)
def _split(t: QuantizedTensor, size: int, dim: int = 0) -> list[QuantizedTensor]:
    length = t.shape[dim]
    return _pieces(t, dim, [*range(0, length, size), length])


@view(aten.split_with_sizes.default)
def _split_sizes(t: QuantizedTensor, sizes: Any, dim: int = 0) -> list[QuantizedTensor]:
    cuts = [0]
    for size in sizes:
        cuts.append(cuts[-1] + size)
    if cuts[-1] != t.shape[dim]:
        raise ValueError(f"split of axis {dim} of {t!r} into {list(sizes)}: these must sum to {t.shape[dim]}")
    return _pieces(t, dim, cuts)


@view(aten.select.int)
def _select(t: QuantizedTensor, dim: int, index: int) -> QuantizedTensor:
    return slicing.select(t, dim % len(t.shape), index)


@view(aten.unbind.int)
def _unbind(t: QuantizedTensor, dim: int = 0) -> list[QuantizedTensor]:
    return [slicing.select(t, dim % len(t.shape), index) for index in range(t.shape[dim])]


@operation(aten.cat.default)
def _cat(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    tensors = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if joins(tensors, [isinstance(t, QuantizedTensor) and t.meta.flat is not None for t in tensors]):
        return Bundle(tensors)
    if not all(isinstance(t, QuantizedTensor) for t in tensors):
        raise TypeError("cat of a QuantizedTensor and a dense tensor; dequantize() first")
    return slicing.concatenate([t.in_rows for t in tensors], stored_dim(tensors[0], dim))


@operation(aten.constant_pad_nd.default)
def _pad(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    """Zeros behind the last element of one axis, as DTensor makes shards equally long."""
    t, added, value = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("value", 0)
    padded = [at for at, count in enumerate(added) if count]
    if not padded:
        return t.mapped(torch.Tensor.clone)  # type: ignore[no-any-return]
    if len(padded) > 1 or padded[0] % 2 == 0 or added[padded[0]] < 0 or value != 0:
        raise ValueError(
            f"padding of {t!r} by {list(added)} with {value}: only zeros at the end of one axis; dequantize() first"
        )
    dim = len(t.shape) - 1 - padded[0] // 2
    shape = [*t.shape[:dim], added[padded[0]], *t.shape[dim + 1 :]]
    t = t.in_rows
    zeros = _zeros(t, shape, {}, slicing.axis_scales(t, stored_dim(t, dim)))
    return slicing.concatenate([t, zeros], stored_dim(t, dim))


@operation(aten.index_select.default)
def _index_select(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    t, dim, index = args
    result = slicing.select_rows(t, index, counted=True) if dim % len(t.shape) == 0 else None
    return slicing.select_runs(t, stored_dim(t, dim), index) if result is None else result


@operation(aten.index.Tensor)
def _index(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Experts by number: t[numbers], of which products copy none (`ao_lab.tensor.experts`).

    Of a matrix other places, and rows that blocks span, are dense numbers, as they are for lookups.
    """
    t, indices = args
    if len(indices) == 1 and indices[0].dim() == 1 and indices[0].dtype != torch.bool:
        if t.dim() == 2 and (rows := slicing.select_rows(t, indices[0])) is not None:
            return rows
        if t.dim() != 2:
            return gathered(t, indices[0]) if waits(t, indices[0]) else chosen(t, indices[0])
    if t.dim() == 2:
        return func(t.dequantize(), indices)  # type: ignore[no-any-return]
    raise ValueError(f"indexing of {t!r}: a vector of numbers along axis 0 alone; dequantize() first")


@operation(aten.is_pinned.default)
def _is_pinned(func: Any, args: Any, kwargs: Any) -> bool:
    return all(part.is_pinned() for part in args[0].parts.values() if part is not None)


@operation(aten._pin_memory.default)
def _pin_memory(func: Any, args: Any, kwargs: Any) -> QuantizedTensor:
    return args[0].mapped(torch.Tensor.pin_memory)  # type: ignore[no-any-return]


@operation(aten.equal.default)
def _equal(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether both store the same: one description, and equal parts. A preshuffled weight stores what its plain form does."""
    first, second = args
    if not (isinstance(first, QuantizedTensor) and isinstance(second, QuantizedTensor)):
        return False
    if first.meta.layout != second.meta.layout:
        first, second = first.plain, second.plain
    if first.meta != second.meta or first.shape != second.shape:
        return False
    pairs = [(getattr(first, name), getattr(second, name)) for name in PARTS]
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def _zeros(
    t: QuantizedTensor, shape: Any, options: dict[str, Any], held: dict[str, torch.Tensor] | None = None
) -> QuantizedTensor:
    """Zeros as t is stored, under copies of its scales that hold for any shape (or of `held`): both go together.

    Scales on the meta device have no values to copy to another one: there they are those of zeros, as `quantize` finds them.
    """
    t = t.plain
    zeros = torch.zeros(
        tuple(shape), dtype=options.get("dtype") or t.dtype, device=options.get("device") or t.device
    )
    held = slicing.scalars(t) if held is None else held
    copies = {
        name: part.to(zeros.device, copy=True)
        for name, part in held.items()
        if zeros.is_meta or not part.is_meta
    }
    scale, outer = copies.get("scale"), copies.get("outer")
    result = _like(t, zeros, None if scale is outer is None else Scales(scale, outer, copies.get("zero")))
    return result.remade({**result.parts, **copies})


def _like(t: QuantizedTensor, dense: torch.Tensor, scales: Scales | None = None) -> QuantizedTensor:
    """A dense tensor, stored as t is, or plain where that is preshuffled; under scales from outside, if there are any."""
    oriented = dense.detach().transpose(-2, -1) if t.meta.transposed else dense.detach()
    static = _input_scales(t, dense.device)
    if isinstance(t, SparseQuantizedTensor):
        result: QuantizedTensor = stored_like(t, oriented, static, scales)
    else:
        packed, length = t.scheme.format.bits < 8, t.recipe.rotation
        oriented = hadamard(oriented.to(torch.float32), length) if length else oriented
        q = fast.quantize(oriented, t.scheme, axis=t.meta.axis, scales=scales, packed=packed)
        result = from_quantized(q, t.recipe, dense.dtype, static)
    result = result if t.meta.layout == PRESHUFFLED else result.to_layout(t.meta.layout)
    return result.transposed() if t.meta.transposed else result


def _input_scales(t: QuantizedTensor, device: torch.device) -> Scales | None:
    """Static scales of t's inputs for a tensor on a device; zeros, to be filled, where those of t are on the meta device."""
    static = t.input_scales
    if static is None or not t.is_meta or device.type == "meta":
        return static
    parts = (static.scale, static.outer, static.zero)
    return Scales(*(None if part is None else torch.zeros_like(part, device=device) for part in parts))


def check_part(target: QuantizedTensor, source: QuantizedTensor) -> None:
    """ValueError where a part of a weight is a copy, or would get another scale than its rest, which shares it."""
    base = target._base if target._is_view() else None
    if not isinstance(base, QuantizedTensor):
        return
    if base.meta.layout != target.meta.layout:
        raise ValueError(
            f"copy_ into {tuple(target.shape)} of {base!r}, whose slices are copies in layout 'plain': writes there "
            f"would be lost; change a dequantize()d copy, and copy_ that whole"
        )
    if base.numel() == target.numel():
        return
    for name in ("scale", "outer", "zero"):
        whole, ours, theirs = (getattr(t, name) for t in (base, target, source))
        if ours is None:
            continue
        shared = ours.numel() == whole.numel() or slicing.cuts_blocks(target, base)
        if shared and not torch.equal(ours, theirs):
            raise ValueError(
                f"copy_ into {tuple(target.shape)} of a weight of shape {tuple(base.shape)}: {name} of {target.scheme.name} "
                f"also holds for the rest, which would change; change a dequantize()d copy, and copy_ that whole"
            )


def stored_as(t: QuantizedTensor) -> tuple[Any, ...]:
    """What two tensors must have in common for one's parts to be the other's."""
    return t.recipe, t.stored_shape, t.meta.axis, t.meta.transposed


def stored_dim(t: QuantizedTensor, dim: int) -> int:
    """A logical axis as the axis of the stored parts."""
    rank = len(t.shape)
    dim = dim % rank
    return {rank - 1: rank - 2, rank - 2: rank - 1}.get(dim, dim) if t.meta.transposed else dim


def _pieces(t: QuantizedTensor, dim: int, cuts: list[int]) -> list[QuantizedTensor]:
    dim = stored_dim(t, dim)
    return [slicing.slice_axis(t, dim, start, end) for start, end in pairwise(cuts)]


# Several tensors as one long tensor: what `torch.cat` makes of flattened weights.


class Bundle(torch.Tensor):
    """One-dimensional tensors one behind the other; each keeps its own memory."""

    pieces: tuple[torch.Tensor, ...]

    @staticmethod
    def __new__(cls, pieces: Sequence[torch.Tensor]) -> Bundle:
        """The pieces in their order; all have one axis, one dtype and one device."""
        first = pieces[0]
        length = sum(piece.shape[0] for piece in pieces)
        result: Bundle = torch.Tensor._make_wrapper_subclass(
            cls, (length,), dtype=first.dtype, device=first.device
        )
        result.pieces = tuple(pieces)
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(func)
        if name == "c10d.broadcast_.default":
            return _broadcast(func, args, kwargs or {})
        if func in (aten.detach.default, aten.alias.default):
            return Bundle([piece.detach() for piece in args[0].pieces])
        if func is aten.slice.Tensor:
            return args[0].piece(*args[1:])
        if (result := func.decompose(*args, **(kwargs or {}))) is not NotImplemented:
            return result
        raise NotImplementedError(
            f"{func} of flattened weights with a quantized one among them; they can be broadcast and cut, or dequantize() first"
        )

    def piece(
        self, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
    ) -> torch.Tensor:
        """The piece from `start` to `end`; ValueError for a cut at another place."""
        first, last = start or 0, min(self.shape[0] if end is None else end, self.shape[0])
        ends = list(accumulate(piece.shape[0] for piece in self.pieces))
        for piece, stop in zip(self.pieces, ends, strict=True):
            if (first, last, step) == (stop - piece.shape[0], stop, 1) and piece.shape[0]:
                fresh: torch.Tensor = aten.alias.default(piece)  # torch enters a new view of the whole in it
                return fresh
        raise ValueError(
            f"flattened weights are cut where they were joined, at {ends}; got {first} to {last}: dequantize() first"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Bundle({len(self.pieces)} pieces, shape={tuple(self.shape)}, {self.dtype})"


def joins(tensors: Sequence[torch.Tensor], flat: Sequence[bool]) -> bool:
    """Whether tensors to be joined are flattened weights: one axis each, and some quantized ones under `view(-1)`."""
    return any(flat) and all(tensor.dim() == 1 for tensor in tensors)


def _broadcast(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Each piece by itself, in the same order on every rank; done when this returns."""
    (bundle,) = args[0]
    work = None
    for piece in bundle.pieces:
        work = waited(func, [[piece], *args[1:]], kwargs)
    return args[0], work


def waited(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The work of a collective of `torch.ops.c10d`, done on return.

    It is asked for as an asynchronous one: of others NCCL gives an empty work, and to wait for that ends the process.
    """
    names = [argument.name.replace("_", "").lower() for argument in func._schema.arguments]
    given, at = list(args), names.index("asyncop")
    if at < len(given):
        given[at] = True
    else:
        kwargs = {**kwargs, func._schema.arguments[at].name: True}
    _, work = func(*given, **kwargs)
    work.wait()
    return work
