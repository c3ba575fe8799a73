"""Several tensors, quantized ones among them, as one long tensor: what `torch.cat` makes of flattened weights.

DistributedDataParallel flattens the parameters of a model, joins them, broadcasts the result from rank 0, cuts it again and
copies the pieces back. A quantized weight has no elements that could lie beside those of a dense one, so the joined tensor
here is a list of its pieces. It can be broadcast, piece by piece as they are stored, and cut where they were joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

aten = torch.ops.aten


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
        _, work = func([piece], *args[1:], **kwargs)
        work.wait()
    return args[0], work


__all__ = ["Bundle", "joins"]
