"""`linear_pair`: two products of the same inputs."""

from __future__ import annotations

from typing import Any

import torch

from fast.device import has_kernels, is_traced
from fast.kernels.launch import cache as ready
from fast.matmul import linear_ops
from fast.matmul.linear import linear
from fast.tensors import require_tensor
from reference import Quantized
from reference.matmul.linear import check_linear


def linear_pair(x: torch.Tensor, first: Quantized, second: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    """(`linear(x, first)`, `linear(x, second)`) of x (..., K) and weights (N, K) and (M, K).

    On a GPU one row of inputs and two weights that are stored alike (one scheme, one shape, 4-bit integers or bytes as `linear`
    multiplies them by kernels of one row) take one launch. Its results lie within `reference.linear_error_bound`, like those of
    `linear`, whose sums may be made in another order. Everything else is two calls. Arguments and errors are those of `linear`.
    """
    key, known = ready_pair("linear_pair", x, first, second)
    if known is not None:
        return known  # type: ignore[no-any-return]
    for w in (first, second):
        check_linear(x, w, None)
        require_tensor(w.codes, "linear_pair")
    if is_traced(x) or is_traced(first.codes) or is_traced(second.codes):
        return _traced(x, first, second)
    made = None
    if has_kernels(x) and x.numel() == x.shape[-1] and alike(first, second):
        from fast.kernels.linear import pair_host as kernels

        made = kernels.linear_pair(x.detach(), first, second, key)
    return made or (linear(x, first), linear(x, second))


def alike(first: Quantized, second: Quantized) -> bool:
    """Whether two weights are stored in one way: scheme, shape, axis, packed or not, scales plain."""
    stored = [(w.scheme.key, tuple(w.shape), w.axis, w.packed) for w in (first, second)]
    return stored[0] == stored[1] and not (first.tiled or second.tiled)


def _traced(x: torch.Tensor, first: Quantized, second: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    if alike(first, second):
        return linear_ops.linear_pair(x, first, second)
    return linear_ops.linear(x, first, None), linear_ops.linear(x, second, None)


def ready_pair(name: str, x: torch.Tensor, first: Any, second: Any) -> tuple[Any, Any]:
    """`ready.call` of a function of two weights."""
    require_tensor(x, name)
    stored = isinstance(first, Quantized) and isinstance(second, Quantized)
    if torch.compiler.is_compiling() or not stored:
        return None, None
    # A key has the id of one record: the other one travels by name.
    values = (second.scheme.key, *ready.settings(first), *ready.settings(second))
    parts = (part for w in (first, second) for part in (w.codes, w.scale, w.outer, w.zero))
    return ready.call(name, first.scheme, values, x, *parts)


__all__ = ["alike", "linear_pair", "ready_pair"]
