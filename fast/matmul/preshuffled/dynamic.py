"""`linear` of inputs that are quantized on the way and a preshuffled weight, for torch tensors."""

from __future__ import annotations

import torch

from fast.dispatch import require_tensor, run
from fast.matmul.preshuffled.dynamic_ops import LINEAR_SMALL_DYNAMIC
from fast.ops import record_name
from reference import Quantized, Scheme


def linear_small_dynamic(
    x: torch.Tensor, scheme: str | Scheme, w: Quantized, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x (..., K) in a scheme along K times the transpose of a preshuffled weight (N, K), plus bias (N), in x's dtype.

    The scales of x are found anew. scheme: one that `exact_inputs` takes, ValueError with its rule for others. On a GPU up to
    `linear.MOST_ROWS` rows of bfloat16 or float16 take two launches (three where K is in parts), which read the weight as it
    is stored; on Hopper more rows of codes under a scale for each row do too, but for those that `linear_small` multiplies by
    the dense weight. Bounds are those of `linear_small`, x being the dequantized inputs: every addition is counted twice there,
    which covers the scales of rows. The bits are the same in every call. Other inputs are what `linear_small` gives of what
    `fast.fake_quantize` gives in x's dtype (which is infinite where that overflows: float16 near its largest number), and so
    are 33 to 128 rows in schemes whose values that dtype holds (MX), where another kernel than that of few rows is faster.
    CPU tensors run `reference.linear` of the quantized inputs. Errors are its. Differentiable in x, straight through as
    `fake_quantize` is, and in bias; NotImplementedError where scales require a gradient.
    """
    require_tensor(x, "linear_small_dynamic")
    values = (tuple(w.shape), record_name(scheme))
    y: torch.Tensor = run(LINEAR_SMALL_DYNAMIC, w.scheme, values, (x, w.codes, w.scale, w.zero, bias))
    return y


__all__ = ["linear_small_dynamic"]
