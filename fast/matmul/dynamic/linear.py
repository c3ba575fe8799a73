"""`linear` of inputs that are quantized on the way and a plain weight of codes, for torch tensors."""

from __future__ import annotations

import importlib.util
from functools import lru_cache

import torch

from fast.dispatch import require_tensor, run
from fast.kernels.launch.cache import settings
from fast.matmul.dynamic.ops import LINEAR_DYNAMIC
from fast.matmul.weights import check_weight
from fast.ops import record_name
from reference import Quantized, Scheme


def linear_dynamic(
    x: torch.Tensor, scheme: str | Scheme, w: Quantized, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x (M, K) in a scheme along K times the transpose of a stored weight (N, K), plus bias (N), in x's dtype.

    `linear_of_codes` of `quantize(x, scheme)`, which says what it takes. On a GPU where `is_one_launch`, that is what it is:
    every program quantizes the rows for itself, to the same bits, and the sums are of another order, within
    `reference.linear_error_bound` of the exact product of the dequantized inputs, every addition counted twice. Elsewhere those
    two functions. Differentiable in bias alone. Errors are theirs.
    """
    require_tensor(x, "linear_dynamic")
    if not isinstance(w, Quantized):
        check_weight(x, w, bias, "linear_dynamic")
    extra = w.outer is not None or w.zero is not None
    # Codes have no gradient, as those of `quantize`.
    x = x.detach() if x.requires_grad else x
    values = (record_name(scheme), extra, *settings(w))
    y: torch.Tensor = run(LINEAR_DYNAMIC, w.scheme, values, (x, w.codes, w.scale, bias))
    return y


@lru_cache(maxsize=4096)
def is_one_launch(rows: int, x: str, w: str, shape: tuple[int, ...]) -> bool:
    """Whether so many rows of bfloat16 are multiplied by a weight (N, K) in one launch on a Hopper GPU. x, w: `Scheme.key`."""
    if importlib.util.find_spec("triton") is None:
        return False
    from fast.kernels.fp8_skinny.host import takes, takes_schemes

    return takes_schemes(x, w) and takes(rows, shape, torch.bfloat16)


__all__ = ["is_one_launch", "linear_dynamic"]
