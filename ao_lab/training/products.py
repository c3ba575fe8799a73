"""a @ b.T of quantized matrices: which function computes it.

* ``scaled_mm``: `torch._scaled_mm` of 8-bit float codes with one scale for each tensor or each row, on GPUs that have it.
* ``dequantize``: both operands dequantized to the output's dtype, and torch's own product. For scales that are powers of two
  nothing is rounded in between, as bfloat16 holds every element of 8 bits or fewer.
* ``emulate``: both dequantized to float32, the product in float32: on CPUs, and on GPUs without FP8 units.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ao_lab.gemm.choices import tuned
from ao_lab.training import functions
from ao_lab.training.casts import Matrix
from reference import Quantized, Scheme
from reference.training.recipe import Product

#: Formats that `torch._scaled_mm` multiplies, and torch's dtypes of them.
FLOAT8 = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
#: What `torch._scaled_mm` asks of the sum's length and of the columns.
STEP = 16
#: GPUs from this compute capability on multiply 8-bit floats.
FIRST = (8, 9)


def product(
    direction: str,
    a: Matrix,
    b: Matrix,
    record: Product,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    kernel: str = "auto",
) -> torch.Tensor:
    """a (M, K) @ b.T (K, N) plus bias (N), in `dtype`.

    direction: "output", "input_grad" or "weight_grad". kernel: a name of `PRODUCTS`; "auto" is `select_product`'s.
    """
    name = select_product(direction, a, b, dtype) if kernel == "auto" else kernel
    return PRODUCTS[name].run(a, b, record, dtype, bias)


def select_product(direction: str, a: Matrix, b: Matrix, dtype: torch.dtype) -> str:
    """The function for two operands: the one that `ao_lab.tune` chose, else the first of `PRODUCTS` that can."""
    (m, k), n = tuple(a.shape), b.shape[0]
    name = tuned(direction, scheme_key(a), scheme_key(b), (m, n, k), dtype, codes_of(a).device)
    if name in PRODUCTS and PRODUCTS[name].unsupported_reason(a, b) is None:
        return name
    return next(name for name, one in PRODUCTS.items() if one.unsupported_reason(a, b) is None)


def scheme_key(matrix: Matrix) -> str:
    """The key of an operand's scheme; "" for a dense one."""
    return matrix.scheme.key if isinstance(matrix, Quantized) else ""


def codes_of(matrix: Matrix) -> torch.Tensor:
    """The codes of an operand, or the dense operand."""
    return matrix.codes if isinstance(matrix, Quantized) else matrix


def has_fp8(device: torch.device) -> bool:
    """Whether a device multiplies 8-bit floats."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST


def _scaled_mm_unsupported(a: Matrix, b: Matrix) -> str | None:
    if not (isinstance(a, Quantized) and isinstance(b, Quantized)):
        return "both operands must be quantized"
    if not has_fp8(a.codes.device):
        return "it needs a GPU with FP8 units"
    kinds = {a.scheme.element, b.scheme.element}
    if not kinds <= FLOAT8.keys() or kinds == {"float8_e5m2"}:
        return "it multiplies e4m3 by e4m3 or e5m2"
    if not (is_one_scale(a.scheme) and is_one_scale(b.scheme)):
        return "each tensor or each row must have one float32 scale for decoding"
    if any(length % STEP for length in (a.shape[1], b.shape[0])) or a.shape[0] == 0:
        return f"the sum's length and the columns must be multiples of {STEP}, and there must be rows"
    return None


def _dequantize_unsupported(a: Matrix, b: Matrix) -> str | None:
    """On CPUs, and where there are no FP8 units, recipes run emulated, in float32."""
    dense = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    return None if dense or has_fp8(codes_of(a).device) else "without FP8 units recipes are emulated"


def _supports_all(a: Matrix, b: Matrix) -> str | None:
    return None


def is_one_scale(scheme: Scheme) -> bool:
    """Whether a scheme has one float32 scale for the tensor or for each row, which multiplies codes."""
    scale = scheme.scale
    plain = scheme.outer is None and scheme.zero is None and scale.storage == "float32"
    return plain and scale.stored == "decode" and scale.block in ("tensor", -1)


def _scaled_mm(
    a: Matrix, b: Matrix, record: Product, dtype: torch.dtype, bias: torch.Tensor | None
) -> torch.Tensor:
    if not (isinstance(a, Quantized) and isinstance(b, Quantized)):
        raise TypeError("scaled_mm takes two quantized operands")
    left, right = (q.codes.view(FLOAT8[q.scheme.element]) for q in (a, b))
    scale_a, scale_b = a.scale, b.scale
    if scale_a.dim() or scale_b.dim():
        # One scale in all beside one for each row becomes one for each row.
        scale_a = scale_a.reshape(-1, 1).expand(a.shape[0], 1).contiguous()
        scale_b = scale_b.reshape(1, -1).expand(1, b.shape[0]).contiguous()
    fast_sums = record.accumulation == "fast"
    y: torch.Tensor = torch._scaled_mm(
        left,
        right.t(),
        scale_a=scale_a,
        scale_b=scale_b,
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=fast_sums,
    )
    return y


def _dequantized(
    a: Matrix, b: Matrix, record: Product, dtype: torch.dtype, bias: torch.Tensor | None
) -> torch.Tensor:
    return torch.nn.functional.linear(values(a, dtype), values(b, dtype), bias)


def _emulated(
    a: Matrix, b: Matrix, record: Product, dtype: torch.dtype, bias: torch.Tensor | None
) -> torch.Tensor:
    wide = None if bias is None else bias.to(torch.float32)
    return torch.nn.functional.linear(values(a, torch.float32), values(b, torch.float32), wide).to(dtype)


def values(matrix: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """What an operand stands for."""
    return functions.dequantize(matrix, dtype) if isinstance(matrix, Quantized) else matrix.to(dtype)


@dataclass(frozen=True)
class Kernel:
    """A way to compute a product, and why it does not take two operands (None: it does)."""

    run: Callable[[Matrix, Matrix, Product, torch.dtype, torch.Tensor | None], torch.Tensor]
    unsupported_reason: Callable[[Matrix, Matrix], str | None]


#: Every function by name, the preferred first.
PRODUCTS = {
    "scaled_mm": Kernel(_scaled_mm, _scaled_mm_unsupported),
    "dequantize": Kernel(_dequantized, _dequantize_unsupported),
    "emulate": Kernel(_emulated, _supports_all),
}
