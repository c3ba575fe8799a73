"""The product of a 2:4 weight by Hopper's sparse tensor cores (`fast.linear_sparse`): the default there, of any number of rows.

It is quicker than dequantizing at the 16 to 8192 rows that were measured; of 16-bit elements `ao_lab.tune` may find cuSPARSELt
quicker (times: reports/LOG.md).

Scales of rows and columns and the bias are applied on the way out, in float32, before the one rounding to the output's dtype:

* int8 by int8: exact sums in int32, and the bits of kernel "int8" of the dense layer.
* float8 by float8, e4m3 and e5m2 in any pair: within `reference.linear_sparse_error_bound`, in one chain over K, which keeps
  about 14 bits on the tensor core; for recipes that accumulate "blocked", in chains of 128 elements.
* bfloat16 and float16 weights as they are stored, and inputs of that dtype: float32 sums, likewise.

The metadata in the order of the kernel's threads is made from the canonical one when a product first needs it and kept beside
it (`ao_lab.gemm.arranged`): as many bytes again, an eighth of a byte for each dense element. It is never saved. NVRTC compiles
a kernel for each shape's tiles at first use.
"""

from __future__ import annotations

from typing import Any

import torch

import fast
from ao_lab.gemm.arranged import kept
from ao_lab.gemm.operand import QuantizedWeight
from ao_lab.gemm.products.codes import quantized_input
from ao_lab.gemm.select import Kernel
from ao_lab.gemm.sparse import device_reason, enter, kind_of, shape_reason, traceable
from fast.launch.nvrtc import missing_compiler
from fast.matmul.weights import one_scale
from fast.sparsity.linear_sparse import HOPPER, MULTIPLES

NAME = "sparse_wgmma"
#: torch's dtypes of elements that are multiplied as they are, and of quantized ones.
PLAIN = {"bfloat16": torch.bfloat16, "float16": torch.float16}
CODES = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)
#: The accumulation of recipes whose float8 sums are promoted.
BLOCKED = "blocked"


def unsupported_reason(w: QuantizedWeight, dtype: torch.dtype) -> str | None:
    """Why it does not take a weight (K, N) beside inputs of a dtype; None where it does."""
    if w.meta.layout != "2:4":
        return "the weight is not in 2:4 storage"
    step = MULTIPLES[16 if w.scheme.element in PLAIN else 8]
    return _operands_reason(w, dtype) or shape_reason(w, step, features=False) or _device_reason(w)


def _operands_reason(w: QuantizedWeight, dtype: torch.dtype) -> str | None:
    element, activation = w.scheme.element, w.recipe.activation
    if element in PLAIN:
        if activation is not None or dtype != PLAIN[element]:
            return f"inputs of {element} weights must be {element} themselves, got {dtype}"
        return None
    if element not in CODES:
        return f"it multiplies {', '.join((*PLAIN, *CODES))}, not {element}"
    if activation is None or activation.element not in CODES or kind_of(activation) != kind_of(w.scheme):
        return f"inputs of {element} weights must be {kind_of(w.scheme)} too"
    if (
        not (one_scale(activation) and one_scale(w.scheme))
        or w.zero is not None
        or activation.zero is not None
    ):
        return "each row must have one float32 scale for decoding, and neither operand a zero point"
    return None if dtype in OUTPUTS else f"it does not write {dtype}"


def _device_reason(w: QuantizedWeight) -> str | None:
    return device_reason(w, HOPPER, later=False) or missing_compiler()


def run(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x (M, K) times w (K, N), plus bias (N), in x's dtype."""
    metadata: torch.Tensor = w.metadata  # type: ignore[attr-defined]
    fast_sums = w.recipe.accumulation != BLOCKED
    if w.recipe.activation is None:
        return product_of(x, w.codes, metadata, w.scheme.element, bias, None, None, x.dtype, fast_sums)
    inputs = quantized_input(x, w, w.recipe.activation)
    codes = inputs.codes.view(CODES[inputs.scheme.element])
    scales = (inputs.scale, w.scale)
    return product_of(codes, w.codes, metadata, w.scheme.element, bias, *scales, x.dtype, fast_sums)


def _product(
    x: torch.Tensor,
    codes: torch.Tensor,
    metadata: torch.Tensor,
    element: str,
    bias: torch.Tensor | None,
    x_scale: torch.Tensor | None,
    scale: torch.Tensor | None,
    dtype: torch.dtype,
    fast_sums: bool,
) -> torch.Tensor:
    """x (M, K) times the 2:4 codes (N, K/2), scaled: (M, N)."""
    values = codes.view({**PLAIN, **CODES}[element])
    order = kept(codes, metadata, NAME, lambda: fast.arrange_sparse_metadata(metadata, values.dtype))
    scales: dict[str, Any] = {"x_scale": x_scale, "scale": scale}
    return fast.linear_sparse(x, values, order, bias, **scales, out_dtype=dtype, fast_sums=fast_sums)


def _fake(x: torch.Tensor, codes: torch.Tensor, metadata: torch.Tensor, element: str, bias: Any, x_scale: Any, scale: Any,
          dtype: torch.dtype, fast_sums: bool) -> torch.Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], codes.shape[0]), dtype=dtype)


product_of = traceable("sparse_wgmma_mm", _product, _fake)
enter(NAME, Kernel(run, unsupported_reason), before="dequantize")

__all__ = ["NAME", "product_of", "run", "unsupported_reason"]
