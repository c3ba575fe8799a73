"""`linear`: inputs times a stored weight, for torch tensors; see `reference.linear`.

Inputs that are codes themselves are multiplied as codes: `linear_of_codes`, of one row, of several integers, and of several
floats where torch's own product is slow (`weights.codes_beat_torch`).
"""

from __future__ import annotations

import torch

from fast.dispatch import run
from fast.launch.cache import settings
from fast.matmul.codes_ops import LINEAR_OF_CODES
from fast.matmul.linear_ops import LINEAR
from fast.matmul.weights import check_weight, require_weights
from reference import Quantized


def linear(x: torch.Tensor, w: Quantized, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., K) times the transpose of a stored weight (N, K), plus bias (N), in x's dtype and on its device.

    On a GPU codes are decoded on the way to the products and nothing dense is made, for one row and for up to 128 rows of
    bfloat16 or float16 (32 where scales change along K; of packed integers of 2, 3, 5 and 6 bits on Hopper 96 where the
    weight has 8192 rows or more, else 32); the result is within `reference.linear_error_bound` of the exact product, which
    promises nothing where sums of codes and inputs leave float32 before their scale: there, and where an input is infinite, a
    result may be NaN. Where no kernel takes them (`weights.rows_fused`), torch multiplies by what `dequantize` gives in x's
    dtype. CPU tensors run `reference.linear`, exact and slow. Arguments and errors are its.
    Differentiable in x and bias: the gradient of x is a product with the dequantized weight. NotImplementedError where scales
    require a gradient.
    """
    require_weights(x, "linear", w)
    operands = (x, w.codes, w.scale, w.outer, w.zero, bias)
    y: torch.Tensor = run(LINEAR, w.scheme, settings(w), operands)
    return y


def linear_of_codes(
    x: Quantized,
    w: Quantized,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    fast_sums: bool = False,
) -> torch.Tensor:
    """Codes x (M, K) times the transpose of a stored weight (N, K), plus bias (N), in a dtype and on x's device.

    Both are int8 (x perhaps has a zero point in all or for each row), or both float8_e4m3fn or float8_e5m2, and each has one
    float32 scale in all or for each row. This is `reference.linear` with accumulation "blocked" and one block, which CPU
    tensors run: the sum of codes, x's scale, the weight's, the bias, each rounded to float32, and one rounding to `dtype`
    (float32, bfloat16 or float16). On a GPU weights are read once, as they are stored. Sums of integers are exact, results the
    same bits. Sums of one row of floats are float32 in another order, within `reference.matmul_error_bound` of that
    accumulation; those of several rows are the tensor core's, within its bound for "hopper_fp8" with promote=128, and with
    fast_sums (torch's `use_fast_accum`) without it. Where no kernel takes them (see `weights.takes_codes`), the reference runs,
    on the host.
    ValueError for other operands; else those of `reference.linear`.
    Differentiable in the bias; NotImplementedError for scales that require a gradient.
    """
    if not isinstance(x, Quantized):
        raise TypeError(
            f"linear_of_codes takes Quantized inputs, got {type(x).__name__}; `linear` takes others"
        )
    if not isinstance(w, Quantized):
        check_weight(x, w, bias, "linear_of_codes")
    # Parts that have no place in the product. A key has the id of one record: the other one travels by name.
    extra = x.outer is not None or w.outer is not None or w.zero is not None
    values = (dtype, w.scheme.key, extra, fast_sums, *settings(x), *settings(w))
    y: torch.Tensor = run(
        LINEAR_OF_CODES, x.scheme, values, (x.codes, x.scale, x.zero, w.codes, w.scale, bias)
    )
    return y


__all__ = ["linear", "linear_of_codes"]
