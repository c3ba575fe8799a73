"""`linear`: inputs times a stored weight, for torch tensors; see `reference.linear`.

Inputs that are codes themselves are multiplied as codes: `linear_of_codes`, of one row; several rows are work for torch's own
products of integers and of float8.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import Any

import torch

import reference
from fast.device import has_kernels, is_traced
from fast.kernels.launch import cache as ready
from fast.matmul import linear_ops
from fast.quantize.quantize import dequantize
from fast.tensors import require_tensor
from reference import Quantized, Scheme
from reference.arrays.errors import choice
from reference.matmul.exact import RESULTS
from reference.matmul.linear import check_linear
from reference.quantize.quantize import check_quantized
from reference.schemes.record_text import record_of

#: Longest sum whose int32 accumulator cannot overflow: 2**31 / (255 * 128).
LONGEST_INT8 = 65536
#: Elements that are multiplied as codes, and by what they can be.
MULTIPLIED = {"int8": ("int8",), **dict.fromkeys(*[("float8_e4m3fn", "float8_e5m2")] * 2)}


def linear(x: torch.Tensor, w: Quantized, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., K) times the transpose of a stored weight (N, K), plus bias (N), in x's dtype and on its device.

    On a GPU codes are decoded on the way to the products and nothing dense is made, for one row and for up to 128 rows of
    bfloat16 or float16 (32 where scales change along K); the result is within `reference.linear_error_bound` of the exact
    product, which promises nothing where sums of codes and inputs leave float32 before their scale: there, and where an input
    is infinite, a result may be NaN. Where no kernel takes them (see `rows_fused`), torch multiplies what `dequantize` gives
    in x's dtype. CPU tensors run `reference.linear`: exact, and slow. Arguments and errors are those of `reference.linear`.
    """
    key, known = _call(require_tensor(x, "linear"), w, bias)
    if known is not None:
        return known  # type: ignore[no-any-return]
    check_linear(x, w, bias)
    require_tensor(w.codes, "linear")
    if is_traced(x) or is_traced(w.codes):
        return linear_ops.linear(x, w, bias)
    x = x.detach()
    if not has_kernels(x):
        return require_tensor(reference.linear(x, w, bias), "linear")
    from fast.kernels.linear import select as kernels

    made = kernels.linear(x, w, bias, key)
    if made is not None:
        return made
    added = None if bias is None else bias.detach().to(x.dtype)
    return torch.nn.functional.linear(x, dequantize(w, x.dtype), added)


def rows_fused(w: Quantized, dtype: torch.dtype) -> int:
    """The most rows of a dtype that a kernel multiplies by a stored weight on a GPU of `device.OLDEST` or later; 0 for none."""
    if importlib.util.find_spec("triton") is None:
        return 0
    from fast.kernels.linear.select import MOST_BLOCK_ROWS, MOST_ROWS, launch_for

    return next(
        (count for count in (MOST_ROWS, MOST_BLOCK_ROWS, 1) if launch_for(w, count, dtype) is not None), 0
    )


