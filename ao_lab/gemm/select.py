"""Which function computes a product with a `QuantizedTensor`: the one place that decides.

A `Kernel` says why it cannot take a weight (or that it can) and computes the product. "auto" is what `ao_lab.tune` chose for
the weight and the number of rows, else the first that can, in the order of `PRODUCTS`; a recipe that names one gets that one or
ValueError. Nothing is measured here.

* ``int8``: exact integer sums; then the input's scale, the weight's scale and the bias in float32, and one rounding to the
  output's dtype. That is `reference.matmul(..., accumulation="blocked")` with one block, bit for bit. On Hopper GPUs all of it
  is one kernel (`fast.linear_of_codes`), elsewhere `torch._int_mm` or `fast.cpu.int8` and what follows.
* ``scaled_mm``: `torch._scaled_mm` of float8 codes, within `reference.matmul_error_bound` of the exact product; on Hopper GPUs
  with scales of blocks too, 1x128 of inputs and 128x128 or 1x128 of weights. On a CPU one scale is given as one for each row;
  torch before 2.13 takes none of these there, and "auto" is ``dequantize``.
  Of one row on a GPU it is `fast.linear.linear_of_codes`, which reads the weight once, inside the same bound, with other bits
  than that row has among several; of several rows too, where that was measured to be faster (`codes_beat_torch`).
* ``fused``: for weights alone, codes are decoded on the way to the products: on a GPU by `fast.linear`, of one row or of a few,
  on a CPU by `fast.cpu.rows`; within `reference.linear_error_bound` of the exact product. On a CPU several rows are multiplied
  by weights of 131,072 elements or more, by smaller ones a single row; where it has products of bfloat16, several rows of such
  inputs by the weight rounded to it, as ``dequantize`` rounds; inputs in a scheme are rounded as there. A preshuffled weight
  is multiplied by `fast.matmul.preshuffled`, of up to 128 rows of 16-bit inputs, and so are groups of rows by experts' weights,
  up to 64 of an expert on average; more rows on Hopper, which decode to the inputs' dtype, as ``dequantize`` rounds. Inputs of
  a preshuffled matrix may have a scheme: where 16-bit floats hold it exactly (8 bits under a scale for each row, MX) the
  product is that of what is stored, in others (NVFP4) inputs are rounded as by ``dequantize``. Beyond the rows that `explain`
  names as ``dequantize``.
* ``dequantize``: the weight is dequantized to the input's dtype, the input (if its recipe says so) goes through its scheme and
  back, and torch multiplies. For weight-only recipes this is F.linear(x, reference.dequantize(w)), bit for bit.
* ``reference``: `reference.matmul` of both, on the host, in the recipe's accumulation. Slow; for tests and questions.

A weight in 2:4 storage (`ao_lab.tensor.sparse`) is stored as no kernel of dense codes reads it: `dequantize` and `reference`
take its dense equivalent. Kernels of its own enter by `ao_lab.gemm.sparse`: `sparse_int4` is the default for int4 weights, on
Hopper `sparse_wgmma` for int8, float8 and 16-bit elements; cuSPARSELt's is what `ao_lab.tune` may choose.

A recipe's activation scheme holds where the sum runs along the weight's blocks, as it does in a layer. Other products (those
that autograd makes for the input's gradient) take the operands as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ao_lab.gemm.choices import choices_for, pinned, rows_range, tuned
from ao_lab.gemm.operand import QuantizedWeight
from ao_lab.gemm.products import fused, int8, reference, scaled_mm
from ao_lab.gemm.products.dense import dequantized, sums_along_blocks
from ao_lab.gemm.products.device import cpu_scales_rows, is_host

Product = Callable[[torch.Tensor, QuantizedWeight, torch.Tensor | None], torch.Tensor]
UnsupportedReason = Callable[[QuantizedWeight, torch.dtype], str | None]


@dataclass(frozen=True)
class Kernel:
    """A way to compute x @ w + bias, and why it does not take a weight (None: it does) beside inputs of a dtype."""

    run: Product
    unsupported_reason: UnsupportedReason


def product(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (M, K) or (B, M, K) times w (K, N) or (B, K, N), plus bias (N), in x's dtype."""
    return PRODUCTS[select_kernel(w, x.dtype, x.shape[-2])].run(x, w, bias)


