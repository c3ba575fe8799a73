"""`linear` of inputs that are quantized on the way and a preshuffled weight, for torch tensors."""

from __future__ import annotations

import torch

from fast.dispatch import require_tensor, run
from fast.matmul.preshuffled.dynamic_ops import LINEAR_SMALL_DYNAMIC
from fast.matmul.preshuffled.exact_inputs import inputs_reason
from reference import Quantized, Scheme
from reference.schemes.schemes import scheme_of


def linear_small_dynamic(
    x: torch.Tensor, scheme: str | Scheme, w: Quantized, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x (..., K), quantized in a scheme along K, times the transpose of a preshuffled weight (N, K), plus bias (N), in x's dtype.

    The scales of x are found anew. scheme: one that `exact_inputs` takes, ValueError with its rule for others. On a GPU up to
    `linear.MOST_ROWS` rows of bfloat16 or float16 take two launches (three where K is in parts), which read the weight as it
    is stored. The result is within `reference.linear_error_bound` of the exact product, x being the dequantized inputs: every
    addition is counted twice there, which covers the scales of rows. It has the same bits in every call. Others are multiplied by torch: what `fast.fake_quantize` gives by what `dequantize` gives, both in x's dtype.
    CPU tensors run `reference.linear` of the quantized inputs. Errors are its. Differentiable in x, straight through as
    `fake_quantize` is, and in bias; NotImplementedError where scales require a gradient.
    """
    require_tensor(x, "linear_small_dynamic")
    record = scheme_of(scheme)
    reason = inputs_reason(record)
    if reason is not None:
        raise ValueError(f"linear_small_dynamic: {reason}; fake_quantize the inputs and multiply them by `linear_small`")
    operands = (x, w.codes, w.scale, w.zero, bias)
    y: torch.Tensor = run(LINEAR_SMALL_DYNAMIC, w.scheme, (tuple(w.shape), record.key), operands)
    return y


__all__ = ["linear_small_dynamic"]