def linear_of_codes(
    x: Quantized, w: Quantized, bias: torch.Tensor | None = None, *, dtype: torch.dtype
) -> torch.Tensor:
    """One row of codes x (1, K) times the transpose of a stored weight (N, K), plus bias (N), in a dtype and on x's device.

    Both are int8 (x perhaps with a zero point), or both float8_e4m3fn or float8_e5m2, and each has one float32 scale in all or
    for each row. This is `reference.linear` with accumulation "blocked" and one block, which CPU tensors run: the sum of codes,
    x's scale, the weight's, the bias, each rounded to float32, and one rounding to `dtype` (float32, bfloat16 or float16).
    On a GPU weights are read once, as they are stored. Sums of integers are exact, results the same bits; sums of floats are
    float32 in another order, within `reference.matmul_error_bound` of that accumulation. Where no kernel takes them (see
    `takes_codes`), the reference runs, on the host. ValueError for other operands, as well as those of `reference.linear`.
    """
    if not isinstance(x, Quantized):
        raise TypeError(
            f"linear_of_codes takes Quantized inputs, got {type(x).__name__}; `linear` takes others"
        )
    require_tensor(x.codes, "linear_of_codes")
    key, known = _call_of_codes(x, w, bias, dtype)
    if known is not None:
        return known  # type: ignore[no-any-return]
    check_linear(x, w, bias)
    check_codes(x, w)
    name = choice(str(dtype).removeprefix("torch."), tuple(RESULTS), "dtype")
    if is_traced(x.codes) or is_traced(w.codes):
        return linear_ops.linear_of_codes(x, w, bias, dtype)
    check_quantized(x)
    check_quantized(w)
    bias = None if bias is None else bias.detach()
    if has_kernels(x.codes):
        from fast.kernels.linear import w8a8_host as kernels

        made = kernels.linear_of_codes(x, w, bias, dtype, key)
        if made is not None:
            return made
    options: dict[str, Any] = {"accumulation": "blocked", "block": max(w.shape[1], 1), "out_dtype": name}
    return require_tensor(reference.linear(x, w, bias, **options), "linear_of_codes")


def check_codes(x: Quantized, w: Quantized) -> None:
    """Raise as `linear_of_codes` does where the operands are not what it multiplies."""
    element, other = x.scheme.element, w.scheme.element
    if tuple(x.shape[:-1]) != (1,):
        raise ValueError(
            f"linear_of_codes takes one row (1, K), got inputs {tuple(x.shape)}; `linear` takes several, dequantized"
        )
    if other not in MULTIPLIED.get(element, ()):
        raise ValueError(
            f"linear_of_codes multiplies int8 by int8 and float8 by float8, got {element} and {other}"
        )
    if not (one_scale(x.scheme) and one_scale(w.scheme)) or w.zero is not None or x.axis != 1:
        raise ValueError(
            f"linear_of_codes takes one float32 scale for each row or in all, and no zero point of the weight, got "
            f"{x.scheme.name} along axis {x.axis} and {w.scheme.name}; `linear` takes such weights"
        )
    if element == "int8" and w.shape[1] > LONGEST_INT8:
        raise ValueError(
            f"linear_of_codes: sums of {w.shape[1]} products, longer than {LONGEST_INT8}, may overflow int32"
        )


def one_scale(scheme: Scheme) -> bool:
    """Whether every row has one float32 scale that multiplies codes, and nothing else but a zero point."""
    scale = scheme.scale
    plain = scale.storage == "float32" and scale.stored == "decode" and scheme.outer is None
    return (
        plain
        and scale.block in (-1, "tensor")
        and scheme.dequantize != "target"
        and (scheme.zero is None or scheme.zero.rule == "code")
    )


@lru_cache(maxsize=4096)
def takes_codes(x: str, w: str, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether a kernel computes `linear_of_codes` of such operands on a GPU of `device.OLDEST` or later.

    x, w: `Scheme.key`; shape: of the weight, as stored. Others have rows whose length is no multiple of 16.
    """
    if importlib.util.find_spec("triton") is None:
        return False
    from fast.kernels.linear.w8a8_host import launch_for

    return launch_for(record_of(x), record_of(w), shape, dtype) is not None


def _call_of_codes(x: Quantized, w: Any, bias: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """`ready.call` of `linear_of_codes`."""
    if torch.compiler.is_compiling() or not isinstance(w, Quantized):
        return None, None
    # A key has the id of one record: the other one travels by name.
    values = (dtype, w.scheme.key, *ready.settings(x), *ready.settings(w))
    return ready.call("linear_of_codes", x.scheme, values, x.codes, x.scale, x.zero, w.codes, w.scale, bias)


def _call(x: torch.Tensor, w: Any, bias: Any) -> tuple[Any, Any]:
    """`ready.call` of `linear`."""
    if torch.compiler.is_compiling() or not isinstance(w, Quantized):
        return None, None
    return ready.call("linear", w.scheme, ready.settings(w), x, w.codes, w.scale, w.outer, w.zero, bias)