def select_kernel(w: QuantizedWeight, dtype: torch.dtype, rows: Any = None) -> str:
    """The name of the kernel for a weight (K, N) and inputs of a dtype; ValueError where the recipe's own cannot.

    rows: of the input; with them the kernel is the one that `ao_lab.tune` chose. None, and rows that a tracer leaves open: the
    default.
    """
    if not sums_along_blocks(w):
        return "dequantize"
    wanted = w.recipe.kernel
    if wanted != "auto":
        reason = PRODUCTS[wanted].unsupported_reason(w, dtype)
        if reason is not None:
            able = ", ".join(
                name for name, kernel in PRODUCTS.items() if kernel.unsupported_reason(w, dtype) is None
            )
            raise ValueError(f"kernel {wanted!r} does not take {w.recipe}: {reason}; these do: {able}")
        return wanted
    if rows is not None and len(w.shape) == 2:
        shape = (rows, w.shape[1], w.shape[0])
        chosen = tuned("inference", *inference_keys(w), shape, dtype, w.device)
        if chosen in PRODUCTS and PRODUCTS[chosen].unsupported_reason(w, dtype) is None:
            return chosen
    return next(name for name in _by_default(w) if PRODUCTS[name].unsupported_reason(w, dtype) is None)


def _by_default(w: QuantizedWeight) -> Iterator[str]:
    """The kernels that "auto" may be, the preferred first. On a CPU torch's product of 8-bit floats takes much longer than
    one of bfloat16: `scaled_mm` comes after `fused`, and is none where torch takes one scale alone, since it multiplies element
    by element then (times: reports/LOG.md)."""
    if not is_host(w.device):
        return iter(PRODUCTS)
    late = ["scaled_mm"] if cpu_scales_rows() else []
    order = [name for name in PRODUCTS if name != "scaled_mm"]
    after = order.index("fused") + 1
    return iter([*order[:after], *late, *order[after:]])


def inference_keys(w: QuantizedWeight) -> tuple[str, str]:
    """The keys of the schemes of a layer's input ("" where it is not quantized) and its weight."""
    return "" if w.recipe.activation is None else w.recipe.activation.key, w.scheme.key


def select_product(w: QuantizedWeight, dtype: torch.dtype) -> Product:
    """The function for a weight (K, N) and inputs of a dtype, of any number of rows; found once by who calls it often.

    Where something was tuned for inference on the device it asks for each range of rows once. What it found holds for
    `choices.VERSION`.
    """
    default = PRODUCTS[select_kernel(w, dtype)].run
    if not any(choice.problem.direction == "inference" for choice in choices_for(w.device)):
        return default
    found: dict[int, Product] = {}

    def run(x: torch.Tensor, w: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
        if pinned():
            return default(x, w, bias)
        rows = rows_range(x.shape[0])
        if rows not in found:
            found[rows] = PRODUCTS[select_kernel(w, dtype, rows)].run
        return found[rows](x, w, bias)

    return run


def _supports_all(w: QuantizedWeight, dtype: torch.dtype) -> str | None:
    return None


#: Every kernel by name, the preferred first.
PRODUCTS = {
    "int8": Kernel(int8.int8, int8.unsupported_reason),
    "scaled_mm": Kernel(scaled_mm.scaled_mm, scaled_mm.unsupported_reason),
    "fused": Kernel(fused.fused, fused.unsupported_reason),
    "dequantize": Kernel(dequantized, _supports_all),
    "reference": Kernel(reference.reference, _supports_all),
}

__all__ = [
    "PRODUCTS",
    "Kernel",
    "inference_keys",
    "product",
    "select_kernel",
    "select_product",
]
